"""A gateway with files and batches in a database and a folder of its own, and lines for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
from openai.types import Batch
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, running

from inferd.config.server import JobsConfig, StateConfig
from inferd.gateway.jobs.asking import Asking
from inferd.jobs.folder import open_folder
from inferd.jobs.runner import Runner
from inferd.jobs.store import JobStore
from inferd.state.open import open_database
from inferd.state.presence import LockedPresence
from inferd.state.thread import StateThread
from inferd.tenancy.principal import Principal

KEYS = {"sk-a": Principal(key_id="a", tenant="team-a"), "sk-b": Principal(key_id="b", tenant="team-b")}
ENDED = ("completed", "failed", "expired", "cancelled")


class Serving(NamedTuple):
    server: Running
    store: JobStore
    door: FakeDoor
    folder: Path

    def client(self, key: str = "sk-a") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.server.url + "/v1", api_key=key, max_retries=0, timeout=60)


@contextlib.contextmanager
def serving_jobs(folder: Path, app: dict[str, Any] | None = None, **config: Any) -> Iterator[Serving]:
    """``app``: what ``create_app`` gets besides; ``config``: of the jobs."""
    url = f"sqlite:///{folder / 'state.db'}"
    presence = LockedPresence(folder / "users")
    state = StateThread(lambda: open_database(url, folder))
    jobs = JobsConfig(**config)
    contents = open_folder(StateConfig(data_dir=str(folder)), jobs)
    store = JobStore(state, presence, contents, jobs)
    store.schedule()
    database = open_database(url, folder)
    presence.enter(database)
    state.run_at_close(presence.leave)
    state.start(database)
    door, router = FakeDoor(dict(KEYS)), FakeRouter("tiny")
    asking = Asking(router, door)
    runner = Runner(store, asking, lambda: router.draining, max_line_bytes=10_000)
    try:
        with running(router, door=door, jobs=runner, **(app or {})) as server:
            asking.application = server.app
            keeping = asyncio.run_coroutine_threadsafe(runner.keep(), server.loop)
            try:
                yield Serving(server, store, door, folder / "jobs")
            finally:
                keeping.cancel()
    finally:
        state.close()
        presence.unlock()


def line(name: object, path: str = "/v1/chat/completions", **body: Any) -> str:
    asked = {"model": "tiny", **body}
    if "prompt" not in body:
        asked["messages"] = [{"role": "user", "content": f"hello {name}"}]
    return json.dumps({"custom_id": name, "method": "POST", "url": path, "body": asked})


def upload(client: openai.OpenAI, content: str | bytes, name: str = "in.jsonl") -> str:
    given = content.encode() if isinstance(content, str) else content
    return client.files.create(file=(name, given), purpose="batch").id


def begin(client: openai.OpenAI, content: str | bytes, path: Any = "/v1/chat/completions", **fields: Any) -> Batch:
    """Upload lines and make a batch of them."""
    name = upload(client, content)
    return client.batches.create(input_file_id=name, endpoint=path, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """The batch when it has ended."""
    deadline = time.monotonic() + 120
    while (found := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def lines_of(client: openai.OpenAI, name: str | None) -> list[dict[str, Any]]:
    """The lines of a file of results; none: there is no file."""
    return [] if name is None else [json.loads(one) for one in client.files.content(name).text.splitlines()]
