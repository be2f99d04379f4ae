"""The lines of a batch's input: read piece by piece, each with its number and its end.

A line ends with LF or CRLF. A mark of the byte order (BOM) before the first line is left out. No more than one line is in
memory, and of a line that is too long nothing.
"""

from __future__ import annotations

from typing import BinaryIO, Final, NamedTuple

from inferd.jobs.batch import Place

_BOM: Final = b"\xef\xbb\xbf"
_PIECE: Final = 64 * 1024


class Line(NamedTuple):
    begin: Place
    end: Place
    data: bytes | None  # without its end; None: it is too long

    @property
    def number(self) -> int:
        """From 1."""
        return self.end.line

    @property
    def is_blank(self) -> bool:
        return self.data is not None and not self.data.strip()


class Lines:
    """Reads the lines behind a place. Raises OSError."""

    def __init__(self, file: BinaryIO, place: Place, max_line_bytes: int) -> None:
        file.seek(place.offset)
        self._file = file
        self._place = place
        self._most = max_line_bytes

    def read(self) -> Line | None:
        """The next line; None: there is none."""
        begin = self._place
        data = self._file.readline(self._most + 2)
        if not data:
            return None
        size, is_whole = len(data), data.endswith(b"\n")
        kept: bytes | None = data
        if not is_whole and size > self._most:
            kept = None
            while rest := self._file.readline(_PIECE):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
        self._place = end = Place(begin.line + 1, begin.offset + size)
        if kept is None:
            return Line(begin, end, None)
        kept = kept.rstrip(b"\r\n") if is_whole else kept
        return Line(begin, end, kept.removeprefix(_BOM) if begin.offset == 0 else kept)

    def several(self, max_lines: int, max_bytes: int) -> list[Line]:
        """The next lines, at least one while there are any; beyond ``max_bytes`` no further one is read."""
        found: list[Line] = []
        size = 0
        while len(found) < max_lines and size < max_bytes:
            line = self.read()
            if line is None:
                break
            found.append(line)
            size += len(line.data or b"")
        return found
