"""Where a configuration was read from, so that it can be read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from inferd.config import Config


class ConfigSource(msgspec.Struct, frozen=True):
    """``read`` reads the file, the environment and the flags together.

    It may block, and raises InferdError with everything that is wrong. ``has_changed`` says whether what lies outside
    the file, such as the version that a registry has in production, has changed since it was called or read before. It
    may block as well, and raises nothing. ``look_soon`` makes the next ``has_changed`` ask a server that is otherwise
    asked less often.
    """

    path: Path
    read: Callable[[], Config]
    has_changed: Callable[[], bool] | None = None
    look_soon: Callable[[], None] | None = None
