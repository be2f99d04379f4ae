"""gRPC in HTTP/2's headers (grpc.io, PROTOCOL-HTTP2): reads a request's headers, and encodes an answer's.

Knows names and forms of headers. Does not know streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from inferd.gateway.call import Encoding
from inferd.gateway.grpc.statuses import Status
from inferd.http.http2.hpack import Header, literal
from inferd.http.http2.request import Request

PREFIX_BYTES: Final = 5  # before each message: one byte (1: compressed), and four bytes with its length

_TYPE: Final = b"application/grpc"
_ACCEPTED: Final = literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
HEAD: Final = b"\x88" + literal(b"content-type", _TYPE) + _ACCEPTED
"""The block before an answer: ``:status: 200`` is the eighth of HPACK's static table."""

OK: Final = literal(b"grpc-status", b"0")

_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_ENCODINGS: Final[dict[bytes, Encoding | None]] = {b"": None, b"identity": None, b"gzip": "gzip", b"deflate": "deflate"}
_NOT_METADATA: Final = frozenset((b"te", b"content-type", b"content-length"))
_USUAL: Final = frozenset((b"user-agent",))  # metadata that do not change how a request is served
_KEY: Final = b"authorization"

_ESCAPED: Final = tuple(
    chr(byte) if 0x20 <= byte < 0x7F and byte != 0x25 else f"%{byte:02X}" for byte in range(256)
)  # percent-encoded, one byte each


class Refusal(NamedTuple):
    """The status and the HTTP status with which a call, or a message of one, is refused before it is served."""

    status: Status
    details: str
    http: bytes = b"200"


class Head:
    """The values of a call's headers. Calls of one connection with equal headers share one object."""

    __slots__ = ("encoding", "is_usual", "length", "metadata", "path", "refusal", "timeout_s", "token")

    def __init__(self, request: Request | None, refusal: Refusal | None = None) -> None:
        self.path = request.path if request is not None else b""
        self.metadata: list[Header] = []
        self.length: int | None = None
        self.encoding: Encoding | None = None
        self.timeout_s: float | None = None
        self.token: str | None = None  # the key, from the header authorization
        self.is_usual = True  # the metadata have nothing besides the key that changes how a request is served
        self.refusal = refusal
        if request is not None and refusal is None:
            self._read(request)

    def _read(self, request: Request) -> None:
        self.length = request.length
        for header in request.headers:
            name, value = header
            if name[:5] == b"grpc-":
                self._read_grpc(name, value)
            elif name not in _NOT_METADATA:
                self.metadata.append(header)
                if name == _KEY and self.token is None and value[:7] == b"Bearer ":
                    self.token = value[7:].strip().decode("latin-1")
                elif name not in _USUAL:
                    self.is_usual = False

    def _read_grpc(self, name: bytes, value: bytes) -> None:
        if name == b"grpc-timeout":
            self.timeout_s = timeout_of(value)
            if self.timeout_s is None:
                self.refusal = Refusal(
                    Status.INVALID_ARGUMENT,
                    f"grpc-timeout is {shown(value)}; up to eight digits and one of H, M, S, m, u, n are expected.",
                )
        elif name == b"grpc-encoding":
            if value not in _ENCODINGS:
                self.refusal = Refusal(
                    Status.UNIMPLEMENTED,
                    f"grpc-encoding is {shown(value)}; this server reads identity, deflate and gzip.",
                )
            else:
                self.encoding = _ENCODINGS[value]


def refusal_of(request: Request) -> Refusal | None:
    """The refusal of a request that is not a gRPC call; None: it is one."""
    if request.method != b"POST":
        return Refusal(Status.INTERNAL, f"The method is {shown(request.method)}; gRPC's calls are POST.", b"405")
    kind = next((value for name, value in request.headers if name == b"content-type"), b"")
    if not kind.startswith(_TYPE) or kind[len(_TYPE) : len(_TYPE) + 1] not in (b"", b"+", b";"):
        return Refusal(Status.INTERNAL, f"content-type is {shown(kind)}; application/grpc is expected.", b"415")
    return None


def timeout_of(value: bytes) -> float | None:
    """A timeout in seconds; None: the value is malformed."""
    digits, unit = value[:-1], _UNITS.get(value[-1:])
    if unit is None or not digits.isdigit() or len(digits) > 8:
        return None
    return int(digits) * unit


def shown(value: bytes) -> str:
    """A header's value as a part of a message: ASCII, with at most 64 bytes of it."""
    return ascii(value[:64].decode("latin-1"))


def status_block(status: Status, details: str, trailers: Iterable[Header] = ()) -> bytes:
    """The encoded status and trailers of an answer, or of an answer without messages, after ``only_head``."""
    block = literal(b"grpc-status", b"%d" % status)
    if details:
        block += literal(b"grpc-message", "".join([_ESCAPED[byte] for byte in details.encode()]).encode("ascii"))
    return block + trailers_block(trailers)


def trailers_block(trailers: Iterable[Header]) -> bytes:
    """The encoded trailing metadata."""
    return b"".join([literal(name, value) for name, value in trailers])


def only_head(http: bytes = b"200") -> bytes:
    """The beginning of the header block of an answer without messages."""
    return HEAD if http == b"200" else literal(b":status", http) + literal(b"content-type", _TYPE)


def path_of(service: str, method: str) -> bytes:
    """The path of a method's requests."""
    return f"/{service}/{method}".encode("ascii")
