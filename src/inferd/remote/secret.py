"""The API key for a remote server, from an environment variable or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from inferd.errors import ConfigError

MAX_KEY_BYTES: Final = 4096
CHECK_EVERY_S: Final = 1.0  # seconds between two checks of a file, at least


class Secret:
    """An API key from an environment variable, or from a file that is read again when it changes.

    The constructor raises ConfigError where there is no usable key. A file that becomes unreadable or invalid later
    leaves the last key in use, so a file that is being replaced causes no errors.
    """

    __slots__ = ("_checked_at", "_identity", "_path", "is_watched", "value")

    def __init__(self, env: Mapping[str, str], *, variable: str | None = None, file: str | None = None) -> None:
        self._path = Path(file).expanduser() if file is not None else None
        self.is_watched = self._path is not None  # the key may change
        self._checked_at = 0.0
        self._identity: tuple[int, int, int] | None = None
        self.value: bytes | None = None  # None: the server requires no key
        if self._path is not None:
            try:
                self._identity = _identity(self._path)
                text = self._path.read_text(encoding="ascii")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
                raise ConfigError(
                    f"The API key in {file!r} cannot be read: {reason}; correct api_key_file.", param="api_key_file"
                ) from None
            self.value = _key(text, f"The file {file!r}", "api_key_file")
        elif variable is not None:
            if variable not in env:
                raise ConfigError(
                    f"The environment variable {variable} is not set; set it to the API key, or change api_key_env.",
                    param="api_key_env",
                )
            self.value = _key(env[variable], f"The environment variable {variable}", "api_key_env")

    def refresh(self, now: float) -> bool:
        """Check the file, at most once in ``CHECK_EVERY_S``. Return whether the key has changed.

        ``now``: the time of ``inferd.clock``, in seconds.
        """
        if self._path is None or now - self._checked_at < CHECK_EVERY_S:
            return False
        self._checked_at = now
        try:
            identity = _identity(self._path)
            if identity == self._identity:
                return False
            value = _key(self._path.read_text(encoding="ascii"), "", "")
        except (OSError, UnicodeDecodeError, ConfigError):
            return False
        self._identity = identity
        changed, self.value = value != self.value, value
        return changed


def environment() -> Mapping[str, str]:
    """The environment variables of this process."""
    return os.environ


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def _key(text: str, where: str, param: str) -> bytes:
    key = text.strip()
    if not key or len(key) > MAX_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} holds no API key: one word of printable ASCII characters is needed.", param=param)
    return key.encode("ascii")
