"""The runs of ``inferd batch`` that have not ended: what is kept beside their output until it is written.

.OUTPUT.job/job.json    the job, and where it runs
.OUTPUT.job/data        files and jobs of a server of the run's own (--model)
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from inferd.cli.running.control import Server, find_server
from inferd.cli.running.own_server import own_server
from inferd.errors import InvalidRequest

_ANY_SIZE: Final = str(1 << 50)  # of a file on the caller's own disk
_ANY_NUMBER: Final = "1000000"


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The place to write a file, which takes its name when all of it is on the disk. Raises OSError, and leaves nothing
    there where it is not written to its end."""
    part = path.with_name(f".{path.stem.removeprefix('.')}.{os.getpid()}.part{path.suffix}")
    try:
        yield part
        _sync(part)
        part.replace(path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Where(msgspec.Struct, frozen=True):
    """The server of a run: one that runs, or one of its own for a model."""

    model: str | None = None
    name: str | None = None  # by which its requests name the model
    port: int | None = None
    config: str | None = None
    url: str | None = None


class Record(msgspec.Struct, frozen=True):
    """A run whose job was made."""

    batch_id: str
    where: Where


class Run:
    """A run, by the file that it writes."""

    def __init__(self, output: Path) -> None:
        self._folder = output.with_name(f".{output.name}.job")
        self._output = output

    def record(self) -> Record | None:
        """None: no job was made for this output, or it is written."""
        try:
            return msgspec.json.decode((self._folder / "job.json").read_bytes(), type=Record)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequest(
                f"{self._folder / 'job.json'} cannot be read ({error}); delete {self._folder}."
            ) from None

    def check_new(self) -> None:
        """Raises InvalidRequest where a job for this output goes on, or the output cannot be written."""
        found = self.record()
        if found is not None:
            raise InvalidRequest(
                f"The job {found.batch_id} for {self._output} has not ended; go on with 'inferd batch resume "
                f"{self._output}', or delete {self._folder} and begin again."
            )
        if not self._output.parent.is_dir():
            raise InvalidRequest(f"The folder {self._output.parent} of the output does not exist; make it first.")

    def begun(self, record: Record) -> None:
        """Keep which job it is. Raises InvalidRequest."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with written_whole(self._folder / "job.json") as part:
                part.write_bytes(msgspec.json.encode(record))
        except OSError as error:
            raise InvalidRequest(f"{self._folder} cannot be written: {error.strerror}.") from None

    def ended(self) -> None:
        """Its output is written."""
        with contextlib.suppress(OSError):  # first: without it nothing else in the folder is needed
            (self._folder / "job.json").unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def server(self, where: Where, key: str | None) -> Iterator[Server]:
        """The server of the run. Raises InferdError."""
        if where.model is None:
            yield find_server(where.port, None if where.config is None else Path(where.config), where.url, key)
            return
        settings = {
            "INFERD_STATE__DATA_DIR": str((self._folder / "data").absolute()),
            "INFERD_JOBS__MAX_FILE_BYTES": _ANY_SIZE,
            "INFERD_JOBS__MAX_BYTES": _ANY_SIZE,
            "INFERD_JOBS__MAX_LINES": _ANY_NUMBER,
        }
        has_job = self.record() is not None
        if not has_job:
            self.ended()  # what a run has left that was killed before its job was made
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"{self._folder} cannot be made: {error.strerror}.") from None
        try:
            with own_server(where.model, [] if where.name is None else ["--name", where.name], settings) as address:
                yield find_server(None, None, address, None)
        finally:
            if self.record() is None:
                self.ended()
