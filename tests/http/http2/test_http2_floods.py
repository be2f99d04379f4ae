"""Peers that want to cost much and pay little: each flood ends its own connection, or is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.http.http2.h2_site import PREFACE, Echo, Peer, asking, block, data, in_loop
from tests.tiers import THOROUGH, sample

from inferd import clock
from inferd.http import cost
from inferd.http.cost import TurnQueue
from inferd.http.http2 import connection as limits
from inferd.http.http2 import frames as f
from inferd.http.http2.hpack import literal


def ping(number: int) -> bytes:
    return f.frame(f.PING, 0, 0, number.to_bytes(8, "big"))


def rapid_reset(number: int) -> bytes:
    stream = 2 * number + 1
    return asking(stream) + f.reset(stream, f.CANCEL)


HUFFMAN = literal(b"x", b"")[:-1] + b"\xff\x81\xf9\x01" + b"\x00" * 32_000  # 51,200 times the letter 0


def refused(number: int) -> bytes:
    """Streams that stay open until no further one may be begun."""
    return asking(2 * number + 1)


FLOODS: dict[str, Callable[[int], bytes]] = {
    "streams begun and given up (CVE-2023-44487)": rapid_reset,
    "streams beyond those that may be open": refused,
    "settings": lambda number: f.settings(((f.INITIAL_WINDOW_SIZE, number % 9000),)),
    "acknowledgements": lambda number: f.SETTINGS_ACK,
    "answers to no ping": lambda number: f.frame(f.PING, f.ACK, 0, bytes(8)),
    "priorities": lambda number: f.frame(f.PRIORITY, 0, 1, b"\0\0\0\3\7"),
    "windows that open by a byte": lambda number: f.window_update(0, 1),
    "windows of streams that are over": lambda number: f.window_update(1, 1) if number else asking(1, is_end=True),
    "goodbyes": lambda number: f.frame(f.GOAWAY, 0, 0, bytes(8)),
    "unknown frames": lambda number: f.frame(77, 0, 0),
    "data without content": lambda number: data(1) if number else asking(1),
    "data of a byte": lambda number: data(1, b"x") if number else asking(1),
    "padding without content": lambda number: f.frame(f.DATA, f.PADDED, 1, b"\x03abc") if number else asking(1),
    "malformed requests": lambda number: asking(2 * number + 1, headers=[]),
    "tiny headers": lambda number: f.headers(2 * number + 1, b"\x82" * 1700, f.MAX_FRAME, is_end=True),
    "headers in Huffman's code": lambda number: f.headers(2 * number + 1, HUFFMAN, f.MAX_FRAME, is_end=True),
    "trailers of nothing": lambda number: asking(1, is_end=True),
    "requests in frames of a byte": lambda number: (
        f.frame(f.HEADERS, 0, 2 * number + 1) + f.frame(f.CONTINUATION, f.END_HEADERS, 2 * number + 1, block())
    ),
}


def read_of(piece: Callable[[int], bytes], number: int) -> tuple[bytes, int]:
    """Whole pieces from ``number`` on, as many as one read of a socket brings, and the number of the next one."""
    found = bytearray()
    while len(found) < 256 * 1024:
        found += piece(number)
        number += 1
    return bytes(found), number


@pytest.mark.parametrize("name", sample(FLOODS, "streams beyond those that may be open", "priorities", "tiny headers"))
def test_a_client_that_floods_is_sent_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the frames: what it costs is counted, and nothing is earned."""
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    piece = FLOODS[name]

    def check() -> None:
        peer = Peer()
        peer.host.answers = "trailers" in name or "over" in name
        peer.send(PREFACE)
        sent = 0
        while not peer.is_sent_away:
            assert sent < 1_000_000
            flood, number = read_of(piece, sent)
            peer.send(flood)
            sent = number
        assert peer.goodbye() == (f.ENHANCE_YOUR_CALM, b"too_much_work")
        assert sent >= 1000 or "eaders" in name, "so many are allowed"
        assert not peer.connection.streams
        written = len(peer.wire.written)
        peer.send(read_of(piece, sent)[0])
        assert len(peer.wire.written) == written, "and nothing else is said"

    in_loop(check)


