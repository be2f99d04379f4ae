"""The folder in which a server pins the model files that it serves; it is removed with the process.

Knows which folders belong to processes that are gone. Their contents are ``registry/pinned.py``'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from inferd.state.folder import alone, descriptor_of, is_locked

_log = logging.getLogger("inferd.app")


@contextlib.contextmanager
def pinned_folder(below: Path) -> Iterator[Path | None]:
    """A new folder, locked for as long as the process lives. Folders of processes that were killed are removed. None:
    it could not be made, and the server works without it."""
    try:
        below.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = below / secrets.token_hex(8)
        with alone(below):
            for other in below.iterdir():
                if _is_abandoned(other):
                    shutil.rmtree(other, ignore_errors=True)
            folder.mkdir(mode=0o700)
            held = descriptor_of(folder)
            fcntl.flock(held, fcntl.LOCK_EX)
    except OSError as error:
        _log.warning("%s: no files of models are pinned there (%s)", below, error.strerror or error)
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _is_abandoned(folder: Path) -> bool:
    """Whether no process holds the folder's lock."""
    try:
        return not is_locked(descriptor_of(folder))
    except OSError:
        return False
