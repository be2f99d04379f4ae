"""The data folder: where a server's state, journals and sockets are on disk, and locks of files and folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from inferd.config import StateConfig
from inferd.errors import ConfigError


def data_folder(config: StateConfig) -> Path:
    """The folder for state, journals and the control socket, which may not exist yet.

    ``data_dir`` where it is set, else ``inferd`` in the user's data folder: ``$XDG_DATA_HOME``, else
    ``~/.local/share`` (XDG base directories) or on macOS ``~/Library/Application Support``.
    """
    if config.data_dir is not None:
        return Path(config.data_dir).expanduser().absolute()
    chosen = os.environ.get("XDG_DATA_HOME", "")
    if chosen.startswith("/"):
        return Path(chosen) / "inferd"
    try:
        home = Path.home()
    except RuntimeError:
        raise ConfigError(
            "This user has no home folder to keep state in; name a folder: INFERD_STATE__DATA_DIR=/var/lib/inferd.",
            param="state.data_dir",
        ) from None
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "inferd"
    return home / ".local" / "share" / "inferd"


def make_folder(folder: Path) -> Path:
    """Create the folder with access for this user alone. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The folder {folder} for keys and usage cannot be created ({error.strerror}); "
            "name another one: INFERD_STATE__DATA_DIR=/path, or state.data_dir in the config file.",
            param="state.data_dir",
        ) from None
    return folder


def descriptor_of(folder: Path) -> int:
    """A descriptor of the folder. Raises OSError, also where the folder is a symbolic link."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def is_locked(descriptor: int) -> bool:
    """Whether a living process holds the lock of this file or folder; closes the descriptor. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[int]:
    """A descriptor of the folder, locked by one process at a time, so that a check and a change are atomic. Raises
    OSError."""
    descriptor = descriptor_of(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
