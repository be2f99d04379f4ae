"""Replicas with roles as real processes, of one each or as groups of ranks: the same answers as of one replica, also
while either side is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import msgspec
import pytest
from tests.conftest import write_tiny_model
from tests.tiers import THOROUGH
from tests.worker.watching import Witness, outputs_of, text_of, until

from inferd import clock
from inferd.config import Config, ModelConfig, ParallelConfig
from inferd.config.generation import RolesConfig
from inferd.events import HandedOver
from inferd.router.choosing.split import Decision
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router
from inferd.router.stream import Stream, open_stream
from inferd.types import GenerateRequest, HandOver, Output, SamplingParams, TextPrompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
ROLES = RolesConfig(prefill=1, decode=1, min_tokens=64)


def request(name: str, text: str, sampling: SamplingParams = GREEDY) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        model="tiny",
        prompt=TextPrompt(text=text),
        sampling=sampling,
        explicit=SamplingParams.__struct_fields__,
        arrived_at=clock.now(),
    )


def replica_of(router: Router, role: str) -> LocalReplica:
    (found,) = [one for one in router.replicas("tiny") if isinstance(one, LocalReplica) and one.role == role]
    return found


def kill(router: Router, role: str) -> None:
    """Kill a worker; of a group the last of its other ranks."""
    replica = replica_of(router, role)
    assert replica.info is not None
    pid = replica.info.rank_pids[-1] if replica.info.rank_pids else replica.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def answers_of_one(config: ModelConfig, prompts: list[str]) -> list[str]:
    """The answers of one replica without a role."""
    router = Router(Config(models={"tiny": msgspec.structs.replace(config, roles=None)}), Witness())
    await router.start()
    try:
        streams = [open_stream(router, request(f"e{i}", prompt)) for i, prompt in enumerate(prompts)]
        return [text_of(outputs) for outputs in await asyncio.gather(*map(outputs_of, streams))]
    finally:
        await router.stop()


def hand_over_of(outputs: list[Output]) -> HandOver:
    end = outputs[-1].end
    assert end is not None
    assert end.outcome == "done", end.failure
    assert end.routing is not None
    assert end.routing.hand_over is not None
    return end.routing.hand_over


@THOROUGH
@pytest.mark.slow
@pytest.mark.interpreted("replaces a function")
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(),
        pytest.param(ParallelConfig(tensor=2), marks=pytest.mark.soak),
        pytest.param(ParallelConfig(tensor=2, pipeline=2), marks=pytest.mark.soak),
    ],
    ids=lambda parallel: parallel.text or "one process",
)
def test_answers_are_equal_with_roles_and_while_either_side_is_killed(
    parallel: ParallelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path, max_positions=8192)
    draw = random.Random(4)
    prompts = [" ".join(draw.choice(("cat", "dog", "sun", "x", "1")) for _ in range(600)) for _ in range(18)]
    config = ModelConfig(source=str(model), roles=ROLES, resume_streams=True, max_model_len=8192, parallel=parallel)

    async def scenario() -> None:
        expected = await answers_of_one(config, prompts)
        witness = Witness()
        router = Router(Config(models={"tiny": config}), witness)
        await router.start()
        await router.settled()
        try:
            alone = await outputs_of(open_stream(router, request("alone", prompts[0])))
            assert "no other answer is computed" in hand_over_of(alone).why
            assert text_of(alone) == expected[0]

            def send(numbers: range) -> list[Stream]:
                return [open_stream(router, request(f"r{i}", prompts[i])) for i in numbers]

            # Whether others run at that moment would depend on this machine.
            monkeypatch.setattr("inferd.router.hand_overs.decide", lambda costs, **_: Decision(True, "a test"))
            handed = [await outputs_of(stream) for stream in send(range(1, 6))]
            assert [text_of(one) for one in handed] == expected[1:6]
            assert all(hand_over_of(one).replica == replica_of(router, "prefill").index for one in handed)
            assert all(hand_over_of(one).num_blocks > 10 and not hand_over_of(one).failure for one in handed)
            assert len([e for e in witness.events if isinstance(e, HandedOver) and not e.failure]) == 5

            under_load = send(range(6, 12))
            await asyncio.sleep(0)  # they are dispatched
            kill(router, "prefill")
            assert [text_of(await outputs_of(stream)) for stream in under_load] == expected[6:12]
            await until(lambda: replica_of(router, "prefill").is_ready, "it computes prompts again", 60)

            under_load = send(range(12, 18))
            kill(router, "decode")
            assert [text_of(await outputs_of(stream)) for stream in under_load] == expected[12:18]
            more = msgspec.structs.replace(config, roles=RolesConfig(prefill=1, decode=2, min_tokens=64))
            applied = await router.apply(Config(models={"tiny": more}))
            assert (applied.done, applied.failed) == (["tiny: 3 replicas instead of 2"], [])
            assert sorted(status.role for status in router.replica_statuses("tiny")) == ["decode", "decode", "prefill"]
            await until(lambda: all(not one.num_in_flight for one in router.replicas("tiny")), "nothing is left", 60)
        finally:
            await router.stop()

    asyncio.run(scenario())
