"""The codec of each dialect. A codec is imported with the first request of its dialect."""

from __future__ import annotations

import functools
import importlib
from typing import Final, cast

from inferd.errors import InvalidRequest
from inferd.predict.codecs.port import Codec

_CODECS: Final[dict[str, str]] = {
    "v2": "inferd.predict.codecs.v2:V2Codec",
    "v2.grpc": "inferd.predict.codecs.v2_grpc:V2GrpcCodec",
    "v1": "inferd.predict.codecs.v1:V1Codec",
    "invocations": "inferd.predict.codecs.invocations:InvocationsCodec",
    "invocations.csv": "inferd.predict.codecs.invocations_csv:InvocationsCsvCodec",
    "invocations.csv.rows": "inferd.predict.codecs.invocations_csv:InvocationsCsvCodec",
    "openai.embeddings": "inferd.predict.codecs.openai_embeddings:OpenAIEmbeddingsCodec",
    "cohere.embed": "inferd.predict.codecs.cohere_embed:CohereEmbedCodec",
    "cohere.rerank": "inferd.predict.codecs.rerank:CohereRerankCodec",
    "rerank": "inferd.predict.codecs.rerank:RerankCodec",
    "score": "inferd.predict.codecs.score:ScoreCodec",
    "classify": "inferd.predict.codecs.classify:ClassifyCodec",
    "tei.embed": "inferd.predict.codecs.tei:TeiEmbedCodec",
    "tei.rerank": "inferd.predict.codecs.tei:TeiRerankCodec",
    "tei.predict": "inferd.predict.codecs.tei:TeiPredictCodec",
    "ollama.embed": "inferd.predict.codecs.ollama:OllamaEmbedCodec",
    "ollama.embeddings": "inferd.predict.codecs.ollama:OllamaEmbeddingsCodec",
    "pooling": "inferd.predict.codecs.pooling:PoolingCodec",
}


@functools.cache
def codec_for(dialect: str) -> Codec:
    """The codec of the dialect. Raises InvalidRequest for an unknown one."""
    place = _CODECS.get(dialect)
    if place is None:
        raise InvalidRequest(f"No codec speaks the dialect {dialect!r}; there are {', '.join(sorted(_CODECS))}.")
    module, _, name = place.partition(":")
    return cast(Codec, getattr(importlib.import_module(module), name)())
