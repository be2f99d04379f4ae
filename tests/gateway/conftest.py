"""What tests of several ways into the gateway share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inferd.router.direct_prediction import DirectPrediction
from inferd.router.replicas.replica import LocalReplica


@pytest.fixture
def sent_directly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests that took the direct path to a worker."""
    ids: list[str] = []
    send = DirectPrediction.send

    def noted(direct: DirectPrediction, slot: Any, request: Any, class_number: int, now: float) -> None:
        ids.append(request.id)
        send(direct, slot, request, class_number, now)

    monkeypatch.setattr(DirectPrediction, "send", noted)
    return ids


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests that a worker was told to cancel."""
    ids: list[str] = []
    cancel = LocalReplica.cancel

    def noted(replica: LocalReplica, request_id: str) -> None:
        cancel(replica, request_id)
        # Messages are written together at the end of the event loop's turn.
        asyncio.get_running_loop().call_soon(ids.append, request_id)

    monkeypatch.setattr(LocalReplica, "cancel", noted)
    return ids
