"""HPACK's Huffman code (RFC 7541, appendix B), read four bits at a time; nothing is written in it.

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

_Row = tuple[tuple[int, bytes], ...]
_REFUSED: Final = -1


class HuffmanError(ValueError):
    """This is no string in this code."""


def decode(data: bytes) -> bytes:
    """Raises HuffmanError."""
    rows, may_end = _table()
    state, found = 0, []
    for byte in data:
        state, symbol = rows[state][byte >> 4]
        if symbol:
            found.append(symbol)
        if state == _REFUSED:
            raise HuffmanError("the end of a string within it")
        state, symbol = rows[state][byte & 15]
        if symbol:
            found.append(symbol)
        if state == _REFUSED:
            raise HuffmanError("the end of a string within it")
    if state not in may_end:
        raise HuffmanError("what fills its last byte is not the beginning of the string's end")
    return b"".join(found)


@functools.cache
def _table() -> tuple[list[_Row], frozenset[int]]:
    """For each state (the bits of a symbol that have been read) and each four bits more: the next state, and the symbol
    that was completed. And the states in which a string may end: less than a byte of ones. Four bits complete at most
    one symbol, as none is shorter than five."""
    symbols: dict[str, bytes] = {}
    code, before = 0, 0
    for length, members in _BY_LENGTH:
        code <<= length - before
        before = length
        for member in members:
            symbols[f"{code:0{length}b}"] = bytes((member,))
            code += 1
    prefixes = {bits[:size] for bits in (*symbols, "1" * 30) for size in range(len(bits))}
    states = {prefix: number for number, prefix in enumerate(sorted(prefixes, key=lambda bits: (len(bits), bits)))}
    rows = []
    for prefix in states:
        row = []
        for nibble in range(16):
            bits, found = prefix, b""
            for bit in f"{nibble:04b}":
                bits += bit
                if bits in symbols:
                    found, bits = symbols[bits], ""
            row.append((states.get(bits, _REFUSED), found))
        rows.append(tuple(row))
    return rows, frozenset(states["1" * size] for size in range(8))
