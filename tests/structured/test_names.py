"""Names are never repeated in one object: which tokens would do so, against reading every token's text."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inferd.structured.names import Place, QuoteTokens, first_place

PIECES = ['{"', '"', '":', "a", "b", 'a"', 'ab":1', ',"', '},"a":', '{"a":{"b"', "\\", '\\"', "\\\\", ", ", "[", "]"]
TOKENS = [piece.encode() for piece in [*PIECES, *"{}:,1", '":1,"a":', '"a":0,"a":', '","b":"', " "]]

assert len(TOKENS) <= 32  # one word of a mask

names = st.sampled_from(["a", "b", "ab", "", 'q"', "\\", "{", ","])
values = st.recursive(
    st.integers(0, 1) | names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


class Repeats(Exception):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise Repeats
    return dict(pairs)


@given(values, st.data())
def test_a_place_knows_every_text_with_unique_names(value: object, data: st.DataObject) -> None:
    text = json.dumps(value).encode()
    cut = data.draw(st.integers(0, len(text)))
    before = Place().after(text[:cut])
    assert before is not None
    assert before.after(text[cut:]) == Place().after(text)


@given(st.lists(st.tuples(names, st.integers(0, 1)), max_size=4))
def test_a_place_ends_where_a_name_is_repeated(members: list[tuple[str, int]]) -> None:
    text = "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in members) + "}"
    try:
        json.loads(text, object_pairs_hook=_unique)
        is_unique = True
    except Repeats:
        is_unique = False
    assert (Place().after(text.encode()) is not None) == is_unique


@given(values, st.data())
def test_the_tokens_found_are_those_that_repeat_a_name(value: object, data: st.DataObject) -> None:
    text = json.dumps(value).encode()
    place = Place().after(text[: data.draw(st.integers(0, len(text)))])
    assert place is not None
    row = np.full(1, -1, dtype=np.int32)
    QuoteTokens(TOKENS).ban(row, place)
    allowed = [number for number in range(len(TOKENS)) if row.view(np.uint32)[0] >> np.uint32(number) & 1]
    assert allowed == [number for number, token in enumerate(TOKENS) if place.after(token) is not None]


def test_the_only_allowed_token_stays() -> None:
    row = np.array([1 << 1], dtype=np.int32)
    place = Place().after(b'{"":1,"')
    assert place is not None
    QuoteTokens(TOKENS).ban(row, place)
    assert row.tolist() == [1 << 1]


beside = st.text(alphabet='{}[]",:a<1', max_size=8)


@given(
    st.lists(st.tuples(beside, st.lists(st.tuples(names, st.integers(0, 1) | names), max_size=3)), max_size=4), beside
)
def test_names_are_those_of_one_json_text_of_an_answer(
    parts: list[tuple[str, list[tuple[str, object]]]], last: str
) -> None:
    """Text beside JSON texts repeats nothing, whatever it looks like."""
    text, is_unique = "", True
    for before, members in parts:
        text += before + "<call>{" + ", ".join(f"{json.dumps(n)}: {json.dumps(v)}" for n, v in members) + "}"
        is_unique = is_unique and len(dict(members)) == len(members)
    start = first_place(["<call>"], is_begun=False)
    assert start is not None
    for at in range(len(text)):
        following = start.after(text[:at].encode())
        if following is not None:
            assert following.after(text[at:].encode()) == start.after(text.encode())
    assert (start.after((text + last).encode()) is not None) == is_unique


@given(values.filter(lambda value: not isinstance(value, int)), beside)
def test_an_answer_may_begin_with_its_json_text(value: object, rest: str) -> None:
    start = first_place(["</think>"], is_begun=True)
    assert start is not None
    end = start.after(json.dumps(value).encode())
    assert end is not None
    assert end.beside == b""
    assert end.after(rest.encode()) is not None
    assert start.after(b'<think>{"a":1,"a":2}</think>{"a":1,"a":2}') is None
    assert start.after(b'<think>{"a":1,"a":2}</think>{"a":1,"b":2}') is not None
