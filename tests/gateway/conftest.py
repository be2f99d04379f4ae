"""What tests of several ways into the gateway share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inferd.router.errand import Errand
from inferd.router.replicas.replica import LocalReplica


@pytest.fixture
def departed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests that took the short way to a worker."""
    ids: list[str] = []
    depart = Errand.depart

    def noted(errand: Errand, desk: Any, request: Any, line: int, now: float) -> None:
        ids.append(request.id)
        depart(errand, desk, request, line, now)

    monkeypatch.setattr(Errand, "depart", noted)
    return ids


@pytest.fixture
def called_off(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests of which a worker was told that nobody waits for them any more."""
    ids: list[str] = []
    cancel = LocalReplica.cancel

    def noted(replica: LocalReplica, request_id: str) -> None:
        cancel(replica, request_id)
        # Messages are written together at the end of the event loop's turn.
        asyncio.get_running_loop().call_soon(ids.append, request_id)

    monkeypatch.setattr(LocalReplica, "cancel", noted)
    return ids
