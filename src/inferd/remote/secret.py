"""The credential that a remote server wants, read where the operator keeps it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from inferd.errors import ConfigError

MAX_KEY_BYTES: Final = 4096
LOOK_EVERY_S: Final = 1.0


class Secret:
    """An API key from the environment or from a file, which is read again when it changes.

    Raises ConfigError when made without a usable key. A file that disappears or breaks later leaves
    the key that was read last: replacing a file is never seen half done.
    """

    __slots__ = ("_identity", "_looked_at", "_path", "value")

    def __init__(self, env: Mapping[str, str], *, variable: str | None = None, file: str | None = None) -> None:
        self._path = Path(file).expanduser() if file is not None else None
        self._looked_at = 0.0
        self._identity: tuple[int, int, int] | None = None
        self.value: bytes | None = None  # None: the server wants no key
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
        """Look at the file, at most once a second; whether there is another key."""
        if self._path is None or now - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at = now
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
    return os.environ


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def _key(text: str, where: str, param: str) -> bytes:
    key = text.strip()
    if not key or len(key) > MAX_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} holds no API key: one word of printable ASCII characters is needed.", param=param)
    return key.encode("ascii")
