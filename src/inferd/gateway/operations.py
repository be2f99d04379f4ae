"""The operations that routes and methods ask models for. A dialect's row in the table of routes names one of them."""

from __future__ import annotations

from typing import Final

from inferd.events import Operation

CHAT: Final = Operation("chat", generates=True)
TEXT_COMPLETION: Final = Operation("text_completion", generates=True)
EMBEDDINGS: Final = Operation("embeddings")
RERANK: Final = Operation("rerank")
SCORE: Final = Operation("score")
DECIDE: Final = Operation("decide")
CLASSIFY: Final = Operation("classify")
POOLING: Final = Operation("pooling")
TOKENIZE: Final = Operation("tokenize")
DETOKENIZE: Final = Operation("detokenize")
PREDICT: Final = Operation("predict")
