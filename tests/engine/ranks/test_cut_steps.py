"""A rank that is killed between two micro-batches of a step: its group ends, and streams go on with the same text."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from tests.worker.watching import Witness, children, is_running, next_output, outputs_of, text_of, until

from inferd import clock
from inferd.config import Config, KVCacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from inferd.events import Retried
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import GenerateRequest, SamplingParams, TextPrompt

SCRIPT = Path(__file__).with_name("cut_step.py")
LONG = "Once upon a time there was a dog. " * 12


def request(name: str, prompt: str, tokens: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(
        id=name,
        model="m",
        prompt=TextPrompt(text=prompt),
        sampling=sampling,
        explicit=SamplingParams.__struct_fields__,
        arrived_at=clock.now(),
    )


def num_files() -> int:
    """How many files and sockets this process has open."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.thorough  # a rank that is killed at any time: tests/engine/ranks/test_groups.py
@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_rank_that_is_killed_between_two_micro_batches_ends_its_group_alone(lost: int, tmp_path: Path) -> None:
    model = ModelConfig(
        source="demo",
        threads=1,
        dtype="float32",
        resume_streams=True,
        parallel=ParallelConfig(pipeline=2),
        scheduler=SchedulerConfig(max_num_seqs=4, prefix_caching=False),
        kv_cache=KVCacheConfig(num_blocks=100),
    )
    flag = tmp_path / "flag"
    witness = Witness()

    async def scenario() -> None:
        command = (sys.executable, "-P", str(SCRIPT), "worker", str(flag), str(lost))
        router = Router(Config(models={"m": model}), witness, command=command)
        await router.start()
        await router.settled()
        try:
            texts = [("running", "There was a cat", 300), ("arriving", LONG, 40)]
            whole = [text_of(await outputs_of(open_stream(router, request(*each)))) for each in texts]
            (replica,) = router.replicas("m")
            assert isinstance(replica, LocalReplica)
            assert replica.pid is not None
            group = [replica.pid, *children(replica.pid)]
            assert len(group) == 2
            held = num_files()
            running = open_stream(router, request(*texts[0]))
            first = await next_output(running)
            flag.touch()
            arriving = open_stream(router, request(*texts[1]))  # its prompt is cut, beside a row of the other
            await until(lambda: not any(map(is_running, group)), "the group is gone", 60)
            found = await asyncio.wait_for(asyncio.gather(outputs_of(running), outputs_of(arriving)), 120)
            assert int(flag.with_suffix(".done").read_text()) > 1, "the step was cut"
            assert [text_of([first, *found[0]]), text_of(found[1])] == whole
            assert [event.kind for event in witness.events if isinstance(event, Retried)] == ["continuation"]
            await until(lambda: num_files() == held, "what belonged to the lost group is closed")
            assert replica.num_in_flight == 0
            (again,) = router.replicas("m")
            assert again.is_ready
        finally:
            await router.stop()

    before = set(children(os.getpid()))  # of fixtures of other modules
    asyncio.run(scenario())
    assert set(children(os.getpid())) <= before
