"""What endpoints work with: the parts that were built once and are handed to every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from inferd.config import Config
from inferd.events import Emit
from inferd.gateway.control import ControlActions
from inferd.gateway.upstream import Upstream
from inferd.tenancy.principal import Door


class Room(NamedTuple):
    """Replaced as a whole when the configuration changes; calls under way keep the one they began with."""

    router: Upstream
    config: Config
    door: Door
    emit: Emit
    metrics: Callable[[], bytes]
    openapi: Callable[[], bytes]
    control: ControlActions | None = None

    @property
    def max_body_bytes(self) -> int:
        return self.config.server.max_body_bytes
