"""Which test runs which block: files of tests run once, with a mark at the beginning of every block.

The marks are bytes of a file that the test's process maps, and every process that it starts: what a worker runs counts for
the test that runs meanwhile, and a process that is killed loses nothing. What was seen is kept for each file of tests.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from tests.mutants.hook import pytest_command, write_hook
from tests.mutants.sources import BUILD, PACKAGE, ROOT, bodies, modules

KEPT: Final = BUILD / "trace"

MAPPED: Final = """import builtins as _b
import mmap as _m
with open({path!r}, "r+b") as _f:
    _b.__inferd_blocks__ = _m.mmap(_f.fileno(), 0)
"""


class Seen(NamedTuple):
    """What the tests of one file ran: their node ids, and ``hits[test, column of the block]``."""

    tests: list[str]
    columns: dict[str, int]
    hits: NDArray[np.bool_]


class Trace:
    """``seen``: by the file of tests. ``seconds``: of each test."""

    def __init__(self, seen: dict[str, Seen], seconds: dict[str, float]) -> None:
        self.seen = seen
        self.seconds = seconds

    def tests_of(self, block: str, files: Iterable[str]) -> list[str]:
        """Those tests of the files that ran the block; all that ran its module where the block was not there then."""
        module = block.partition(":")[0] + ":"
        found: list[str] = []
        for seen in (self.seen[file] for file in files if file in self.seen):
            if block in seen.columns:
                columns = [seen.columns[block]]
            else:
                columns = [column for name, column in seen.columns.items() if name.startswith(module)]
            found += [seen.tests[row] for row in np.flatnonzero(seen.hits[:, columns].any(axis=1))]
        return found


def record(jobs: int, files: Sequence[str]) -> None:
    """Run the files of tests, in as many processes at once, and keep what was seen."""
    names: list[str] = []
    changed = {file: marked(file, names) for file in modules()}
    blocks = json.dumps(names).encode()
    KEPT.mkdir(parents=True, exist_ok=True)
    names_of = f"{hashlib.sha256(blocks).hexdigest()[:16]}.names"
    (KEPT / names_of).write_bytes(blocks)
    runs = []
    for job in range(min(jobs, len(files))):
        folder = KEPT / f"job{job}"
        marks = folder / "marks"
        folder.mkdir(parents=True, exist_ok=True)
        marks.write_bytes(bytes(len(names)))
        env = write_hook(folder, changed, MAPPED.format(path=str(marks)))
        env |= {"INFERD_MUTANTS_SEEN": str(KEPT), "INFERD_MUTANTS_NAMES": names_of}
        command = pytest_command("-p", "tests.mutants.recording", *files[job::jobs])
        with (folder / "log").open("w") as log:
            runs.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log))
    codes = [run.wait() for run in runs]
    if any(code not in (0, 1, 5) for code in codes):
        sys.exit(f"The tests could not be run (exit codes {codes}); see {KEPT}/job*/log.")
    for file in files:
        if not kept(file).is_file():  # none of its tests is run here
            kept(file).write_text(json.dumps({"file": file, "names": names_of, "tests": {}}))
            kept(file).with_suffix(".hits").write_bytes(b"")


def kept(file: str) -> Path:
    """Where it is kept what the tests of a file ran."""
    return KEPT / f"{hashlib.sha256(file.encode()).hexdigest()[:16]}.seen"


def read(are_there: Collection[str] | None = None) -> Trace:
    """What is kept; of these tests alone, if they are named."""
    names: dict[str, dict[str, int]] = {}
    seen: dict[str, Seen] = {}
    seconds: dict[str, float] = {}
    for place in sorted(KEPT.glob("*.seen")):
        told = msgspec.json.decode(place.read_bytes(), type=_Kept)
        if told.names not in names:
            listed: list[str] = msgspec.json.decode((KEPT / told.names).read_bytes(), type=list[str])
            names[told.names] = {name: number for number, name in enumerate(listed)}
        columns = names[told.names]
        rows = np.frombuffer(place.with_suffix(".hits").read_bytes(), np.uint8).reshape(-1, (len(columns) + 7) // 8)
        hits = np.unpackbits(rows, axis=1, count=len(columns)).astype(np.bool_)
        is_there = [are_there is None or test in are_there for test in told.tests]
        tests = [test for test, there in zip(told.tests, is_there, strict=True) if there]
        seen[told.file] = Seen(tests, columns, hits[is_there])
        seconds |= told.tests
    return Trace(seen, seconds)


class _Kept(msgspec.Struct):
    """``names``: the file that lists the blocks. ``tests``: with how long each took."""

    file: str
    names: str
    tests: dict[str, float]


def test_files(path: str) -> list[str]:
    """The files of tests in a folder, or the file itself, relative to the repository."""
    place = ROOT / path
    files = [place] if place.is_file() else place.rglob("test_*.py")
    return [file.relative_to(ROOT).as_posix() for file in files]


def marked(file: str, names: list[str]) -> str:
    """A module's text with a mark at the beginning of each block, numbered on from ``names``."""
    tree = ast.parse((PACKAGE / file).read_text("utf-8"))
    for name, statements in list(bodies(tree, file)):
        at = 1 if name.endswith(":0") and _is_text(statements[0]) else 0
        mark = ast.parse(f"__inferd_blocks__[{len(names)}] = 1").body[0]
        after = statements[min(at, len(statements) - 1)]
        for node in ast.walk(mark):
            ast.copy_location(node, after)
        statements.insert(at, mark)
        names.append(name)
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
