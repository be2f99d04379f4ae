"""What another configuration changes in a model while it serves: each setting counts from then on, whatever waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.worker.tiny_backend import letters
from tests.worker.watching import Witness, ask, outputs_of, routing, serving, text_of, until, worker

from inferd.config import Config, ModelConfig, QueueConfig, RetryConfig
from inferd.errors import Overloaded
from inferd.events import Retried
from inferd.router.replicas import loading
from inferd.router.router import Router
from inferd.router.stream import open_stream

TINY = ModelConfig(source="tiny", queue=QueueConfig(max_requests=1, timeout_s=60.0))


async def filled(router: Router, gate: Path, waiting: int) -> None:
    """Everything that the worker takes, and so many behind it."""
    for number in range(worker(router).capacity + waiting):
        open_stream(router, ask(f"gate={gate}", name=f"{gate.name}-{number}"))


async def changed(router: Router, **settings: object) -> None:
    await router.apply(Config(models={"tiny": msgspec.structs.replace(TINY, **settings)}))


def queue_is_full(router: Router) -> bool:
    try:
        open_stream(router, ask(name="one more")).close()
    except Overloaded as error:
        return error.code == "queue_full"
    return False


@pytest.mark.parametrize("more", [3, 1])
def test_as_many_wait_as_the_new_queue_holds(more: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with routing(Config(models={"tiny": TINY})) as (router, _):
            await filled(router, tmp_path / "gate", 1)
            assert queue_is_full(router)
            await changed(router, queue=QueueConfig(max_requests=more, timeout_s=60.0))
            for number in range(more - 1):
                open_stream(router, ask(name=f"behind-{number}"))
            assert queue_is_full(router)
            assert router.models()[0].waiting == more
            (tmp_path / "gate").touch()

    asyncio.run(scenario())


def test_requests_wait_for_as_long_as_the_new_queue_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with routing(Config(models={"tiny": TINY})) as (router, _):
            await changed(router, queue=QueueConfig(max_requests=9, timeout_s=0.05))
            await filled(router, tmp_path / "gate", 0)
            (late,) = await outputs_of(open_stream(router, ask(name="late")))
            assert late.end is not None
            assert late.end.failure is not None
            assert late.end.failure.code == "queue_timeout"
            (tmp_path / "gate").touch()

    asyncio.run(scenario())


def test_hedges_and_their_budget_are_as_the_new_settings_say(tmp_path: Path) -> None:
    def hedges(witness: Witness) -> list[bool]:
        return [event.granted for event in witness.events if isinstance(event, Retried) and event.kind == "hedge"]

    async def hedged(router: Router, name: str) -> None:
        gate = tmp_path / name
        stream = open_stream(router, ask(f"gate={gate}", name=name))
        await asyncio.sleep(0.15)
        gate.touch()
        assert text_of(await outputs_of(stream)) == letters(4)

    async def scenario() -> None:
        async with routing(Config(models={"tiny": msgspec.structs.replace(TINY, replicas=2)})) as (router, witness):
            await hedged(router, "never")
            assert hedges(witness) == []
            for settings, granted in (
                (RetryConfig(hedge_after_s=0.02, budget=1.0, max_attempts=1), []),
                (RetryConfig(hedge_after_s=0.02, budget=1.0, max_attempts=2), [True]),
            ):
                await changed(router, replicas=2, retry=settings)
                await hedged(router, f"attempts-{settings.max_attempts}")
                await until(lambda: all(r.num_in_flight == 0 for r in router.replicas("tiny")), "nothing is left")
                assert hedges(witness) == granted

    asyncio.run(scenario())


def test_a_model_that_could_not_be_loaded_is_tried_again_by_requests_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(loading, "RETRY_LOAD_S", 0.3)
        source = f"missing-unless={tmp_path / 'repaired'}"
        async with serving(source, load="on_demand", until_ready=False) as (router, _):
            (only,) = await outputs_of(open_stream(router, ask()))
            assert only.end is not None
            assert only.end.failure is not None
            assert only.end.failure.code == "model_failed"
            (tmp_path / "repaired").touch()
            await until(lambda: router.models()[0].state == "unloaded", "it may be tried again")
            assert text_of(await outputs_of(open_stream(router, ask(name="again")))) == letters(4)

    asyncio.run(scenario())
