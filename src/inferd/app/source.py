"""Where a configuration was read from, so that it can be read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from inferd.config import Config


class ConfigSource(msgspec.Struct, frozen=True):
    """``read`` reads the file, the environment and the flags together.

    It may block, and raises InferdError with everything that is wrong.
    """

    path: Path
    read: Callable[[], Config]
