"""Models and replicas that come and go while requests are served: on demand, replaced, counted up and down."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from tests.router.tickets import ticket_of
from tests.worker.tiny_backend import letters
from tests.worker.watching import (
    Bytes,
    ask,
    is_worker,
    next_output,
    outputs_of,
    routing,
    serving,
    text_of,
    until,
    worker_pid,
)

from inferd.config import Config, ModelConfig, QueueConfig, RetryConfig, SchedulerConfig, ServerConfig
from inferd.errors import ModelNotFound, Overloaded, Unavailable
from inferd.events import ModelUnloaded, Retried
from inferd.router.router import Router
from inferd.router.status import Applied
from inferd.router.stream import open_stream

TINY = ModelConfig(source="tiny")
OTHER_ENGINE = msgspec.structs.replace(TINY, scheduler=SchedulerConfig(max_num_seqs=3))


class Clients:
    """So many that each send one request after the other, until they are told to leave."""

    def __init__(self, router: Router, count: int = 4) -> None:
        self._router = router
        self._is_leaving = False
        self.num_answers = 0
        self.wrong: list[object] = []
        self._tasks = [asyncio.ensure_future(self._send(number)) for number in range(count)]

    async def _send(self, number: int) -> None:
        turn = 0
        while not self._is_leaving:
            turn += 1
            outputs = await outputs_of(
                open_stream(self._router, ask("pace=0.005", name=f"{number}-{turn}", max_tokens=5))
            )
            if text_of(outputs) != letters(5):
                self.wrong.append(outputs[-1].end)
            self.num_answers += 1

    async def leave(self) -> None:
        self._is_leaving = True
        await asyncio.gather(*self._tasks)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rolling_restart_under_load_fails_no_request(replicas: int) -> None:
    async def scenario() -> None:
        async with serving(replicas=replicas) as (router, witness):
            before = {worker_pid(router, number) for number in range(replicas)}
            clients = Clients(router)
            await until(lambda: clients.num_answers > 10, "the clients are at work")
            await router.restart("tiny")
            after = clients.num_answers
            await until(lambda: clients.num_answers > after + 10, "the clients are still at work")
            await clients.leave()
            assert not clients.wrong
            assert not {event.outcome for event in witness.ended()} - {"done"}
            assert not before & {worker_pid(router, number) for number in range(replicas)}
            assert not [pid for pid in before if is_worker(pid)]
            assert router.models()[0].state == "ready"

    asyncio.run(scenario())


def test_another_configuration_changes_models_under_load_without_a_failed_request() -> None:
    async def scenario() -> None:
        config = Config(models={"tiny": TINY, "gone": TINY})
        async with routing(config) as (router, witness):
            clients = Clients(router)
            await until(lambda: clients.num_answers > 10, "the clients are at work")
            last = open_stream(router, ask("pace=0.01", name="last", max_tokens=30, model="gone"))
            two = msgspec.structs.replace(OTHER_ENGINE, replicas=2, queue=QueueConfig(max_requests=7))
            wanted = Config(models={"new": TINY, "tiny": two})
            said = (await router.apply(wanted)).done
            assert [status.name for status in router.models()] == ["new", "tiny"]
            assert [status.state for status in router.models()] == ["ready", "ready"]
            assert router.models()[1].replicas_ready == 2
            assert any("gone" in sentence for sentence in said)
            assert any("2 replicas instead of 1" in sentence for sentence in said)
            with pytest.raises(ModelNotFound):
                open_stream(router, ask(model="gone"))
            assert text_of(await outputs_of(last)) == letters(30)
            assert text_of(await outputs_of(open_stream(router, ask(model="new", name="n")))) == letters(4)
            assert await router.apply(wanted) == Applied(done=[], failed=[])
            await router.apply(Config(models={"new": TINY, "tiny": msgspec.structs.replace(two, replicas=1)}))
            assert router.models()[1].replicas_ready == 1
            await clients.leave()
            assert not clients.wrong
            assert not {event.outcome for event in witness.ended()} - {"done"}
            await until(
                lambda: [e.reason for e in witness.events if isinstance(e, ModelUnloaded)] == ["removed"], "it is gone"
            )

    asyncio.run(scenario())


def test_a_new_version_that_does_not_load_leaves_the_old_one_serving(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with routing(Config(models={"tiny": TINY})) as (router, _):
            pid = worker_pid(router)
            broken = msgspec.structs.replace(TINY, source=f"missing-unless={tmp_path / 'repaired'}")
            applied = await router.apply(Config(models={"tiny": broken}))
            (said,) = applied.failed
            assert not applied.done
            assert "config.json" in said
            assert "goes on serving" in said
            assert worker_pid(router) == pid
            assert router.models()[0].state == "ready"
            assert text_of(await outputs_of(open_stream(router, ask()))) == letters(4)
            (tmp_path / "repaired").touch()
            applied = await router.apply(Config(models={"tiny": broken}))
            assert any("replaced" in sentence for sentence in applied.done)
            assert not applied.failed
            assert worker_pid(router) != pid

    asyncio.run(scenario())


def test_without_memory_for_two_a_replica_is_stopped_before_the_next_one_starts() -> None:
    async def scenario() -> None:
        config = Config(models={"tiny": msgspec.structs.replace(TINY, replicas=2)}, server=ServerConfig(memory_bytes=1))
        async with routing(config) as (router, _):
            clients = Clients(router)
            most = 0

            def count(limit: int = 2) -> bool:
                nonlocal most
                most = max(most, len(router.replicas("tiny")))
                return most > limit

            await until(lambda: router.models()[0].memory_bytes > 0, "the workers have told their size")
            restart = asyncio.ensure_future(router.restart("tiny"))
            await until(lambda: count() or restart.done(), "the restart is over")
            await clients.leave()
            assert most == 2
            assert not clients.wrong

    asyncio.run(scenario())


def test_a_model_on_demand_is_started_by_its_first_request_and_leaves_when_idle() -> None:
    async def scenario() -> None:
        config = msgspec.structs.replace(TINY, load="on_demand", idle_after_s=0.2)
        async with routing(Config(models={"tiny": config})) as (router, witness):
            assert router.models()[0].state == "unloaded"
            await asyncio.wait_for(router.settled(), 10)
            streams = [open_stream(router, ask(name=f"r{number}")) for number in range(5)]
            assert router.models()[0].residency in ("absent", "loading")
            for stream in streams:
                assert text_of(await outputs_of(stream)) == letters(4)
            pid = worker_pid(router)
            assert witness.count("ready") == 1
            await until(lambda: router.models()[0].residency == "absent", "it left")
            assert not is_worker(pid)
            (event,) = [event for event in witness.events if isinstance(event, ModelUnloaded)]
            assert event.reason == "idle"
            assert event.freed_bytes > 1_000_000
            assert text_of(await outputs_of(open_stream(router, ask(name="again")))) == letters(4)

    asyncio.run(scenario())


def test_what_cannot_be_loaded_on_demand_is_told_and_tried_again_on_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        source = f"missing-unless={tmp_path / 'repaired'}"
        config = msgspec.structs.replace(TINY, source=source, load="on_demand")
        async with routing(Config(models={"tiny": config})) as (router, _):
            (only,) = await outputs_of(open_stream(router, ask()))
            assert only.end is not None
            assert only.end.failure is not None
            assert only.end.failure.code == "model_failed"
            assert "config.json" not in only.end.failure.message
            with pytest.raises(Unavailable, match="could not be loaded"):
                open_stream(router, ask(name="next"))
            (tmp_path / "repaired").touch()
            assert (await router.load("tiny")).state == "ready"
            assert text_of(await outputs_of(open_stream(router, ask(name="later")))) == letters(4)

    asyncio.run(scenario())


def test_the_least_recently_used_model_leaves_for_one_that_does_not_fit_beside_it() -> None:
    async def scenario() -> None:
        models = {name: msgspec.structs.replace(TINY, load="on_demand") for name in ("a", "b", "c")}
        size = 400_000_000
        config = Config(models=models, server=ServerConfig(memory_bytes=2 * size + 1))

        def plan(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Bytes:
            return Bytes(size)

        async with routing(config, plan=plan) as (router, witness):

            def inside() -> set[str]:
                return {status.name for status in router.models() if status.residency == "resident"}

            for turn, name in enumerate(("a", "b", "a", "c")):
                assert text_of(await outputs_of(open_stream(router, ask(name=f"r{turn}", model=name)))) == letters(4)
            assert inside() == {"a", "c"}
            (event,) = [event for event in witness.events if isinstance(event, ModelUnloaded)]
            assert (event.model, event.reason) == ("b", "evicted")

    asyncio.run(scenario())


def test_a_model_that_never_fits_is_refused_with_the_plan() -> None:
    async def scenario() -> None:
        config = Config(
            models={"tiny": msgspec.structs.replace(TINY, load="on_demand")}, server=ServerConfig(memory_bytes=2**30)
        )

        def plan(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Bytes:
            return Bytes(3 * 2**30)

        async with routing(config, plan=plan) as (router, _):
            (only,) = await outputs_of(open_stream(router, ask()))
            assert only.end is not None
            assert only.end.failure is not None
            assert only.end.failure.code == "insufficient_memory"
            assert "3.00 GiB" in only.end.failure.message
            with pytest.raises(Overloaded, match="raise server"):
                await router.load("tiny")

    asyncio.run(scenario())


def test_a_hundred_loads_and_unloads_at_once_end_as_the_last_one_says() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            calls = [router.unload("tiny") if number % 2 else router.load("tiny") for number in range(100)]
            await asyncio.gather(*calls)
            assert router.models()[0].state == "unloaded"
            await asyncio.gather(*(router.load("tiny") for _ in range(50)))
            assert router.models()[0].state == "ready"
            assert witness.count("ready") <= 3
            assert text_of(await outputs_of(open_stream(router, ask()))) == letters(4)

    asyncio.run(scenario())


def test_unloading_waits_for_work_and_gives_up_when_it_takes_too_long() -> None:
    async def scenario() -> None:
        async with serving(drain_s=0.1) as (router, _):
            long = open_stream(router, ask("pace=0.01", name="long", max_tokens=100_000))
            await next_output(long)
            with pytest.raises(Unavailable, match="drain_s"):
                await router.unload("tiny")
            assert router.models()[0].state == "ready"
            long.close()
            await until(lambda: router.models()[0].in_flight == 0, "it is idle")
            pid = worker_pid(router)
            gone = await router.unload("tiny")
            assert gone.freed_bytes > 1_000_000
            assert not is_worker(pid)
            assert router.models()[0].memory_bytes == 0
            with pytest.raises(Unavailable, match="unloaded"):
                open_stream(router, ask(name="late"))
            await router.load("tiny")
            assert text_of(await outputs_of(open_stream(router, ask(name="again")))) == letters(4)

    asyncio.run(scenario())


def test_loading_is_over_when_every_replica_is_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, gate = tmp_path / "first", tmp_path / "gate"
        gate.touch()
        config = msgspec.structs.replace(TINY, source=f"first={first} gate={gate}", replicas=2)
        async with routing(Config(models={"tiny": config})) as (router, _):
            await router.unload("tiny")
            first.unlink()
            gate.unlink()
            loading = asyncio.ensure_future(router.load("tiny"))
            await until(lambda: router.models()[0].replicas_ready == 1, "the first one is there")
            assert not (await asyncio.wait((loading,), timeout=0.1))[0]
            gate.touch()
            status = await loading
            assert (status.state, status.replicas_ready) == ("ready", 2)

    asyncio.run(scenario())


def test_a_replica_that_cannot_be_loaded_is_told_beside_one_that_can(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, there = tmp_path / "first", tmp_path / "there"
        there.touch()
        config = msgspec.structs.replace(TINY, source=f"first={first} missing-unless={there}", replicas=2)
        async with routing(Config(models={"tiny": config})) as (router, _):
            await router.unload("tiny")
            first.unlink()
            there.unlink()
            status = await router.load("tiny")
            assert (status.state, status.replicas_ready) == ("degraded", 1)
            assert sorted(replica.detail for replica in router.replica_statuses("tiny")) == [
                "",
                "The folder has no config.json.",
            ]

    asyncio.run(scenario())


def test_requests_wait_for_a_model_from_the_moment_that_it_is_to_be_loaded_again() -> None:
    async def scenario() -> None:
        is_planned, may_go_on = threading.Event(), threading.Event()
        size = 1

        def plan(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Bytes:
            is_planned.set()
            assert may_go_on.wait(10)
            return Bytes(size)

        config = Config(models={"tiny": TINY}, server=ServerConfig(memory_bytes=10**12))
        async with routing(config, plan=plan) as (router, _):
            await router.unload("tiny")
            with pytest.raises(Unavailable, match="unloaded"):
                open_stream(router, ask(name="early"))
            loading = asyncio.ensure_future(router.load("tiny"))
            await asyncio.to_thread(is_planned.wait, 10)
            held = open_stream(router, ask(name="held"))
            may_go_on.set()
            assert text_of(await outputs_of(held)) == letters(4)
            await loading
            await router.unload("tiny")
            size = 10**13
            with pytest.raises(Overloaded, match="missing"):
                await router.load("tiny")
            assert not router.models()[0].replicas_ready
            await until(
                lambda: router._pools["tiny"].availability.is_operator_unloaded, "what the operator unloaded stays away"
            )

    asyncio.run(scenario())


def test_stopping_in_the_middle_of_changes_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        slow = msgspec.structs.replace(TINY, source=f"gate={tmp_path / 'never'}")
        models = {"tiny": TINY, "lazy": msgspec.structs.replace(slow, load="on_demand")}
        async with routing(Config(models=models)) as (router, _):
            waiting = open_stream(router, ask(model="lazy", name="waits"))
            models = {"tiny": slow, "lazy": models["lazy"], "more": slow}
            applying = asyncio.ensure_future(router.apply(Config(models=models)))
            await until(lambda: len(router.replicas("tiny")) == 2, "the replacement has begun")
            await router.stop()
            (only,) = await outputs_of(waiting)
            assert only.end is not None
            assert only.end.failure is not None
            assert only.end.failure.code == "shutting_down"
            await asyncio.wait_for(asyncio.gather(applying, return_exceptions=True), 5)

    asyncio.run(scenario())


def test_a_stream_whose_worker_dies_goes_on_token_by_token_where_the_model_says_so() -> None:
    async def scenario() -> None:
        async with serving(replicas=2, resume_streams=True) as (router, witness):
            stream = open_stream(router, ask("pace=0.01", max_tokens=40))
            first = await next_output(stream)
            assert first.prompt is not None
            busy = next(r for r in router.replicas("tiny") if r.num_in_flight)
            os.kill(worker_pid(router, busy.index), signal.SIGKILL)
            rest = await outputs_of(stream)
            assert text_of([first, *rest]) == letters(40)
            assert not [output for output in rest if output.prompt is not None]
            (ended,) = witness.ended()
            assert ended.outcome == "done"
            assert ended.usage.completion_tokens == 40
            assert [e.kind for e in witness.events if isinstance(e, Retried)] == ["continuation"]

    asyncio.run(scenario())


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_an_answer_of_which_nothing_was_sent_is_made_anew_within_the_budget_of_retries(budget: float) -> None:
    async def scenario() -> None:
        config = msgspec.structs.replace(TINY, replicas=2, retry=RetryConfig(budget=budget))
        async with routing(Config(models={"tiny": config})) as (router, witness):
            stream = open_stream(router, msgspec.structs.replace(ask("pace=0.01", max_tokens=40, n=2), stream=False))
            await until(lambda: ticket_of(stream).has_output, "something was made")
            busy = next(r for r in router.replicas("tiny") if r.num_in_flight)
            os.kill(worker_pid(router, busy.index), signal.SIGKILL)
            outputs = await outputs_of(stream)
            (ended,) = witness.ended()
            assert [(e.kind, e.granted) for e in witness.events if isinstance(e, Retried)] == [("retry", budget > 0)]
            if budget:
                assert [text_of(outputs, index) for index in range(2)] == [letters(40)] * 2
                assert (ended.outcome, ended.usage.completion_tokens) == ("done", 80)
                assert len([output for output in outputs if output.prompt is not None]) == 1
            else:
                assert (ended.outcome, ended.error_kind) == ("failed", "worker_died")

    asyncio.run(scenario())


def test_a_request_that_may_not_run_twice_ends_with_its_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(replicas=2) as (router, _):
            stream = open_stream(router, ask(f"gate={tmp_path / 'never'}", idempotent=False))
            busy = next(r for r in router.replicas("tiny") if r.num_in_flight)
            os.kill(worker_pid(router, busy.index), signal.SIGKILL)
            (only,) = await outputs_of(stream)
            assert only.end is not None
            assert only.end.failure is not None
            assert only.end.failure.kind == "worker_died"

    asyncio.run(scenario())
