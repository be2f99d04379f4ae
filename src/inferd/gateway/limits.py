"""The limits of a request's fields, and the checks of single values, for all dialects.

The limits bound the work of one request before it is queued. A value outside is a 400 that names field, value and
limit. The worker checks the limits that depend on the model (vocabulary, context length).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from inferd.gateway.errors import invalid, shown

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
MAX_LOGPROBS: Final = 20
MAX_MESSAGES: Final = 16_384
MAX_TOOLS: Final = 512


class Range(NamedTuple):
    """The allowed values of a number: from ``low`` to ``high``, without ``low`` if ``low_is_open``."""

    low: float
    high: float
    low_is_open: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        return (self.low < value if self.low_is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above' if self.low_is_open else 'at least'} {self.low} and at most {self.high}"


RANGES: Final[dict[str, Range]] = {
    "max_tokens": Range(0, INT32_MAX),
    "max_completion_tokens": Range(1, INT32_MAX),
    "min_tokens": Range(0, INT32_MAX),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1),
    "top_k": Range(-1, INT32_MAX),
    "min_p": Range(0, 1),
    "seed": Range(-(2**63), INT64_MAX),
    "repetition_penalty": Range(0, 100, low_is_open=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "length_penalty": Range(-10, 10),
    "n": Range(1, 128),
    "best_of": Range(1, 128),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "logprobs": Range(0, MAX_LOGPROBS),
    "top_logprobs": Range(0, MAX_LOGPROBS),
    "truncate_prompt_tokens": Range(-1, INT32_MAX),
    "priority": Range(-(2**31), INT32_MAX),
    "token id": Range(0, INT32_MAX),
    "logit_bias": Range(-100, 100),
}


def check_range(name: str, value: float, param: str | None = None) -> None:
    """Raises InvalidRequest, which names ``param`` (or ``name``), for a value outside ``RANGES[name]``."""
    limits = RANGES[name]
    if value not in limits:
        field = param or name
        raise invalid(field, f"{field} must be {limits}, not {shown(value)}.")


def check_token_ids(name: str, ids: Sequence[int], limit: int) -> None:
    """Raises InvalidRequest for more than ``limit`` ids, or for an id that cannot be a token."""
    check_length(name, ids, limit)
    for position, token_id in enumerate(ids):
        if not 0 <= token_id <= INT32_MAX:
            check_range("token id", token_id, f"{name}[{position}]")


def check_length(name: str, values: Sequence[object] | dict[int, float], limit: int) -> None:
    """Raises InvalidRequest for more than ``limit`` values."""
    if len(values) > limit:
        raise invalid(name, f"{name} may have at most {limit} entries, not {len(values)}.")


def check_strings(name: str, values: Sequence[str], limit: int, max_chars: int) -> None:
    """Raises InvalidRequest for more than ``limit`` texts, an empty text, or one above ``max_chars`` characters."""
    check_length(name, values, limit)
    for position, text in enumerate(values):
        if not text:
            raise invalid(f"{name}[{position}]", f"{name}[{position}] is empty; leave it out or give it text.")
        if len(text) > max_chars:
            raise invalid(
                f"{name}[{position}]", f"{name}[{position}] has {len(text)} characters; at most {max_chars} are taken."
            )


def check_arguments_schema(name: str, schema: Mapping[str, object] | None) -> None:
    """Refuse a schema of a tool's arguments that no JSON object is valid against. Raises InvalidRequest."""
    kind = None if schema is None else schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and "object" not in kinds:
        raise invalid(
            name,
            f"{name}: at /type: the arguments of a tool are an object, but type is {shown(kind)}; write 'object', with "
            "the arguments as its properties.",
            "unsupported_schema",
        )
