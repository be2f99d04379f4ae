"""The elements of an array in a JSON object, each as soon as it has arrived. Pure: bytes in, elements out.

Only the object's braces, its other fields and the element that arrives are kept. Nothing is decoded: ``close`` returns
the object without the elements, and an element is any text between two commas, so decoders find what is not JSON.
"""

from __future__ import annotations

import re
from typing import Final

from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest

MAX_REST_BYTES: Final = 64 * 1024
"""Of the object without the elements."""

_MARK: Final = re.compile(rb'["{}\[\],:]')
_TEXT: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # up to its end, or to where more is needed
_OPEN: Final = b"{["
_CLOSE: Final = b"}]"


class Elements:
    """Reads a body. ``name``: the field that is the array."""

    __slots__ = ("_at", "_begin", "_buffer", "_depth", "_in_array", "_in_text", "_key", "_most", "_name",
                 "_num_found", "_rest", "_text", "_text_at")  # fmt: skip

    def __init__(self, name: str, max_element_bytes: int) -> None:
        self._name = name
        self._most = max_element_bytes
        self._buffer = bytearray()
        self._at = 0  # how far the buffer was read
        self._begin = 0  # of the element that arrives
        self._depth = 0
        self._in_array = False
        self._in_text = False
        self._text_at = 0
        self._text = b""  # the last one of the object itself
        self._key = b""  # of the field that arrives
        self._rest = b""
        self._num_found = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The elements that are complete by these bytes. Raises InvalidRequest where one is too long."""
        self._buffer += data
        found: list[bytes] = []
        while self._read_text() if self._in_text else self._read_mark(found):
            pass
        if self._in_array:
            del self._buffer[: self._begin]
            self._at -= self._begin
            self._text_at -= self._begin
            self._begin = 0
            if len(self._buffer) > self._most:
                raise self._too_long()
        elif len(self._buffer) + len(self._rest) > MAX_REST_BYTES:
            raise InvalidRequest(
                f"The body has more than {bytes_text(MAX_REST_BYTES)} beside {self._name!r}; send that array alone.",
                code="invalid_json",
            )
        return found

    def close(self) -> bytes:
        """The object without the elements of its array, which is complete where this is valid JSON."""
        return self._rest + bytes(self._buffer)

    def _read_text(self) -> bool:
        """Read to the end of a string; False: more bytes are needed."""
        found = _TEXT.match(self._buffer, self._at)
        assert found is not None, "it matches nothing too"
        self._at = found.end()
        if self._at == len(self._buffer) or self._buffer[self._at] != ord('"'):
            return False
        self._at += 1
        self._in_text = False
        if self._depth == 1:
            self._text = bytes(self._buffer[self._text_at : self._at])
        return True

    def _read_mark(self, found: list[bytes]) -> bool:
        match = _MARK.search(self._buffer, self._at)
        if match is None:
            self._at = len(self._buffer)
            return False
        at, self._at = match.start(), match.end()
        mark = self._buffer[at]
        if mark == ord('"'):
            self._in_text, self._text_at = True, at
        elif mark in _OPEN:
            self._depth += 1
            if mark == ord("[") and self._depth == 2 and self._key == f'"{self._name}"'.encode():
                self._enter()
        elif mark in _CLOSE:
            if self._in_array and self._depth == 2:
                self._end_element(at, found, is_last=True)
                self._leave(at)
            self._depth -= 1
        elif self._depth == 2 and self._in_array and mark == ord(","):
            self._end_element(at, found)
        elif self._depth == 1:
            self._key = self._text if mark == ord(":") else b""
        return True

    def _enter(self) -> None:
        self._rest += bytes(self._buffer[: self._at])
        self._in_array = True
        self._begin = self._at
        self._num_found = 0

    def _leave(self, at: int) -> None:
        del self._buffer[:at]
        self._at = 1
        self._in_array = False
        self._key = b""

    def _end_element(self, at: int, found: list[bytes], *, is_last: bool = False) -> None:
        element = bytes(self._buffer[self._begin : at]).strip(b" \t\r\n")
        if len(element) > self._most:
            raise self._too_long()
        if element or self._num_found or not is_last:  # an array of nothing has no element
            found.append(element)
            self._num_found += 1
        self._begin = self._at

    def _too_long(self) -> InvalidRequest:
        return InvalidRequest(
            f"An element of {self._name!r} has more than {bytes_text(self._most)} (server.max_body_bytes); send less.",
            param=self._name,
            code="request_too_large",
        )
