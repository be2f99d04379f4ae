"""Traces of arrivals as JSON lines, for the simulator. Knows the fields; reads no text of any prompt.

A line is an object with ``timestamp``, the arrival in milliseconds, and one of

- ``seconds``: what the request takes a replica; or
- ``output_length``: tokens of its answer. A request takes the given seconds times its length over the mean length; or
- ``requests``: a list of requests that arrive together, each with ``seconds``, ``output_length`` or ``Output Length``.

A request with none of these takes the given seconds. Other fields are ignored. Arrivals count from the first one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from inferd.autoscale.simulate import Arrival
from inferd.errors import InvalidRequest
from inferd.planning.trace import ANSWERS, number_in, rows

MAX_SECONDS: Final = 7 * 86_400.0
"""Seconds from the first arrival to the last end that are simulated at most."""


def read_trace(lines: Iterable[bytes], model_seconds: float) -> list[Arrival]:
    """The arrivals of a trace, in order of time.

    ``model_seconds``: the seconds of a mean request. Raises InvalidRequest that names the first bad line, and for a
    trace without a request.
    """
    found: list[tuple[float, float | None, float | None]] = []
    for number, at, request in rows(lines):
        length = next((number_in(request, name, number) for name in ANSWERS if name in request), None)
        found.append((at, number_in(request, "seconds", number), length))
    lengths = [length for _, _, length in found if length is not None]
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    first = min(at for at, _, _ in found)
    arrivals = [
        Arrival(at - first, seconds if seconds is not None else _seconds(length, mean, model_seconds))
        for at, seconds, length in found
    ]
    return sorted(arrivals)


def check_duration(arrivals: list[Arrival], at_once: int) -> None:
    """Raises InvalidRequest for arrivals that take longer to simulate than is of use, where ``at_once`` of them are
    worked at together."""
    work_s = sum(one.seconds for one in arrivals) / at_once + max(one.seconds for one in arrivals)
    for what, seconds, remedy in (
        ("comes", arrivals[-1].at, "cut the trace; 'timestamp' is in milliseconds"),
        ("ends", arrivals[-1].at + work_s, "take fewer or shorter requests, or more of --min and --slots"),
    ):
        if seconds > MAX_SECONDS:
            raise InvalidRequest(
                f"The last request {what} {seconds:.4g} s after the first one comes, and {MAX_SECONDS:,.0f} s are "
                f"simulated at most: {remedy}.",
                param="trace",
                code="long_trace",
            )


def _seconds(length: float | None, mean: float, model_seconds: float) -> float:
    return model_seconds if length is None or mean <= 0 else model_seconds * length / mean
