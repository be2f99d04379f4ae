"""The files of recorded payloads: one folder per tenant, one file per hour, mode 0600.

A file is deleted as a whole: when its hour is older than the days that are kept, when the tenant's files are larger
than allowed (the oldest first), or by command. Nothing is written into a file of an earlier hour.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

PARTS: Final = 8
"""Files that the size of a tenant is spread over at least, so that deleting the oldest frees a part of it."""

_HOUR_S: Final = 3600
_NAME: Final = re.compile(r"(\d{8}T\d{2})-(\d{4})\.jsonl")


class Segment(NamedTuple):
    """One file."""

    path: Path
    begins: float  # seconds since the epoch
    part: int
    size: int

    @property
    def ends(self) -> float:
        return self.begins + _HOUR_S


class PayloadStore:
    """The folder ``payloads`` of a data folder. Every method blocks."""

    def __init__(self, data_dir: Path) -> None:
        self.folder = data_dir / "payloads"

    def append(self, tenant: str, lines: bytes, now: float, max_bytes: int) -> None:
        """Write whole lines, then delete the oldest files beyond ``max_bytes``. Raises OSError."""
        folder = self.folder / folder_of(tenant)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        segments = list(segments_of(folder))
        hour = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H")
        own = [segment for segment in segments if segment.path.name.startswith(hour)]
        part = own[-1].part + (own[-1].size >= max_bytes // PARTS) if own else 0
        path = folder / f"{hour}-{part:04d}.jsonl"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            before = os.fstat(descriptor).st_size
            try:
                rest = memoryview(lines)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
        size = sum(segment.size for segment in segments) + len(lines)
        for segment in segments:
            if size <= max_bytes:
                break
            if segment.path != path:
                segment.path.unlink(missing_ok=True)
                size -= segment.size

    def purge(self, now: float, keep_days: int) -> int:
        """Delete every file that ended more than ``keep_days`` days ago; returns their number. Raises OSError."""
        return self._delete(lambda segment: segment.ends + keep_days * 86_400 <= now, None)

    def delete(self, tenant: str | None, before: float | None) -> int:
        """Delete the files of a tenant (None: of all), or of them those that ended before a time; returns their number.
        Raises OSError."""
        return self._delete(lambda segment: before is None or segment.ends <= before, tenant)

    def _delete(self, is_meant: Any, tenant: str | None) -> int:
        num_deleted = 0
        for folder in self._folders(tenant):
            for segment in segments_of(folder):
                if is_meant(segment):
                    segment.path.unlink(missing_ok=True)
                    num_deleted += 1
            with contextlib.suppress(OSError):  # it has other files
                folder.rmdir()
        return num_deleted

    def records(self, tenant: str | None = None) -> Iterator[dict[str, Any]]:
        """Every record, of one tenant or of all, the oldest of each tenant first. Raises OSError."""
        for folder in self._folders(tenant):
            for segment in segments_of(folder):
                with contextlib.suppress(FileNotFoundError), segment.path.open("rb") as file:  # purged meanwhile
                    for line in file:
                        with contextlib.suppress(msgspec.DecodeError):
                            yield msgspec.json.decode(line, type=dict[str, Any])

    def _folders(self, tenant: str | None) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = sorted(path for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink())
        return found if tenant is None else [path for path in found if path.name == folder_of(tenant)]


def folder_of(tenant: str) -> str:
    """A name without separators, and different for each tenant."""
    digest = hashlib.sha256(tenant.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    return f"{quote(tenant, safe='', errors='backslashreplace')[:60]}-{digest}"


def segments_of(folder: Path) -> Iterator[Segment]:
    """The files of a tenant, the oldest first."""
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            begins = datetime.strptime(match[1], "%Y%m%dT%H").replace(tzinfo=UTC).timestamp()
            with contextlib.suppress(FileNotFoundError):
                yield Segment(path, begins, int(match[2]), path.stat().st_size)
