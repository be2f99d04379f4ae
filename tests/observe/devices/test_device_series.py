"""Devices and energy on the page of metrics."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.observe.test_observer import ended
from tests.worker.watching import until_now

from inferd.config import Config, DevicesConfig, ModelConfig
from inferd.events import QueueChanged, StepDone
from inferd.observe import Observer
from inferd.observe.devices import Devices
from inferd.types import StepStats, Usage

GPU: dict[str, Any] = {
    "device": "gpu0",
    "place": "cpu",
    "duty": 0.8,
    "power_w": 200,
    "temperature_c": 61,
    "memory_used_bytes": 6e10,
    "memory_total_bytes": 8e10,
    "throttled": {"thermal": 1.0},
    "errors": {"uncorrected": 3},
}


def write(file: Path, **script: Any) -> Path:
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(script))
    beside.replace(file)
    return file


@contextmanager
def observing(file: Path, **prices: Any) -> Iterator[Observer]:
    config = Config(
        devices=DevicesConfig(simulated=str(file), interval_s=0.05, **prices),
        models={"tiny": ModelConfig(source="tiny", device="cpu")},
    )
    devices = Devices(config.devices)
    devices.configure(config)
    observer = Observer(models=["tiny"], devices=devices, aliases=["triton"], stream=io.StringIO())
    devices.start()
    try:
        yield observer
    finally:
        devices.stop()
        observer.close()


def is_shown(observer: Observer, series: str) -> bool:
    return bool(value(observer, series))


def value(observer: Observer, series: str) -> float | None:
    for line in observer.render_metrics().decode().splitlines():
        if line.startswith(f"{series} "):
            return float(line.split()[-1])
    return None


def test_a_device_has_the_series_that_it_tells_and_no_others(tmp_path: Path) -> None:
    sensor = {"device": "board temp1", "kind": "sensor", "temperature_c": 30}
    with observing(write(tmp_path / "d.json", devices=[GPU, sensor])) as observer:
        until_now(lambda: is_shown(observer, 'inferd_device_duty_cycle{device="gpu0",kind="gpu"}'), "it was read", 10)
        page = observer.render_metrics().decode()
        lines = set(page.splitlines())
    assert {
        'inferd_device_info{device="gpu0",kind="gpu",name="simulated",uuid="SIM-gpu0"} 1',
        'inferd_device_duty_cycle{device="gpu0",kind="gpu"} 0.8',
        'inferd_device_memory_used_bytes{device="gpu0",kind="gpu"} 60000000000',
        'inferd_device_temperature_celsius{device="gpu0",kind="gpu"} 61',
        'inferd_device_temperature_celsius{device="board temp1",kind="sensor"} 30',
        'inferd_device_power_watts{device="gpu0",kind="gpu"} 200',
        'inferd_gpu_duty_cycle{gpu="0",uuid="SIM-gpu0"} 0.8',
        'nv_gpu_utilization{gpu="0",gpu_uuid="SIM-gpu0"} 0.8',
        'inferd_device_errors_total{device="gpu0",error="uncorrected",kind="gpu"} 0',
        'inferd_device_read_failures_total{source="simulated"} 0',
    } <= lines
    of_sensor = [line.partition("{")[0] for line in lines if 'device="board temp1"' in line]
    assert sorted(of_sensor) == ["inferd_device_info", "inferd_device_temperature_celsius"], "absent, not 0"


def test_a_device_that_vanishes_has_no_series_and_its_counters_go_on_when_it_is_back(tmp_path: Path) -> None:
    series = 'inferd_device_energy_joules_total{device="gpu0",kind="gpu"}'
    file = write(tmp_path / "d.json", devices=[GPU])
    with observing(file) as observer:
        until_now(lambda: (value(observer, series) or 0) > 10, "it has used energy", 10)
        before = value(observer, series) or 0
        write(file, devices=[])
        until_now(lambda: 'device="gpu0"' not in observer.render_metrics().decode(), "it is gone", 10)
        write(file, devices=[GPU, {"device": "new"}])
        until_now(lambda: (value(observer, series) or 0) > before, "it goes on", 10)
        assert (value(observer, series) or 0) < before + 200 * 10, "and does not begin at the sum again"
        write(file, fails=True)
        failures = 'inferd_device_read_failures_total{source="simulated"}'
        until_now(lambda: (value(observer, failures) or 0) >= 2, "failures are counted", 10)


def test_throttling_and_errors_are_counted_from_the_start_of_the_server(tmp_path: Path) -> None:
    labels = '{device="gpu0",kind="gpu",reason="thermal"}'
    file = write(tmp_path / "d.json", devices=[GPU])
    with observing(file) as observer:
        until_now(lambda: is_shown(observer, f"inferd_device_throttled_seconds_total{labels}"), "it is throttled", 10)
        write(file, devices=[{**GPU, "errors": {"uncorrected": 5}}])
        errors = 'inferd_device_errors_total{device="gpu0",error="uncorrected",kind="gpu"}'
        until_now(lambda: value(observer, errors) == 2.0, "there are two more", 10)


def test_energy_and_cost_of_a_model_are_counted_where_they_are_measured(tmp_path: Path) -> None:
    energy = 'inferd_model_energy_joules_total{model="tiny"}'
    with observing(write(tmp_path / "d.json", devices=[GPU]), price_per_kwh=0.3, currency="CHF") as observer:
        until_now(lambda: is_shown(observer, 'inferd_device_power_watts{device="gpu0",kind="gpu"}'), "it was read", 10)
        assert value(observer, energy) is None
        for _ in range(20):
            observer.emit(QueueChanged(model="tiny", waiting=0, in_flight=1))
            observer.emit(
                StepDone(
                    model="tiny",
                    replica=0,
                    stats=StepStats(step_s=0.02, step_sequences=1, step_tokens=5, num_running=1),
                )
            )
        observer.emit(ended(model="tiny", tenant="blue", usage=Usage(prompt_tokens=60, completion_tokens=40)))
        until_now(lambda: is_shown(observer, energy), "energy was attributed", 10)
        assert value(observer, 'inferd_model_device_seconds_total{model="tiny"}') == pytest.approx(0.4)
        cost = value(observer, 'inferd_model_cost_total{currency="CHF",model="tiny"}')
        assert cost == pytest.approx((value(observer, energy) or 0) / 3.6e6 * 0.3)


def test_without_devices_there_are_no_series_of_them() -> None:
    observer = Observer(models=["tiny"], aliases=["triton"], stream=io.StringIO())
    page = observer.render_metrics().decode()
    observer.close()
    assert [line for line in page.splitlines() if line.startswith(("inferd_device_", "inferd_gpu_", "nv_gpu"))] == []
