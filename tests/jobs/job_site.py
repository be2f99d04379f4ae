"""Servers that work on batches one after the other, on one database and one folder, with a sender that echoes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from inferd import clock
from inferd.config.server import JobsConfig
from inferd.events import Event
from inferd.jobs.batch import Batch, Lease, StoredFile, new_id
from inferd.jobs.folder import Disk, Folder
from inferd.jobs.pace import Load
from inferd.jobs.results import Answer
from inferd.jobs.run import Run
from inferd.jobs.store import JobStore
from inferd.state.database import Transaction
from inferd.state.open import open_database
from inferd.state.presence import LockedPresence
from inferd.state.thread import StateThread

T = TypeVar("T")
PATH = "/v1/completions"
TENANT = "team-a"
MAX_LINE = 10_000


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))

    return run


class Crash(BaseException):
    """The server is killed here."""


class Points:
    """Counts the writes to the disk and to the database, and kills the server at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.count = 0

    def passed(self) -> bool:
        """False: the server is killed at this point."""
        self.count += 1
        return self.count - 1 != self.at


class CountedDisk(Disk):
    def __init__(self, points: Points) -> None:
        self._points = points

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        if not self._points.passed():
            os.pwrite(descriptor, data[: len(data) // 2], offset)
            raise Crash
        super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        if not self._points.passed():
            raise Crash
        super().sync(descriptor)


class CountedStore(JobStore):
    """Is killed before or after a transaction."""

    points = Points()

    async def _change(self, work: Callable[[Transaction], T]) -> T:
        if not self.points.passed():
            raise Crash
        result = await super()._change(work)
        if not self.points.passed():
            raise Crash
        return result


class Echo:
    """Answers each request with its prompt; one with ``"fails"`` with an error."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.is_valid = True
        self.at_work = 0
        self.most_at_work = 0

    def may_ask(self, batch: Batch) -> bool:
        return self.is_valid

    def load(self, model: str | None) -> Load:
        return Load()

    async def ask(self, batch: Batch, body: bytes, request_id: str, note: Callable[[str], None]) -> Answer:
        prompt = json.loads(body)["prompt"]
        self.asked[prompt] += 1
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            await self.is_open.wait()
            for _ in range(hash(prompt) % 5):  # answers come in another order than the questions
                await asyncio.sleep(0)
        finally:
            self.at_work -= 1
        if "fails" in prompt:
            return Answer(400, b'{"error": {"message": "no", "code": "bad"}}')
        return Answer(200, json.dumps({"echo": prompt, "usage": {"prompt_tokens": 2, "completion_tokens": 1}}).encode())


class Server:
    """One server of the site."""

    def __init__(self, store: CountedStore, sender: Echo, tell: Callable[[Event], None]) -> None:
        self.store = store
        self.sender = sender
        self._tell = tell

    async def take(self) -> tuple[Batch, Lease]:
        ((batch, lease),) = await self.store.take(frozenset(), 1)
        return batch, lease

    async def work(self) -> Batch:
        """Take the batch that waits, and work on it to its end."""
        run = self.run(*await self.take())
        await run.go()
        assert (run._num_in_flight, run._held_bytes) == (0, 0), "what was counted is given back"
        return await self.store.batch(TENANT, run.batch.id)

    def run(self, batch: Batch, lease: Lease) -> Run:
        return Run(batch, lease, self.store, self.sender, self._tell, MAX_LINE)


class Site:
    def __init__(self, folder: Path, url: str, **config: Any) -> None:
        self._folder = folder
        self._url = url
        self.config = JobsConfig(**config)
        self.told: list[Event] = []

    @contextlib.asynccontextmanager
    async def server(self, points: Points | None = None, disk: Disk | None = None) -> AsyncIterator[Server]:
        points = points or Points()
        folder = Folder(self._folder / "jobs", CountedDisk(points) if disk is None else disk)
        with contextlib.ExitStack() as stack:
            presence = LockedPresence(self._folder / "users")
            database = open_database(self._url, self._folder)
            presence.enter(database)
            stack.callback(presence.unlock)  # the row stays, as of a server that was killed
            state = StateThread(lambda: open_database(self._url, self._folder))
            stack.callback(state.close)
            folder.open()
            store = CountedStore(state, presence, folder, self.config)
            store.points = points
            state.start(database)
            yield Server(store, Echo(), self.told.append)

    async def add(self, server: Server, content: bytes, name: str = "batch_1", **fields: Any) -> Batch:
        """Upload a file, and make a batch of it."""
        upload = server.store.folder.upload(server.store.gateway, new_id("file-"))
        upload.write(content)
        upload.finish()
        now = clock.wall()
        made = StoredFile(
            id=upload.name, tenant=TENANT, created_at=now, expires_at=now + 3600, purpose="batch", filename="in.jsonl",
            num_bytes=len(content), folder=server.store.folder.id,
        )  # fmt: skip
        await server.store.add_file(made)
        given = {"key_id": "k", "created_at": now, "expires_at": now + 3600, **fields}
        batch = Batch(id=name, tenant=TENANT, endpoint=PATH, input_file_id=made.id, **given)
        await server.store.add_batch(batch)
        return batch

    def content(self, name: str) -> Path:
        """Where a file is kept."""
        return self._folder / "jobs" / "files" / name

    def results(self, batch: Batch) -> tuple[bytes, bytes]:
        """The files of results."""
        ids = (batch.output_file_id, batch.error_file_id)
        output, errors = [b"" if name is None else self.content(name).read_bytes() for name in ids]
        return output, errors

    def left(self) -> list[str]:
        """The files in the folder that are no content."""
        return [path.name for name in ("results", "uploads") for path in (self._folder / "jobs" / name).iterdir()]


def lines(count: int, fails: int = 0) -> bytes:
    """Requests, each ``fails``-th of which is answered with an error."""
    return b"".join(_lines(count, fails))


def _lines(count: int, fails: int) -> Iterator[bytes]:
    for number in range(count):
        prompt = f"p{number}" + (" fails" if fails and number % fails == fails - 1 else "")
        body = {"model": "m", "prompt": prompt}
        line = {"custom_id": f"r{number}", "method": "POST", "url": PATH, "body": body}
        yield json.dumps(line).encode() + b"\n"


def ids_of(content: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in content.splitlines()]
