"""Stop strings are found however the text is cut, and nothing of them is sent."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.stop import StopBuffer

letters = st.text("ab", max_size=30)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


def run(stops: tuple[str, ...], parts: list[str], include: bool = False) -> tuple[str, str | None]:
    buffer = StopBuffer(stops, include)
    sent = "".join(buffer.push(part) for part in parts)
    return sent + (buffer.flush() if buffer.matched is None else ""), buffer.matched


def expected(stops: tuple[str, ...], text: str, include: bool) -> tuple[str, str | None]:
    """The plain definition: the shortest text that ends with a stop string, the longest such string."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(min(a, len(text)) for a in at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_is_found_across_every_split_of_the_text(include: bool) -> None:
    text, stop = "Hello\nUser: x", "\nUser:"
    wanted = "Hello\nUser:" if include else "Hello"
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert run((stop,), [text[:first], text[first:second], text[second:]], include) == (wanted, stop)
    assert run((stop,), list(text), include) == (wanted, stop)


@given(text=letters, stops=stop_strings, at=st.lists(st.integers(0, 30), max_size=8), include=st.booleans())
def test_the_result_does_not_depend_on_how_the_text_arrives(
    text: str, stops: tuple[str, ...], at: list[int], include: bool
) -> None:
    assert run(stops, cut(text, at), include) == expected(stops, text, include)


@given(text=letters, stops=stop_strings)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    buffer = StopBuffer(stops, include=False)
    sent = ""
    for i, letter in enumerate(text):
        sent += buffer.push(letter)
        if buffer.matched is not None:
            return
        held = text[len(sent) : i + 1]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert sent + buffer.flush() == text


def test_nothing_is_sent_after_a_match() -> None:
    buffer = StopBuffer(("END",), include=False)
    assert buffer.push("x END and") == "x "
    assert (buffer.push("more"), buffer.push_unchecked("more"), buffer.flush()) == ("", "", "")
    assert buffer.matched == "END"


def test_without_stop_strings_text_passes_at_once() -> None:
    buffer = StopBuffer((), include=False)
    assert buffer.push("all of it") == "all of it"
    assert (
        StopBuffer(("",), include=True).push("an empty stop string stops nothing")
        == "an empty stop string stops nothing"
    )


def test_unchecked_text_neither_stops_nor_begins_a_stop_string() -> None:
    buffer = StopBuffer(("END",), include=False)
    assert buffer.push_unchecked("END E") == "END E"
    assert buffer.push("ND") == "ND"
    assert buffer.matched is None


def test_text_held_back_comes_before_unchecked_text() -> None:
    buffer = StopBuffer(("END",), include=False)
    assert buffer.push("xE") == "x"
    assert buffer.push_unchecked("ND") == "END"
    assert buffer.flush() == ""
