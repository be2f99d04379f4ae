"""Which test runs which block: the whole suite once, with a mark at the beginning of every block.

The marks are bytes of a file that the test's process maps, and every process that it starts: what a worker runs counts for
the test that runs meanwhile, and a process that is killed loses nothing.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

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


class Trace:
    """``names``: of blocks. ``tests``: their node ids, with how long each took. ``hits[test, block]``."""

    def __init__(self, names: list[str], tests: dict[str, float], hits: NDArray[np.bool_]) -> None:
        self.tests = list(tests)
        self.seconds = tests
        self._columns = {name: number for number, name in enumerate(names)}
        self._hits = hits

    def tests_of(self, block: str) -> list[str] | None:
        """Those that ran it; None where the block was not there when it was traced."""
        column = self._columns.get(block)
        if column is None:
            return None
        return [self.tests[row] for row in np.flatnonzero(self._hits[:, column])]

    def tests_of_file(self, file: str) -> list[str]:
        """Those that ran anything of a module."""
        columns = [number for name, number in self._columns.items() if name.startswith(f"{file}:")]
        return [self.tests[row] for row in np.flatnonzero(self._hits[:, columns].any(axis=1))]


def record(jobs: int, paths: list[str]) -> None:
    """Run the suite, in as many processes at once, and keep what was seen."""
    names: list[str] = []
    changed = {file: marked(file, names) for file in modules()}
    files = sorted(file for path in paths for file in _test_files(ROOT / path))
    runs = []
    for job in range(jobs):
        folder = KEPT / f"job{job}"
        marks = folder / "marks"
        folder.mkdir(parents=True, exist_ok=True)
        marks.write_bytes(bytes(len(names)))
        env = write_hook(folder, changed, MAPPED.format(path=str(marks)))
        env["INFERD_MUTANTS_SEEN"] = str(folder / "seen")
        command = pytest_command("-p", "tests.mutants.recording", *files[job::jobs])
        with (folder / "log").open("w") as log:
            runs.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log))
    codes = [run.wait() for run in runs]
    if any(code not in (0, 1) for code in codes):
        sys.exit(f"The suite could not be run (exit codes {codes}); see {KEPT}/job*/log.")
    (KEPT / "names.json").write_text(json.dumps(names))


def read(are_there: Collection[str] | None = None) -> Trace:
    """What was kept; of these tests alone, if they are named. Raises FileNotFoundError where nothing was."""
    names: list[str] = msgspec.json.decode((KEPT / "names.json").read_bytes(), type=list[str])
    tests: dict[str, float] = {}
    rows: list[NDArray[np.uint8]] = []
    for seen in sorted(KEPT.glob("job*/seen")):
        found: dict[str, float] = msgspec.json.decode(seen.with_suffix(".tests").read_bytes(), type=dict[str, float])
        tests |= found
        rows.append(np.frombuffer(seen.read_bytes(), np.uint8).reshape(len(found), -1))
    hits = np.unpackbits(np.concatenate(rows), axis=1, count=len(names)).astype(np.bool_)
    if are_there is not None:
        kept = [test in are_there for test in tests]
        tests = {test: seconds for test, seconds in tests.items() if test in are_there}
        hits = hits[kept]
    return Trace(names, tests, hits)


def _test_files(path: Path) -> list[str]:
    files = [path] if path.is_file() else path.rglob("test_*.py")
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
