"""What tests of several ways into the gateway share."""

from __future__ import annotations

import asyncio

import pytest

from inferd.router.replicas.replica import LocalReplica
from inferd.router.ticket import Ticket


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests that were sent to a worker."""
    ids: list[str] = []
    dispatch = LocalReplica.dispatch

    def noted(replica: LocalReplica, ticket: Ticket) -> None:
        ids.append(ticket.request.id)
        dispatch(replica, ticket)

    monkeypatch.setattr(LocalReplica, "dispatch", noted)
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
