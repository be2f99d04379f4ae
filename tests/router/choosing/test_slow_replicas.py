"""A replica whose answers begin late is set aside: by its answers alone, and for as long as another one has room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from tests.worker.tiny_backend import MAX_NUM_SEQS
from tests.worker.watching import Witness, ask, outputs_of, serving, until, worker

from inferd.events import BreakerChanged
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import GenerateRequest

SLOW_S = 0.3


def of_session(request: GenerateRequest, session: str) -> GenerateRequest:
    return msgspec.structs.replace(request, session=session)


async def replica_of(router: Router, witness: Witness, request: GenerateRequest) -> int:
    """Which replica answered it."""
    await outputs_of(open_stream(router, request))
    (ended,) = [event for event in witness.ended() if event.request_id == request.id]
    assert ended.replica is not None
    return ended.replica


async def sessions_of(router: Router, witness: Witness) -> list[str]:
    """A session of each of two replicas."""
    found: dict[int, str] = {}
    for number in range(100):
        found.setdefault(
            await replica_of(router, witness, of_session(ask(name=f"of-{number}"), f"s{number}")), f"s{number}"
        )
        if len(found) == 2:
            break
    return [found[0], found[1]]


def ejections(witness: Witness) -> list[int]:
    return [event.replica for event in witness.events if isinstance(event, BreakerChanged) and event.state == "ejected"]


async def made_slow(router: Router, witness: Witness, *, failures: int = 0) -> tuple[str, str]:
    """Sessions of a replica that is set aside for its slow answers, and of the other one.

    ``failures``: requests that fail at once, between two answers of the slow one.
    """
    slow, quick = await sessions_of(router, witness)
    for turn in range(10):
        await outputs_of(open_stream(router, of_session(ask(name=f"quick-{turn}", max_tokens=1), quick)))
    for turn in range(8):
        for number in range(failures):
            (failed,) = await outputs_of(
                open_stream(router, of_session(ask("defect", name=f"bad-{turn}-{number}"), slow))
            )
            assert failed.end is not None
            assert failed.end.outcome == "failed"
        if ejections(witness):
            break
        await outputs_of(
            open_stream(router, of_session(ask(f"pace={SLOW_S}", name=f"slow-{turn}", max_tokens=1), slow))
        )
    return slow, quick


def test_a_request_that_fails_before_its_first_word_does_not_count_as_an_answer() -> None:
    async def scenario() -> None:
        async with serving(replicas=2) as (router, witness):
            await made_slow(router, witness, failures=6)
            assert ejections(witness) == [0]

    asyncio.run(scenario())


def test_a_replica_that_is_set_aside_gets_only_what_no_other_can_take(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(replicas=2) as (router, witness):
            slow, _ = await made_slow(router, witness)
            assert ejections(witness) == [0]
            for number in range(4):
                request = of_session(ask(name=f"elsewhere-{number}"), slow)
                assert await replica_of(router, witness, request) == 1, "also what belongs to the slow one's session"
            gate = tmp_path / "gate"
            capacity = worker(router, 1).capacity
            assert capacity >= MAX_NUM_SEQS
            held = [open_stream(router, ask(f"gate={gate}", name=f"held-{number}")) for number in range(capacity + 1)]
            await until(lambda: [r.num_in_flight for r in router.replicas("tiny")] == [1, capacity], "both have work")
            gate.touch()
            for stream in held:
                await outputs_of(stream)

    asyncio.run(scenario())
