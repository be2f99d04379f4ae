"""The contents of files on disk: uploads that arrive, files under their ids, and results of batches that run.

    folder.id             the folder's identity, which rows of files name
    folder.owner          the identity of the database that has these rows
    uploads/GATEWAY.ID    what a server receives
    files/ID              the content of a file, complete
    results/BATCH.FENCE.output, .errors    what the holder of a lease has written of a batch's results

A content is written to a temporary name, flushed, and then renamed, so a file under its id is complete. Deleting removes
the name: the disk's blocks are the file system's. All methods block, and raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Literal

from inferd.config import StateConfig
from inferd.config.server import JobsConfig
from inferd.errors import ConfigError
from inferd.jobs.batch import Segment
from inferd.state.folder import data_folder, make_folder

Kind = Literal["output", "errors"]
KINDS: Final[tuple[Kind, Kind]] = ("output", "errors")

PIECE: Final = 256 * 1024
ORPHAN_S: Final = 3600.0
"""Age from which on a content that no row names is removed: its row would have been written by then."""


class Disk:
    """The calls that write. Tests replace it by one that is full, or fails."""

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            size = os.pwrite(descriptor, view, offset)
            view, offset = view[size:], offset + size

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)


class Folder:
    """The folder of ``jobs.folder``."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = path
        self.disk = Disk() if disk is None else disk
        self.id = ""

    def open(self) -> None:
        """Make what is missing, and read the folder's identity."""
        for name in ("", "uploads", "files", "results"):
            (self.path / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.id = self._mark("folder.id", secrets.token_hex(16))

    def belongs_to(self, owner: str) -> bool:
        """Whether the folder's contents are those of this database: the first one that asks."""
        return self._mark("folder.owner", owner) == owner

    def _mark(self, name: str, text: str) -> str:
        """The text of a small file, which is written where it is missing."""
        path = self.path / name
        if not path.exists():
            made = self.path / f"{name}.{secrets.token_hex(8)}"
            with made.open("w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                self.disk.sync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(made, path)  # of several servers that start together, one has the first
            made.unlink()
            self.sync_folder("")
        return path.read_text(encoding="ascii").strip()

    # -- contents ---------------------------------------------------------------------------

    def upload(self, gateway: str, name: str) -> Upload:
        """Begin to receive the content of a file."""
        return Upload(self, self.path / "uploads" / f"{gateway}.{name}", name)

    def content(self, name: str) -> BinaryIO:
        return (self.path / "files" / name).open("rb", buffering=PIECE)

    def has_content(self, name: str) -> bool:
        return (self.path / "files" / name).exists()

    def delete(self, names: Collection[str]) -> None:
        """Delete contents. Idempotent."""
        for name in names:
            (self.path / "files" / name).unlink(missing_ok=True)
        if names:
            self.sync_folder("files")

    def keep(self, temporary: Path, name: str) -> None:
        """Give a complete, flushed file its name."""
        temporary.rename(self.path / "files" / name)
        self.sync_folder("files")

    # -- results ----------------------------------------------------------------------------

    def results(self, batch: str, fence: int) -> Results:
        """The files that the holder of a lease writes."""
        return Results(self, batch, fence)

    def result_path(self, batch: str, fence: int, kind: Kind) -> Path:
        return self.path / "results" / f"{batch}.{fence}.{kind}"

    def join(self, batch: str, kind: Kind, segments: Sequence[Segment], name: str) -> int:
        """Put the parts of a file of results together under its id; returns its bytes. Idempotent."""
        total = sum(segment.num_bytes for segment in segments)
        with contextlib.suppress(FileNotFoundError):
            if (self.path / "files" / name).stat().st_size == total:
                return total
        temporary = self.path / "results" / f"{batch}.{secrets.token_hex(8)}.joined"
        try:
            with temporary.open("wb", buffering=0) as made:
                offset = 0
                for segment in segments:
                    with self.result_path(batch, segment.fence, kind).open("rb") as part:
                        for piece in _pieces(part, segment.num_bytes):
                            self.disk.write(made.fileno(), piece, offset)
                            offset += len(piece)
                self.disk.sync(made.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.keep(temporary, name)
        return total

    def remove_results(self, batch: str) -> None:
        """Remove the parts of a batch that has ended. Idempotent."""
        for path in (self.path / "results").glob(f"{batch}.*"):
            path.unlink(missing_ok=True)

    # -- what is left of crashes ------------------------------------------------------------

    def contents(self, now: float) -> list[str]:
        """The ids of contents that are old enough to be looked for in the database."""
        return [path.name for path in (self.path / "files").iterdir() if _is_old(path, now)]

    def running(self) -> set[str]:
        """The batches that have parts of results."""
        return {path.name.partition(".")[0] for path in (self.path / "results").iterdir()}

    def remove_uploads(self, living: Collection[str]) -> None:
        """Remove what was received by servers that have ended."""
        for path in (self.path / "uploads").iterdir():
            if path.name.partition(".")[0] not in living:
                path.unlink(missing_ok=True)

    def sync_folder(self, name: str) -> None:
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.disk.sync(descriptor)
        finally:
            os.close(descriptor)


class _Descriptors:
    """Open files that a thread may still write to when they are closed: the last to leave closes them. A number that
    was closed too early could be another file's by then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: list[int] = []
        self._is_closing = False

    def add(self, number: int) -> int:
        self._numbers.append(number)
        return number

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        with self._lock:
            if self._is_closing:
                raise OSError(errno.EBADF, "the file was closed")
            yield
        if self._is_closing:
            self.close()

    def close(self) -> None:
        """Close them, or leave it to the thread that uses them. Idempotent."""
        self._is_closing = True
        if self._lock.acquire(blocking=False):
            try:
                while self._numbers:
                    os.close(self._numbers.pop())
            finally:
                self._lock.release()


class Upload:
    """A content that arrives. Either ``finish`` or ``abort`` it."""

    def __init__(self, folder: Folder, path: Path, name: str) -> None:
        self._folder = folder
        self._path = path
        self._open = _Descriptors()
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._descriptor = self._open.add(os.open(path, flags, 0o600))
        self.name = name
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        with self._open.in_use():
            self._folder.disk.write(self._descriptor, data, self.num_bytes)
        self.num_bytes += len(data)

    def finish(self) -> None:
        """Give it its name; durable when it returns."""
        with self._open.in_use():
            self._folder.disk.sync(self._descriptor)
        self._open.close()
        self._folder.keep(self._path, self.name)

    def abort(self) -> None:
        """Idempotent, and without effect after ``finish``."""
        self._open.close()
        self._path.unlink(missing_ok=True)


class Results:
    """The two files of results that the holder of a lease writes: answers and errors."""

    def __init__(self, folder: Folder, batch: str, fence: int) -> None:
        self._folder = folder
        self._paths = {kind: folder.result_path(batch, fence, kind) for kind in KINDS}
        self._descriptors: dict[Kind, int] = {}
        self._open = _Descriptors()

    def write(self, kind: Kind, data: bytes, offset: int) -> None:
        """Write behind what counts, over what does not, and flush it."""
        with self._open.in_use():
            descriptor = self._descriptors.get(kind)
            if descriptor is None:
                flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
                descriptor = self._open.add(os.open(self._paths[kind], flags, 0o600))
                self._descriptors[kind] = descriptor
                self._folder.sync_folder("results")
            self._folder.disk.write(descriptor, data, offset)
            self._folder.disk.sync(descriptor)

    def close(self) -> None:
        self._open.close()


def open_folder(state: StateConfig, jobs: JobsConfig) -> Folder:
    """The folder of the settings, made where it is missing. Raises ConfigError."""
    path = Path(jobs.folder).expanduser().absolute() if jobs.folder is not None else data_folder(state) / "jobs"
    if jobs.folder is None:
        make_folder(data_folder(state))
    folder = Folder(path)
    try:
        folder.open()
    except OSError as error:
        raise ConfigError(
            f"The folder {path} for files of clients cannot be used ({error.strerror}); name another one with "
            "jobs.folder, or turn files and batches off with jobs.enabled: false.",
            param="jobs.folder",
        ) from None
    return folder


def is_full(error: OSError) -> bool:
    """Whether the disk has no room, or the user's quota of it is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _pieces(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        piece = file.read(min(PIECE, num_bytes))
        if not piece:
            raise OSError(errno.EIO, f"a file of results is shorter than it was: {getattr(file, 'name', '')}")
        num_bytes -= len(piece)
        yield piece


def _is_old(path: Path, now: float) -> bool:
    try:
        return now - path.stat().st_mtime > ORPHAN_S
    except FileNotFoundError:
        return False
