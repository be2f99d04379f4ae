"""Waiting for things to come true, with a deadline; and what tests of real workers share."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from tests.stopwatch import Stopwatch
from tests.worker import tiny_backend

from inferd import clock
from inferd.config import Config, ModelConfig, QueueConfig
from inferd.events import Event, ReplicaChanged, RequestEnded
from inferd.router.replicas.loading import Plan
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router
from inferd.router.stream import Stream, open_stream
from inferd.types import GenerateRequest, Output, SamplingParams, TextPrompt
from inferd.worker.supervisor import Patience

TINY_WORKER = (sys.executable, str(Path(tiny_backend.__file__).resolve()))
IMPATIENT = Patience(watch_s=0.05, silent_s=20.0, first_delay_s=0.02, stacks_s=0.05)


async def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Let the event loop run until the condition holds; seconds in which processors were missing do not count."""
    watch = Stopwatch()
    while not condition():
        assert not watch.is_past(seconds), f"waited {seconds} s in vain: {what}"
        await asyncio.sleep(0.005)


def until_now(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Likewise without an event loop."""
    watch = Stopwatch()
    while not condition():
        assert not watch.is_past(seconds), f"waited {seconds} s in vain: {what}"
        time.sleep(0.005)


def ask(
    text: str = "hello",
    *,
    name: str = "r",
    max_tokens: int = 4,
    n: int = 1,
    priority: int = 0,
    deadline_s: float | None = None,
    model: str = "tiny",
    idempotent: bool = True,
) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        model=model,
        prompt=TextPrompt(text=text),
        sampling=SamplingParams(max_tokens=max_tokens, n=n),
        priority=priority,
        deadline_s=deadline_s,
        idempotent=idempotent,
        arrived_at=clock.now(),
    )


async def next_output(stream: Stream) -> Output:
    """The next item of a stream without a relay."""
    item = await anext(stream)
    assert isinstance(item, Output)
    return item


async def outputs_of(stream: Stream) -> list[Output]:
    return [item async for item in stream if isinstance(item, Output)]


def text_of(outputs: list[Output], index: int = 0) -> str:
    return "".join(delta.text for output in outputs for delta in output.deltas if delta.index == index)


class Witness:
    """Collects events and answers questions about them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def ended(self) -> list[RequestEnded]:
        return [event for event in self.events if isinstance(event, RequestEnded)]

    def states(self) -> list[str]:
        """The replicas' changes of state, repetitions left out."""
        seen: list[str] = []
        for event in self.events:
            if isinstance(event, ReplicaChanged) and (not seen or seen[-1] != event.state):
                seen.append(event.state)
        return seen

    def count(self, state: str) -> int:
        return self.states().count(state)


class Interrupted(NamedTuple):
    """An answer that nothing interrupted, and the same one that something did; both of a router of its own."""

    whole: list[Output]
    outputs: list[Output]
    witness: Witness


async def interrupted(
    model: ModelConfig, sampling: SamplingParams, interrupt: Callable[[int], Awaitable[None]]
) -> Interrupted:
    """``interrupt`` is called with the worker's process after the second answer's first output."""

    def request(name: str) -> GenerateRequest:
        return GenerateRequest(
            id=name,
            model="tiny",
            prompt=TextPrompt(text="Once upon a time"),
            sampling=sampling,
            explicit=SamplingParams.__struct_fields__,
            arrived_at=clock.now(),
        )

    witness = Witness()
    router = Router(Config(models={"tiny": model}), witness)
    await router.start()
    try:
        whole = await outputs_of(open_stream(router, request("whole")))
        stream = open_stream(router, request("broken"))
        outputs = [await next_output(stream)]
        await interrupt(worker_pid(router))
        outputs += await outputs_of(stream)
    finally:
        await router.stop()
    return Interrupted(whole, outputs, witness)


class Bytes(NamedTuple):
    """What a plan says a replica takes."""

    total_bytes: int

    @property
    def here_bytes(self) -> int:
        return self.total_bytes


def no_plan(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Bytes | None:
    return None


@asynccontextmanager
async def routing(
    config: Config, *, patience: Patience = IMPATIENT, plan: Plan = no_plan, until_ready: bool = True
) -> AsyncIterator[tuple[Router, Witness]]:
    """A router with real workers around the tiny backend; at the end nothing of them may be left."""
    witness = Witness()
    router = Router(config, witness, command=TINY_WORKER, patience=patience, plan=plan)
    await router.start()
    others = children(os.getpid())
    try:
        if until_ready:
            await until(
                lambda: all(s.replicas_ready == s.replicas for s in router.models() if s.load == "startup"),
                "the replicas are ready",
            )
        yield router, witness
    finally:
        pids = {*children(os.getpid()), *others}
        await router.stop()
        assert not [pid for pid in pids if is_worker(pid)]
        identities = [event.request_id for event in witness.ended()]
        assert len(identities) == len(set(identities)), "a request ended twice"


@asynccontextmanager
async def serving(
    source: str = "tiny",
    *,
    replicas: int = 1,
    max_requests: int = 100,
    queue_timeout_s: float = 60.0,
    hang_timeout_s: float = 60.0,
    load_timeout_s: float = 60.0,
    patience: Patience = IMPATIENT,
    until_ready: bool = True,
    **settings: object,
) -> AsyncIterator[tuple[Router, Witness]]:
    """Likewise with one model, called tiny."""
    config = ModelConfig(
        source=source,
        replicas=replicas,
        hang_timeout_s=hang_timeout_s,
        load_timeout_s=load_timeout_s,
        queue=QueueConfig(max_requests=max_requests, timeout_s=queue_timeout_s),
    )
    config = msgspec.structs.replace(config, **settings)
    async with routing(Config(models={"tiny": config}), patience=patience, until_ready=until_ready) as running:
        yield running


def worker(router: Router, replica: int = 0) -> LocalReplica:
    found = router.replicas("tiny")[replica]
    assert isinstance(found, LocalReplica)
    return found


def worker_pid(router: Router, replica: int = 0) -> int:
    pid = worker(router, replica).pid
    assert pid is not None
    return pid


def is_alive(pid: int) -> bool:
    """Whether a process exists; a zombie does: a child that its parent has not waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_worker(pid: int) -> bool:
    """Whether a process is a tiny worker."""
    try:
        return "tiny_backend" in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_running(pid: int) -> bool:
    """Whether a process that is not our child exists and is no zombie that its new parent has yet to bury."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """The process ids of a process's children."""
    while True:
        try:
            lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            if not Path(f"/proc/{pid}").exists():
                raise
            continue  # a thread ended in between: another one has its children now
        return [int(child) for children_of_thread in lists for child in children_of_thread.split()]
