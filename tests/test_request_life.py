"""The page on a request's life names the files in the order in which a real request runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Final, NamedTuple

import httpx
import pytest
from tests.tiers import THOROUGH
from tests.worker.watching import children, is_running, until_now

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "request-life.md"
_ROW: Final = re.compile(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", re.MULTILINE)

# Writes the first call of each function of inferd in each phase; the file's one byte is the number of the phase, and
# nothing is written in phase 0. It is mapped, so that looking costs little, and so that the worker, which has its own
# environment, sees it as well.
_TRACER: Final = """
import mmap, os, sys, threading, time
with open({flag!r}, "r+b") as file:
    phase = mmap.mmap(file.fileno(), 1)
out = os.open({out!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
seen = set()
def trace(frame, event, argument):
    if event == "call" and phase[0]:
        code, now = frame.f_code, phase[0]
        if (now, code) not in seen:
            seen.add((now, code))
            if {package!r} in code.co_filename:
                line = f"{{time.monotonic_ns()}} {{now}} {{code.co_filename}} {{code.co_name}}\\n"
                os.write(out, line.encode())
threading.setprofile(trace)
sys.setprofile(trace)
"""
IDLE: Final = 1
REQUEST: Final = 2
SOME: Final = 6
"""So many modules more or fewer are some: on a busy machine what is done once in a while falls into the request."""

REGULAR_S: Final = 5.5
"""Regular work is done every five seconds at the latest, but for some that is done every minute."""


class Call(NamedTuple):
    """The first call of a function: nanoseconds of a clock that all processes share, file within inferd, name."""

    at: int
    file: str
    function: str


class Calls(NamedTuple):
    """The first calls in each phase, in their order."""

    idle: list[Call]
    request: list[Call]


def traced_calls(folder: Path) -> Calls:
    """What a server calls while it has no request, and what it calls while it answers one streamed chat."""
    flag, out = folder / "flag", folder / "calls"
    flag.write_bytes(bytes(1))
    package = "/src/inferd/"  # the folder of a checkout may have that name as well
    (folder / "sitecustomize.py").write_text(_TRACER.format(flag=str(flag), out=str(out), package=package), "utf-8")
    log = folder / "log"
    with log.open("wb") as stderr:
        process = start(folder, stderr)
    assert process.stdout is not None
    workers: list[int] = []
    try:
        ready = next((line for line in process.stdout if "is ready at" in line), "")
        assert ready, "the server did not become ready"
        workers = children(process.pid)
        (url,) = re.findall(r"http://\S+", ready)
        stream_chat(url)  # what is done once for a process is no part of a request's life
        until_now(lambda: b"/v1/chat/completions" in log.read_bytes(), "that request is over")
        switch(flag, IDLE)
        time.sleep(REGULAR_S)
        until_now(lambda: b"/observe/live/alerts.py check\n" in out.read_bytes(), "all regular work was done", 60)
        switch(flag, REQUEST)
        stream_chat(url)
        until_now(lambda: b" http_line\n" in out.read_bytes(), "the request's line is written")
        switch(flag, 0)
        time.sleep(0.1)  # for a call that is just being written
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        until_now(lambda: not any(is_running(pid) for pid in workers), "the workers are gone", 10)
    calls = Calls([], [])
    for line in out.read_text("utf-8").splitlines():
        at, phase, rest = line.split(" ", 2)
        path, function = rest.rsplit(" ", 1)
        found = calls.idle if int(phase) == IDLE else calls.request
        found.append(Call(int(at), path.rpartition(package)[2], function))
    return Calls(sorted(calls.idle), sorted(calls.request))


def start(folder: Path, stderr: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "inferd", "serve", "demo", "--port", "0", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path)), "XDG_DATA_HOME": str(folder)},
    )


def switch(flag: Path, phase: int) -> None:
    with flag.open("r+b") as file:  # not truncated, for it is mapped
        file.write(bytes([phase]))


def stream_chat(url: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    # Seconds long, so that the gateway sends the first piece before the last one is computed, on a busy machine too.
    body = {"model": "demo", "messages": messages, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert lines[-1] == "data: [DONE]"


def first_calls(folder: Path) -> tuple[dict[tuple[str, str], int], set[tuple[str, str]]]:
    """The files and functions of a request with the times of their first calls, and those of idle times."""
    folder.mkdir()
    calls = traced_calls(folder)
    first: dict[tuple[str, str], int] = {}
    for call in calls.request:
        first.setdefault((call.file, call.function), call.at)
    return first, {(call.file, call.function) for call in calls.idle}


@THOROUGH
@pytest.mark.interpreted("follows the frames of Python functions")
def test_the_page_names_the_files_in_the_order_in_which_a_request_runs_them(tmp_path: Path) -> None:
    first, idle = first_calls(tmp_path / "0")
    rows = _ROW.findall(PAGE.read_text("utf-8"))
    assert len(rows) > 20
    assert [row for row in rows if row not in first] == [], "the request does not run these"
    assert rows == sorted(rows, key=lambda row: first[row])

    said = re.search(r"These are (\d+) files. In all, some (\d+) modules", PAGE.read_text("utf-8"))
    assert said is not None
    assert len({file for file, _ in rows}) == int(said[1])
    files = {file for file, function in first.keys() - idle}
    most = int(said[2]) + SOME
    if len(files) > most:  # regular work may fall into the request, on a busy machine: other work each time
        again, idle = first_calls(tmp_path / "1")
        files &= {file for file, function in again.keys() - idle}
    assert int(said[2]) - SOME <= len(files) <= most, sorted(files)
