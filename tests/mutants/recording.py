"""The plugin of pytest that keeps, after each file of tests, which blocks each of its tests ran. Processes of
``tests.mutants.trace`` alone load it."""

from __future__ import annotations

import builtins
import json
import mmap
import os
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from tests.mutants import trace

_blocks: mmap.mmap = vars(builtins)["__inferd_blocks__"]
_empty = bytes(len(_blocks))
_tests: dict[str, float] = {}
_failed: set[str] = set()
_rows: dict[str, bytes] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    _blocks[:] = _empty
    _tests.setdefault(item.nodeid, 0.0)
    result = yield
    row = np.packbits(np.frombuffer(_blocks[:], np.uint8))
    if item.nodeid in _failed or not _tests[item.nodeid]:
        del _tests[item.nodeid]  # failed or skipped: it can show nothing
        _rows.pop(item.nodeid, None)
    else:  # some tests are several under one name
        before = np.frombuffer(_rows.get(item.nodeid, bytes(len(row))), np.uint8)
        _rows[item.nodeid] = (row | before).tobytes()
    file = _file_of(item.nodeid)
    if nextitem is None or _file_of(nextitem.nodeid) != file:
        _keep(file)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)
    elif report.when == "call" and report.passed:
        _tests[report.nodeid] = max(report.duration, 0.001)


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _keep(file: str) -> None:
    tests = {test: seconds for test, seconds in _tests.items() if _file_of(test) == file}
    place = Path(os.environ["INFERD_MUTANTS_SEEN"], trace.kept(file).name)
    place.with_suffix(".hits").write_bytes(b"".join(_rows[test] for test in tests))
    place.write_text(json.dumps({"file": file, "names": os.environ["INFERD_MUTANTS_NAMES"], "tests": tests}))
