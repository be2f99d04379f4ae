"""The outline of a JSON document: the document without deeply nested values.

A decoder reads a document in one call and holds the interpreter's lock until the call ends. Here no call reads more
than a ``Piece``, so other threads run between two calls. That needs an interpreted loop: a compiled one holds the
lock until it ends. The document is not validated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from inferd.errors import InvalidRequest
from inferd.gateway.body.decode_cost import Piece, pieces

MAX_TOKENS: Final = 1 << 19  # of the pieces that are split into tokens: about 200 ms of a processor

_SEARCHED_BYTES: Final = 256 * 1024  # searched by one call
_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)|[\[\]{}]|[^"\[\]{}]+', re.DOTALL)
_NO_BRACKET: Final = bytes(sorted(set(range(256)) - set(b"[]{}")))
_STEPS: Final = bytes([1 if byte in b"[{" else 255 for byte in range(256)])  # of a bracket: 255 is -1 as an int8
_ROUNDS: Final = 8  # of removing empty lists and objects: most tensors have fewer dimensions


def contains(body: bytes, word: bytes) -> bool:
    """As ``word in body``, in several calls for a large body, because one call may take long."""
    if len(body) <= _SEARCHED_BYTES:
        return word in body
    return any(
        body.find(word, at, at + _SEARCHED_BYTES + len(word) - 1) >= 0 for at in range(0, len(body), _SEARCHED_BYTES)
    )


def outline(body: bytes, levels: int, most: tuple[int, int] | None = None) -> bytes:
    """The document with ``levels`` levels of lists and objects. Lists and objects that are nested deeper are empty.

    ``most``: the largest number of commas, and of lists and objects; None: no limit. Raises InvalidRequest.
    """
    kept: list[bytes] = []
    depth = values = lists = num_tokens = 0
    for piece in pieces(body):
        outside = b"".join(piece.outside)
        brackets = outside.translate(None, _NO_BRACKET)
        if most is not None:
            values += outside.count(b",")
            lists += brackets.count(b"[") + brackets.count(b"{")
            if values > most[0] or lists > most[1]:
                raise InvalidRequest(
                    f"The request body has more than {most[0]} values, or more than {most[1]} lists and objects, which "
                    "is more than this model can take in one request. Send several requests, or numbers as binary "
                    "data.",
                    code="too_many_values",
                )
        depths = _depths(brackets, depth)
        if not brackets and depth <= levels:
            kept.append(piece.raw)
        elif min(depths) <= levels:
            tokens = _tokens(piece)
            num_tokens += len(tokens)
            if num_tokens > MAX_TOKENS:
                raise InvalidRequest(
                    "The request body has more lists and objects than are read outside of its tensors; send fewer "
                    "inputs, outputs and parameters in a request.",
                    code="too_many_values",
                )
            kept += _shallow(tokens, depth, levels)
        depth = depths[-1]
    return b"".join(kept)


def _depths(brackets: bytes, depth: int) -> list[int]:
    """The depth before the first bracket and after each bracket, where brackets that enclose nothing may be left out:
    the first, the lowest and the last depth are exact."""
    for _ in range(_ROUNDS):
        fewer = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    return list(accumulate(memoryview(brackets.translate(_STEPS)).cast("b"), initial=depth))


def _tokens(piece: Piece) -> list[bytes]:
    """The piece as tokens: strings, brackets, and the text between them."""
    tokens: list[bytes] = _TOKEN.findall(b'"' + piece.raw if piece.is_inside else piece.raw)
    if piece.is_inside:
        tokens[0] = tokens[0][1:]
    return tokens


def _shallow(tokens: list[bytes], depth: int, levels: int) -> Iterator[bytes]:
    """The tokens that are no deeper than ``levels``, and the brackets of the lists and objects there."""
    for token in tokens:
        if token in b"[{":
            depth += 1
            if depth <= levels + 1:
                yield token
        elif token in b"]}":
            if depth <= levels + 1:
                yield token
            depth -= 1
        elif depth <= levels:
            yield token
