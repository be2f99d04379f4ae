"""The stopwatch of promises in seconds: waiting counts, a crowded machine does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests import stopwatch
from tests.stopwatch import Stopwatch


def test_what_is_waited_counts_but_for_the_time_in_which_processors_were_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressure, now = tmp_path / "cpu", 100.0
    monkeypatch.setattr(stopwatch, "_PRESSURE", pressure)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pressure.write_text("some avg10=98.93 avg60=97.87 avg300=82.50 total=5000000\nfull avg10=0.00 total=7\n")
    watch = Stopwatch()
    now += 3.0
    assert watch.seconds == 3.0
    pressure.write_text("some avg10=98.93 avg60=97.87 avg300=82.50 total=7500000\nfull avg10=0.00 total=7\n")
    assert watch.seconds == 0.5
    assert (watch.is_past(0.4), watch.is_past(0.6)) == (True, False)
    now += 100.0
    pressure.write_text("some avg10=98.93 avg60=97.87 avg300=82.50 total=107500000\n")
    assert watch.seconds == 0.5
    assert watch.is_past(0.6), "a wait has an end, however crowded the machine is"
    pressure.unlink()
    assert Stopwatch().seconds == 0.0
