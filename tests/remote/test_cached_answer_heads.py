"""Heads of a remote server's answers that come again are found by their bytes, and mean what the parser would have read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.tiers import THOROUGH

from inferd import clock
from inferd.errors import UpstreamFailed
from inferd.head_pattern import is_exact, pattern_of
from inferd.remote import connection as wire
from inferd.remote.connection import Connection, Head, Headers

LINES = [
    "host: a",
    "content-length: 12",
    "x-length: 9",
    "Content-Length: 007",
    "Inference-Header-Content-Length: 5",
    "a: b",
]


@given(st.lists(st.sampled_from(LINES)))
@example(["Inference-Header-Content-Length: 5", "Content-Length: 12"])
def test_a_pattern_keeps_everything_but_the_length(lines: list[str]) -> None:
    head = "\r\n".join(["POST / HTTP/1.1", *lines]).encode()
    pattern, digits = pattern_of(head + b"\r\n\r\nbody", len(head))
    assert pattern_of(head, len(head)) == (pattern, digits)
    if is_exact(head):
        lengths = [line for line in lines if line.lower().partition(":")[0].endswith("length")]
        found = next(line for line in lengths[:2] if line.lower().startswith("content-length: "))
        assert digits == found.partition(" ")[2].encode()
        at = pattern.lower().index(b"\r\ncontent-length: ") + 18
        assert pattern[:at] + digits + pattern[at:] == head


# -- the wire ------------------------------------------------------------------------------------


class Transport:
    def __init__(self) -> None:
        self.is_closed = False

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None:
        self.is_closed = True


class Ear:
    """Writes down an answer in a form that does not depend on how it was cut."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def answer_whole(self, head: Head, body: bytes) -> None:
        self.answer_head(head.status, head.headers)
        if body:
            self.answer_data(body)
        self.answer_ended()

    def answer_head(self, status: int, headers: Headers) -> None:
        self.heard.append((status, [header for header in headers if header[0] != b"content-length"]))

    def answer_data(self, data: bytes) -> None:
        if isinstance(self.heard[-1], bytes):
            self.heard[-1] += data
        else:
            self.heard.append(data)

    def answer_ended(self) -> None:
        self.heard.append("ended")

    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        self.heard.append((error.code, is_stale))

    def answer_broken(self, error: UpstreamFailed) -> None:
        raise AssertionError("nothing is raised here")


def listen(answers: list[bytes], cuts: list[int], *, remembers: bool) -> list[Any]:
    """What is heard of answers on one connection, which come in pieces of these sizes."""
    with pytest.MonkeyPatch.context() as patch:
        if not remembers:
            patch.setattr(wire, "_MAX_KNOWN_HEADS_BYTES", 0)
        wire._known_heads.clear()
        wire._chunk_sizes.clear()
        heard: list[Any] = []
        freed: list[Connection] = []
        connection = Connection(freed.append, lambda lost: None)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        turn = 0
        for answer in answers:
            if connection.is_closed:
                break
            ear = Ear()
            connection.send(b"", ear, clock.now())
            at = 0
            while at < len(answer) and not connection.is_closed:
                size = cuts[turn % len(cuts)]
                turn += 1
                connection.data_received(answer[at : at + size])
                at += size
            heard.append((ear.heard, connection.is_closed, connection.is_busy))
            if connection.is_busy:
                break
        return heard


