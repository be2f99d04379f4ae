"""The figures of a load test, from the measurements of each request. Pure; no clocks, no sockets.

TTFT is the time from sending a request to its first text; ITL the gap between two pieces of text;
TPOT (E2E - TTFT) / (output tokens - 1); E2E the time to the end of the answer. Seconds throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load test. Times are seconds after the test's start."""

    sent_at: float
    ended_at: float
    first_at: float | None = None
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        if self.first_at is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_at) / (self.output_tokens - 1)


class Spread(msgspec.Struct, frozen=True):
    """The distribution of one measure, in seconds. All zero when nothing was measured."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its load and its results."""

    kind: Literal["closed", "open"]
    load: float  # clients at a time (closed loop), or requests per second (open loop)
    num_requests: int
    num_errors: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    errors: dict[str, int] = {}  # sentence -> how often


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of ascending values, interpolated linearly (numpy's default)."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread()
    ordered = sorted(values)
    return Spread(
        len(ordered),
        math.fsum(ordered) / len(ordered),
        percentile(ordered, 50),
        percentile(ordered, 95),
        percentile(ordered, 99),
        ordered[-1],
    )


def summarise(records: Sequence[Record], *, kind: Literal["closed", "open"], load: float) -> Summary:
    """Figures of one run. Failed requests count as errors and in nothing else."""
    good = [record for record in records if record.error is None]
    began = min((record.sent_at for record in records), default=0.0)
    duration = max((record.ended_at for record in records), default=0.0) - began
    prompt = sum(record.prompt_tokens for record in good)
    output = sum(record.output_tokens for record in good)
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    per_s = 1 / duration if duration > 0 else 0.0
    return Summary(
        kind=kind,
        load=load,
        num_requests=len(records),
        num_errors=len(records) - len(good),
        duration_s=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=output * per_s,
        total_tokens_per_s=(prompt + output) * per_s,
        ttft=spread([value for record in good if (value := record.ttft_s) is not None]),
        tpot=spread([value for record in good if (value := record.tpot_s) is not None]),
        itl=spread([gap for record in good for gap in record.gaps_s]),
        e2e=spread([record.e2e_s for record in good]),
        errors=errors,
    )
