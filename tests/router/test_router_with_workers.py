"""The router over real worker processes: what must hold when they are killed, stopped, hung or broken."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
from tests.stopwatch import Stopwatch
from tests.worker.tiny_backend import letters
from tests.worker.watching import (
    IMPATIENT,
    ask,
    next_output,
    outputs_of,
    routing,
    serving,
    text_of,
    until,
    worker,
    worker_pid,
)

from inferd.config import Config, ModelConfig, QueueConfig, RetryConfig
from inferd.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable
from inferd.events import RequestRefused
from inferd.router.stream import open_stream
from inferd.types import GenerateRequest, TextPrompt


def test_a_request_streams_token_by_token_and_ends_once() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            outputs = await outputs_of(open_stream(router, ask(max_tokens=5, n=2)))
            assert text_of(outputs) == text_of(outputs, 1) == letters(5)
            assert [o.end is not None for o in outputs].count(True) == 1
            end = outputs[-1].end
            assert end is not None
            assert end.outcome == "done"
            assert end.usage.completion_tokens == 10
            assert end.timings.dispatched is not None
            (ended,) = witness.ended()
            assert ended.outcome == "done"
            assert ended.usage == end.usage
            assert ended.finish_reasons == ("length", "length")
            assert ended.replica == 0

    asyncio.run(scenario())


def test_what_a_request_does_wrong_ends_it_alone() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            good = open_stream(router, ask("pace=0.01", name="good", max_tokens=20))
            expected = {
                "invalid": ("refused", "invalid_request"),
                "defect": ("failed", "internal"),
                "refused": ("refused", "overloaded"),
            }
            for word, (outcome, kind) in expected.items():
                (only,) = await outputs_of(open_stream(router, ask(word, name=word)))
                assert only.end is not None
                assert (only.end.outcome, only.end.failure and only.end.failure.kind) == (outcome, kind)
            assert text_of(await outputs_of(good)) == letters(20)
            assert witness.count("ready") == 1

    asyncio.run(scenario())


def test_requests_keep_away_from_a_replica_that_computes_a_long_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(replicas=2) as (router, witness):
            gate = tmp_path / "gate"
            long = msgspec.structs.replace(ask(f"gate={gate}", name="long"), num_bytes=40_000)
            streams = [open_stream(router, long)]
            replicas = router.replicas("tiny")
            await until(lambda: sum(replica.num_in_flight for replica in replicas) == 1, "it is sent")
            (busy,) = [replica for replica in replicas if replica.num_in_flight]
            assert busy.load == pytest.approx(1 + 10_000 / 1024)
            streams += [open_stream(router, ask(f"gate={gate}", name=f"short{number}")) for number in range(6)]
            await until(lambda: sum(replica.num_in_flight for replica in replicas) == 7, "all are sent")
            assert busy.num_in_flight == 1, "six sequences are less than ten thousand tokens"
            gate.touch()
            for stream in streams:
                assert text_of(await outputs_of(stream)) == letters(4)
            assert [replica.load for replica in replicas] == [0, 0]
            assert len(witness.ended()) == 7

    asyncio.run(scenario())


def test_a_replica_whose_long_prompt_is_computed_counts_its_sequences_alone() -> None:
    async def scenario() -> None:
        async with serving() as (router, _):
            long = msgspec.structs.replace(ask("pace=0.01", name="long", max_tokens=50), num_bytes=40_000)
            stream = open_stream(router, long)
            (replica,) = router.replicas("tiny")
            first = await next_output(stream)
            assert first.deltas
            assert replica.load == replica.outstanding == 1
            assert text_of([first, *await outputs_of(stream)]) == letters(50)

    asyncio.run(scenario())


def test_an_exception_in_a_step_fails_the_requests_of_that_step_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            gate = tmp_path / "gate"
            later = open_stream(router, ask(f"gate={gate}", name="later"))
            (failed,) = await outputs_of(open_stream(router, ask("raise", name="bad")))
            assert failed.end is not None
            assert failed.end.failure is not None
            assert failed.end.failure.kind == "internal"
            gate.touch()
            assert text_of(await outputs_of(later)) == letters(4)
            assert witness.count("ready") == 1

    asyncio.run(scenario())


def test_a_worker_whose_steps_keep_failing_is_replaced() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            for i in range(3):
                await outputs_of(open_stream(router, ask("raise", name=f"bad-{i}")))
            await until(lambda: witness.count("ready") == 2, "the second worker is ready")
            assert text_of(await outputs_of(open_stream(router, ask(name="good")))) == letters(4)

    asyncio.run(scenario())


def test_after_kill_9_started_streams_fail_within_2_s_and_waiting_requests_run_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            started = open_stream(router, ask("pace=0.02", name="started", max_tokens=1000))
            first = await next_output(started)
            assert text_of([first])
            gate = tmp_path / "gate"
            unstarted = [open_stream(router, ask(f"gate={gate}", name=f"unstarted-{i}")) for i in range(3)]
            await until(lambda: router.models()[0].in_flight == 4, "all are in the worker")
            os.kill(worker_pid(router), signal.SIGKILL)
            watch = Stopwatch()
            rest = await outputs_of(started)
            assert watch.seconds < 2
            end = rest[-1].end
            assert end is not None
            assert end.failure is not None
            assert end.failure.kind == "worker_died"
            assert end.usage.completion_tokens == len(text_of([first, *rest]))
            gate.touch()
            for stream in unstarted:
                outputs = await outputs_of(stream)
                assert text_of(outputs) == letters(4)
                assert [o.prompt is not None for o in outputs].count(True) == 1
            assert witness.count("died") == 1
            assert router.models()[0].state == "ready"

    asyncio.run(scenario())


def test_a_request_that_kills_every_worker_is_given_up_after_two(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            gate = tmp_path / "gate"
            innocents = [open_stream(router, ask(f"gate={gate}", name=f"innocent-{i}")) for i in range(5)]
            await until(lambda: router.models()[0].in_flight == 5, "the innocents are in the worker")
            gate.touch()
            poison = open_stream(router, ask("die", name="poison"))
            (end,) = [o.end for o in await outputs_of(poison)]
            assert end is not None
            assert end.failure is not None
            assert (end.failure.kind, end.failure.code) == ("worker_died", "poison_request")
            for stream in innocents:
                last = (await outputs_of(stream))[-1].end
                assert last is not None
                # An innocent that had output when the worker died ends with it; none is called poison.
                assert last.outcome == "done" or (last.failure is not None and last.failure.code == "worker_died")
            assert witness.count("died") == 2

    asyncio.run(scenario())


def test_innocents_that_had_no_output_survive_a_poison_request_in_their_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            gate = tmp_path / "gate"
            innocents = [open_stream(router, ask(f"gate={gate}", name=f"innocent-{i}", max_tokens=1)) for i in range(5)]
            await until(lambda: router.models()[0].in_flight == 5, "the innocents are in the worker")
            poison = open_stream(router, ask("die", name="poison"))
            await until(lambda: witness.count("died") == 1, "the first worker is dead")
            gate.touch()
            for stream in innocents:
                assert text_of(await outputs_of(stream)) == letters(1)
            (only,) = await outputs_of(poison)
            assert only.end is not None
            assert only.end.failure is not None
            assert only.end.failure.code == "poison_request"

    asyncio.run(scenario())


def test_the_next_one_of_those_that_may_have_killed_a_worker_goes_on_with_the_first_output_of_the_one_before(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            gate = tmp_path / "gate"
            words = f"gate={gate} pace=0.01"
            streams = [open_stream(router, ask(words, name=f"long-{i}", max_tokens=1_000_000)) for i in range(3)]
            await until(lambda: router.models()[0].in_flight == 3, "all are in the worker")
            os.kill(worker_pid(router), signal.SIGKILL)
            await until(lambda: witness.count("died") == 1, "the worker is dead")
            gate.touch()
            async with asyncio.timeout(30):
                for stream in streams:
                    assert text_of([await next_output(stream)])
            assert router.models()[0].in_flight == 3, "none of them has ended"

    asyncio.run(scenario())


def test_a_worker_that_died_is_told_in_words_until_the_next_one_is_there() -> None:
    async def scenario() -> None:
        async with serving(patience=msgspec.structs.replace(IMPATIENT, first_delay_s=30.0)) as (router, _):
            os.kill(worker_pid(router), signal.SIGKILL)
            await until(lambda: router.models()[0].replicas_ready == 0, "its death is noticed")
            assert router.models()[0].detail == "replica 0 died"

    asyncio.run(scenario())


def test_a_stopped_worker_is_noticed_and_replaced() -> None:
    async def scenario() -> None:
        async with serving(patience=msgspec.structs.replace(IMPATIENT, silent_s=2.0)) as (router, witness):
            pid = worker_pid(router)
            os.kill(pid, signal.SIGSTOP)
            stream = open_stream(router, ask(name="waits"))
            assert text_of(await outputs_of(stream)) == letters(4)
            assert "hung" in witness.states()
            assert worker_pid(router) != pid

    asyncio.run(scenario())


def test_a_hung_step_is_noticed_and_its_worker_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(hang_timeout_s=1.5) as (router, witness):
            started = open_stream(router, ask("hang@2", name="started"))
            outputs = await outputs_of(started)
            assert text_of(outputs) == letters(2)
            end = outputs[-1].end
            assert end is not None
            assert end.failure is not None
            assert end.failure.kind == "worker_died"
            assert "hung" in witness.states()
            assert text_of(await outputs_of(open_stream(router, ask(name="next")))) == letters(4)

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_fails_without_restarts_and_says_why() -> None:
    async def scenario() -> None:
        async with serving("missing", until_ready=False) as (router, witness):
            waiting = open_stream(router, ask())
            await router.settled()
            status = router.models()[0]
            assert (status.state, status.replicas_ready) == ("failed", 0)
            assert "config.json" in router.load_failures()["tiny"].message
            (only,) = await outputs_of(waiting)
            assert only.end is not None
            assert only.end.failure is not None
            assert only.end.failure.kind == "unavailable"
            with pytest.raises(Unavailable, match="could not be loaded"):
                open_stream(router, ask(name="late"))
            assert witness.states() == ["starting", "loading", "failed"] or witness.states() == [
                "starting",
                "loading",
                "died",
                "failed",
            ]

    asyncio.run(scenario())


def test_a_worker_that_dies_while_loading_is_given_up_after_some_tries() -> None:
    async def scenario() -> None:
        async with serving("die", until_ready=False) as (router, witness):
            await router.settled()
            assert router.models()[0].state == "failed"
            assert witness.count("starting") == 5

    asyncio.run(scenario())


def test_a_hanging_load_is_cut_off_at_its_timeout() -> None:
    async def scenario() -> None:
        async with serving("hang", until_ready=False, load_timeout_s=1.0) as (router, witness):
            await until(lambda: witness.count("hung") >= 1, "the load is called hung")
            await router.settled()
            assert witness.count("starting") == 1, "a second try would take as long"
            failure = router.load_failures()["tiny"]
            assert (failure.kind, "load_timeout_s, 1 s" in failure.message) == ("model_load", True), failure

    asyncio.run(scenario())


def test_requests_wait_while_the_model_loads(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        async with serving(f"gate={gate}", until_ready=False, max_requests=2) as (router, _):
            streams = [open_stream(router, ask(name=f"early-{i}")) for i in range(2)]
            with pytest.raises(Overloaded) as refused:
                open_stream(router, ask(name="one too many"))
            assert (refused.value.retry_after_s or 0) >= 1
            with pytest.raises(Unavailable):
                await router.tokenize("tiny", TextPrompt(text="ab"))
            assert router.models()[0].state == "loading"
            gate.touch()
            for stream in streams:
                assert text_of(await outputs_of(stream)) == letters(4)

    asyncio.run(scenario())


def test_a_cancelled_request_in_the_queue_never_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, mark = tmp_path / "gate", tmp_path / "mark"
        async with serving(f"gate={gate}", until_ready=False) as (router, witness):
            left = open_stream(router, ask(f"mark={mark}", name="left"))
            stays = open_stream(router, ask(name="stays"))
            left.close()
            left.close()
            (only,) = await outputs_of(left)
            assert only.end is not None
            assert only.end.outcome == "cancelled"
            gate.touch()
            await outputs_of(stays)
            assert not mark.exists()
            assert [event.outcome for event in witness.ended()] == ["cancelled", "done"]

    asyncio.run(scenario())


def test_a_cancelled_request_in_the_worker_stops_and_is_charged_for_what_was_made() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            stream = open_stream(router, ask("pace=0.01", max_tokens=100_000))
            await anext(stream)
            stream.close()
            last = (await outputs_of(stream))[-1].end
            assert last is not None
            assert last.outcome == "cancelled"
            assert last.usage.completion_tokens >= 1
            await until(lambda: router.models()[0].in_flight == 0, "the slot is free")
            assert len(witness.ended()) == 1

    asyncio.run(scenario())


def test_a_deadline_that_passes_in_the_queue_ends_the_request_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate, mark = tmp_path / "gate", tmp_path / "mark"
        async with serving(f"gate={gate}", until_ready=False) as (router, _):
            (only,) = await outputs_of(open_stream(router, ask(f"mark={mark}", deadline_s=0.05)))
            assert only.end is not None
            assert only.end.failure is not None
            assert only.end.failure.kind == "deadline_exceeded"
            gate.touch()
            await outputs_of(open_stream(router, ask(name="next")))
            assert not mark.exists()

    asyncio.run(scenario())


def test_waiting_too_long_refuses_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(f"gate={tmp_path / 'never'}", until_ready=False, queue_timeout_s=0.05) as (router, _):
            (only,) = await outputs_of(open_stream(router, ask()))
            assert only.end is not None
            assert only.end.outcome == "refused"
            assert only.end.failure is not None
            assert (only.end.failure.kind, only.end.failure.code) == ("overloaded", "queue_timeout")

    asyncio.run(scenario())


def test_each_model_has_a_queue_bounds_and_patience_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        held = f"gate={tmp_path / 'gate'}"
        narrow = ModelConfig(source=held, load_timeout_s=60.0, queue=QueueConfig(max_requests=1, timeout_s=0.2))
        wide = msgspec.structs.replace(narrow, queue=QueueConfig(max_requests=3, timeout_s=60.0))
        config = Config(models={"narrow": narrow, "wide": wide})
        async with routing(config, until_ready=False) as (router, _):
            first = open_stream(router, ask(name="n0", model="narrow"))
            waiting = [open_stream(router, ask(name=f"w{i}", model="wide")) for i in range(3)]
            for model in ("narrow", "wide"):
                with pytest.raises(Overloaded) as refused:
                    open_stream(router, ask(name=f"one too many {model}", model=model))
                assert refused.value.code == "queue_full"
            assert [status.waiting for status in router.models()] == [1, 3]
            (only,) = await outputs_of(first)
            assert only.end is not None
            assert only.end.failure is not None
            assert only.end.failure.code == "queue_timeout"
            assert [status.waiting for status in router.models()] == [0, 3]
            (tmp_path / "gate").touch()
            for stream in waiting:
                assert text_of(await outputs_of(stream)) == letters(4)

    asyncio.run(scenario())


def test_tokenizer_calls_answer_fail_and_survive_a_death() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            assert await router.tokenize("tiny", TextPrompt(text="ab"), want_strings=True) == ([97, 98], ["a", "b"])
            assert await router.detokenize("tiny", [97, 98]) == "ab"
            with pytest.raises(InvalidRequest, match="invalid"):
                await router.tokenize("tiny", TextPrompt(text="invalid"))
            with pytest.raises(Unavailable):
                await router.tokenize("tiny", TextPrompt(text="die"))
            await until(lambda: witness.count("ready") == 2, "the worker is back")
            assert await router.detokenize("tiny", [97]) == "a"

    asyncio.run(scenario())


def test_a_worker_stops_preparing_what_nothing_waits_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as (router, _):
            stream = open_stream(router, ask(f"trial={tmp_path / 'cancelled'}"))
            checked = asyncio.create_task(router.check([ask(f"trial={tmp_path / 'withdrawn'}")]))
            for name in ("cancelled", "withdrawn"):
                await until(lambda path=tmp_path / name: path.exists(), "the worker waits")  # type: ignore[misc]
            checked.cancel()
            stream.close()
            await until(lambda: not any(tmp_path.iterdir()), "nothing is waited for")
            assert await router.detokenize("tiny", [97]) == "a"

    asyncio.run(scenario())


def test_unknown_models_and_ids_in_use_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as (router, _):
            with pytest.raises(ModelNotFound, match="'other'"):
                open_stream(router, GenerateRequest(id="x", model="other", prompt=TextPrompt(text="")))
            stream = open_stream(router, ask(f"gate={tmp_path / 'gate'}"))
            with pytest.raises(InvalidRequest, match="already running"):
                open_stream(router, ask())
            stream.close()

    asyncio.run(scenario())


def test_draining_refuses_new_work_and_finishes_the_old() -> None:
    async def scenario() -> None:
        async with serving() as (router, _):
            stream = open_stream(router, ask("pace=0.02", max_tokens=10))
            router.begin_drain()
            assert router.draining
            late = open_stream(router, ask(name="late but accepted"))
            drained = asyncio.create_task(router.drain(20))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="shutting down"):
                open_stream(router, ask(name="too late"))
            assert text_of(await outputs_of(stream)) == letters(10)
            assert text_of(await outputs_of(late)) == letters(4)
            assert await drained

    asyncio.run(scenario())


def test_what_outlives_the_grace_period_is_aborted_with_an_error() -> None:
    async def scenario() -> None:
        async with serving() as (router, _):
            stream = open_stream(router, ask("pace=0.02", max_tokens=10_000))
            await anext(stream)
            assert not await router.drain(0.05)
            router.abort()
            last = (await outputs_of(stream))[-1].end
            assert last is not None
            assert last.failure is not None
            assert (last.outcome, last.failure.code) == ("failed", "shutting_down")

    asyncio.run(scenario())


def test_two_replicas_share_the_work_and_cover_for_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(replicas=2) as (router, witness):
            gate = tmp_path / "gate"
            streams = [open_stream(router, ask(f"gate={gate}", name=f"r{i}")) for i in range(6)]
            assert [r.num_in_flight for r in router.replicas("tiny")] == [3, 3]
            os.kill(worker_pid(router, 0), signal.SIGKILL)
            await until(lambda: witness.count("died") == 1, "one worker is dead")
            assert router.models()[0].state == "degraded"
            gate.touch()
            for stream in streams:
                assert text_of(await outputs_of(stream)) == letters(4)

    asyncio.run(scenario())


def test_of_two_attempts_at_a_request_the_one_that_fails_first_leaves_it_to_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        retry = RetryConfig(hedge_after_s=0.02, budget=1.0)
        async with serving(replicas=2, retry=retry) as (router, witness):
            gate = tmp_path / "gate"
            request = ask(f"gate={gate} raise-once={tmp_path / 'raised'} pace=0.3", max_tokens=2)
            stream = open_stream(router, request)
            await until(lambda: [r.num_in_flight for r in router.replicas("tiny")] == [1, 1], "both have the request")
            gate.touch()
            outputs = await outputs_of(stream)
            assert (tmp_path / "raised").exists()
            assert text_of(outputs) == letters(2)
            assert [event.outcome for event in witness.ended()] == ["done"]

    asyncio.run(scenario())


def test_a_full_queue_says_when_to_come_back_by_how_fast_it_moves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(max_requests=6) as (router, _):
            # Three ends, 0.4 s apart; then everything stands still behind a gate.
            for i in range(3):
                await outputs_of(open_stream(router, ask("pace=0.2", name=f"quick-{i}", max_tokens=2)))
            gate = tmp_path / "gate"
            capacity = worker(router).capacity
            held = [open_stream(router, ask(f"gate={gate}", name=f"held-{i}")) for i in range(capacity + 6)]
            with pytest.raises(Overloaded) as refused:
                open_stream(router, ask(name="one too many"))
            # Seven ends at that rate take 2.8 s, more on a busy machine.
            assert 2.0 < (refused.value.retry_after_s or 0) < 10.0
            gate.touch()
            for stream in held:
                assert text_of(await outputs_of(stream)) == letters(4)

    asyncio.run(scenario())


def test_a_refusal_says_whether_the_request_ends_as_well(tmp_path: Path) -> None:
    """So that each request is counted once: at the door, or at its end."""

    async def scenario() -> None:
        queue = QueueConfig(max_requests=1, timeout_s=0.1)
        models = {"tiny": ModelConfig(source=f"gate={tmp_path / 'never'}", load_timeout_s=60.0, queue=queue)}
        async with routing(Config(models=models), until_ready=False) as (router, witness):
            displaced = open_stream(router, ask(name="displaced", priority=1))
            expired = open_stream(router, ask(name="expired"))
            with pytest.raises(Overloaded):
                open_stream(router, ask(name="at the door"))
            for stream in (displaced, expired):
                await outputs_of(stream)
            refused = [event for event in witness.events if isinstance(event, RequestRefused)]
            assert [(event.reason, event.was_queued) for event in refused] == [
                ("queue_full", True),
                ("queue_full", False),
                ("queue_timeout", True),
            ]
            assert {event.request_id for event in witness.ended()} == {"displaced", "expired"}

    asyncio.run(scenario())
