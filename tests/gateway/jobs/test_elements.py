"""The elements of an array are those of the decoded body, however its bytes arrive."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.gateway.jobs.elements import MAX_REST_BYTES, Elements

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
others = st.dictionaries(st.sampled_from(["a", '"', "\\", "x[", "requests2"]), values, max_size=3)


def read(body: bytes, cuts: list[int], most: int = 1000) -> tuple[list[bytes], bytes]:
    elements = Elements("requests", most)
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    found = [one for a, b in itertools.pairwise(places) for one in elements.feed(body[a:b])]
    return found, elements.close()


@given(st.lists(values, max_size=5), others, others, st.lists(st.integers(0)), st.sampled_from([None, 1]))
def test_elements_are_those_of_the_decoded_body(
    requests: list[Any], before: dict[str, Any], behind: dict[str, Any], cuts: list[int], indent: int | None
) -> None:
    whole = {**before, "requests": requests, **behind}
    found, rest = read(json.dumps(whole, indent=indent).encode(), cuts)
    assert [json.loads(one) for one in found] == requests
    assert json.loads(rest) == {**whole, "requests": []}


@given(st.lists(st.sampled_from([*'{}[],:"\\x', '"requests"']), max_size=16), st.lists(st.integers(0)))
def test_what_is_no_json_is_none_by_its_rest_or_its_elements(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    found, rest = read(text.encode(), cuts)
    try:
        valid = all(json.loads(one) is not Ellipsis for one in found) and json.loads(rest) is not Ellipsis
    except ValueError:
        valid = False
    if valid:
        json.loads(text)


@pytest.mark.parametrize("end", [b"", b"]}", b",1]}"])
def test_an_element_that_is_too_long_is_refused_before_its_end(end: bytes) -> None:
    body = b'{"requests":["' + b"x" * 1000 + b'"' + end
    with pytest.raises(InvalidRequest, match=r"server\.max_body_bytes"):
        read(body, [900])


def test_other_fields_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="beside 'requests'"):
        read(b'{"a":"' + b"x" * MAX_REST_BYTES, [])


def test_a_long_string_is_read_once() -> None:
    """Its time grows with its bytes: a million of them in pieces of 100 take a moment."""
    elements = Elements("requests", 10_000_000)
    elements.feed(b'{"requests":["')
    for _ in range(10_000):
        assert elements.feed(b"\\n" * 50) == []
    (found,) = elements.feed(b'"]}')
    assert len(found) == 1_000_002
