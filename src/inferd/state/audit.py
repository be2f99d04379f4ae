"""The audit log: a line per admin action, each with the hash of the line before it.

The log is append-only files of JSON lines in ``audit/`` of the data folder. A file is named by the number of its first
line; the chain goes on from file to file. ``head`` holds the number, hash and place of the last line, so that a log
whose end was cut off is recognised. Every line and the head are on the disk (fsync) before ``append`` returns. The lock
of the folder orders the servers and commands that share it.

What the chain proves, and what it does not, is in docs/audit-log.md. Knows nothing of HTTP or of the actions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from inferd.errors import StateUnavailable
from inferd.state.folder import alone
from inferd.worker.log_lines import encoded

SEGMENT_BYTES: Final = 8 * 1024 * 1024
"""A file of this size is followed by another one."""

MAX_TEXT: Final = 256
"""Characters of each text; the rest is cut off."""

NO_HASH: Final = "0" * 64
"""What the first line has as the hash of the line before it."""

_HEAD_BYTES: Final = 256
_NAME: Final = re.compile(r"(\d{12})\.jsonl")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line. ``of``: the number of the line with which the action began, where this line has its outcome."""

    seq: int
    at: str  # RFC 3339, UTC
    actor: str  # key:ID, control-socket:UID, user:UID, config-file or server
    tenant: str
    action: str
    target: str
    outcome: str  # begun, done, refused, failed
    request_id: str
    detail: str = ""
    of: int = 0
    prev: str = NO_HASH


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An action, before it has a place in the chain."""

    at: str
    actor: str
    action: str
    outcome: str
    tenant: str = ""
    target: str = ""
    request_id: str = ""
    detail: str = ""
    of: int = 0


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of the log."""

    seq: int = 0
    hash: str = NO_HASH
    file: str = ""
    size: int = 0  # of the file, with the line


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What ``verify`` found. ``problem`` names the first line that is wrong; empty: the chain is whole."""

    first: int
    last: int
    hash: str
    problem: str = ""


class AuditLog:
    """The audit log of a data folder. Any number of processes may append; every method blocks."""

    def __init__(self, data_dir: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = data_dir / "audit"
        self._segment_bytes = segment_bytes

    def append(self, record: AuditRecord) -> tuple[AuditEntry, str]:
        """Write a line; returns it and its hash when both it and the head are on the disk.

        Raises StateUnavailable, with the log as before, where that is not possible.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with alone(self.folder) as directory:
                return self._append(record, directory)
        except OSError as error:
            raise StateUnavailable(
                f"The audit log cannot be written ({error.strerror or error}), so the action is refused. Free space on "
                "the disk of state.data_dir, or correct the permissions of its folder audit.",
                code="audit_unavailable",
            ) from error

    def _append(self, record: AuditRecord, directory: int) -> tuple[AuditEntry, str]:
        head = self._completed(self._head())
        entry = AuditEntry(
            seq=head.seq + 1,
            prev=head.hash,
            of=record.of,
            **{
                name: _cut(getattr(record, name))
                for name in ("at", "actor", "tenant", "action", "target", "outcome", "request_id", "detail")
            },
        )
        line = _encoded(entry)
        digest = hashlib.sha256(line).hexdigest()
        is_new = not head.file or head.size >= self._segment_bytes or not (self.folder / head.file).exists()
        name = f"{entry.seq:012d}.jsonl" if is_new else head.file
        end = 0 if is_new else head.size
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write(descriptor, line + b"\n")
                os.fsync(descriptor)
                if is_new:
                    os.fsync(directory)
                after = Head(seq=entry.seq, hash=digest, file=name, size=os.fstat(descriptor).st_size)
                self._write_head(after)
            except OSError:
                with contextlib.suppress(OSError):  # what stays is cut off, or counted, by the next append
                    if is_new:
                        (self.folder / name).unlink()
                    else:
                        os.ftruncate(descriptor, end)  # of this line alone, which no caller was told of
                        self._write_head(head)
                raise
        finally:
            os.close(descriptor)
        return entry, digest

    # -- the head ---------------------------------------------------------------------------

    def head(self) -> Head:
        """The last line, as the head file says. Raises OSError."""
        return self._head()

    def _head(self) -> Head:
        """Without a head, or with one that was spoilt: the beginning of the newest file."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode((self.folder / "head").read_bytes(), type=Head)
        files = self._files()
        if not files:
            return Head()
        first = next(iter(_lines(files[-1])), None)
        entry = None if first is None else _decoded(first.text)
        if entry is None:
            return Head(seq=_first_of(files[-1]) - 1, file=files[-1].name)
        return Head(seq=entry.seq - 1, hash=entry.prev, file=files[-1].name)

    def _write_head(self, head: Head) -> None:
        """In place and of one length, so that it needs no space on a full disk once it is there."""
        descriptor = os.open(self.folder / "head", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write(descriptor, msgspec.json.encode(head).ljust(_HEAD_BYTES - 1) + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _completed(self, head: Head) -> Head:
        """The head, moved on to the last whole line: a process may have been killed between the line and its head. What
        it wrote in part was never confirmed, and is cut off."""
        path = self.folder / head.file
        if not head.file or not path.exists() or path.stat().st_size <= head.size:
            return head
        size = head.size
        for line in _lines(path, size):
            entry = _decoded(line.text)
            if entry is None or not line.is_whole or entry.prev != head.hash:
                break
            size += len(line.text) + 1
            head = Head(seq=entry.seq, hash=hashlib.sha256(line.text).hexdigest(), file=head.file, size=size)
        else:
            return head
        if not line.is_whole:
            os.truncate(path, size)
        return msgspec.structs.replace(head, size=path.stat().st_size)

    # -- reading ----------------------------------------------------------------------------

    def entries(self, *, before: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """The newest entries, the newest first; ``before``: with lower numbers alone. Lines that cannot be read are
        left out. Raises OSError."""
        found: list[AuditEntry] = []
        for path in reversed(self._files()):
            if before is not None and _first_of(path) >= before:
                continue
            here = [entry for line in _lines(path) if (entry := _decoded(line.text)) is not None]
            found += [entry for entry in reversed(here) if before is None or entry.seq < before]
            if len(found) >= limit:
                break
        return found[:limit]

    def verify(self, known: tuple[int, str] | None = None) -> Verdict:
        """Check every line, from the oldest file that is there. ``known``: the number and hash of a line that were
        recorded elsewhere. Raises OSError."""
        if not self.folder.is_dir():
            return self._verdict(known)
        with alone(self.folder):
            return self._verdict(known)

    def _verdict(self, known: tuple[int, str] | None) -> Verdict:
        seq, prev, first, problem = 0, NO_HASH, 0, ""
        head = self._head()
        hashes = {head.seq: head.hash} if head.seq else {}
        if known is not None and hashes.setdefault(known[0], known[1]) != known[1]:
            problem = f"entry {known[0]} has another hash than the recorded one"
        for path in self._files():
            if not problem and path.stat().st_size == 0:
                problem = f"{path.name} is empty"
            for number, line in enumerate(_lines(path), 1):
                entry = _decoded(line.text)
                where = f"{path.name}, line {number}"
                if problem or (not line.is_whole and seq >= max(hashes, default=0)):
                    break  # such a line was cut short by a crash, and no caller was told of it
                if entry is None or not line.is_whole:
                    problem = f"{where}: it is not a whole entry"
                elif not first and (number > 1 or entry.seq != _first_of(path)):
                    problem = f"{where}: the file begins with entry {entry.seq}, and its name says {_first_of(path)}"
                elif first and entry.seq != seq + 1:
                    problem = f"{where}: entry {entry.seq} follows entry {seq}"
                elif (first or entry.seq == 1) and entry.prev != prev:
                    problem = f"{where}: entry {entry.seq} does not continue the chain; the entry before it was changed"
                elif line.text != _encoded(entry):
                    problem = f"{where}: entry {entry.seq} was written by another program"
                else:
                    seq, prev, first = entry.seq, hashlib.sha256(line.text).hexdigest(), first or entry.seq
                    if hashes.get(seq, prev) != prev:
                        problem = f"{where}: entry {seq} has another hash than the recorded one"
        last = max(hashes, default=0)
        if not problem and seq < last:
            problem = f"the log ends with entry {seq}, and entry {last} is recorded: its end was cut off"
        return Verdict(first=first, last=seq, hash=prev, problem=problem)

    def _files(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))


class _Line(NamedTuple):
    text: bytes
    is_whole: bool


def _lines(path: Path, start: int = 0) -> Iterator[_Line]:
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            yield _Line(line.removesuffix(b"\n"), line.endswith(b"\n"))


def _cut(text: str) -> str:
    """At most ``MAX_TEXT`` characters, of which each can be written as UTF-8."""
    return text[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()


def _first_of(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _encoded(entry: AuditEntry) -> bytes:
    """ASCII without control characters: texts of clients stay harmless for readers of the file."""
    return encoded(msgspec.to_builtins(entry)).encode("ascii")


def _decoded(line: bytes) -> AuditEntry | None:
    try:
        return msgspec.json.decode(line, type=AuditEntry)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
