"""HPACK (RFC 7541): decoding a peer's header blocks with the dynamic table, and encoding literals without it.

``tests/http/http2`` compares it with the library ``hpack``, which takes five times as long for a block of a gRPC call.
"""

from __future__ import annotations

from typing import Final

from inferd.http.http2.huffman import HuffmanError, decode
from inferd.http.limits import MAX_HEADERS

Header = tuple[bytes, bytes]

TABLE_BYTES: Final = 4096  # of the dynamic table: the default, which this server's SETTINGS do not change
_ENTRY_BYTES: Final = 32  # of an entry besides its name and value (section 4.1)
_MAX_INTEGER: Final = 1 << 28
_MAX_EXCESS: Final = 4  # times the limit of a block's size, beyond which the connection ends

STATIC: Final[tuple[Header, ...]] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    *((b":status", status) for status in (b"200", b"204", b"206", b"304", b"400", b"404", b"500")),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    *(
        (name, b"")
        for name in (
            b"accept-language accept-ranges accept access-control-allow-origin age allow authorization cache-control "
            b"content-disposition content-encoding content-language content-length content-location content-range "
            b"content-type cookie date etag expect expires from host if-match if-modified-since if-none-match "
            b"if-range if-unmodified-since last-modified link location max-forwards proxy-authenticate "
            b"proxy-authorization range referer refresh retry-after server set-cookie strict-transport-security "
            b"transfer-encoding user-agent vary via www-authenticate"
        ).split()
    ),
)


class HpackError(ValueError):
    """A block that cannot be decoded. The table is unknown from then on, so later blocks cannot be decoded either."""


class Decoder:
    """Decodes the header blocks of one connection, in their order."""

    __slots__ = ("_limit", "_size", "_table", "num_headers", "version")

    def __init__(self) -> None:
        self._table: list[Header] = []  # the newest first
        self._size = 0
        self._limit = TABLE_BYTES  # of the table; the peer may choose less
        self.num_headers = 0  # fields of the block that was decoded last
        self.version = 0
        """Changes with the table. While it stays the same, equal blocks have equal meanings."""

    def decode(self, block: bytes, max_bytes: int) -> list[Header] | None:
        """The fields of a block in their order; None where they exceed ``max_bytes`` or ``MAX_HEADERS``.

        A field counts its name, its value and 32 bytes. A block beyond the limits is decoded all the same, because it
        may change the table. Raises HpackError for an invalid block, and for one many times as large as ``max_bytes``.
        """
        found: list[Header] = []
        at, end, size, count = 0, len(block), 0, 0
        while at < end:
            byte = block[at]
            if byte >= 0x80:  # an indexed field
                number, at = (byte & 0x7F, at + 1) if byte != 0xFF else _integer(block, at, 7)
                header = self._entry(number)
            elif byte >= 0x40:  # a literal field that enters the table
                header, at = self._literal(block, at, 6)
                self._remember(header)
            elif byte >= 0x20:
                if found or size:
                    raise HpackError("the table's size changes within a block")
                limit, at = _integer(block, at, 5)
                if limit > TABLE_BYTES:
                    raise HpackError(f"a table of {limit} bytes; at most {TABLE_BYTES} are allowed")
                self._limit = limit
                self._shrink(limit)
                self.version += 1
                continue
            else:
                header, at = self._literal(block, at, 4)
            size += len(header[0]) + len(header[1]) + _ENTRY_BYTES
            count += 1
            if size <= max_bytes:
                if count <= MAX_HEADERS:
                    found.append(header)
            elif size > _MAX_EXCESS * max_bytes:
                raise HpackError(f"a few bytes that stand for more than {_MAX_EXCESS * max_bytes} bytes of headers")
        self.num_headers = count
        return found if size <= max_bytes and count <= MAX_HEADERS else None

    def _entry(self, number: int) -> Header:
        if 0 < number <= len(STATIC):
            return STATIC[number - 1]
        try:
            if number:
                return self._table[number - len(STATIC) - 1]
        except IndexError:
            pass
        raise HpackError(f"there is no header {number}")

    def _literal(self, block: bytes, at: int, bits: int) -> tuple[Header, int]:
        number, at = _integer(block, at, bits)
        if number:
            name = self._entry(number)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _remember(self, header: Header) -> None:
        size = len(header[0]) + len(header[1]) + _ENTRY_BYTES
        self.version += 1
        self._shrink(max(0, self._limit - size))
        if size <= self._limit:
            self._table.insert(0, header)
            self._size += size

    def _shrink(self, limit: int) -> None:
        while self._size > limit:
            name, value = self._table.pop()
            self._size -= len(name) + len(value) + _ENTRY_BYTES


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """The number in the last ``bits`` of the byte at ``at`` and what follows (section 5.1), and where it ends."""
    try:
        most = (1 << bits) - 1
        value = block[at] & most
        at += 1
        if value < most:
            return value, at
        shift = 0
        while True:
            byte = block[at]
            at += 1
            value += (byte & 0x7F) << shift
            if value > _MAX_INTEGER or shift > 28:
                raise HpackError("a number is too large")
            if byte < 0x80:
                return value, at
            shift += 7
    except IndexError:
        raise HpackError("the block ends within a number") from None


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    if at >= len(block):
        raise HpackError("the block ends before a string")
    is_coded = block[at] >= 0x80
    size, at = _integer(block, at, 7)
    found = block[at : at + size]
    if len(found) < size:
        raise HpackError(f"a string of {size} bytes has {len(found)}")
    if is_coded:
        try:
            found = decode(found)
        except HuffmanError as error:
            raise HpackError(f"a string cannot be decoded: {error}") from None
    return found, at + size


# -- writing -------------------------------------------------------------------------------------


def literal(name: bytes, value: bytes) -> bytes:
    """A literal field without indexing (section 6.2.2). It changes no table, so blocks can join such fields freely."""
    return b"\x00" + _sized(name) + _sized(value)


def _sized(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    size -= 127
    out = bytearray(b"\x7f")
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out) + text
