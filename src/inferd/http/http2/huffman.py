"""HPACK's Huffman code (RFC 7541, appendix B): decoding, a byte at a time. This server does not encode with it.

The code is canonical: symbols of one length have consecutive codes, in the order in which they are listed here, and
those of the next length go on where these end. So the lengths are the whole table.
"""

from __future__ import annotations

import functools
from typing import Final

_BY_LENGTH: Final = (
    (5, b"012aceiost"),
    (6, b" %-./3456789=A_bdfghlmnpru"),
    (7, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, b"&*,;XZ"),
    (10, b'!"()?'),
    (11, b"'+|"),
    (12, b"#>"),
    (13, b"\x00$@[]~"),
    (14, b"^}"),
    (15, b"<`{"),
    (19, b"\\\xc3\xd0"),
    (20, b"\x80\x82\x83\xa2\xb8\xc2\xe0\xe2"),
    (21, b"\x99\xa1\xa7\xac\xb0\xb1\xb3\xd1\xd8\xd9\xe3\xe5\xe6"),
    (22, bytes.fromhex("818485868892 9a9ca0a3a4a9aaadb2b5b9babbbdbec4c6e4e8e9")),
    (23, bytes.fromhex("0187898a8b8c8d8f9395969798 9b9d9ea5a6a8aeafb4b6b7bcbfc5e7ef")),
    (24, bytes.fromhex("098e9091949fabced7e1eced")),
    (25, bytes.fromhex("c7cfeaeb")),
    (26, bytes.fromhex("c0c1c8c9cacdd2d5dadbeef0f2f3ff")),
    (27, bytes.fromhex("cbccd3d4d6dddedff1f4f5f6f7f8fafbfcfdfe")),
    (28, bytes.fromhex("02030405060708 0b0c0e0f1011121314151718191a1b1c1d1e1f7fdcf9")),
    (30, b"\n\r\x16"),  # and behind them the end of a string, which no string has
)

_Row = list[tuple[int, bytes]]
"""For each value of the next byte: the next state, and the symbols that are complete with it (two at most)."""


class HuffmanError(ValueError):
    """The bytes are no string in this code."""


def decode(data: bytes) -> bytes:
    """The string that ``data`` encodes (RFC 7541, section 5.2). Raises HuffmanError."""
    rows = _rows()
    state, found = 0, []
    for byte in data:
        state, symbols = rows[state][byte]
        if symbols:
            found.append(symbols)
    if state not in rows.may_end:
        raise HuffmanError("the string contains its end symbol, or its padding is no prefix of that symbol")
    return b"".join(found)


class _Rows(dict[int, _Row]):
    """The transitions of the decoder: a row for each state. A row is computed when it is first used.

    A state stands for the bits of an incomplete symbol.
    """

    def __init__(self) -> None:
        self._symbols: dict[str, bytes] = {}
        code, before = 0, 0
        for length, members in _BY_LENGTH:
            code <<= length - before
            before = length
            for member in members:
                self._symbols[f"{code:0{length}b}"] = bytes((member,))
                code += 1
        prefixes = {bits[:size] for bits in (*self._symbols, "1" * 30) for size in range(len(bits))}
        self._prefixes = sorted(prefixes, key=lambda bits: (len(bits), bits))
        self._states = {prefix: number for number, prefix in enumerate(self._prefixes)}
        self._refused = len(self._prefixes)  # the state after an invalid symbol, which is never left
        self[self._refused] = [(self._refused, b"")] * 256
        self.may_end = frozenset(self._states["1" * size] for size in range(8))
        """States in which a string may end: after a padding of less than eight ones."""

    def __missing__(self, state: int) -> _Row:
        row = self[state] = [self._next(self._prefixes[state], byte) for byte in range(256)]
        return row

    def _next(self, bits: str, byte: int) -> tuple[int, bytes]:
        found = b""
        for bit in f"{byte:08b}":
            bits += bit
            if bits in self._symbols:
                found += self._symbols[bits]
                bits = ""
            elif bits not in self._states:
                return self._refused, b""
        return self._states[bits], found


_rows = functools.cache(_Rows)