def test_a_client_that_floods_with_pings_is_sent_away_in_the_words_that_clients_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 100.0)

    def check() -> None:
        peer = Peer()
        peer.send(PREFACE)
        for number in range(4):
            peer.send(ping(number))
        assert peer.goodbye() is None, "so many are allowed"
        peer.send(ping(4))
        assert peer.goodbye() == (f.ENHANCE_YOUR_CALM, b"too_many_pings")

    in_loop(check)


@pytest.mark.parametrize("name", FLOODS)
def test_a_turn_of_the_loop_does_no_more_than_a_turns_work(name: str) -> None:
    """The rest waits, nothing is read meanwhile, and other connections are served."""
    piece = FLOODS[name]

    def check() -> None:
        peer = Peer()
        other = Peer(peer.host)
        for one in (peer, other):
            one.send(PREFACE)
        peer.connection.data_received(read_of(piece, 0)[0])
        assert peer.wire.is_paused
        assert not peer.connection.cost, "it was entered"
        other.connection.data_received(asking(1, is_end=True))
        assert other.host.seen[-1][0] == 1
        other.host.end_turn()
        assert not peer.wire.is_paused or peer.goodbye() is not None

    in_loop(check)


def test_connections_that_have_more_to_do_take_turns() -> None:
    """One slice of one of them in each turn of the loop, so that the loop serves other connections in between."""
    done: list[str] = []
    turn: list[Callable[[], None]] = []
    turn_queue = TurnQueue(turn.append)

    def worker(name: str, slices: int) -> Callable[[], None]:
        left = slices

        def go_on() -> None:
            nonlocal left
            left -= 1
            done.append(name)
            if left:
                turn_queue.add(go_on)

        return go_on

    for name, slices in (("a", 3), ("b", 1), ("c", 2)):
        turn_queue.add(worker(name, slices))
    while turn:
        (call,) = turn
        turn.clear()
        call()
        done.append("|")
    assert "".join(done) == "a|b|c|a|c|a|"


