"""Devices that a file simulates."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import ConfigError
from inferd.observe.devices.simulated import Simulated, integral, script_of, value_at


def script(file: Path, *devices: dict[str, Any], at: int = 0, **options: Any) -> Path:
    """``at``: the time of the change, in nanoseconds, which tells two versions apart."""
    file.write_text(json.dumps({"devices": devices, **options}))
    os.utime(file, ns=(at, at))
    return file


def test_a_device_tells_what_its_file_says_over_time(tmp_path: Path) -> None:
    file = script(
        tmp_path / "devices.json",
        {
            "device": "a",
            "place": "cpu",
            "duty": [[0, 0.2], [15, 0.8]],
            "power_w": [[0, 100], [10, 300]],
            "temperature_c": 60,
            "memory_used_bytes": 6e10,
            "memory_total_bytes": 8e10,
            "throttled": {"thermal": [[0, 0], [15, 0.5]]},
            "errors": {"uncorrected": [[0, 0], [20, 1]]},
        },
        {"device": "b", "kind": "sensor", "temperature_c": 30},
    )
    source = Simulated(file)
    (first, sensor) = source.read(1000.0)
    assert (first.duty, first.power_w, first.energy_j, first.index) == (0.2, 100.0, 0.0, 0)
    assert (sensor.temperature_c, sensor.power_w, sensor.energy_j, sensor.duty, sensor.index) == (
        30,
        None,
        None,
        None,
        None,
    )
    (second, _) = source.read(1020.0)
    assert (second.power_w, second.energy_j) == (300.0, 10 * 100 + 10 * 300)
    assert second.duty == pytest.approx((15 * 0.2 + 5 * 0.8) / 20)
    assert (second.throttled_s, second.errors) == ({"thermal": 2.5}, {"uncorrected": 1})


def test_a_changed_file_begins_at_its_first_value_and_counters_go_on(tmp_path: Path) -> None:
    file = script(tmp_path / "devices.json", {"device": "a", "power_w": 100})
    source = Simulated(file)
    source.read(0.0)
    script(file, {"device": "a", "power_w": [[0, 10], [5, 20]]}, at=1)
    (then,) = source.read(10.0)
    assert (then.energy_j, then.power_w) == (1000.0, 10.0)
    (last,) = source.read(20.0)
    assert last.energy_j == 1000 + 5 * 10 + 5 * 20


def test_a_file_may_say_that_reading_fails(tmp_path: Path) -> None:
    source = Simulated(script(tmp_path / "devices.json", fails=True))
    with pytest.raises(OSError, match="says that reading fails"):
        source.read(0.0)


@pytest.mark.parametrize("text", ["", "[]", '{"devices": [{"device": "a", "watts": 3}]}', '{"devices": [{}]}'])
def test_a_file_that_is_none_is_named_with_the_remedy(tmp_path: Path, text: str) -> None:
    file = tmp_path / "devices.json"
    file.write_text(text)
    with pytest.raises(
        ConfigError, match=r"devices\.simulated: .*devices\.json is no file of simulated devices"
    ) as error:
        script_of(file)
    assert "docs/devices.md" in error.value.message


Pairs = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 500)), min_size=1, max_size=6).map(sorted)


@given(Pairs, st.lists(st.floats(0, 200), min_size=2, max_size=8).map(sorted))
def test_the_integral_of_parts_is_that_of_the_whole(pairs: list[tuple[float, float]], at: list[float]) -> None:
    parts = sum(integral(pairs, begin, end) for begin, end in itertools.pairwise(at))
    assert parts == pytest.approx(integral(pairs, at[0], at[-1]), abs=1e-6)
    values = [value for _, value in pairs]
    assert min(values) <= value_at(pairs, at[0]) <= max(values)
