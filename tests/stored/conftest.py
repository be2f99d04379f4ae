"""A store on a database of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest

from inferd import clock
from inferd.config.server import StoredConfig
from inferd.events import Emit, ignore
from inferd.state.open import open_database
from inferd.state.presence import LockedPresence
from inferd.state.thread import StateThread
from inferd.stored.port import Status, StoredResponse, response_id
from inferd.stored.store import DurableStore

Open = Callable[..., AbstractAsyncContextManager[DurableStore]]


@pytest.fixture
def open_store(state_url: str, tmp_path: Path) -> Open:
    """A server's store; several may be open at the same time."""

    @contextlib.asynccontextmanager
    async def opened(
        max_bytes: int = 1 << 30, max_age_s: float = 3600.0, tell: Emit = ignore
    ) -> AsyncIterator[DurableStore]:
        presence = LockedPresence(tmp_path / "users")
        state = StateThread(lambda: open_database(state_url, tmp_path))
        store = DurableStore(state, presence, StoredConfig(max_bytes=max_bytes, max_age_s=max_age_s), tell)
        store.schedule()
        database = open_database(state_url, tmp_path)
        presence.enter(database)
        state.run_at_close(presence.leave)
        state.start(database)
        try:
            yield store
        finally:
            state.close()
            presence.unlock()

    return opened


def item(text: str, name: str = "") -> bytes:
    """A message as an item."""
    fields = {"id": name} if name else {}
    return msgspec.json.encode(
        {**fields, "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    )


def made(
    tenant: str = "a",
    *,
    given: str = "question",
    said: str = "answer",
    previous: str = "",
    conversation: str = "",
    status: Status = "completed",
    background: bool = False,
    name: str = "",
) -> StoredResponse:
    """A response with one item of input and, when it has ended, one of output."""
    name = name or response_id()
    output = [] if status in ("queued", "in_progress") else [msgspec.Raw(item(said, f"msg_out{name}"))]
    body = {"id": name, "object": "response", "status": status, "output": output, "model": "m"}
    return StoredResponse(
        id=name,
        tenant=tenant,
        created_at=clock.wall(),
        status=status,
        body=msgspec.json.encode(body),
        input_items=b"[%b]" % item(given, f"msg_in{name}"),
        previous=previous,
        conversation=conversation,
        background=background,
    )
