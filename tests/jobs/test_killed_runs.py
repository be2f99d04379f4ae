"""A run is killed at system calls, and its disk fails and fills up, for real: every run ends with the same results."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.jobs.job_site import TENANT, Echo, Site, in_loop, lines
from tests.jobs.whole_run import NAME, seen, whole_run

from inferd.jobs import run as run_module
from inferd.jobs.batch import Batch
from inferd.jobs.folder import Disk, is_full
from inferd.jobs.runner import Runner

SCRIPT = Path(__file__).with_name("whole_run.py")
LINES = 60
STRACE = shutil.which("strace")
SETS = (
    "write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,link,linkat,ftruncate,mkdir",
    "pwrite64",
    "fsync,fdatasync",
    "rename,renameat,renameat2,unlink,unlinkat,link,linkat,ftruncate,mkdir",
)
"""Calls that change files. The number of a call is counted in each thread, so each set kills at other places."""


def can_trace() -> bool:
    """A container may have strace, and may not let it trace."""
    words = [STRACE or "strace", "-qq", "-o", "/dev/null", "true"]
    return STRACE is not None and subprocess.run(words, check=False, capture_output=True).returncode == 0


needs_strace = pytest.mark.skipif(not can_trace(), reason="strace is not installed, or may not trace")


def run(folder: Path, inject: str | None = None) -> int:
    """A run as a process, with faults at its system calls; the exit status."""
    words = [sys.executable, str(SCRIPT), str(folder), str(LINES)]
    if inject is not None:
        assert STRACE is not None
        words = [STRACE, "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", f"inject={inject}", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(words, check=False, env=env, capture_output=True, timeout=300).returncode


def results(folder: Path) -> tuple[str, bytes, bytes]:
    """How the batch ended, and its files of results. Every other file of results is gone."""

    async def read() -> Batch:
        async with site.server() as server:
            await server.store.sweep()
            return await server.store.batch(TENANT, NAME)

    site = Site(folder, f"sqlite://{folder}/state.db")
    batch = asyncio.run(read())
    output, errors = site.results(batch)
    assert site.left() == []
    return batch.status, output, errors


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    assert run(folder) == 0
    found = results(folder)
    assert (found[0], found[1].count(b"\n"), found[2].count(b"\n")) == ("completed", LINES * 3 // 4, LINES // 4)
    return found


def killed_at(folder: Path, calls: str, number: int, expected: object) -> bool:
    """Kill a run at its ``number``-th call, and run it to its end; False: it has fewer calls."""
    status = run(folder, f"{calls}:signal=KILL:when={number}")
    assert status in (0, -signal.SIGKILL)
    was_killed = status != 0
    if was_killed:
        assert run(folder) == 0
    assert results(folder) == expected, f"killed at call {number} of {calls}"
    return was_killed


@pytest.mark.soak
@pytest.mark.timeout(7200)
@needs_strace
def test_a_run_that_is_killed_at_any_system_call_ends_with_the_same_results(
    tmp_path: Path, expected: tuple[str, bytes, bytes]
) -> None:
    count = 0
    for calls in SETS:
        number = 1
        while killed_at(tmp_path / f"{count}", calls, number, expected):
            shutil.rmtree(tmp_path / f"{count}")
            count, number = count + 1, number + 1
        shutil.rmtree(tmp_path / f"{count}")
    assert count >= 300, count


@needs_strace
def test_a_run_that_is_killed_at_a_system_call_goes_on(tmp_path: Path, expected: tuple[str, bytes, bytes]) -> None:
    assert killed_at(tmp_path / "a", "pwrite64", 20, expected)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@needs_strace
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("calls", ["pwrite64", "fsync,fdatasync"])
def test_calls_that_fail_now_and_then_change_no_result(
    tmp_path: Path, expected: tuple[str, bytes, bytes], calls: str, error: str
) -> None:
    for number in range(1, 8):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for _ in range(20):  # a server that cannot start is started again
            if run(folder, f"{calls}:error={error}:when={number}+7") == 0:
                break
        else:
            assert run(folder) == 0
        assert results(folder) == expected


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own; the test is skipped where none can be mounted."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(words, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (65536, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("holds", ["the contents", "everything"])
@in_loop
async def test_a_batch_pauses_while_its_disk_is_full_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: str
) -> None:
    for name, value in (("COMMIT_S", 0.0), ("LOOK_S", 0.01), ("PAUSE_S", 0.05)):
        monkeypatch.setattr(run_module, name, value)
    with small_disk(tmp_path / "disk") as disk:
        folder = tmp_path / "data" if holds == "the contents" else disk / "data"
        folder.mkdir()
        (folder / "jobs").symlink_to(disk / "jobs")
        (disk / "jobs").mkdir()
        site = Site(folder, f"sqlite://{folder}/state.db")
        async with site.server(disk=Disk()) as server, asyncio.timeout(300):
            sender = Echo()
            sender.is_open.clear()
            await site.add(server, lines(400), NAME)
            keeping = asyncio.create_task(Runner(server.store, sender, lambda: False, max_line_bytes=10_000).keep())
            while not sender.at_work:
                await asyncio.sleep(0.01)
            fill(disk / "ballast")
            sender.is_open.set()
            if holds == "the contents":
                while "disk of jobs.folder is full" not in (await seen(server.store)).note:
                    await asyncio.sleep(0.01)
            else:
                await asyncio.sleep(1.0)  # the note cannot be written either
            upload = server.store.folder.upload(server.store.gateway, "file-x")
            with pytest.raises(OSError, match="No space left") as refused:
                upload.write(bytes(1 << 20))
            assert is_full(refused.value)
            upload.abort()
            assert (await seen(server.store)).num_answered < 400
            (disk / "ballast").unlink()
            while not (found := await seen(server.store)).has_ended:
                await asyncio.sleep(0.02)
            keeping.cancel()
        assert (found.status, found.num_done, found.note) == ("completed", 400, "")
        assert max(sender.asked.values()) == 1, "nothing is computed twice"


def test_the_runs_of_this_file_are_whole(tmp_path: Path) -> None:
    found = asyncio.run(whole_run(tmp_path, 3))
    assert (found.status, found.num_done) == ("completed", 3)
