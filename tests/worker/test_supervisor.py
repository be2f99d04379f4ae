"""One worker through many starts: nothing is left behind, failures count where they belong, back-off holds."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import subprocess
import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from tests.tiers import THOROUGH
from tests.worker.tiny_backend import letters
from tests.worker.watching import (
    IMPATIENT,
    Witness,
    ask,
    children,
    is_running,
    outputs_of,
    serving,
    text_of,
    until,
    worker,
    worker_pid,
)

from inferd.config import Config, ModelConfig
from inferd.events import LoadProgress, ReplicaChanged
from inferd.machine.memory import rss_bytes
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.worker import process as process_module
from inferd.worker.main import PROGRESS_S
from inferd.worker.supervisor import Patience, _Watch, restart_delay

RESTARTS = 30


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_killed_worker_is_told_by_its_signal_and_not_by_its_channel() -> None:
    async def scenario() -> list[str]:
        async with serving() as (router, witness):
            for life in (2, 3, 4):
                os.kill(worker_pid(router), signal.SIGKILL)
                await until(lambda life=life: witness.count("ready") == life, "it is there again")  # type: ignore[misc]
            return [e.reason for e in witness.events if isinstance(e, ReplicaChanged) and e.state == "died"]

    said = asyncio.run(scenario())
    assert said == ["its process was killed by signal 9 (SIGKILL, as by the kernel where memory runs out)"] * 3


def test_what_a_worker_says_of_its_end_is_told_with_it(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        async with serving(f"leave-once={tmp_path / 'left'}") as (_, witness):
            return [e.reason for e in witness.events if isinstance(e, ReplicaChanged) and e.state == "died"]

    assert asyncio.run(scenario()) == ["its process exited with status 6: rank 1 is stopped"]


async def restarted(times: int) -> tuple[list[int], list[int], list[int]]:
    """Kill a worker so many times: descriptors, threads and tasks before and after, and the children."""

    def books() -> list[int]:
        gc.collect()
        return [num_descriptors(), threading.active_count(), len(asyncio.all_tasks())]

    at_once = msgspec.structs.replace(IMPATIENT, first_delay_s=0.001, longest_delay_s=0.001)
    async with serving(patience=at_once) as (router, witness):
        before = books()
        for life in range(2, times + 2):
            os.kill(worker_pid(router), signal.SIGKILL)
            await until(lambda life=life: witness.count("ready") == life, f"life {life} is ready")  # type: ignore[misc]
        assert text_of(await outputs_of(open_stream(router, ask()))) == letters(4)
        await asyncio.sleep(0)
        return before, books(), children(os.getpid())


@THOROUGH
def test_many_restarts_leave_no_process_descriptor_thread_or_task_behind() -> None:
    others = children(os.getpid())
    before, after, during = asyncio.run(restarted(RESTARTS))
    assert all(now <= then + 2 for then, now in zip(before, after, strict=True)), (before, after)
    assert len(during) == len(others) + 1
    assert children(os.getpid()) == others


@pytest.mark.interpreted("replaces a function of a compiled module")
def test_the_check_for_leaks_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[int] = []
    real = process_module._exited

    async def leaking(process: subprocess.Popen[bytes]) -> None:
        leaked.append(os.pidfd_open(process.pid))
        await real(process)

    monkeypatch.setattr(process_module, "_exited", leaking)
    before, after, _ = asyncio.run(restarted(5))
    assert after[0] >= before[0] + 5
    for descriptor in leaked:
        os.close(descriptor)


def test_the_progress_of_loading_is_reported_when_its_phase_changes_and_then_at_intervals() -> None:
    async def scenario() -> list[LoadProgress]:
        async with serving("tiny reports=300") as (_, witness):
            return [event for event in witness.events if isinstance(event, LoadProgress)]

    told = asyncio.run(scenario())
    assert [(event.phase, event.done) for event in (told[0], told[1], told[-1])] == [
        ("weights", 0),
        ("files", 0),
        ("weights", 1),
    ]
    during = [event.at for event in told[1:-1]]
    assert all(later - earlier >= PROGRESS_S for earlier, later in pairwise(during)), "each report is a message"


def test_a_worker_ignores_the_signals_of_terminals_and_service_managers() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            stream = open_stream(router, ask("pace=0.02", max_tokens=10))
            await anext(stream)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(worker_pid(router), number)
            assert letters(10).endswith(text_of(await outputs_of(stream)))
            assert witness.count("ready") == 1

    asyncio.run(scenario())


def test_a_worker_that_grows_tells_how_much_memory_it_has() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            before, more = worker(router).rss_bytes, 100_000_000
            await outputs_of(open_stream(router, ask(f"grow={more}")))
            await until(lambda: router.models()[0].memory_bytes > before + 0.9 * more, "it has told its size")
            told = [event for event in witness.events if isinstance(event, ReplicaChanged) and event.state == "ready"]
            assert told[-1].rss_bytes == router.models()[0].memory_bytes

    asyncio.run(scenario())


def test_the_memory_of_a_worker_is_that_of_all_its_ranks() -> None:
    async def scenario() -> None:
        async with serving("ranks") as (router, _):  # the other rank is this process
            alone, other = rss_bytes(worker_pid(router)), rss_bytes()
            assert worker(router).measure_rss() > alone + 0.5 * other
            more = 100_000_000
            await outputs_of(open_stream(router, ask(f"grow={more}")))
            expected = alone + 0.5 * other + 0.9 * more
            await until(lambda: worker(router).rss_bytes > expected, "a heartbeat has told the size of both")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("source", "states"),
    [
        ("missing", ["starting", "loading", "failed"]),
        ("die", [*["starting", "loading", "died"] * 5, "failed"]),
    ],
)
def test_a_load_that_fails_is_told_once_and_each_death_before_it(source: str, states: list[str]) -> None:
    async def scenario() -> None:
        async with serving(source, until_ready=False) as (router, witness):
            await router.settled()
            assert witness.states() == states
            assert router.load_failures()["tiny"].kind == "model_load"

    asyncio.run(scenario())


def test_stopping_kills_a_worker_that_does_not_leave() -> None:
    async def scenario() -> None:
        async with serving(patience=msgspec.structs.replace(IMPATIENT, stop_s=0.3)) as (router, witness):
            os.kill(worker_pid(router), signal.SIGSTOP)
            await asyncio.wait_for(router.stop(), 20)
            assert witness.states()[-1] == "stopped"

    asyncio.run(scenario())


def test_a_worker_leaves_when_the_other_end_of_its_channel_is_gone() -> None:
    async def scenario() -> None:
        async with serving() as (router, _):
            pid = worker_pid(router)
            process = worker(router)._supervisor._process
            assert isinstance(process, process_module.WorkerProcess)
            process._channel.close()
            await until(lambda: not is_running(pid), "the worker has left")

    asyncio.run(scenario())


def test_a_model_that_was_ready_once_is_tried_again_after_a_failed_load(tmp_path: Path) -> None:
    async def scenario() -> None:
        gone = tmp_path / "folder-is-gone"
        patience = msgspec.structs.replace(IMPATIENT, longest_delay_s=0.05)
        async with serving(f"missing-if={gone}", patience=patience) as (router, witness):
            gone.touch()
            os.kill(worker_pid(router), signal.SIGKILL)
            await until(lambda: witness.count("died") >= 3, "it died and two loads failed")
            waiting = open_stream(router, ask())
            gone.unlink()
            assert text_of(await outputs_of(waiting)) == letters(4)

    asyncio.run(scenario())


def test_where_no_process_can_be_started_the_model_fails_and_the_server_lives() -> None:
    async def scenario() -> None:
        config = ModelConfig(source="tiny")
        patience = msgspec.structs.replace(IMPATIENT, first_delay_s=0.001)
        router = Router(Config(models={"tiny": config}), Witness(), command=("/does/not/exist",), patience=patience)
        await router.start()
        await asyncio.wait_for(router.settled(), 10)
        assert router.models()[0].state == "failed"
        await router.stop()

    asyncio.run(scenario())


def test_a_worker_that_was_of_use_is_back_at_once_however_often_it_is_killed() -> None:
    async def scenario() -> None:
        async with serving() as (router, witness):
            for life in range(1, 9):
                assert text_of(await outputs_of(open_stream(router, ask(name=f"r{life}")))) == letters(4)
                pid = worker_pid(router)
                os.kill(pid, signal.SIGKILL)
                await until(lambda life=life: witness.count("died") == life, "it is dead")  # type: ignore[misc]
                assert worker(router)._supervisor.state in ("died", "starting")
                await until(lambda pid=pid: worker(router).pid not in (None, pid), "the next is there", 1.0)  # type: ignore[misc]

    asyncio.run(scenario())


def test_a_worker_that_never_serves_is_restarted_more_and_more_slowly(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        patience = msgspec.structs.replace(IMPATIENT, first_delay_s=0.001)
        async with serving(patience=patience) as (router, witness):
            for life in range(2, 6):
                os.kill(worker_pid(router), signal.SIGKILL)
                await until(lambda life=life: witness.count("ready") == life, f"life {life} is ready")  # type: ignore[misc]

    with caplog.at_level(logging.WARNING, "inferd.supervisor"):
        asyncio.run(scenario())
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2 + [logging.ERROR] * 2
    said = [record.getMessage() for record in caplog.records]
    assert ["in a row" in sentence for sentence in said] == [False, True, True, True]
    assert said[-1].endswith("(4 times in a row)")
    assert "0.0 s" not in " ".join(said)


def test_useful_lives_that_end_again_and_again_count_as_a_crash_loop_too(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        patience = msgspec.structs.replace(IMPATIENT, burst=2)
        async with serving(patience=patience) as (router, witness):
            for life in range(2, 6):
                assert text_of(await outputs_of(open_stream(router, ask(name=f"r{life}")))) == letters(4)
                os.kill(worker_pid(router), signal.SIGKILL)
                await until(lambda life=life: witness.count("ready") == life, f"life {life} is ready")  # type: ignore[misc]

    with caplog.at_level(logging.WARNING, "inferd.supervisor"):
        asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records]
    assert [sentence.endswith("(2 times in a row)") for sentence in said] == [False, False, False, True]


def test_while_no_process_can_be_started_for_want_of_descriptors_the_model_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0
    real = socket.socketpair

    def exhausted() -> tuple[socket.socket, socket.socket]:
        nonlocal tries
        tries += 1
        if tries <= 8:
            raise OSError(errno.EMFILE, "Too many open files")
        return real()

    async def scenario() -> None:
        monkeypatch.setattr(socket, "socketpair", exhausted)  # the loop has its own by now
        patience = msgspec.structs.replace(IMPATIENT, first_delay_s=0.001)
        async with serving(patience=patience) as (router, _):
            assert text_of(await outputs_of(open_stream(router, ask()))) == letters(4)

    asyncio.run(scenario())
    assert tries > 8


def test_the_delay_doubles_with_every_failure_in_a_row_up_to_a_limit() -> None:
    assert restart_delay(Patience(), 0) == 0.0
    delays = [restart_delay(Patience(), n) for n in (1, 2, 3, 8, 40, 10_000)]
    for delay, expected in zip(delays, (0.1, 0.2, 0.4, 12.8, 30.0, 30.0), strict=True):
        assert 0.75 * expected <= delay <= 1.25 * expected


def test_a_pause_of_the_gateway_itself_does_not_count_against_the_worker() -> None:
    watch = _Watch()
    start = watch._looked_at
    watch.pass_time(start + 100.0, at_most=1.0)
    assert watch.silent_s == 1.0


def test_only_a_busy_worker_without_progress_is_stuck() -> None:
    watch = _Watch()
    now = watch._looked_at
    for steps, busy, expected in ((1, True, 0.0), (1, True, 1.0), (1, True, 2.0), (2, True, 0.0), (2, False, 0.0)):
        watch.progress(steps, busy)
        assert watch.stuck_s == expected
        now += 1.0
        watch.pass_time(now, at_most=5.0)
