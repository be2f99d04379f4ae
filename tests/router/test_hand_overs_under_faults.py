"""Replicas with roles while one is stopped or killed by a signal, while roles change, and with adapters, of one process
each and as groups of ranks: the answers stay those of one replica, every request ends, and no replica keeps a block."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from tests.adapters import write_adapter
from tests.conftest import write_tiny_model
from tests.router.test_hand_overs import hand_over_of, request
from tests.worker.watching import Witness, outputs_of, text_of, until

from inferd.config import Config, ModelConfig, ParallelConfig
from inferd.config.generation import RolesConfig
from inferd.events import HandedOver, StepDone
from inferd.router.choosing.split import Decision
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import GenerateRequest, SamplingParams
from inferd.worker.supervisor import Patience

pytestmark = [pytest.mark.soak, pytest.mark.interpreted("replaces a function")]
ROLES = RolesConfig(prefill=1, decode=2, min_tokens=64)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
NUM_PROMPTS = 24
SHORT = Patience(silent_s=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_positions=8192)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: str(write_adapter(root / name, folder, seed=seed)) for seed, name in enumerate("ab")}


@pytest.fixture(
    scope="module", params=[ParallelConfig(), ParallelConfig(tensor=2)], ids=lambda one: one.text or "one process"
)
def parallel(request: pytest.FixtureRequest) -> ParallelConfig:
    found: ParallelConfig = request.param
    return found


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    draw = random.Random(7)
    return [" ".join(draw.choice(("cat", "dog", "sun", "x", "1")) for _ in range(500)) for _ in range(NUM_PROMPTS)]


def configured(
    folder: Path, adapters: dict[str, str], parallel: ParallelConfig, roles: RolesConfig | None = None
) -> Config:
    model = ModelConfig(
        source=str(folder),
        roles=roles,
        adapters=adapters,
        resume_streams=True,
        max_model_len=8192,
        threads=1,
        parallel=parallel,
    )
    return Config(models={"tiny": model})


def asked(index: int, prompts: list[str], names: tuple[str, ...] = ("", "a", "b")) -> GenerateRequest:
    """Every prompt for the base and for adapters in turn; each prompt comes twice, for two of them."""
    made = request(f"r{index}", prompts[index // 2], SAMPLING)
    return msgspec.structs.replace(made, adapter=names[index % len(names)])


@pytest.fixture(scope="module")
def expected(folder: Path, adapters: dict[str, str], parallel: ParallelConfig, prompts: list[str]) -> list[str]:
    """The answers of one replica of the same layout."""

    async def alone() -> list[str]:
        router = Router(configured(folder, adapters, parallel), Witness())
        await router.start()
        try:
            streams = [open_stream(router, asked(index, prompts)) for index in range(2 * NUM_PROMPTS)]
            return [text_of(outputs) for outputs in await asyncio.gather(*map(outputs_of, streams))]
        finally:
            await router.stop()

    found = asyncio.run(alone())
    assert len(set(found)) > NUM_PROMPTS, "adapters change answers"
    return found


@asynccontextmanager
async def divided(
    folder: Path, adapters: dict[str, str], parallel: ParallelConfig, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Router, Witness]]:
    """A router with roles that hands every prompt over; at the end no replica keeps a block."""
    # Whether others run at that moment would depend on this machine.
    monkeypatch.setattr("inferd.router.hand_overs.decide", lambda costs, **_: Decision(True, "a test"))
    witness = Witness()
    router = Router(configured(folder, adapters, parallel, ROLES), witness, patience=SHORT)
    await router.start()
    await router.settled()
    try:
        yield router, witness
        await until(lambda: all(not one.num_in_flight for one in router.replicas("tiny")), "no request is left", 60)
        await until(lambda: all(one.is_ready for one in router.replicas("tiny")), "all are back", 60)
        # The blocks of prompts whose requests did not come are kept for 30 s.
        for _ in range(40):
            before = len(witness.events)
            probes = [open_stream(router, request(f"probe{i}", "a b c d", SAMPLING)) for i in range(8)]
            await asyncio.gather(*map(outputs_of, probes))
            steps = [event for event in witness.events[before:] if isinstance(event, StepDone)]
            used = {event.replica: event.stats.blocks_used for event in steps}  # in the last step of each
            if used == {one.index: 0 for one in router.replicas("tiny")}:
                break
            await asyncio.sleep(1)
        else:
            pytest.fail(f"blocks are left: {used}")
    finally:
        await router.stop()


async def answers(router: Router, numbers: range, prompts: list[str]) -> list[str]:
    streams = [open_stream(router, asked(index, prompts)) for index in numbers]
    found = await asyncio.gather(*map(outputs_of, streams))
    for outputs in found:
        end = outputs[-1].end
        assert end is not None
        assert end.outcome == "done", end.failure
    return [text_of(outputs) for outputs in found]


def test_adapters_are_handed_over(
    folder: Path,
    adapters: dict[str, str],
    parallel: ParallelConfig,
    prompts: list[str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of the base and of each adapter are kept apart, also those of an adapter that is loaded while it runs."""

    async def scenario() -> None:
        async with divided(folder, {"a": adapters["a"]}, parallel, monkeypatch) as (router, _):
            for index in range(6):
                one = asked(index, prompts)
                if one.adapter == "b":
                    applied = await router.apply(configured(folder, adapters, parallel, ROLES))
                    assert not applied.failed
                outputs = await outputs_of(open_stream(router, one))
                assert text_of(outputs) == expected[index]
                handed = hand_over_of(outputs)
                assert handed.num_blocks > 10, handed
                assert not handed.failure

    asyncio.run(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stopped_replica_changes_no_answer(
    role: str,
    folder: Path,
    adapters: dict[str, str],
    parallel: ParallelConfig,
    prompts: list[str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with divided(folder, adapters, parallel, monkeypatch) as (router, _):
            assert await answers(router, range(12), prompts) == expected[:12]
            under_load = asyncio.create_task(answers(router, range(12, 36), prompts))
            busy = replica_with(router, role)
            await until(lambda: busy.num_in_flight > 0 or role == "prefill", "it has requests")
            pid = busy.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                assert await asyncio.wait_for(under_load, 120) == expected[12:36]
            finally:
                kill(pid)
            assert await answers(router, range(36, 48), prompts) == expected[36:48]

    asyncio.run(scenario())


@pytest.mark.timeout(280)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_process_that_is_killed_during_hand_overs_changes_no_answer(
    role: str,
    folder: Path,
    adapters: dict[str, str],
    parallel: ParallelConfig,
    prompts: list[str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a group it is the rank that does not keep the books."""

    async def scenario() -> None:
        draw = random.Random(11)
        num_during = 0
        async with divided(folder, adapters, parallel, monkeypatch) as (router, witness):
            for kills in range(4):
                numbers = range(12 * kills, 12 * kills + 12)
                under_load = asyncio.create_task(answers(router, numbers, prompts))
                prompts_there = replica_with(router, "prefill").prompts
                await until(lambda: len(prompts_there) > 0, "a prompt is computed for another replica")  # noqa: B023
                await asyncio.sleep(draw.uniform(0.0, 0.2))
                killed = replica_with(router, role)
                assert killed.info is not None
                pid = killed.info.rank_pids[0] if parallel.count > 1 else killed.pid
                assert pid is not None
                before = len(witness.events)
                num_during += len(prompts_there) > 0
                kill(pid)
                assert await asyncio.wait_for(under_load, 120) == expected[numbers.start : numbers.stop]
                failed = [one for one in witness.events[before:] if isinstance(one, HandedOver) and one.failure]
                print(f"{len(failed)} hand-overs failed: {sorted({one.failure for one in failed})}")
                await until(lambda: all(one.is_ready for one in router.replicas("tiny")), "all are back", 60)
        assert num_during

    asyncio.run(scenario())


def test_roles_change_while_streams_run(
    folder: Path,
    adapters: dict[str, str],
    parallel: ParallelConfig,
    prompts: list[str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with divided(folder, adapters, parallel, monkeypatch) as (router, _):
            for index, roles in enumerate(
                (RolesConfig(prefill=2, decode=1, min_tokens=64), None, RolesConfig(prefill=1, decode=1, min_tokens=64))
            ):
                numbers = range(16 * index, 16 * (index + 1))
                under_load = asyncio.create_task(answers(router, numbers, prompts))
                await asyncio.sleep(0.05)
                applied = await router.apply(configured(folder, adapters, parallel, roles))
                assert not applied.failed
                assert await asyncio.wait_for(under_load, 120) == expected[numbers.start : numbers.stop]

    asyncio.run(scenario())


def replica_with(router: Router, role: str) -> LocalReplica:
    return next(one for one in router.replicas("tiny") if isinstance(one, LocalReplica) and one.role == role)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
