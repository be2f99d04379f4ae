"""The Unix socket through which the operator talks to a server: ``<data_dir>/run/<port>.sock``.

The permission to open the socket allows everything, so the folder is 0700 and the socket 0600, both of the server's
user. A socket left by a killed server is replaced. One that answers belongs to another server and is left alone.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from inferd.errors import ConfigError
from inferd.state.folder import alone

_MAX_PATH_BYTES = 100  # the kernel takes 104 to 108, by platform
_BACKLOG = 64


class NoControlSocketError(Exception):
    """The socket could not be made; the message says why. A server works without it."""


class ControlSocket:
    """A listening socket and its file, which is removed with it."""

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self.listener = listener
        self.path = path
        self._identity = _identity(path)

    def close(self) -> None:
        """Idempotent. The next server's file, if it is there already, stays."""
        self.listener.close()
        if self._identity is not None and _identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self._identity = None


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Inode numbers are used again at once; together with the time they are not."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def open_control_socket(data_dir: Path, port: int) -> ControlSocket:
    """Listen for the operator. Raises ConfigError where another server listens there, and
    NoControlSocketError where the folder does not allow it."""
    folder = data_dir / "run"
    path = folder / f"{port}.sock"
    try:
        for made in (data_dir, folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        with alone(folder) as directory:
            found = os.fstat(directory)
            if found.st_uid != os.geteuid():
                raise NoControlSocketError(f"{folder} belongs to another user")
            if stat.S_IMODE(found.st_mode) != 0o700:
                os.fchmod(directory, 0o700)
            return ControlSocket(_bound(path, directory, data_dir), path)
    except OSError as error:
        raise NoControlSocketError(f"{path}: {error.strerror or error}") from None


def _bound(path: Path, directory: int, data_dir: Path) -> socket.socket:
    address = _address(path, directory)
    if _is_live(address):
        raise ConfigError(
            f"Another server uses {path}; stop it, or choose another port or another state.data_dir than {data_dir}.",
            param="state.data_dir",
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(address)
        path.chmod(0o600)  # until here the mode of the folder has protected the socket
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _address(path: Path, directory: int) -> str:
    """The address to bind or connect to: the path, or a short alias of a path that is too long for the kernel."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        return str(path)
    short = f"/proc/self/fd/{directory}/{path.name}"
    if not Path("/proc/self/fd").exists():
        raise NoControlSocketError(f"{path} is longer than {_MAX_PATH_BYTES} bytes; choose a shorter state.data_dir")
    return short


def _is_live(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except BlockingIOError:  # its backlog is full, so a server listens
            return True
        except OSError:
            return False
        return True


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection to a server's socket. Raises OSError."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout_s)
        made.connect(_address(path, directory))
    except BaseException:
        made.close()
        raise
    finally:
        os.close(directory)
    return made
