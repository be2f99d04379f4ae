"""multipart/form-data, part by part as it arrives (RFC 7578, RFC 2046). Pure: bytes in, events out.

Nothing is kept but the head of a part and as many bytes as a boundary has.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from inferd.errors import InvalidRequest

MAX_HEAD_BYTES: Final = 8 * 1024
MAX_PARTS: Final = 32

_BOUNDARY: Final = re.compile(rb'(?:^|;)\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER: Final = re.compile(rb';\s*(name|filename)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)


class Begin(NamedTuple):
    """A part begins."""

    name: str
    filename: str | None  # None: a field


class Data(NamedTuple):
    """Bytes of the part that began last."""

    data: bytes


class End(NamedTuple):
    """The part has ended."""


Event = Begin | Data | End


def boundary_of(content_type: bytes | None) -> bytes:
    """The boundary of a content type. Raises InvalidRequest where it is none of a form."""
    media = b"" if content_type is None else content_type.partition(b";")[0].strip().lower()
    found = None if content_type is None else _BOUNDARY.search(content_type.partition(b";")[2])
    if media != b"multipart/form-data" or found is None:
        raise InvalidRequest(
            "The body must be multipart/form-data with a boundary, with the fields 'file' and 'purpose'.",
            param="content-type",
            code="invalid_form",
        )
    return found[1] or found[2]


class Form:
    """Reads a body. ``is_complete`` once its last boundary came."""

    __slots__ = ("_boundary", "_buffer", "_num_parts", "_state", "is_complete")

    def __init__(self, boundary: bytes) -> None:
        self._boundary = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # the first boundary has no line before it
        self._state = "before"
        self._num_parts = 0
        self.is_complete = False

    def feed(self, data: bytes) -> list[Event]:
        """The events of more bytes. Raises InvalidRequest."""
        events: list[Event] = []
        self._buffer += data
        while not self.is_complete and self._go_on(events):
            pass
        if self.is_complete:
            self._buffer = b""  # what comes behind it is to be left out
        return events

    def _go_on(self, events: list[Event]) -> bool:
        """Read one thing; False: more bytes are needed."""
        if self._state == "head":
            return self._read_head(events)
        if self._state == "behind":
            return self._read_line()
        at = self._buffer.find(self._boundary)
        is_part = self._state == "part"
        cut = at if at >= 0 else max(0, len(self._buffer) - len(self._boundary) + 1)
        if is_part and cut:
            events.append(Data(self._buffer[:cut]))
        self._buffer = self._buffer[cut:]
        if at < 0:
            return False
        if is_part:
            events.append(End())
        self._buffer = self._buffer[len(self._boundary) :]
        self._state = "behind"
        return True

    def _read_line(self) -> bool:
        """What comes behind a boundary: the end of the body, or of the line."""
        if len(self._buffer) < 2:
            return False
        if self._buffer.startswith(b"--"):
            self.is_complete = True
            return True
        at = self._buffer.find(b"\r\n")
        if at < 0 and len(self._buffer) <= MAX_HEAD_BYTES:
            return False
        if at < 0 or self._buffer[:at].strip(b" \t"):
            raise _broken("a boundary is followed by other bytes")
        self._buffer = self._buffer[at:]  # with the end of the line: a head may be empty
        self._state = "head"
        return True

    def _read_head(self, events: list[Event]) -> bool:
        at = self._buffer.find(b"\r\n\r\n")
        if at < 0 or at > MAX_HEAD_BYTES:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise _broken(f"the head of a part has more than {MAX_HEAD_BYTES} bytes")
            return False
        head, self._buffer = self._buffer[:at], self._buffer[at + 4 :]
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        events.append(_begin_of(head))
        self._state = "part"
        return True


def _begin_of(head: bytes) -> Begin:
    for line in head.split(b"\r\n"):
        field, _, value = line.partition(b":")
        if field.strip().lower() == b"content-disposition":
            found = {key.lower(): quoted or plain for key, quoted, plain in _PARAMETER.findall(value)}
            name = found.get(b"name")
            if name is not None:
                filename = found.get(b"filename")
                return Begin(_text(name), None if filename is None else _text(filename))
    raise _broken("a part has no name in its Content-Disposition")


def _text(value: bytes) -> str:
    return value.replace(b'\\"', b'"').replace(b"%22", b'"').decode("utf-8", "replace")


def _broken(what: str) -> InvalidRequest:
    return InvalidRequest(f"The body is not valid multipart/form-data: {what}.", code="invalid_form")
