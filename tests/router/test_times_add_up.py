"""Where the time of requests goes in a real worker: the parts add up, whatever the load is made of."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.worker.watching import outputs_of

from inferd import clock
from inferd.config import Config, KVCacheConfig, ModelConfig, SchedulerConfig
from inferd.events import ignore
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import Continuation, End, GenerateRequest, SamplingParams, TextPrompt


def request(name: str, text: str, sampling: SamplingParams, priority: int = 0, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        model="tiny",
        prompt=TextPrompt(text=text),
        sampling=sampling,
        explicit=SamplingParams.__struct_fields__,
        priority=priority,
        arrived_at=clock.now(),
        **fields,
    )


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[Router]:
    config = ModelConfig(
        source=str(model),
        threads=1,
        max_model_len=256,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        kv_cache=KVCacheConfig(block_size=4, num_blocks=96),
    )
    router = Router(Config(models={"tiny": config}), ignore)
    await router.start()
    try:
        yield router
    finally:
        await router.stop()


def error_of(end: End) -> float:
    """By how much the parts of a request miss the time between its tokenizing and its end, as a share of it."""
    assert end.engine is not None
    parts = [value for name, value in msgspec.structs.asdict(end.engine).items() if name != "num_steps"]
    timings = end.timings
    assert timings.finished is not None
    assert timings.tokenized is not None
    return abs(math.fsum(parts) - (timings.finished - timings.tokenized)) / (timings.finished - timings.tokenized)


async def ends_of_a_mixed_load(router: Router, count: int) -> list[End]:
    """Several at a time: prompts of all lengths, choices, beams, continuations, classes, clients that leave."""
    rng = random.Random(14)
    places = asyncio.Semaphore(12)

    async def one(number: int) -> End:
        words = " ".join(str(rng.randrange(100)) for _ in range(rng.choice([2, 10, 60])))
        max_tokens = rng.choice([1, 8, 40])
        kind = number % 8
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0 if kind < 4 else 1.0, seed=1)
        if kind == 5:
            sampling = msgspec.structs.replace(sampling, n=3)
        elif kind == 6:
            sampling = msgspec.structs.replace(sampling, use_beam_search=True, n=2, temperature=0.0, max_tokens=8)
        fields: dict[str, Any] = {"deadline_s": 0.5} if kind == 7 else {}
        if kind == 4:
            sampling = msgspec.structs.replace(sampling, max_tokens=40)
            fields = {"resumes": Continuation(token_ids=(65, 66, 67), seed=1)}
        async with places:
            stream = open_stream(
                router, request(f"r{number}", words, sampling, priority=rng.choice([-1, 0, 1]), **fields)
            )
            if kind == 3 and max_tokens > 1:
                await anext(stream)
                stream.close()
                async for _ in stream:
                    pass
                end = stream.request.end
            else:
                end = (await outputs_of(stream))[-1].end
        assert end is not None
        return end

    return await asyncio.gather(*(one(number) for number in range(count)))


async def ends_alone(router: Router, n: int) -> list[End]:
    """Of requests one after the other."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, n=n)
    found = []
    for number in range(4):
        stream = open_stream(router, request(f"alone-{n}-{number}", "one two three", sampling))
        end = (await outputs_of(stream))[-1].end
        assert end is not None
        found.append(end)
    return found


@pytest.fixture(scope="module")
def ends(tiny_model: Path) -> dict[str, list[End]]:
    """The ends of requests alone, and of a mixed load, in one worker."""

    async def scenario() -> dict[str, list[End]]:
        async with served(tiny_model) as router:
            alone = [end for n in (1, 2) for end in await ends_alone(router, n)]
            return {"alone": alone, "mixed": await ends_of_a_mixed_load(router, 120)}

    return asyncio.run(scenario())


def test_the_parts_of_a_mixed_load_add_up(ends: dict[str, list[End]]) -> None:
    known = [end for end in ends["mixed"] if end.timings.tokenized is not None]
    assert len(known) > 100
    good = [end for end in known if error_of(end) <= 0.02]
    assert len(good) >= 0.99 * len(known)
    for end in known:
        times = end.engine
        assert times is not None
        assert min(value for name, value in msgspec.structs.asdict(times).items() if name != "speculation") >= -1e-9
    assert {end.outcome for end in known} >= {"done", "cancelled"}
    assert sum(end.num_preemptions for end in known) > 0, "memory was short"
    assert sum(end.engine.preempted for end in known if end.engine is not None) > 0


def test_a_request_alone_has_no_part_of_others(ends: dict[str, list[End]]) -> None:
    for end in ends["alone"]:
        times = end.engine
        assert times is not None
        assert error_of(end) <= 0.02
        assert (times.crowding, times.others_prefill, times.prefill_shared) == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
        assert (times.preempted, times.recomputed) == (0.0, 0.0)
        assert times.num_steps <= 40
        assert times.decode > 0.0