@THOROUGH
def test_useful_requests_pay_for_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks and takes its answers is never sent away, however much it asks in however little time."""
    monkeypatch.setattr(clock, "now", lambda: 100.0)

    def check() -> None:
        peer = Peer()
        peer.send(PREFACE)
        for number in range(20_000):
            peer.send(asking(2 * number + 1) + data(2 * number + 1, bytes(100), is_end=True))
            peer.send(f.window_update(0, 100))
        assert peer.goodbye() is None
        assert len(peer.host.seen) == 20_000

    in_loop(check)


@pytest.mark.interpreted("replaces a constant of a compiled module, which has its value in its code")
def test_large_requests_pay_for_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    monkeypatch.setattr(cost, "BURST", 20_000)  # a hundredth, for a hundredth of the bytes

    def check() -> None:
        peer = Peer()
        peer.host.answer = b"short"
        peer.send(PREFACE)
        for number in range(5):
            stream = 2 * number + 1
            peer.send(asking(stream), f.window_update(0, 10))
            peer.connection._receivable = peer.connection.streams[stream].receivable = 1 << 30
            for _ in range(10):
                peer.send(data(stream, bytes(16384)) * 15)
            peer.send(data(stream, is_end=True))
        assert peer.goodbye() is None
        assert len(peer.host.seen) == 5

    in_loop(check)


def test_time_brings_allowances_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "now", lambda: now)
    peer = Peer()
    peer.send(PREFACE)
    for number in range(5000):
        now += 1 / 150
        peer.send(rapid_reset(number))
    assert peer.goodbye() is None


def test_pings_are_answered_as_long_as_something_is_said_in_between() -> None:
    """As clients do that measure the line while answers come."""
    peer = Peer()
    peer.send(PREFACE)
    for number in range(100):
        peer.send(asking(2 * number + 1, is_end=True), ping(number))
    assert len([kind for kind, flags, _, _ in peer.frames() if (kind, flags) == (f.PING, f.ACK)]) == 100


@pytest.mark.parametrize("size", [0, 1, 16384])
def test_headers_without_end_are_cut_off(size: int) -> None:
    def check() -> None:
        peer = Peer()
        peer.send(PREFACE, f.frame(f.HEADERS, 0, 1, block()))
        for _ in range(40):
            peer.send(f.frame(f.CONTINUATION, 0, 1, bytes(size)))
        assert peer.goodbye() == (f.ENHANCE_YOUR_CALM, b"headers without end")

    in_loop(check)


def test_headers_that_grow_when_they_are_read_are_not_kept() -> None:
    """One header of 4000 bytes that is remembered, and then named again and again."""

    def check() -> None:
        large = block() + b"\x40\x01x\x7f\xa1\x1e" + bytes(4000)
        peer = Peer()
        peer.host.read_head = lambda headers: None if headers is None else object()  # type: ignore[method-assign]
        peer.send(PREFACE, f.frame(f.HEADERS, f.END_HEADERS, 1, large + b"\xbe" * 30))
        assert [kind for kind, _ in peer.of(1)] == [f.RST_STREAM]
        assert peer.goodbye() is None
        peer.send(f.frame(f.HEADERS, f.END_HEADERS, 3, block() + b"\xbe" * 16000))
        told = peer.goodbye()
        assert told is not None
        assert told[0] == f.COMPRESSION_ERROR
        assert not peer.connection.streams

    in_loop(check)


def test_a_window_that_opens_costs_no_look_at_streams_that_it_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand answers that no window takes, and a frame of 13 bytes that opens another window by a byte."""
    peer = Peer()
    peer.host.answer = bytes(10)
    peer.send(f.PREFACE + f.settings(((f.INITIAL_WINDOW_SIZE, 0),)))
    for number in range(1000):
        peer.send(asking(2 * number + 1, is_end=True))
    looks: list[int] = []
    pump = Echo.pump

    def counted(stream: Echo) -> None:
        looks.append(stream.id)
        pump(stream)

    monkeypatch.setattr(Echo, "pump", counted)
    for _ in range(5):
        peer.send(f.window_update(0, 1), f.window_update(7, 1))
    assert looks == [7] * 5
    assert b"".join([content for kind, content in peer.of(7) if kind == f.DATA]) == bytes(5)


def test_there_are_so_many_streams_and_no_more() -> None:
    peer = Peer()
    peer.host.answers = False
    peer.send(PREFACE)
    for number in range(limits.MAX_STREAMS + 5):
        peer.send(asking(2 * number + 1))
    assert len(peer.connection.streams) == len(peer.host.streams) == limits.MAX_STREAMS
    assert peer.of(2 * limits.MAX_STREAMS + 1) == [(f.RST_STREAM, f.REFUSED_STREAM.to_bytes(4, "big"))]


def test_nothing_is_read_from_a_peer_that_does_not_read() -> None:
    """So requests of a peer that takes no answers make the server keep one window at most."""
    peer = Peer()
    peer.send(PREFACE)
    peer.connection.pause_writing()
    assert peer.wire.is_paused
    peer.host.answer = bytes(100_000)
    peer.send(f.settings(((f.INITIAL_WINDOW_SIZE, f.MAX_WINDOW),)), f.window_update(0, 1 << 29))
    written = len(peer.wire.written)
    peer.send(asking(1, is_end=True))
    assert len(peer.wire.written) - written < 100, "what does not fit into a frame waits"
    peer.connection.resume_writing()
    assert not peer.wire.is_paused
    assert sum(len(content) for kind, content in peer.of(1) if kind == f.DATA) == 100_000


