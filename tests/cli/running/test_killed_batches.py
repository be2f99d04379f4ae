"""``inferd batch run`` with a model of its own is killed at system calls: every run ends with the same answers.

The command, its gateway and its worker are real processes. ``tests/jobs/test_killed_runs.py`` kills the store of jobs at
every call that changes a file; here the calls are a sample over all processes of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.gateway.jobs.serving_jobs import line
from tests.jobs.test_killed_runs import SETS, needs_strace

PATH = "/v1/completions"
MODEL = "demo"
LINES = 12
POINTS = 300
KILLED = "+++ killed by SIGKILL"
LEFT_S = 15.0  # for the processes that a killed one has left to end by themselves
CALLS = (SETS[0], SETS[1], SETS[2], SETS[3], "sendto,sendmsg,writev", "connect,accept4,clone,clone3,execve,exit_group")
"""Kinds of calls; the number of a call is counted in each thread. The last two talk to other processes."""


def run(folder: Path, *words: str, trace: str | None = None) -> tuple[int, bool]:
    """The command with its processes; the exit status, and whether one of them was killed at a call."""
    command = [sys.executable, "-m", "inferd", "batch", *words]
    log = folder / "trace"
    if trace is not None:
        inject = f"inject={trace}"
        command = ["strace", "-f", "--seccomp-bpf", "-q", "-o", str(log), "-e", inject, *command]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    killed_at = None
    deadline = time.monotonic() + 120
    try:
        while (status := process.poll()) is None:
            now = time.monotonic()
            assert now < deadline, words
            if killed_at is None and trace is not None and log.exists() and KILLED in log.read_text(errors="replace"):
                killed_at = now
            if (
                killed_at is not None and now - killed_at > LEFT_S
            ):  # the command itself was killed, and strace follows the rest
                status = -signal.SIGKILL
                break
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the killed process has left
        process.wait()
    return status, trace is not None and KILLED in log.read_text(errors="replace")


def finished(folder: Path) -> None:
    """What its user does after a run that was killed: resume it, or begin again where it has no job yet."""
    for _ in range(3):
        if (folder / ".out.jsonl.job" / "job.json").exists():
            status, _ = run(folder, "resume", "out.jsonl")
        elif (folder / "out.jsonl").exists():
            return
        else:
            status, _ = run(folder, "run", "in.jsonl", "-o", "out.jsonl", "--model", MODEL)
        assert status == 0
    raise AssertionError("it does not end")


def answers(folder: Path) -> list[tuple[str, str, int]]:
    """Ids, texts and tokens in the order of the file; ids of requests and times differ from run to run."""
    found = []
    for text in (folder / "out.jsonl").read_text().splitlines():
        one = json.loads(text)
        body = one["response"]["body"]
        found.append((one["custom_id"], body["choices"][0]["text"], body["usage"]["completion_tokens"]))
    return found


def new_run(folder: Path) -> Path:
    folder.mkdir()
    asked = [
        line(f"r{number}", PATH, model="m", prompt=f"Once {number}", max_tokens=8, temperature=0, ignore_eos=True)
        for number in range(LINES)
    ]
    (folder / "in.jsonl").write_text("\n".join(asked) + "\n")
    return folder


def killed_at(folder: Path, calls: str, number: int, expected: list[tuple[str, str, int]]) -> bool:
    """Kill a run at the ``number``-th call of a thread, and let it be finished; False: no thread has so many."""
    new_run(folder)
    trace = f"{calls}:signal=KILL:when={number}"
    _, was_killed = run(folder, "run", "in.jsonl", "-o", "out.jsonl", "--model", MODEL, trace=trace)
    finished(folder)
    assert answers(folder) == expected, f"killed at call {number} of {calls}"
    assert not (folder / ".out.jsonl.job" / "job.json").exists()
    shutil.rmtree(folder)
    return was_killed


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, int]]:
    folder = new_run(tmp_path_factory.mktemp("expected") / "run")
    finished(folder)
    found = answers(folder)
    assert [name for name, _, _ in found] == [f"r{number}" for number in range(LINES)]
    return found


@pytest.mark.soak
@pytest.mark.timeout(10_800)
@needs_strace
def test_a_command_that_is_killed_at_any_of_many_calls_ends_with_the_same_answers(
    tmp_path: Path, expected: list[tuple[str, str, int]]
) -> None:
    count = 0
    for calls in CALLS:
        number = missed = 0
        while missed < 2 and count < POINTS:
            number += 1
            was_killed = killed_at(tmp_path / "run", calls, number, expected)
            count, missed = count + was_killed, 0 if was_killed else missed + 1
    assert count >= POINTS, count


@pytest.mark.soak
@pytest.mark.timeout(600)
@needs_strace
def test_a_command_that_is_killed_while_it_ends_is_finished(
    tmp_path: Path, expected: list[tuple[str, str, int]]
) -> None:
    assert killed_at(tmp_path / "run", "rmdir", 1, expected), "its output is written, and its job is there"
    assert killed_at(tmp_path / "run", "unlinkat", 1, expected), "the job's folder is half removed"
