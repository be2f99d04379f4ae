"""HTTP/2 on the wire: however it is cut, and seen as the library h2 sees it, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.http.http2.h2_site import ASKING, PREFACE, Host, Peer, asking, block, data, frames_in, in_loop

from inferd.http.http2 import frames as f
from inferd.http.http2 import request
from inferd.http.http2.hpack import Header

NUMBERS = st.sampled_from([1, 1, 3, 3, 5, 7, 2, 0])


def split(number: int, at: int, is_end: bool) -> bytes:
    """Headers in two frames."""
    whole = block()
    flags = f.END_STREAM if is_end else 0
    return f.frame(f.HEADERS, flags, number, whole[:at]) + f.frame(f.CONTINUATION, f.END_HEADERS, number, whole[at:])


def padded(number: int, content: bytes, padding: int, flags: int) -> bytes:
    return f.frame(f.DATA, f.PADDED | flags, number, bytes((padding,)) + content + bytes(min(padding, 20)))


ODD_HEADERS: list[Sequence[Header]] = [
    [*ASKING, (b"X-Upper", b"1")],
    [*ASKING, (b"connection", b"close")],
    [*ASKING, (b"te", b"gzip")],
    [*ASKING, (b"a", b"b"), (b":path", b"/")],
    ASKING[1:],
    [*ASKING, (b":status", b"200")],
    [*ASKING, (b"a", b"b\nc")],
    [*ASKING, (b"", b"x")],
]
FRAMES_FOR_BOTH = st.one_of(
    st.builds(asking, NUMBERS, is_end=st.booleans()),
    st.builds(asking, NUMBERS, is_end=st.booleans(), headers=st.sampled_from(ODD_HEADERS)),
    st.builds(data, NUMBERS, st.binary(max_size=20), is_end=st.booleans()),
    st.builds(padded, NUMBERS, st.binary(max_size=5), st.integers(0, 9), st.sampled_from([0, f.END_STREAM])),
    st.builds(split, NUMBERS, st.integers(0, 10), st.booleans()),
    st.builds(f.reset, NUMBERS, st.just(8)),
    st.builds(f.window_update, NUMBERS, st.sampled_from([0, 1, 100, f.MAX_WINDOW])),
    st.just(f.frame(f.PING, 0, 0, b"12345678")),
    st.builds(lambda value: f.settings(((f.INITIAL_WINDOW_SIZE, value),)), st.sampled_from([0, 5, 70000])),
    st.just(f.SETTINGS_ACK),
    st.builds(lambda number: f.frame(f.PRIORITY, 0, number, bytes(5)), NUMBERS),
    st.builds(lambda number: f.frame(f.HEADERS, 37, number, b"\0\0\0\1\7" + block()), NUMBERS),
    st.builds(f.frame, st.integers(0, 6), st.integers(0, 255), NUMBERS, st.binary(max_size=12)),
)
FRAMES = FRAMES_FOR_BOTH | st.one_of(  # others end h2's connection, or are looked at by it
    st.builds(lambda kind: f.frame(kind, 0, 0, b"whatever"), st.integers(10, 20)),
    st.builds(f.goaway, st.just(0), st.just(0)),
    st.builds(f.frame, st.integers(7, 9), st.integers(0, 255), NUMBERS, st.binary(max_size=12)),
)
TALK = st.lists(FRAMES, max_size=12).map(b"".join)


class Calm(Host):
    """As a host whose answers wait: they would end streams before the client has, and so change what may follow."""

    def __init__(self, *, answers: bool = False) -> None:
        super().__init__()
        self.answers = answers


@settings(max_examples=120, deadline=None)
@given(TALK, st.lists(st.integers(1, 40), max_size=30), st.booleans())
@example(asking(1) + data(1, b"abc", is_end=True), [1] * 30, True)
def test_any_cut_gives_the_same(talk: bytes, sizes: list[int], answers: bool) -> None:
    def check() -> None:
        whole, cut = Peer(Calm(answers=answers)), Peer(Calm(answers=answers))
        talked = PREFACE + talk
        whole.send(talked)
        at = 0
        for size in sizes:
            cut.send(talked[at : at + size])
            at += size
        cut.send(talked[at:])
        assert cut.host.seen == whole.host.seen
        assert cut.host.left == whole.host.left
        assert cut.wire.written == whole.wire.written

    in_loop(check)


def theirs(talk: bytes) -> tuple[list[tuple[int, list[Header], bytes]], int]:
    """The requests that the library h2 reads, each when it is complete, and the number of bytes that h2 read.

    h2 often ends the connection after a stream error, which ends one stream here (RFC 9113, section 5.4.2). Therefore
    h2 is configured not to validate headers.
    """
    config = h2.config.H2Configuration(client_side=False, header_encoding=None, validate_inbound_headers=False)
    server = h2.connection.H2Connection(config)
    server.initiate_connection()
    headers: dict[int, list[Header]] = {}
    bodies: dict[int, bytes] = {}
    found: list[tuple[int, list[Header], bytes]] = []
    for at in range(len(talk)):
        try:
            events = server.receive_data(talk[at : at + 1])
        except h2.exceptions.ProtocolError:
            return found, at
        for event in events:
            if isinstance(event, h2.events.RequestReceived):
                headers[event.stream_id] = [(bytes(name), bytes(value)) for name, value in event.headers]
                bodies[event.stream_id] = b""
            elif isinstance(event, h2.events.DataReceived):
                bodies[event.stream_id] += event.data
            elif isinstance(event, h2.events.StreamEnded):
                found.append((event.stream_id, headers[event.stream_id], bodies[event.stream_id]))
    return found, len(talk)


@settings(max_examples=120, deadline=None)
@given(st.lists(FRAMES_FOR_BOTH, max_size=12).map(b"".join))
@example(split(1, 3, False) + padded(1, b"ab", 4, f.END_STREAM) + asking(3, is_end=True))
def test_requests_are_seen_as_h2_sees_them_or_not_at_all(talk: bytes) -> None:
    def check() -> None:
        known, size = theirs(PREFACE + talk)
        peer = Peer(Calm())
        peer.send((PREFACE + talk)[:size])
        seen = []
        for number, one, body in peer.host.seen:
            pseudo = [header for header in ASKING if header[0] not in (b":method", b":path")]
            told = [(b":method", one.method), (b":path", one.path), *pseudo, *one.headers]
            seen.append((number, sorted(told), body))
        others = [(number, sorted(headers), body) for number, headers, body in known]
        assert all(one in others for one in seen)
        refused = {number for kind, _, number, _ in peer.frames() if kind == f.RST_STREAM}
        if peer.goodbye() is None:
            assert [one for one in others if one[0] not in refused] == [one for one in seen if one[0] not in refused]

    in_loop(check)


REQUESTS = st.lists(
    st.tuples(st.lists(st.binary(max_size=30), max_size=4), st.booleans(), st.integers(0, 20)), min_size=1, max_size=6
)


@settings(max_examples=50, deadline=None)
@given(REQUESTS, st.randoms(use_true_random=False))
def test_what_h2s_client_asks_is_answered(requests: list[tuple[list[bytes], bool, int]], random: object) -> None:
    """A client of the library, with its dynamic table and its padding; it reads what we say."""

    def check() -> None:
        peer = Peer()
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        answers: dict[int, bytes] = {}
        ended = set()
        for pieces, has_more, padding in requests:
            number = client.get_next_available_stream_id()
            client.send_headers(number, [*ASKING, (b"x-some", b"%d" % padding)])
            for piece in pieces:
                client.send_data(number, piece, pad_length=padding)
            if has_more:
                client.send_headers(number, [(b"x-behind", b"it")], end_stream=True)
            else:
                client.end_stream(number)
        peer.send(client.data_to_send())
        for event in client.receive_data(peer.wire.written):
            if isinstance(event, h2.events.DataReceived):
                answers[event.stream_id] = answers.get(event.stream_id, b"") + event.data
            elif isinstance(event, h2.events.StreamEnded):
                ended.add(event.stream_id)
        expected = {2 * place + 1: b"".join(pieces) for place, (pieces, _, _) in enumerate(requests)}
        assert {number: body for number, body in answers.items() if body} == {n: b for n, b in expected.items() if b}
        assert ended == set(expected)

    in_loop(check)


# -- flow control ----------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 200),
    st.lists(st.integers(1, 60000), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from([0, 1, 3, 5, 7]), st.integers(1, 50000)), max_size=60),
    st.sampled_from([16384, 20000]),
)
def test_no_window_is_overrun_and_no_byte_is_lost(
    first: int, sizes: list[int], updates: list[tuple[int, int]], max_frame: int
) -> None:
    def check() -> None:
        peer = Peer()
        peer.send(f.PREFACE + f.settings(((f.INITIAL_WINDOW_SIZE, first), (f.MAX_FRAME_SIZE, max_frame))))
        windows = {0: f.FIRST_WINDOW}
        expected: dict[int, bytes] = {}
        for place, size in enumerate(sizes):
            number = 2 * place + 1
            windows[number] = first
            expected[number] = peer.host.answer = bytes((number,)) * size
            peer.send(asking(number, is_end=True))
        for number, more in [*updates, (0, 1 << 20), *((number, 1 << 20) for number in expected)]:
            if number in windows:
                windows[number] += more
                peer.send(f.window_update(number, more))
        spent = dict.fromkeys(windows, 0)
        told: dict[int, bytes] = dict.fromkeys(expected, b"")
        for kind, _, number, content in frames_in(peer.wire.written):
            if kind == f.DATA:
                assert len(content) <= max_frame
                told[number] += content
                spent[number] += len(content)
                spent[0] += len(content)
        assert told == expected
        assert all(spent[number] <= windows[number] for number in windows)
        assert not peer.connection.send_queue
        assert not peer.connection.streams

    in_loop(check)


def test_a_smaller_window_makes_streams_owe() -> None:
    peer = Peer()
    peer.send(PREFACE)
    peer.host.answer = bytes(100_000)
    peer.send(f.window_update(0, 1 << 20), asking(1, is_end=True))
    assert sum(len(content) for kind, content in peer.of(1) if kind == f.DATA) == f.FIRST_WINDOW
    peer.send(f.settings(((f.INITIAL_WINDOW_SIZE, 10_000),)))
    peer.send(f.window_update(1, f.FIRST_WINDOW - 10_000))
    assert sum(len(content) for kind, content in peer.of(1) if kind == f.DATA) == f.FIRST_WINDOW
    peer.send(f.window_update(1, 34_465))
    assert sum(len(content) for kind, content in peer.of(1) if kind == f.DATA) == 100_000


@pytest.mark.parametrize(("more", "code"), [(1, f.FLOW_CONTROL_ERROR), (0, f.PROTOCOL_ERROR)])
def test_a_window_of_no_possible_size_ends_its_stream_alone(more: int, code: int) -> None:
    def check() -> None:
        peer = Peer()
        peer.send(PREFACE, asking(1), asking(3))
        peer.send(f.window_update(1, f.MAX_WINDOW - f.FIRST_WINDOW))
        assert f.RST_STREAM not in [kind for kind, _ in peer.of(1)], "the largest window"
        peer.send(f.window_update(1, more))
        assert [content for kind, content in peer.of(1) if kind == f.RST_STREAM] == [code.to_bytes(4, "big")]
        assert peer.goodbye() is None
        assert list(peer.connection.streams) == [3]

    in_loop(check)


def test_streams_share_a_narrow_connection() -> None:
    peer = Peer()
    peer.send(PREFACE)
    peer.host.answer = bytes(60_000)
    for number in (1, 3, 5):
        peer.send(asking(number, is_end=True))
    for _ in range(12):
        peer.send(f.window_update(0, 10_000))
    said = {number: sum(len(c) for kind, c in peer.of(number) if kind == f.DATA) for number in (1, 3, 5)}
    assert sum(said.values()) == 180_000
    assert all(size == 60_000 for size in said.values())


def test_a_stream_that_sends_more_than_its_window_is_reset() -> None:
    peer = Peer()
    peer.send(PREFACE, asking(1))
    for _ in range(5):
        peer.send(data(1, bytes(16384)))
    assert peer.of(1) == [(f.RST_STREAM, f.FLOW_CONTROL_ERROR.to_bytes(4, "big"))]
    assert peer.host.left == [1]


def test_the_connections_window_is_given_back() -> None:
    peer = Peer()
    peer.send(PREFACE)
    for number in range(1, 400, 2):
        peer.send(asking(number), data(number, bytes(16384)), data(number, bytes(16384)), data(number, is_end=True))
    assert len(peer.host.seen) == 200
    assert peer.goodbye() is None
    given_back = [c for kind, _, number, c in peer.frames() if (kind, number) == (f.WINDOW_UPDATE, 0)]
    assert len(given_back) >= 2


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("talk", "code"),
    [
        (f.frame(f.PING, 0, 0, bytes(8)), f.PROTOCOL_ERROR),  # SETTINGS come first
        (f.settings(()) + f.frame(f.DATA, 0, 0, b"x"), f.PROTOCOL_ERROR),
        (f.settings(()) + data(1, b"x"), f.PROTOCOL_ERROR),
        (f.settings(()) + asking(2), f.PROTOCOL_ERROR),
        (f.settings(()) + asking(3) + f.frame(f.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"), f.COMPRESSION_ERROR),
        (f.settings(()) + f.frame(f.HEADERS, 4, 1, b"\xfe"), f.COMPRESSION_ERROR),
        (f.settings(()) + f.HEAD.pack(0x40, 1, 0, 0, 1) + bytes(16385), f.FRAME_SIZE_ERROR),
        (f.settings(()) + f.frame(f.PING, 0, 0, b"short"), f.FRAME_SIZE_ERROR),
        (f.settings(()) + f.frame(f.WINDOW_UPDATE, 0, 0, bytes(4)), f.PROTOCOL_ERROR),
        (f.settings(()) + f.window_update(0, f.MAX_WINDOW), f.FLOW_CONTROL_ERROR),
        (f.settings(()) + f.reset(1, 8), f.PROTOCOL_ERROR),
        (f.settings(()) + f.frame(f.PUSH_PROMISE, 4, 1, bytes(4)), f.PROTOCOL_ERROR),
        (f.settings(()) + f.frame(f.CONTINUATION, 4, 1), f.PROTOCOL_ERROR),
        (f.settings(()) + f.frame(f.HEADERS, 0, 1, block()) + f.frame(f.PING, 0, 0, bytes(8)), f.PROTOCOL_ERROR),
        (f.settings(()) + f.frame(f.HEADERS, 0, 1, block()) + f.frame(f.CONTINUATION, 4, 3), f.PROTOCOL_ERROR),
        (f.settings(((f.INITIAL_WINDOW_SIZE, 1 << 31),)), f.FLOW_CONTROL_ERROR),
        (f.settings(((f.MAX_FRAME_SIZE, 100),)), f.PROTOCOL_ERROR),
        (f.settings(((f.ENABLE_PUSH, 2),)), f.PROTOCOL_ERROR),
        (f.frame(f.SETTINGS, 0, 0, b"12345"), f.FRAME_SIZE_ERROR),
        (f.settings(()) + f.frame(f.HEADERS, 12, 1, b"\xff" + block()), f.PROTOCOL_ERROR),
        (f.settings(()) + asking(1) + f.frame(f.DATA, f.PADDED, 1, b"\x01"), f.PROTOCOL_ERROR),
        (f.settings(()) + asking(1) + f.frame(f.DATA, f.PADDED, 1), f.FRAME_SIZE_ERROR),
    ],
)
def test_a_connection_that_breaks_the_protocol_is_closed_with_the_reason(talk: bytes, code: int) -> None:
    def check() -> None:
        peer = Peer()
        peer.send(f.PREFACE + talk)
        told = peer.goodbye()
        assert told is not None
        assert told[0] == code
        assert told[1], "the reason in words"
        peer.send(asking(9, is_end=True))
        assert not peer.host.seen

    in_loop(check)


PRIORITY = b"\0\0\0\3\7"


@pytest.mark.parametrize("padding", [None, 0, 9])
@pytest.mark.parametrize("priority", [b"", PRIORITY])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_headers_are_the_same_with_padding_and_a_priority_and_in_pieces(
    padding: int | None, priority: bytes, size: int
) -> None:
    whole = block()
    flags = f.END_STREAM | (f.WITH_PRIORITY if priority else 0) | (f.PADDED if padding is not None else 0)
    head = b"" if padding is None else bytes((padding,))
    content = head + priority + whole[:size] + bytes(padding or 0)
    if size < len(whole):
        talk = f.frame(f.HEADERS, flags, 1, content) + f.frame(f.CONTINUATION, f.END_HEADERS, 1, whole[size:])
    else:
        talk = f.frame(f.HEADERS, flags | f.END_HEADERS, 1, content)

    def check() -> None:
        found, plain = Peer(), Peer()
        found.send(PREFACE, talk)
        plain.send(PREFACE, asking(1, is_end=True))
        assert found.host.seen == plain.host.seen
        assert found.of(1) == plain.of(1)
        assert len(found.host.seen) == 1

    in_loop(check)


@pytest.mark.parametrize("headers", ODD_HEADERS)
def test_a_malformed_request_ends_its_stream_alone(headers: Sequence[Header]) -> None:
    peer = Peer()
    peer.send(PREFACE, asking(1, headers=headers, is_end=True), asking(3, is_end=True))
    assert peer.of(1) == [(f.RST_STREAM, f.PROTOCOL_ERROR.to_bytes(4, "big"))]
    assert [number for number, _, _ in peer.host.seen] == [3]


def test_headers_that_are_known_are_known_until_the_table_changes() -> None:
    """The byte 0xbe is the newest header that was remembered, whatever that is."""
    peer = Peer()
    fixed = b"\x83\x86\x84"
    first = fixed + b"\x40\x01a\x01b"
    again = fixed + b"\xbe"
    peer.send(PREFACE)
    other, two_ago = fixed + b"\x40\x01c\x01d", fixed + b"\xbf"
    for place, said in enumerate((first, again, again, other, again, other, two_ago)):
        peer.send(f.frame(f.HEADERS, 5, 2 * place + 1, said))
    told = [seen.headers for _, seen, _ in peer.host.seen]
    assert told == [[(b"a", b"b")]] * 3 + [[(b"c", b"d")]] * 4, "a block that is to be remembered is read each time"


def test_a_peer_with_a_smaller_table_hears_that_ours_is_empty() -> None:
    peer = Peer()
    peer.send(f.PREFACE + f.settings(((f.HEADER_TABLE_SIZE, 0),)))
    peer.send(asking(1, is_end=True), asking(3, is_end=True))
    heads = [content for number in (1, 3) for kind, content in peer.of(number) if kind == f.HEADERS][::2]
    assert heads == [b"\x20\x88", b"\x88"]


def test_large_headers_go_out_in_pieces() -> None:
    told = f.headers(1, bytes(40_000), 16384, is_end=True)
    kinds = [(kind, flags) for kind, flags, _, _ in frames_in(told)]
    assert kinds == [(f.HEADERS, f.END_STREAM), (f.CONTINUATION, 0), (f.CONTINUATION, f.END_HEADERS)]


def test_trailers_of_a_request_are_read_and_ignored() -> None:
    peer = Peer()
    peer.send(PREFACE, asking(1), data(1, b"x"), asking(1, is_end=True, headers=[(b"a", b"b")]))
    [(_, seen, body)] = peer.host.seen
    assert (body, (b"a", b"b") in seen.headers) == (b"x", False)
    peer.send(asking(3), asking(3, is_end=False, headers=[(b"a", b"b")]))
    assert (f.RST_STREAM, f.PROTOCOL_ERROR.to_bytes(4, "big")) in peer.of(3)


def test_curl_on_this_port_reads_what_it_speaks() -> None:
    peer = Peer()
    peer.send(b"GET /v2/models HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"speaks gRPC" in peer.wire.written
    assert peer.wire.is_closed


def test_a_lost_connection_ends_every_stream() -> None:
    peer = Peer()
    peer.host.answers = False
    peer.send(PREFACE, asking(1, is_end=True), asking(3))
    peer.send(f.reset(3, f.CANCEL))
    assert peer.host.left == [3]
    peer.connection.connection_lost(None)
    assert peer.host.left == [3, 1]
    assert not peer.host.connections


def test_a_server_that_leaves_takes_what_was_under_way() -> None:
    async def main() -> None:
        peer = Peer()
        peer.host.answers = False
        peer.send(PREFACE, asking(1, is_end=True))
        peer.connection.shut_down()
        told = [content for kind, _, _, content in peer.frames() if kind == f.GOAWAY]
        assert [int.from_bytes(content[:4], "big") for content in told] == [f.MAX_WINDOW]
        peer.send(asking(3, is_end=True))  # it had not heard of that yet
        peer.send(f.frame(f.PING, f.ACK, 0, b"inferd.."))
        told = [content for kind, _, _, content in peer.frames() if kind == f.GOAWAY]
        assert [int.from_bytes(content[:4], "big") for content in told] == [f.MAX_WINDOW, 3]
        peer.send(asking(5, is_end=True))
        assert [number for number, _, _ in peer.host.seen] == [1, 3]
        for stream in peer.host.streams:
            stream.send_answer(b"\x88", b"", b"late", b"")
        assert [content for kind, content in peer.of(3) if kind == f.DATA] == [b"late"]
        assert not peer.connection.streams

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "is_good"), [(b"x-a", True), (b"", False), (b"A", False), (b"a b", False), (b"upgrade", False)]
)
def test_names_of_headers_are_looked_at(name: bytes, is_good: bool) -> None:
    assert request.is_fit(name) == is_good


def test_what_is_raised_while_frames_are_taken_ends_the_connection_and_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    def check() -> None:
        peer = Peer()
        peer.send(PREFACE, asking(1))
        monkeypatch.setattr(peer.host, "open_stream", broken)
        peer.send(asking(3))
        assert peer.host.left == [1]
        assert peer.is_sent_away
        assert peer.goodbye() == (f.INTERNAL_ERROR, b"internal_error")

    in_loop(check)