def answer_of(status: int, body: bytes, form: str, sizes: list[int]) -> bytes:
    head = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\n" % status
    if form == "length":
        return head + b"content-length: %d\r\n\r\n" % len(body) + body
    if form == "too long":
        return head + b"content-length: %d\r\n\r\n" % len(body) + body + b"x"
    if form == "two lengths":
        return head + b"content-length: %d\r\ncontent-length: 1\r\n\r\n" % len(body) + body
    if form == "continue":
        return b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"content-length: %d\r\n\r\n" % len(body) + body
    if form == "closing":
        return head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    pieces, at, turn = [], 0, 0
    while at < len(body):
        piece_ = body[at : at + sizes[turn % len(sizes)]]
        line = {"chunks": b"%x", "capitals": b"%X", "zeros": b"00%x", "extensions": b"%x;a=b"}[form] % len(piece_)
        pieces.append(line + b"\r\n" + piece_ + b"\r\n")
        at += len(piece_)
        turn += 1
    end = b"0\r\ntrailer: x\r\n\r\n" if form == "extensions" else b"0\r\n\r\n"
    return head + b"transfer-encoding: chunked\r\n\r\n" + b"".join(pieces) + end


answers = st.builds(
    answer_of,
    st.sampled_from([200, 200, 200, 404, 500]),
    st.binary(min_size=0, max_size=40),
    st.sampled_from(
        [
            *("length", "length", "chunks", "chunks", "capitals", "zeros", "extensions"),
            *("continue", "closing", "too long", "two lengths"),
        ]
    ),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
)


@THOROUGH
@settings(max_examples=300, deadline=None)
@given(st.lists(answers, min_size=1, max_size=4), st.lists(st.sampled_from([1, 3, 10, 60, 10_000]), min_size=1))
def test_an_answer_with_a_cached_head_is_delivered_as_the_parser_would_deliver_it(
    some: list[bytes], cuts: list[int]
) -> None:
    twice = [answer for answer in some for _ in range(2)]
    assert listen(twice, cuts, remembers=True) == listen(twice, cuts, remembers=False)


@pytest.mark.parametrize("form", ["length", "chunks"])
def test_a_cached_head_may_be_split_at_any_byte(form: str) -> None:
    body = (
        b"x" * 65
    )  # by three shorter than the head up to the first byte of its last three: the two were once taken for one
    answer = answer_of(200, body, form, [40])
    for cut in range(1, len(answer)):
        cuts = [len(answer), cut, len(answer)]
        assert listen([answer] * 2, cuts, remembers=True) == listen([answer] * 2, cuts, remembers=False), cut


def test_a_head_that_has_not_ended_is_like_none() -> None:
    head = b"POST /a HTTP/1.1\r\ncontent-length: 40\r\nhost: a"
    unended = head + b"\r"
    assert pattern_of(unended, unended.find(b"\r\n\r\n")) == (b"", b"")
    assert not is_exact(b"")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.integers(0, 400),
    st.binary(min_size=1, max_size=3),
    st.lists(st.sampled_from([7, 40, 10_000]), min_size=1, max_size=3),
)
def test_a_damaged_answer_fails_with_a_cached_head_as_without(
    sizes: list[int], at: int, damage: bytes, cuts: list[int]
) -> None:
    good = answer_of(200, b"0123456789" * 5, "chunks", sizes)
    at = min(at, len(good) - 1)
    bad = good[:at] + damage + good[at + len(damage) :]
    assert listen([good, bad], cuts, remembers=True) == listen([good, bad], cuts, remembers=False)


@pytest.mark.parametrize("form", ["length", "chunks"])
@pytest.mark.parametrize("remembers", [True, False])
def test_a_connection_is_not_used_again_where_a_full_read_may_have_left_bytes(form: str, remembers: bool) -> None:
    small = answer_of(200, b"{}", form, [64])
    large = answer_of(200, b"x" * wire.FULL_READ_BYTES, form, [50_000])
    whole = [len(small), len(large)]
    (_, (heard, is_closed, is_busy)) = listen([small, large], whole, remembers=remembers)
    assert heard[-1] == "ended"
    assert (is_closed, is_busy) == (True, False)
    in_parts = [len(small), len(large) - 10, 10]
    (_, (heard, is_closed, is_busy)) = listen([small, large], in_parts, remembers=remembers)
    assert heard[-1] == "ended"
    assert (is_closed, is_busy) == (False, False)
