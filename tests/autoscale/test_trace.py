"""Traces of arrivals: their fields, and what is wrong with a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.autoscale.simulate import Arrival
from inferd.autoscale.trace import read_trace
from inferd.errors import InvalidRequest


def test_each_form_of_a_line_gives_its_arrivals() -> None:
    lines = [
        b'{"timestamp": 3000, "seconds": 0.5}',
        b"",
        b'{"timestamp": 1000, "output_length": 30, "input_length": 5, "hash_ids": [1]}',
        b'{"timestamp": 2000, "requests": [{"prompt": "x", "Output Length": 10}, {"output_length": 20}]}',
        b'{"timestamp": 1500}',
    ]
    assert read_trace(lines, 4.0) == [
        Arrival(0.0, 6.0),
        Arrival(0.5, 4.0),
        Arrival(1.0, 2.0),
        Arrival(1.0, 4.0),
        Arrival(2.0, 0.5),
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b"{}", "'timestamp' is missing"),
        (b'{"timestamp": "3"}', "'timestamp' is '3', not a number"),
        (b'{"timestamp": -1}', "not a number of 0 or more"),
        (b'{"timestamp": true}', "not a number of 0 or more"),
        (b'{"timestamp": 1, "seconds": 1e999}', "line 2|Line 2"),
        (b'{"timestamp": 1, "requests": 3}', "'requests' is not a list"),
        (b'{"timestamp": 1, "requests": [3]}', "an entry of 'requests'"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        read_trace([b'{"timestamp": 1}', line], 1.0)
    assert "Line 2 " in caught.value.message


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no request"):
        read_trace([b"", b"  "], 1.0)


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_any_bytes_are_arrivals_or_a_sentence(lines: list[bytes]) -> None:
    try:
        found = read_trace(lines, 1.0)
    except InvalidRequest:
        return
    assert found == sorted(found)
