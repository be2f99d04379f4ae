"""Turns a request's sampling fields into ``SamplingParams``, and checks their limits.

Knows the names of the fields in OpenAI's dialect. ``gateway/limits.py`` has the limits.
"""

from __future__ import annotations

from typing import Any, Final

from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.fields import is_given
from inferd.gateway.limits import (
    INT32_MAX,
    INT64_MAX,
    RANGES,
    check_length,
    check_range,
    check_strings,
    check_token_ids,
)
from inferd.gateway.openai.wire import REFUSED, GenerationFields
from inferd.types import SamplingParams

MAX_PROMPTS: Final = 256
MAX_SEQUENCES: Final = 1024  # prompts times candidates of one HTTP request


_SCALARS: Final = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
    "n",
    "best_of",
    "prompt_logprobs",
)
_SWITCHES: Final = (
    "include_stop_str_in_output",
    "ignore_eos",
    "use_beam_search",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "watermark",
)

_REMEDY: Final[dict[str, str]] = {
    "functions": "Use 'tools' instead.",
    "audio": "This server writes text only; leave it out.",
    "suffix": "Put the whole context into 'prompt'.",
    "prompt_embeds": "Send text or token ids in 'prompt'.",
    "echo": "Use 'continue_final_message' to continue a message, or /v1/completions with 'echo'.",
    "moderation": "Moderate before or after the call.",
}


def check_unsupported(body: GenerationFields) -> None:
    """Raises InvalidRequest for a field that would change the answer and is not supported."""
    for name in REFUSED[type(body)]:
        if is_given(getattr(body, name)):
            remedy = _REMEDY.get(name, "Leave it out.")
            raise invalid(name, f"{name} is not supported. {remedy}", "unsupported_parameter")


def sampling_of(
    body: GenerationFields, *, max_tokens: int | None, logprobs: int | None
) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling parameters, and the names of those that the client set itself.

    ``max_tokens`` and ``logprobs`` are given already checked, because chat and text completions name them differently.
    Raises InvalidRequest.
    """
    chosen: dict[str, Any] = {}
    for name in _SCALARS:
        value = getattr(body, name)
        if value is not None:
            if value not in RANGES[name]:
                check_range(name, value)
            chosen[name] = value
    for name in _SWITCHES:
        value = getattr(body, name)
        if value is not None:
            chosen[name] = value
    if max_tokens is not None:
        chosen["max_tokens"] = max_tokens
    if logprobs is not None:
        chosen["logprobs"] = logprobs
    if body.top_p == 0:
        chosen["top_p"] = 1e-9  # OpenAI's 0 keeps the most likely token alone
    if body.top_k is not None:
        check_range("top_k", body.top_k)
        chosen["top_k"] = max(0, body.top_k)  # vLLM writes "off" as -1 or 0
    if body.seed is not None:
        check_range("seed", body.seed)
        chosen["seed"] = body.seed & INT64_MAX
    _add_lists(body, chosen)
    sampling = SamplingParams(**chosen)
    _check_together(body, sampling)
    return sampling, tuple(chosen)


def _add_lists(body: GenerationFields, chosen: dict[str, Any]) -> None:
    if body.stop is not None:
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
        check_strings("stop", stop, 16, 1024)
        chosen["stop"] = stop
    if body.stop_token_ids is not None:
        check_token_ids("stop_token_ids", body.stop_token_ids, 1024)
        chosen["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.bad_words is not None:
        check_strings("bad_words", body.bad_words, 256, 1024)
        chosen["bad_words"] = tuple(body.bad_words)
    if body.allowed_token_ids is not None:
        if not body.allowed_token_ids:
            raise invalid("allowed_token_ids", "allowed_token_ids is empty; name at least one token or leave it out.")
        check_token_ids("allowed_token_ids", body.allowed_token_ids, 65_536)
        chosen["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.logit_bias is not None:
        check_length("logit_bias", body.logit_bias, 1024)
        for token_id, bias in body.logit_bias.items():
            if not 0 <= token_id <= INT32_MAX:
                raise invalid("logit_bias", f"logit_bias has the key {shown(token_id)}, which is no token id.")
            if bias not in RANGES["logit_bias"]:
                check_range("logit_bias", bias, f"logit_bias[{token_id}]")
        chosen["logit_bias"] = body.logit_bias


def _check_together(body: GenerationFields, sampling: SamplingParams) -> None:
    """Limits that involve two fields."""
    if sampling.best_of is not None and sampling.best_of < sampling.n:
        raise invalid("best_of", f"best_of must be at least n ({sampling.n}), not {sampling.best_of}.")
    if body.stream:
        if sampling.width > sampling.n:
            raise invalid(
                "best_of",
                f"best_of ({sampling.best_of}) above n ({sampling.n}) cannot be streamed; set stream to false.",
            )
        if sampling.use_beam_search:
            raise invalid("use_beam_search", "Beam search cannot be streamed; set stream to false.")
        if sampling.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed; set stream to false.")
    elif body.stream_options is not None:
        raise invalid(
            "stream_options", "stream_options is only allowed when stream is true; set stream to true or leave it out."
        )
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise invalid("min_tokens", f"min_tokens ({sampling.min_tokens}) is above max_tokens ({sampling.max_tokens}).")
