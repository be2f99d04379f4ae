"""What a plan takes of a trace: the lengths of its requests, and their rate."""

from __future__ import annotations

import json

import pytest

from inferd.errors import InvalidRequest
from inferd.planning.trace import read_lengths


def lines(*rows: dict[str, object]) -> list[bytes]:
    return [json.dumps(row).encode() for row in rows]


def request(prompt: int, answer: int) -> dict[str, object]:
    return {"input_length": prompt, "output_length": answer}


def test_lengths_are_means_and_a_total_that_most_requests_stay_within() -> None:
    found = read_lengths(lines(*({"timestamp": 500 * at, **request(10 * at, at)} for at in range(1, 101))))
    assert (found.num_requests, found.seconds, found.per_second) == (100, 49.5, 100 / 49.5)
    assert (found.prompt_mean, found.answer_mean) == (505.0, 50.5)
    assert sum(11 * at <= found.total_p95 for at in range(1, 101)) == 95


def test_requests_that_arrive_together_have_no_rate_and_one_request_is_its_own_bound() -> None:
    together = read_lengths(lines({"timestamp": 7, "requests": [request(4, 2), request(6, 0)]}))
    assert (together.num_requests, together.seconds, together.per_second) == (2, 0.0, None)
    assert (together.prompt_mean, together.answer_mean, together.total_p95) == (5.0, 1.0, 6)
    assert read_lengths(lines({"timestamp": 7, "Prompt Length": 3, "Output Length": 4})).total_p95 == 7


@pytest.mark.parametrize("missing", ["input_length", "output_length"])
def test_a_request_without_a_length_is_named_by_its_line(missing: str) -> None:
    second = {name: value for name, value in request(1, 1).items() if name != missing}
    with pytest.raises(InvalidRequest, match=f"Line 2 of the trace is bad: a request has no '{missing}'"):
        read_lengths(lines({"timestamp": 1, **request(1, 1)}, {"timestamp": 2, **second}))
