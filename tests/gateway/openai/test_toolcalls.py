"""Tool calls are found in text however it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.gateway.openai.toolcalls import CLOSE, OPEN, ParsedCall, ToolCallParser, parse_all, parse_call

CALL = '{"name": "f", "arguments": {"x": [1, "</tool_call"]}}'
PIECES = [
    OPEN,
    CLOSE,
    OPEN[:5],
    CLOSE[:-1],
    CALL,
    '{"name": "g"}',
    "{}",
    "not json",
    " ",
    "\n",
    "text",
    "<",
    "é💡",
    "[1]",
]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def streamed(pieces: list[str], *, only_one: bool = False) -> tuple[str, list[ParsedCall]]:
    parser = ToolCallParser(only_one=only_one)
    shown = ""
    calls: list[ParsedCall] = []
    for piece in pieces:
        text, found = parser.feed(piece)
        shown, calls = shown + text, calls + found
    text, found = parser.finish()
    return shown + text, calls + found


@given(st.data(), texts, st.booleans())
def test_every_way_of_cutting_gives_the_same_text_and_calls(data: st.DataObject, text: str, only_one: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(pieces, only_one=only_one) == parse_all([text], only_one=only_one)
    assert streamed(list(text), only_one=only_one) == parse_all([text], only_one=only_one)


@given(st.text() | texts)
def test_text_without_calls_is_given_back_as_it_was(text: str) -> None:
    shown, calls = parse_all([text])
    if not calls:
        assert shown == text


@given(texts)
def test_text_is_never_lost_but_for_calls_and_the_space_beside_them(text: str) -> None:
    shown, calls = parse_all([text])
    left = shown
    position = 0
    for character in left:
        position = text.index(character, position) + 1  # a subsequence of what was written
    assert len(calls) <= text.count(OPEN)


def test_text_streams_until_it_may_be_a_call() -> None:
    parser = ToolCallParser()
    assert parser.feed("Hello ") == ("Hello", [])
    assert parser.feed("there<tool") == (" there", [])
    assert parser.feed("box>") == ("<toolbox>", [])
    assert parser.feed("\n<tool_call>" + CALL) == ("", [])
    assert parser.feed(CLOSE) == ("", [ParsedCall("f", '{"x":[1, "</tool_call"]}')])
    assert parser.feed("\n") == ("", [])
    assert parser.finish() == ("", [])


def test_several_calls_have_no_text_between_them() -> None:
    text = f"{OPEN}{CALL}{CLOSE}\n{OPEN}{CALL}{CLOSE}\n"
    shown, calls = parse_all([text])
    assert (shown, len(calls)) == ("", 2)
    shown, calls = parse_all([text], only_one=True)
    assert (shown, len(calls)) == ("", 1)


def test_a_call_left_open_counts_when_it_is_complete() -> None:
    assert parse_all([OPEN + CALL])[1][0].name == "f"
    assert parse_all([" " + OPEN + CALL[:-1]]) == (" " + OPEN + CALL[:-1], [])


def test_what_is_no_call_is_none() -> None:
    for body in (
        "",
        "x",
        "[]",
        '{"arguments": {}}',
        '{"name": ""}',
        '{"name": 5}',
        '{"name": "f", "arguments": [1]}',
        "\ud800",
    ):
        assert parse_call(body) is None
    assert parse_call('{"name": "f"}') == ParsedCall("f", "{}")
    assert parse_call('{"name": "f", "parameters": {"a": 1}}') == ParsedCall("f", '{"a":1}')
