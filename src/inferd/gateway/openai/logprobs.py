"""Log-probabilities in the three shapes clients know: chat, legacy completions, vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.gateway.generation.logprobs import finite
from inferd.gateway.openai.wire import (
    ChatLogprobs,
    LegacyLogprobs,
    PromptLogprobBody,
    PromptLogprobs,
    TokenLogprobBody,
    TopLogprobBody,
)
from inferd.types import TokenLogprob, TopLogprob


def _token(item: TokenLogprob | TopLogprob, as_id: bool) -> str:
    return f"token_id:{item.token_id}" if as_id else item.token


def chat_logprobs(items: Sequence[TokenLogprob], *, as_ids: bool, top: int) -> ChatLogprobs:
    """Log-probabilities in the form of chat completions, with the ``top`` most likely tokens each."""
    return ChatLogprobs(
        [
            TokenLogprobBody(
                _token(item, as_ids),
                finite(item.logprob),
                list(item.raw),
                [TopLogprobBody(_token(t, as_ids), finite(t.logprob), list(t.raw)) for t in item.top[:top]],
            )
            for item in items
        ]
    )


def legacy_logprobs(
    items: Sequence[TokenLogprob | None], *, first_token: str = "", as_ids: bool, top: int, text_offset: int
) -> tuple[LegacyLogprobs, int]:
    """The completions shape, and the text offset after it.

    ``first_token`` stands for an entry without probabilities (a prompt's first token has none).
    Offsets count characters from the start of the choice's text.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for item in items:
        offsets.append(text_offset)
        if item is None:
            tokens.append(first_token)
            token_logprobs.append(None)
            top_logprobs.append(None)
            text_offset += len(first_token)
            continue
        name = _token(item, as_ids)
        logprob = finite(item.logprob)
        tokens.append(name)
        token_logprobs.append(logprob)
        # Two tokens can have the same text; the more likely one comes first and stays.
        best: dict[str, float] = {}
        for t in item.top[:top]:
            best.setdefault(_token(t, as_ids), finite(t.logprob))
        best.setdefault(name, logprob)
        top_logprobs.append(best)
        text_offset += len(item.token)
    return LegacyLogprobs(tokens, token_logprobs, top_logprobs, offsets), text_offset


def prompt_logprobs(items: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """vLLM's shape: per prompt token an object from token id to its probability and rank."""
    shaped: PromptLogprobs = []
    for item in items:
        if item is None:
            shaped.append(None)
            continue
        entry = {str(item.token_id): PromptLogprobBody(finite(item.logprob), item.rank, item.token)}
        for rank, t in enumerate(item.top, start=1):
            entry.setdefault(str(t.token_id), PromptLogprobBody(finite(t.logprob), rank, t.token))
        shaped.append(entry)
    return shaped
