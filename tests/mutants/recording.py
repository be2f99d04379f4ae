"""The plugin of pytest that keeps, after each test, which blocks it ran. Processes of ``tests.mutants.trace`` alone load it."""

from __future__ import annotations

import builtins
import json
import mmap
import os
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

_blocks: mmap.mmap = vars(builtins)["__inferd_blocks__"]
_empty = bytes(len(_blocks))
_seen = Path(os.environ["INFERD_MUTANTS_SEEN"])
_tests: dict[str, float] = {}
_failed: set[str] = set()
_rows: dict[str, bytes] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _blocks[:] = _empty
    _tests[item.nodeid] = 0.0
    result = yield
    row = np.packbits(np.frombuffer(_blocks[:], np.uint8))
    if item.nodeid in _failed or not _tests[item.nodeid]:
        del _tests[item.nodeid]  # failed or skipped: it can show nothing
        _rows.pop(item.nodeid, None)
    else:  # some tests are several under one name
        before = np.frombuffer(_rows.get(item.nodeid, bytes(len(row))), np.uint8)
        _rows[item.nodeid] = (row | before).tobytes()
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)
    elif report.when == "call" and report.passed:
        _tests[report.nodeid] = max(report.duration, 0.001)


def pytest_sessionfinish() -> None:
    kept = {test: seconds for test, seconds in _tests.items() if seconds}  # a test that was interrupted took none
    _seen.write_bytes(b"".join(_rows[test] for test in kept))
    _seen.with_suffix(".tests").write_text(json.dumps(kept))
