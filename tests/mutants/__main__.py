"""``make mutants``: wrong changes, each against the tests that run it; what no test notices is a gap in the tests.

First the changes of ``known``, which must all be noticed; then a sample, of which ``WANTED`` must be, but for those that
``equivalent`` names. The files of tests nearest to a change are run with it. For a change that they do not notice, other
files are run once without it, to know which test runs what: those near to the change, then those that are further away.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants import trace as tracing
from tests.mutants.equivalent import reason_for
from tests.mutants.hook import pytest_command
from tests.mutants.known import KNOWN, Known
from tests.mutants.operators import Change, applied
from tests.mutants.run import Limits, Outcome, try_change
from tests.mutants.selection import Nearness, likely_tests, sample
from tests.mutants.sources import BUILD, PACKAGE, ROOT, modules, sources, sources_of_tests

WANTED: Final = 0.95
NEAREST: Final = 3  # files of tests that are run with a change as they are
AS_THEY_ARE: Final = Limits(20.0, 75.0)
ROUNDS: Final = 8, 24  # files of tests, the nearest first, of which those are asked about a change that run it
UNTRACED: Final = ("bench", "clients", "experiments", "mutants", "training", "test_setup.py", "test_tutorials.py")
"""Tests that are not asked about changes: they measure, take minutes, or are about other files than the sources."""


class Tried(NamedTuple):
    """A change of the sample, and what became of it. ``outcome`` is None where no test is known to run it."""

    change: Change
    outcome: Outcome | None
    reason: str | None  # why it is equivalent
    num_files: int = 0  # of tests, the nearest first, that were run with it to their end and passed

    @property
    def is_noticed(self) -> bool:
        return self.outcome is not None and self.outcome.fate != "survived"


def main() -> int:
    asked = _arguments().parse_args()
    began = time.monotonic()
    missed = 0
    is_whole = not asked.rooms and asked.part[0] == 1
    with ThreadPoolExecutor(asked.jobs) as pool:
        if is_whole:
            for known, outcome in pool.map(_try_known, range(len(KNOWN))):
                missed += outcome.fate == "survived"
                _say(f"{outcome.fate:<10} known: {known.what}", outcome)
    part, parts = asked.part
    drawn = sample(asked.number, asked.seed, asked.rooms)[part - 1 :: parts] if asked.number else []
    tried = _try_all(drawn, asked.jobs, is_kept=asked.keep_trace)
    return _report(asked.seed, tried, missed, len(KNOWN) if is_whole else 0, time.monotonic() - began)


def _try_all(drawn: list[Change], jobs: int, *, is_kept: bool) -> list[Tried]:
    """Each change against the tests that are near to it, and what they do not notice against others."""
    tried = {change: Tried(change, None, _reason(change)) for change in drawn}
    tests = {file for path in traced() for file in tracing.test_files(path)}
    nearness = Nearness(sources_of_tests(tests), sources())
    ranked = {change: nearness.files(change) for change in drawn}
    left = [change for change, one in tried.items() if one.reason is None]
    with ThreadPoolExecutor(jobs) as pool:
        nearest: Callable[[tuple[int, Change]], Tried] = lambda job: _try_nearest(*job, ranked[job[1]][:NEAREST])  # noqa: E731
        for one in pool.map(nearest, enumerate(left)):
            tried[one.change] = one
            if one.is_noticed:
                _say_tried(one)
    asked = {change: one.num_files for change, one in tried.items()}
    for count in ROUNDS:
        left = [one.change for one in tried.values() if one.reason is None and not one.is_noticed]
        files = {change: ranked[change][asked[change] : count] for change in left}
        trace = _trace(jobs, sorted({file for those in files.values() for file in those}), is_kept=is_kept)
        with ThreadPoolExecutor(jobs) as pool:
            attempt: Callable[[tuple[int, Change]], Tried] = lambda job: _try(*job, trace, files[job[1]])  # noqa: B023, E731
            for one in pool.map(attempt, enumerate(left)):
                if one.outcome is not None:
                    tried[one.change] = one
                _say_tried(one)
        asked, is_kept = dict.fromkeys(left, count), True
    return [*tried.values()]


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--number", type=int, default=60, help="how many changes are drawn; 0: the known ones alone")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other changes")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at once")
    parser.add_argument("--rooms", nargs="*", default=(), help="draw from these rooms alone: router predict")
    parser.add_argument("--keep-trace", action="store_true", help="use the last trace, though files have changed since")
    parser.add_argument("--part", type=_part, default=(1, 1), help="2/4: the second quarter of what is drawn")
    return parser


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write it as 2/4")
    return int(part), int(parts)


def _trace(jobs: int, files: list[str], *, is_kept: bool) -> tracing.Trace:
    """Which test of the files runs what: of all files as they are, or of those that were kept before they changed."""
    digest = hashlib.sha256()
    for path in sorted([*(PACKAGE / file for file in modules()), *(ROOT / "tests").rglob("*.py")]):
        digest.update(path.read_bytes())
    stamp = tracing.KEPT / "of"
    if not (is_kept or (stamp.is_file() and stamp.read_text() == digest.hexdigest())):
        shutil.rmtree(tracing.KEPT, ignore_errors=True)
    missing = [file for file in files if not tracing.kept(file).is_file()]
    if missing:
        print(f"running {len(missing)} files of tests once, to see which test runs what", flush=True)
        tracing.record(jobs, missing)
    if not is_kept:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(digest.hexdigest())
    return tracing.read(are_there=_collected(files) if is_kept and files else None)


def traced() -> list[str]:
    """The folders and files of tests that are asked about changes."""
    found = []
    for path in sorted((ROOT / "tests").iterdir()):
        is_of_tests = path.is_dir() and any(path.rglob("test_*.py"))
        if (is_of_tests or path.match("test_*.py")) and path.name not in UNTRACED:
            found.append(f"tests/{path.name}")
    return found


def _collected(files: list[str]) -> set[str]:
    """The tests of the files that there are now."""
    said = subprocess.run(
        pytest_command("--collect-only", *files), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {line for line in said.stdout.splitlines() if "::" in line}


def _try_known(number: int) -> tuple[Known, Outcome]:
    known = KNOWN[number]
    source = (PACKAGE / known.file).read_text("utf-8")
    if source.count(known.text) != 1:
        sys.exit(f"{known.file}: the text of the known change {known.what!r} is not found once; move it in known.py.")
    text = source.replace(known.text, known.replacement)
    return known, try_change(f"known{number}", known.file, text, known.tests, Limits(90.0, 300.0))


def _reason(change: Change) -> str | None:
    return reason_for(change, (PACKAGE / change.file).read_text("utf-8"))


def _try_nearest(number: int, change: Change, files: list[str]) -> Tried:
    """Noticed is what fails twice with the change and passes without it, within the limits; else it is not known yet.
    Files that passed to their end are not run again to see whether they run the change."""
    source = (PACKAGE / change.file).read_text("utf-8")

    def outcome(text: str, tests: Sequence[str]) -> Outcome:
        return try_change(f"{number}", change.file, text, tests, AS_THEY_ARE)

    found = outcome(applied(change, source), files)
    if found.by.startswith("tests/"):
        whole = found.by.partition("[")[0]  # with all its parameters
        if outcome(source, [whole]).fate == "survived" and outcome(applied(change, source), [whole]).fate != "survived":
            return Tried(change, found, None)
    return Tried(change, None, None, len(files) if found.fate == "survived" else 0)


def _try(number: int, change: Change, trace: tracing.Trace, files: list[str]) -> Tried:
    source = (PACKAGE / change.file).read_text("utf-8")
    outcome = None
    for tests in likely_tests(change, trace, files):
        if tests:
            seconds = [trace.seconds[test] for test in tests]
            limits = Limits(max(20.0, 6.0 * max(seconds)), 60.0 + 8.0 * sum(seconds))
            outcome = _noticed(f"{number}", change.file, applied(change, source), tests, limits)
            if outcome.fate != "survived":
                break
    return Tried(change, outcome, None)


def _noticed(name: str, file: str, text: str, tests: Sequence[str], limits: Limits) -> Outcome:
    """As ``try_change``. A test that passes when it is asked again has failed by chance, and the others are asked."""
    left = list(tests)
    while True:
        outcome = try_change(name, file, text, left, limits)
        if outcome.fate == "survived" or outcome.by not in left:
            return outcome
        again = try_change(name, file, text, [outcome.by], limits)
        if again.fate != "survived":
            return outcome
        left.remove(outcome.by)
        if not left:
            return again


def _say_tried(one: Tried) -> None:
    fate = "not run" if one.outcome is None else one.outcome.fate
    _say(f"{fate:<10} {one.change.file}:{one.change.line} {one.change.what}", one.outcome)


def _say(what: str, outcome: Outcome | None) -> None:
    by = "" if outcome is None or not outcome.by else f"  by {outcome.by}"
    print(what + by, flush=True)


def _report(seed: int, tried: list[Tried], missed: int, num_known: int, seconds: float) -> int:
    equivalent = [one for one in tried if one.reason is not None]
    noticed = [one for one in tried if one.is_noticed]
    survived = [one for one in tried if one.reason is None and not one.is_noticed]
    lines = [line for one in survived for line in _shown(one)]
    effective = len(noticed) + len(survived)
    lines += [
        "",
        f"known: {missed} of {num_known} not noticed",
        f"sample of seed {seed}: {len(tried)} drawn, {len(equivalent)} equivalent, {len(noticed)} noticed "
        f"({sum(one.outcome is not None and one.outcome.fate == 'timed out' for one in noticed)} by a time-out), "
        f"{len(survived)} not ({sum(one.outcome is None for one in survived)} of them run by no traced test)"
        + (f": {len(noticed) / effective:.1%}" if effective else ""),
        f"{seconds / 60:.1f} minutes",
    ]
    (BUILD / "report").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    is_good = not missed and (not effective or len(noticed) / effective >= WANTED)
    return 0 if is_good else 1


def _shown(one: Tried) -> Iterable[str]:
    source = (PACKAGE / one.change.file).read_text("utf-8")
    yield ""
    asked = "run by no traced test" if one.outcome is None else f"{one.outcome.num_tests} tests were asked last"
    yield f"survived: {one.change.what} ({one.change.block}; {asked})"
    place = (Path("src/inferd") / one.change.file).as_posix()
    yield from difflib.unified_diff(
        source.splitlines(), applied(one.change, source).splitlines(), place, place, n=2, lineterm=""
    )


if __name__ == "__main__":
    sys.exit(main())
