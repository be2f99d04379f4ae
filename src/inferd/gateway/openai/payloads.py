"""The texts of completions that records of payloads may have."""

from __future__ import annotations

from typing import Final

from inferd.observe.payloads.texts import JsonTexts

COMPLETION_TEXTS: Final = JsonTexts(
    *("content", "text", "arguments", "reasoning_content", "reasoning", "refusal"), whole=("name",)
)
