"""The bytes that cost the gateway most, for every door that the code has: routes, methods and frames.

A new route or method is among them. ``strike`` sends them; what they cost is measured by ``bench.hostile`` and by
``tests/gateway/test_hostile_doors.py``.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from inferd.gateway.body.decode_cost import MAX_DECODE_COST, TEXT_BYTES_OF_A_UNIT
from inferd.gateway.grpc.rpc import Method
from inferd.gateway.route import Route
from inferd.http.http2 import frames as f
from inferd.http.http2.hpack import literal
from inferd.protowire import sized

BODY_BYTES: Final = 16 * 1024 * 1024 - 4096  # as many as a server takes by default
MAX_TEXTS: Final = TEXT_BYTES_OF_A_UNIT * MAX_DECODE_COST - 4096
_SCALARS: Final = frozenset((int, float, bool, str, type(None), msgspec.UnsetType))


class Attack(NamedTuple):
    """Bytes for one connection. ``is_flood``: they are sent again and again while the connection lasts."""

    door: str
    bytes_of: str
    is_grpc: bool
    wire: bytes
    is_flood: bool = False


# -- JSON ----------------------------------------------------------------------------------------


def _values(weight: int, most: int) -> dict[str, bytes]:
    """Values that are slow to decode: as many as are decoded at all, and as many as a body holds."""
    return {
        "numbers": b"[" + b"1," * (weight - 64) + b"1]",
        "empty lists": b"[" + b"[]," * (weight // 5 - 16) + b"[]]",
        "keys": b"{" + b",".join([b'"%d":0' % number for number in range(weight // 6 - 16)]) + b"}",
        "16 MB of empty lists": b"[" + b"[]," * ((most - 256) // 3) + b"[]]",
    }


def _large_fields(request: type[msgspec.Struct]) -> list[str]:
    """Names of the fields that may hold more than a number or a text."""
    found = []
    for name, kind in typing.get_type_hints(request).items():
        kinds = set(typing.get_args(kind) or (kind,))
        if not kinds <= _SCALARS and not name.startswith("_"):
            found.append(name)
    return found or ["x"]


# -- HTTP/1.1 ------------------------------------------------------------------------------------


def http_attacks(
    routes: Iterable[Route],
    model_of: Callable[[str], str],
    key: str,
    weight: int,
    channels: int,
    most: int = BODY_BYTES,
) -> Iterator[Attack]:
    """``model_of``: the name of a model that a route's pattern serves; those for tensors take rows of ``channels`` numbers."""
    values = _values(weight, most)
    seen = set()
    for route in routes:
        door = f"{route.method} {route.pattern}"
        model = model_of(route.pattern)
        path = route.pattern.replace("{model}", model).replace("{version}", "1").replace("{id}", "x")
        known = f"authorization: Bearer {key}\r\n"
        yield Attack(door, "60 KB of query", False, _head(route.method, path + "?" + "a=&" * 20_000, known))
        yield Attack(door, "15,000 headers", False, _head(route.method, path, known + "a:\r\n" * 15_000))
        if route.pattern.endswith("/stream"):
            yield from _websocket_attacks(door, path, known, channels)
        if route.method != "POST":
            continue
        chunks = _head("POST", path, "transfer-encoding: chunked\r\n") + b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n"
        yield Attack(door, "chunks of a byte, no key", False, chunks)
        yield Attack(
            door,
            "chunks of a byte",
            False,
            chunks.replace(b"host: localhost", b"host: localhost\r\n" + known[:-2].encode(), 1),
        )
        bomb = _deflated(most)
        packed = f"content-encoding: gzip\r\ncontent-length: {len(bomb)}\r\n"
        yield Attack(door, "a compressed bomb, no key", False, _head("POST", path, packed) + bomb)
        yield Attack(door, "a compressed bomb", False, _head("POST", path, known + packed) + bomb)
        if route.pattern.endswith("/infer"):
            yield from _beside_parameters(door, path, known, most)
        if route.request is None or route.request in seen:
            continue
        seen.add(route.request)
        for index, field in enumerate(_large_fields(route.request)):
            for name, value in values.items() if not index else (("empty lists", values["empty lists"]),):
                body = b'{"model":"%b","%b":%b}' % (model.encode(), field.encode(), value)
                length = f"content-length: {len(body)}\r\n"
                yield Attack(door, f"{name} as {field}", False, _head("POST", path, known + length) + body)
        if route.pattern.endswith("/chat/completions"):
            yield from _texts_of_a_chat(door, model, path, known, most)
        deep = b'{"x":' + b"[" * (most // 2) + b"]" * (most // 2 - 16) + b"}"
        yield Attack(door, "depth", False, _head("POST", path, known + f"content-length: {len(deep)}\r\n") + deep)


def _texts_of_a_chat(door: str, model: str, path: str, known: str, most: int) -> Iterator[Attack]:
    """Texts that are slow to decode, and texts in which JSON is read."""
    call = '{"id":"%d","type":"function","function":{"name":"f","arguments":"%s"}}'
    texts = {"escapes": r"\n", "emoji": "\U0001f600", "quotes": r"\"", "letters": "a"}
    # As long as they are read.
    read = {name: texts[name] * (MAX_TEXTS // len(texts[name].encode())) for name in ("emoji", "letters")}
    calls = {
        "16 MB of lists as arguments": [call % (1, "[]," * (most // 3 - 256))],
        "a megabyte of lists as arguments": [call % (1, "[" + "[]," * 300_000 + "[]]")],
        "thousands of calls": [call % (number, "{}") for number in range(4000)],
        **{f"4 MB of {name} as an argument": [call % (1, rf"{{\"x\":\"{read[name]}\"}}")] for name in read},
    }
    messages = {name: f'{{"role":"assistant","tool_calls":[{",".join(all_)}]}}' for name, all_ in calls.items()}
    said = {f"16 MB of {name}": text * ((most - 256) // len(text.encode())) for name, text in texts.items()}
    said |= {f"4 MB of {name}": text for name, text in read.items()}
    said["4 MB of letters and an emoji"] = read["letters"] + texts["emoji"]
    messages |= {name: f'{{"role":"user","content":"{text}"}}' for name, text in said.items()}
    short = '"' + "\u00e9" * 60 + '",'
    messages["4 MB of short texts"] = f'{{"role":"user","content":[{short * (MAX_TEXTS // 180)}""]}}'
    asked = {name: f'"messages":[{message}]' for name, message in messages.items()}
    for name, number in {"the largest": "1e308", "nothing": "4e-324"}.items():
        for count in (600, 15_000, 250_000):
            tool = f'{{"name":"f","parameters":{{"x":[{",".join([number] * count)}]}}}}'
            asked[f"{count} numbers near {name}"] = (
                f'"messages":[{{"role":"user","content":""}}],"tools":[{{"type":"function","function":{tool}}}]'
            )
    for name, fields in asked.items():
        body = f'{{"model":"{model}",{fields}}}'.encode()
        head = _head("POST", path, known + f"content-length: {len(body)}\r\n")
        yield Attack(door, name, False, head + body)


def http1_floods() -> Iterator[Attack]:
    """One connection that stays open, and costs much beside its bytes. No key."""
    host = b"host: localhost\r\n"
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\n" + host + b"transfer-encoding: chunked\r\n\r\n"
    floods = {
        "chunks of a byte with extensions": chunked + b"1;a=b\r\n \r\n" * 600_000,
        "requests of small chunks": (chunked + b"1\r\n \r\n" * 6000 + b"0\r\n\r\n") * 60,
        "trailers": (chunked + b"0\r\n" + b"a:\r\n" * 10_000 + b"\r\n") * 60,
        "refused requests": (b"GET /v1/models HTTP/1.1\r\n" + host + b"\r\n") * 5000,
        "requests of tiny headers": (b"GET /x HTTP/1.1\r\n" + host + b"a:\r\n" * 8000 + b"\r\n") * 20,
        "headers without an end": b"GET /x HTTP/1.1\r\n" + b"a:\r\n" * 200_000,
    }
    for name, wire in floods.items():
        yield Attack("HTTP/1.1", name, False, wire)


def _beside_parameters(door: str, path: str, known: str, most: int) -> Iterator[Attack]:
    """Tensors that have to be stepped over, because the gateway reads what stands behind them."""
    begin, end = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[', b'1]}],"parameters":{"priority":1}}'

    def asked(told: str, body: bytes) -> Attack:
        length = f"content-length: {len(body)}\r\n"
        return Attack(door, f"{len(body) >> 20} MB of {told}", False, _head("POST", path, known + length) + body)

    values = {
        "numbers": b"1,",
        "empty lists": b"[],",
        "empty texts": b'"",',
        "objects": b'{"a":1},',
        "escapes": rb'"\"",',
        "lists in lists": b"[" * 40 + b"]" * 40 + b",",
    }
    for name, value in values.items():
        for count in (4_000_000, most // len(value) - 64):
            body = begin + value * min(count, most // len(value) - 64) + end
            yield asked(f"{name} beside parameters", body)
    yield asked("backslashes beside parameters", begin + b'"' + b"\\\\" * (most // 2 - 128) + b'",' + end)
    yield asked("keys as parameters", b'{"parameters":{' + b'"k":0,' * (most // 6 - 64) + b'"k":0}}')
    yield asked("a letter", b"s" * most)


def _websocket_attacks(door: str, path: str, known: str, channels: int) -> Iterator[Attack]:
    """Frames of a client are masked, here by nothing."""
    offer = "upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    head = f"GET {path}?window=1&channels={channels} HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n{offer}{known}\r\n".encode()
    mask = bytes(4)
    end = b"\x88\x80" + mask
    whole = b'{"samples":[' + b"1," * 500_000 + b"1]}"
    text = b"\x81\xff" + len(whole).to_bytes(8, "big") + mask + whole
    frames = {
        "empty frames": b"\x82\x80" + mask,
        "pings": b"\x89\x80" + mask,
        "fragments": b"\x00\x80" + mask,
        "samples of a byte": b"\x82\x81" + mask + b"x",
    }
    for name, frame in frames.items():
        first = b"\x02\x80" + mask if name == "fragments" else b""
        yield Attack(door, name, False, head + first + frame * 20_000 + end)
    yield Attack(door, "a megabyte of numbers", False, head + text * 4 + end)


def _head(method: str, path: str, more: str) -> bytes:
    media = "content-type: application/json\r\n" if method == "POST" else ""
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{media}{more}\r\n".encode()


def _deflated(size: int) -> bytes:
    deflate = zlib.compressobj(9, wbits=31)
    return deflate.compress(b" " * size) + deflate.flush()


# -- gRPC ----------------------------------------------------------------------------------------


def grpc_attacks(methods: dict[bytes, Method], model: str, writer: str, key: str) -> Iterator[Attack]:
    """``writer``: a model that generates text, which ``model`` does not."""
    asking = sized(1, model.encode())
    tiny = {
        "fields": b"\x22\x00",
        "unknown fields": b"\x98\x06\x01",
        "groups": b"\x9b\x06\x9c\x06",
        "parameters": sized(4, sized(1, b"k") + sized(2, b"\x08\x01" * 12)),
        "tensors": b"\x2a\x00",
    }
    keyed = [(b"authorization", b"Bearer " + key.encode())]
    packed = (b"grpc-encoding", b"gzip")
    bomb, small = _deflated(BODY_BYTES), _deflated(700_000)
    for path, method in methods.items():
        door = path.decode("ascii")
        few = method.max_bytes or 1 << 20
        yield Attack(door, "14 MB of fields, no key", True, _call(path, asking + tiny["fields"] * 7_000_000, []))
        yield Attack(door, "a compressed bomb, no key", True, _call(path, bomb, [packed], 1))
        yield Attack(door, "a compressed bomb", True, _call(path, bomb, [*keyed, packed], 1))
        yield Attack(door, "small compressed bombs", True, _calls(path, small, [*keyed, packed], 1), is_flood=True)
        nothing = _opening(1, path, keyed) + _pieces(1, bytes(5) * 3000, is_end=False)
        yield Attack(door, "messages of nothing", True, nothing)
        for name, piece in tiny.items():
            requests = _calls(path, (asking + piece * 2040)[:few], keyed)
            yield Attack(door, f"requests of 2040 {name}", True, requests, is_flood=True)
            if method.max_bytes is None and name == "fields":
                for told, text in _texts_of_a_call(writer).items():
                    yield Attack(door, told, True, _call(path, text, keyed))
            if method.max_bytes is None:
                large = asking + piece * (BODY_BYTES // len(piece))
                yield Attack(door, f"{len(large) >> 20} MB of {name}", True, _call(path, large, keyed))
            elif name == "fields":
                break


def _texts_of_a_call(model: str) -> dict[str, bytes]:
    """Requests for a text, with texts that are slow to decode."""

    def asked(**inputs: bytes) -> bytes:
        tensors = [
            sized(5, sized(1, name.encode()) + sized(2, b"BYTES") + sized(3, b"\x01") + sized(5, sized(8, text)))
            for name, text in inputs.items()
        ]
        return sized(1, model.encode()) + b"".join(tensors)

    emoji = "\U0001f600".encode()
    parameter = sized(4, sized(1, b"k") + sized(2, sized(3, emoji * (BODY_BYTES // 4 - 256))))
    return {
        "4 MB of emoji as a text": asked(text_input=emoji * (MAX_TEXTS // 4 - 256)),
        "15 MB of emoji as a text": asked(text_input=emoji * (BODY_BYTES // 4 - 256)),
        "4 MB of lists as parameters": asked(text_input=b"a", sampling_parameters=b"[[]" + b",[]" * 1_390_000 + b"]"),
        "15 MB of emoji as a parameter": asked(text_input=b"a") + parameter,
    }


def _opening(stream: int, path: bytes, more: Sequence[tuple[bytes, bytes]]) -> bytes:
    told = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"), *more]
    block = b"".join([literal(*header) for header in (*told, (b"content-type", b"application/grpc"))])
    return f.headers(stream, block, f.MAX_FRAME, is_end=False)


def _pieces(stream: int, content: bytes, *, is_end: bool) -> bytes:
    out = []
    for at in range(0, len(content), f.MAX_FRAME):
        is_last = is_end and at + f.MAX_FRAME >= len(content)
        out.append(f.frame(f.DATA, f.END_STREAM if is_last else 0, stream, content[at : at + f.MAX_FRAME]))
    return b"".join(out)


def _call(path: bytes, message: bytes, more: Sequence[tuple[bytes, bytes]], flag: int = 0, stream: int = 1) -> bytes:
    content = struct.pack(">BL", flag, len(message)) + message
    return _opening(stream, path, more) + _pieces(stream, content, is_end=True)


def _calls(path: bytes, message: bytes, more: Sequence[tuple[bytes, bytes]], flag: int = 0) -> bytes:
    """As many as fit into some reads."""
    each = len(_call(path, message, more, flag))
    return b"".join([_call(path, message, more, flag, 2 * number + 1) for number in range(1 + (1 << 20) // each)])


def flood_attacks() -> Iterator[Attack]:
    """Frames without calls. Streams are numbered on, as far as a flood goes on."""
    block = b"".join([literal(*header) for header in ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"))])
    huffman = literal(b"x", b"")[:-1] + b"\xff\x81\xf9\x01" + b"\x00" * 32_000
    floods = {
        "PING": f.frame(f.PING, 0, 0, bytes(8)),
        "SETTINGS": f.settings(((f.INITIAL_WINDOW_SIZE, 1),)),
        "SETTINGS acknowledged": f.SETTINGS_ACK,
        "PRIORITY": f.frame(f.PRIORITY, 0, 1, b"\0\0\0\3\7"),
        "WINDOW_UPDATE by a byte": f.window_update(0, 1),
        "GOAWAY": f.frame(f.GOAWAY, 0, 0, bytes(8)),
        "frames of no known kind": f.frame(77, 0, 0),
    }
    for name, piece in floods.items():
        yield Attack("HTTP/2", name, True, piece * ((1 << 20) // len(piece)), is_flood=True)
    of_streams = {
        "calls of no method": (block, 0),
        "tiny headers": (b"\x82" * 1700, 0),
        "headers in Huffman's code": (block + huffman, 0),
        "calls given up": (block, f.CANCEL),
    }
    for name, (told, code) in of_streams.items():
        pieces = [
            f.headers(number, told, f.MAX_FRAME, is_end=True) + (f.reset(number, code) if code else b"")
            for number in range(1, 2 * (1 + (4 << 20) // (len(told) + 9)), 2)
        ]
        yield Attack("HTTP/2", name, True, b"".join(pieces))
    opened = b"".join(
        [_opening(number, b"/inference.GRPCInferenceService/ServerLive", []) for number in range(1, 2049, 2)]
    )
    more = [_opening(number, b"/inference.GRPCInferenceService/ServerLive", []) for number in range(2049, 40_000, 2)]
    yield Attack("HTTP/2", "calls beyond those that stay open", True, opened + b"".join(more))
    empty = f.frame(f.DATA, 0, 1)
    yield Attack("HTTP/2", "DATA of nothing", True, opened + empty * 100_000)
    piece = f.headers(1, block, f.MAX_FRAME, is_end=False)
    whole = (
        f.frame(f.HEADERS, 0, 1) + f.frame(f.CONTINUATION, 0, 1) * 30 + f.frame(f.CONTINUATION, f.END_HEADERS, 1, block)
    )
    yield Attack("HTTP/2", "CONTINUATION", True, piece + whole * 2000)


# -- striking ------------------------------------------------------------------------------------

_MARK: Final = b"the end!"  # in a PING behind an attack: its answer says that all before it has been looked at


def strike(port: int, attack: Attack, seconds: float = 10.0, flood_s: float = 0.5) -> None:
    """Send it, and take what is answered, until the server ends it or has looked at everything."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.setblocking(False)
        wire = (f.PREFACE + f.settings(()) if attack.is_grpc else b"") + attack.wire
        view, heard = memoryview(wire), b""
        until = time.monotonic() + (flood_s if attack.is_flood else seconds)
        is_marked = not attack.is_grpc
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until + (0 if is_marked or not attack.is_flood else seconds):
                readable, writable, _ = select.select([connection], [connection] if view else [], [], 0.5)
                if readable:
                    piece = connection.recv(1 << 18)
                    if not piece or (attack.is_grpc and is_marked and _MARK in heard[-16:] + piece):
                        return
                    heard = piece
                if writable:
                    view = view[connection.send(view[: 1 << 18]) :]
                if not view and not is_marked:
                    if attack.is_flood and attack.door == "HTTP/2" and time.monotonic() < until:
                        view = memoryview(attack.wire)
                        continue
                    is_marked = True
                    view = memoryview(f.frame(f.PING, 0, 0, _MARK))
