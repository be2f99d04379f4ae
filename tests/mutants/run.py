"""One wrong change against the tests that could notice it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tests.mutants.hook import pytest_command, write_hook
from tests.mutants.sources import BUILD, ROOT

Fate = Literal["killed", "timed out", "survived"]


class Outcome(NamedTuple):
    """What became of a change, and the first test that noticed it."""

    fate: Fate
    by: str
    seconds: float
    num_tests: int


class Limits(NamedTuple):
    """Seconds after which a test, or all of them together with pytest's start, hang: that is noticed as well."""

    test: float
    whole: float


def try_change(name: str, file: str, text: str, tests: Sequence[str], limits: Limits) -> Outcome:
    """Run the tests with another text for one module, until the first fails."""
    folder = BUILD / "changes" / name
    shutil.rmtree(folder, ignore_errors=True)
    env = write_hook(folder, {file: text})
    command = pytest_command("-x", f"--timeout={limits.test:.0f}", f"--basetemp={folder / 'temporary'}", *tests)
    began = time.monotonic()
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            code = run.wait(timeout=limits.whole)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            _end(run)
    seconds = time.monotonic() - began
    said = _read(folder / "log")
    failed = failed_tests(said)
    shutil.rmtree(folder / "temporary", ignore_errors=True)
    is_of_files = not any("::" in test for test in tests)
    if code == 0 or (code == 5 and is_of_files):  # 5: all tests of the files are for another tier
        return Outcome("survived", "", seconds, len(tests))
    if code == 5 or any("not found: " in line for line in said):
        raise RuntimeError(f"tests that were traced are not there any more; trace again ({folder / 'log'})")
    is_hang = code == -1 or any("Failed: Timeout (>" in line for line in said)
    by = failed[0] if failed else "no end" if is_hang else f"exit code {code}"
    return Outcome("timed out" if is_hang else "killed", by, seconds, len(tests))


def failed_tests(said: Sequence[str]) -> list[str]:
    """The node ids in the lines of pytest's summary. An id may have spaces; a reason follows it."""
    lines = [line for line in said if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return [line.partition(" ")[2].partition(" - ")[0] for line in lines]


def _end(run: subprocess.Popen[bytes]) -> None:
    """The processes that it started are in its session, or end with their parents."""
    try:
        run.send_signal(signal.SIGKILL)
    finally:
        run.wait()


def _read(path: Path) -> list[str]:
    return path.read_text("utf-8", errors="replace").splitlines()
