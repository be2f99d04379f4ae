"""The protocol by which the gateway records admin actions and reads what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inferd.state.audit import AuditEntry


class Auditor(Protocol):
    """Records admin actions in the server's audit log. ``inferd.app`` implements it."""

    async def record(
        self,
        *,
        actor: str,
        action: str,
        outcome: str,
        tenant: str = "",
        target: str = "",
        request_id: str = "",
        detail: str = "",
        of: int = 0,
    ) -> int:
        """Write a line; returns its number when the line is on the disk. Raises StateUnavailable."""
        ...

    def note_refused(
        self, *, actor: str, tenant: str, action: str, address: str, code: str, target: str, request_id: str
    ) -> None:
        """Count a refused sign-in or a refused request for administration; its line may stand for many. Never waits and
        never raises."""
        ...

    async def entries(self, *, before: int | None, limit: int) -> Sequence[AuditEntry]:
        """The newest lines, the newest first. Raises StateUnavailable."""
        ...
