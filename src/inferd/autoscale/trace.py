"""Traces of arrivals as JSON lines, for the simulator. Knows the fields; reads no text of any prompt.

A line is an object with ``timestamp``, the arrival in milliseconds, and one of

- ``seconds``: what the request takes a replica; or
- ``output_length``: tokens of its answer. A request takes the given seconds times its length over the mean length; or
- ``requests``: a list of requests that arrive together, each with ``seconds``, ``output_length`` or ``Output Length``.

A request with none of these takes the given seconds. Other fields are ignored. Arrivals count from the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from inferd.autoscale.simulate import Arrival
from inferd.errors import InvalidRequest

MAX_LINE: Final = 16 << 20
MAX_ARRIVALS: Final = 5_000_000

_decoder: Final = msgspec.json.Decoder(dict[str, object])
_LENGTHS: Final = ("output_length", "Output Length")


def read_trace(lines: Iterable[bytes], model_seconds: float) -> list[Arrival]:
    """The arrivals of a trace, in order of time.

    ``model_seconds``: the seconds of a mean request. Raises InvalidRequest that names the first bad line, and for a
    trace without a request.
    """
    found: list[tuple[float, float | None, float | None]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE:
            raise _bad(number, f"it has {len(line)} bytes, and {MAX_LINE} are the most")
        try:
            row = _decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _bad(number, f"it is not a JSON object ({error})") from None
        at = _number(row, "timestamp", number)
        if at is None:
            raise _bad(number, "'timestamp' is missing; give the arrival in milliseconds")
        together = row.get("requests", [row])
        if not isinstance(together, list):
            raise _bad(number, "'requests' is not a list")
        for request in together:
            if not isinstance(request, dict):
                raise _bad(number, "an entry of 'requests' is not an object")
            length = next((_number(request, name, number) for name in _LENGTHS if name in request), None)
            found.append((at / 1000.0, _number(request, "seconds", number), length))
        if len(found) > MAX_ARRIVALS:
            raise _bad(number, f"there are more than {MAX_ARRIVALS:,} requests; cut the trace")
    if not found:
        raise InvalidRequest("The trace has no request; a trace has one JSON object per line.", code="empty_trace")
    lengths = [length for _, _, length in found if length is not None]
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    first = min(at for at, _, _ in found)
    arrivals = [
        Arrival(at - first, seconds if seconds is not None else _seconds(length, mean, model_seconds))
        for at, seconds, length in found
    ]
    return sorted(arrivals)


def _seconds(length: float | None, mean: float, model_seconds: float) -> float:
    return model_seconds if length is None or mean <= 0 else model_seconds * length / mean


def _number(row: dict[str, object], name: str, line: int) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _bad(line, f"{name!r} is {str(value)[:40]!r}, not a number of 0 or more")
    return float(value)


def _bad(number: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"Line {number} of the trace is bad: {what}.", param="trace", code="bad_trace")
