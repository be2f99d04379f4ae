"""The fields of a line in the access log."""

from __future__ import annotations

import msgspec
from msgspec import UnsetType


class UsageLine(msgspec.Struct):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TimingsLine(msgspec.Struct):
    """In the order of ``Timings``; a stage that was not reached is left out."""

    dispatched: float | UnsetType
    tokenized: float | UnsetType
    scheduled: float | UnsetType
    first_token: float | UnsetType
    finished: float | UnsetType


class SpeedLine(msgspec.Struct):
    """Seconds to the first token and between two tokens, and tokens per second of the whole request."""

    ttft_s: float
    tpot_s: float | UnsetType
    tokens_s: float | UnsetType


class HttpLine(msgspec.Struct):
    """One request in the access log."""

    ts: str
    level: str
    event: str
    request_id: str
    tenant: str
    key_id: str
    model: str | None
    route: str
    method: str
    status: int
    outcome: str | None
    finish_reasons: tuple[str, ...]
    error_code: str | None
    error: str | UnsetType
    path: str | UnsetType
    stream: bool
    duration_s: float
    request_bytes: int
    response_bytes: int
    usage: UsageLine | UnsetType
    timings: TimingsLine | UnsetType
    speed: SpeedLine | UnsetType
    rescued_from: str | UnsetType
