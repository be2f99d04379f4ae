"""What is held of one call while it runs: its answer up to a bound, and the same answer once."""

from __future__ import annotations

import pytest

from inferd.events import HttpServed
from inferd.observe.payloads import capture
from inferd.observe.payloads.capture import Capture


class Receiver:
    """Keeps what it is offered."""

    def __init__(self) -> None:
        self.seen: list[Capture] = []

    def offer(self, capture: Capture, event: HttpServed) -> None:
        self.seen.append(capture)


def test_the_parts_of_a_streamed_answer_are_held_with_their_request() -> None:
    made = Capture(Receiver(), None)
    assert (made.num_bytes, made.is_cut, made.is_whole) == (0, False, False)
    made.request = b"request"
    made.add(b"one")
    made.add(b"three")
    made.take(b"onethree")
    assert made.answer == [b"one", b"three"], "the whole is the same answer again"
    assert (made.num_held, made.num_bytes, made.is_whole) == (8, 15, False)


def test_a_whole_answer_is_held_once() -> None:
    made = Capture(Receiver(), None)
    made.take(b"whole")
    made.add(b"compressed")
    made.take(b"again")
    assert (made.answer, made.num_held, made.is_whole) == ([b"whole"], 5, True)


@pytest.mark.parametrize(("size", "is_cut"), [(0, False), (1, True)])
def test_an_answer_is_held_up_to_its_bound_and_smaller_parts_beyond_one_that_was_cut(size: int, is_cut: bool) -> None:
    made = Capture(Receiver(), None)
    most = capture.MAX_ANSWER_BYTES
    made.add(bytes(most - 2))
    made.add(bytes(2 + size))
    assert (made.is_cut, made.num_held) == (is_cut, most - 2 if is_cut else most)
    made.add(b"xx"[: 2 * size])
    assert made.num_held == most
