"""The clocks, on a machine that was asleep."""

from __future__ import annotations

import time

import pytest

from inferd import clock


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts sleep")
def test_the_time_since_boot_counts_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep_s, read = 3600.0, time.clock_gettime
    before = clock.since_boot()
    monkeypatch.setattr(
        time, "clock_gettime", lambda which: read(which) + (asleep_s if which == time.CLOCK_BOOTTIME else 0.0)
    )
    assert asleep_s <= clock.since_boot() - before < asleep_s + 600
