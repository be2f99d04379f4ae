"""The answers of a batch before it was resumed: read once more from its former files of results, beside its input.

Both files have their lines in the order of the input, so each is read once, from its begin to its end. A line is found
by its id, which the batch and the number of the input's line give. A line of results that cannot be read, in a file
that was damaged, counts as absent. Reads block, and raise OSError.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import BinaryIO, Final, NamedTuple

import msgspec

from inferd.jobs.folder import Kind
from inferd.jobs.results import EARLY, request_id

_log = logging.getLogger("inferd.jobs")

_ENDED: Final = frozenset(code for code, _ in EARLY.values())


class Found(NamedTuple):
    """The answer that a line of the input had, as its line of results."""

    kind: Kind
    result: bytes
    body: bytes  # of the answer; empty: the request was not asked


class _Error(msgspec.Struct, frozen=True):
    code: str


class _Response(msgspec.Struct, frozen=True):
    body: msgspec.Raw


class _Read(msgspec.Struct, frozen=True):
    """What is read of a line of results."""

    id: str
    response: _Response | None
    error: _Error | None


_decoder: Final = msgspec.json.Decoder(_Read)


class Earlier:
    """The former results of a batch. ``files``: the open file of each kind there is."""

    def __init__(self, batch_id: str, files: Sequence[tuple[Kind, BinaryIO]]) -> None:
        self._batch_id = batch_id
        self._files = files
        self._next: list[tuple[bytes, _Read] | None] = []
        self._line = 0  # of the input, up to which the results are read

    def answers(self, numbers: Sequence[int]) -> list[Found | None]:
        """The answers that these lines had, by their ascending numbers; None: it had none, or was not asked because the
        batch ended. After an OSError the same call may be repeated."""
        line, ahead, places = self._line, list(self._next), [file.tell() for _, file in self._files]
        try:
            if not self._next:
                self._next = [_read(file) for _, file in self._files]
            found: list[Found | None] = []
            for number in numbers:
                while self._line < number:
                    self._line += 1
                    one = self._answer(self._line)
                found.append(one)
            return found
        except OSError:
            self._line, self._next = line, ahead
            for (_, file), place in zip(self._files, places, strict=True):
                file.seek(place)
            raise

    def close(self) -> None:
        for _, file in self._files:
            with contextlib.suppress(OSError):
                file.close()

    def _answer(self, number: int) -> Found | None:
        name = request_id(self._batch_id, number)
        for i, (kind, file) in enumerate(self._files):
            ahead = self._next[i]
            if ahead is not None and ahead[1].id == name:
                self._next[i] = _read(file)
                result, read = ahead
                if read.error is not None and read.error.code in _ENDED:
                    return None
                return Found(kind, result, b"" if read.response is None else bytes(read.response.body))
        return None


def _read(file: BinaryIO) -> tuple[bytes, _Read] | None:
    while line := file.readline():
        try:
            return line, _decoder.decode(line)
        except msgspec.MsgspecError as error:
            _log.warning("a result of a resumed batch is damaged (%s); its request is asked again", error)
    return None
