"""Traces of requests as JSON lines: the rows, checked, for a plan and for the simulator of replicas.

A line is an object with ``timestamp``, the arrival in milliseconds, and either a request's own fields or ``requests``,
a list of requests that arrive together. Knows the fields of lengths; reads no text of any prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from inferd.errors import InvalidRequest

MAX_LINE: Final = 16 << 20
MAX_ARRIVALS: Final = 5_000_000
MAX_LENGTH: Final = 10_000_000
"""Tokens of a prompt or of an answer at most."""
PROMPTS: Final = ("input_length", "Prompt Length")
ANSWERS: Final = ("output_length", "Output Length")
"""Names of the tokens of prompts and of answers in published traces (Mooncake, AIBrix)."""

_decoder: Final = msgspec.json.Decoder(dict[str, object])


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a trace, as a plan needs them. Lengths in tokens."""

    num_requests: int
    seconds: float  # from the first arrival to the last
    prompt_mean: float
    answer_mean: float
    total_p95: int  # prompt and answer together, which 95 % of the requests stay within

    @property
    def per_second(self) -> float | None:
        """Requests per second; None for a trace without duration."""
        return self.num_requests / self.seconds if self.seconds > 0 else None


def rows(lines: Iterable[bytes]) -> Iterator[tuple[int, float, Mapping[str, object]]]:
    """(number of the line, arrival in seconds, the request's fields) of each request, in the order of the file.

    Raises InvalidRequest that names the first bad line, and for a trace without a request.
    """
    count = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE:
            raise bad(number, f"it has {len(line)} bytes, and {MAX_LINE} are the most")
        try:
            row = _decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad(number, f"it is not a JSON object ({error})") from None
        at = number_in(row, "timestamp", number)
        if at is None:
            raise bad(number, "'timestamp' is missing; give the arrival in milliseconds")
        together = row.get("requests", [row])
        if not isinstance(together, list):
            raise bad(number, "'requests' is not a list")
        for request in together:
            if not isinstance(request, dict):
                raise bad(number, "an entry of 'requests' is not an object")
            count += 1
            if count > MAX_ARRIVALS:
                raise bad(number, f"there are more than {MAX_ARRIVALS:,} requests; cut the trace")
            yield number, at / 1000.0, request
    if not count:
        raise InvalidRequest("The trace has no request; a trace has one JSON object per line.", code="empty_trace")


def read_lengths(lines: Iterable[bytes]) -> Lengths:
    """The lengths and the rate of a trace's requests.

    Raises InvalidRequest as ``rows`` does, and for a request without the lengths of its prompt and its answer.
    """
    arrivals: list[float] = []
    prompts: list[float] = []
    answers: list[float] = []
    for number, at, request in rows(lines):
        arrivals.append(at)
        for found, names in ((prompts, PROMPTS), (answers, ANSWERS)):
            length = next((number_in(request, name, number) for name in names if name in request), None)
            if length is None:
                raise bad(number, f"a request has no {names[0]!r}; a plan needs the tokens of prompts and answers")
            if length > MAX_LENGTH:
                raise bad(number, f"a request has {length:.4g} tokens, and {MAX_LENGTH:,} are the most")
            found.append(length)
    totals = sorted(prompt + answer for prompt, answer in zip(prompts, answers, strict=True))
    return Lengths(
        num_requests=len(totals),
        seconds=max(arrivals) - min(arrivals),
        prompt_mean=sum(prompts) / len(prompts),
        answer_mean=sum(answers) / len(answers),
        total_p95=max(1, math.ceil(totals[math.ceil(0.95 * len(totals)) - 1])),
    )


def number_in(row: Mapping[str, object], name: str, line: int) -> float | None:
    """The field's value; None where it is not there. Raises InvalidRequest for anything but a number of 0 or more."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise bad(line, f"{name!r} is {str(value)[:40]!r}, not a number of 0 or more")
    return float(value)


def bad(number: int, what: str) -> InvalidRequest:
    """The error about a line."""
    return InvalidRequest(f"Line {number} of the trace is bad: {what}.", param="trace", code="bad_trace")