def test_the_rest_of_a_long_read_is_looked_at_when_a_slow_reader_took_its_answers() -> None:
    peer = Peer()
    peer.send(PREFACE)
    unknown = f.frame(77, 0, 0)
    peer.connection.data_received(unknown * (cost.MAX_PER_TURN // cost.FRAME + 1) + asking(1, is_end=True))
    peer.connection.pause_writing()
    peer.host.end_turn()
    assert not peer.host.seen, "the rest waits"
    peer.connection.resume_writing()
    assert peer.wire.is_paused, "nothing is read before the rest"
    peer.host.end_turn()
    assert [number for number, *_ in peer.host.seen] == [1]
    assert not peer.wire.is_paused


# -- time ------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(clock, "now", lambda: self.now)

    def check_timeouts(self, peer: Peer, seconds: float) -> None:
        """As the server's timer does, once a second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            peer.connection.check_timeouts(self.now)


def test_a_stream_without_window_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    time, peer = Clock(monkeypatch), Peer()
    peer.send(f.PREFACE + f.settings(((f.INITIAL_WINDOW_SIZE, 0),)), asking(1, is_end=True))
    peer.host.answer = b"answer"
    peer.send(asking(3, is_end=True))
    time.check_timeouts(peer, 59)
    assert not peer.host.streams[1].was_stuck
    time.check_timeouts(peer, 3)
    assert peer.host.streams[1].was_stuck
    assert (f.RST_STREAM, f.CANCEL.to_bytes(4, "big")) in peer.of(3)
    assert 3 not in peer.connection.streams


def test_a_window_that_opens_by_a_byte_at_a_time_is_given_up_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    time, peer = Clock(monkeypatch), Peer()
    peer.host.answer = bytes(1000)
    peer.send(f.PREFACE + f.settings(((f.INITIAL_WINDOW_SIZE, 0),)), asking(1, is_end=True))
    for _ in range(7):
        time.check_timeouts(peer, 10)
        peer.send(f.window_update(1, 1))
    assert peer.host.streams[0].was_stuck


def test_a_handshake_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in (b"", f.PREFACE[:10], f.PREFACE):
        time, peer = Clock(monkeypatch), Peer()
        for byte in said:
            time.check_timeouts(peer, 0)
            peer.send(bytes((byte,)))
        time.check_timeouts(peer, 9)
        assert not peer.wire.is_closed
        time.check_timeouts(peer, 2)
        assert peer.wire.is_closed


def test_a_handshake_without_settings_does_not_hold_up_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        time, peer = Clock(monkeypatch), Peer()
        peer.send(f.PREFACE)
        peer.connection.shut_down()
        assert not peer.is_sent_away
        time.check_timeouts(peer, 2)
        assert peer.is_sent_away
        assert peer.goodbye() == (f.NO_ERROR, b"")

    asyncio.run(main())


def test_headers_that_do_not_go_on_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        time, peer = Clock(monkeypatch), Peer()
        peer.send(PREFACE, f.frame(f.HEADERS, 0, 1, block()))
        time.check_timeouts(peer, 31)
        assert peer.goodbye() == (f.ENHANCE_YOUR_CALM, b"headers that do not end")

    asyncio.run(main())


def test_a_peer_that_vanished_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    time, peer = Clock(monkeypatch), Peer()
    peer.send(PREFACE)
    time.check_timeouts(peer, 62)
    assert [content for kind, flags, _, content in peer.frames() if (kind, flags) == (f.PING, 0)] == [b"inferd.."]
    time.check_timeouts(peer, 10)
    peer.send(f.frame(f.PING, f.ACK, 0, b"inferd.."))
    time.check_timeouts(peer, 62)
    assert not peer.wire.is_closed
    time.check_timeouts(peer, 22)
    assert peer.wire.is_closed


def test_there_is_room_for_so_many_connections() -> None:
    peer = Peer()
    assert peer.connection in peer.host.connections
    peer.host.is_full = True
    another = Peer(peer.host)
    assert another.goodbye() is not None
    assert another.wire.is_closed
    assert another.connection not in peer.host.connections
