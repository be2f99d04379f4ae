"""The folder in which a server keeps the model files that it serves; it goes with the process.

Knows which of such folders nobody uses any more. What lies in them is ``registry/kept.py``'s.
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
def kept_folder(below: Path) -> Iterator[Path | None]:
    """A new folder below, held for as long as the process lives; those of processes that were killed are removed.
    None where it cannot be made: a server without one serves all the same."""
    try:
        below.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = below / secrets.token_hex(8)
        with alone(below):
            for other in below.iterdir():
                if _is_left(other):
                    shutil.rmtree(other, ignore_errors=True)
            folder.mkdir(mode=0o700)
            held = descriptor_of(folder)
            fcntl.flock(held, fcntl.LOCK_EX)
    except OSError as error:
        _log.warning("%s: no files of models are kept there (%s)", below, error.strerror or error)
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _is_left(folder: Path) -> bool:
    try:
        return not is_locked(descriptor_of(folder))
    except OSError:
        return False
