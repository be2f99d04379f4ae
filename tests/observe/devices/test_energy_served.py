"""A real server with a simulated device: the energy of each model, against what the device drew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.observe.devices.test_device_series import write
from tests.server_process import Server, running
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

IDLE_W, PACE_S = 50.0, 0.1
LABELS = 'device="gpu0",kind="gpu"'


def devices(power_w: float) -> list[dict[str, Any]]:
    """The device that computes, and one whose joules are the seconds between its readings."""
    return [
        {"device": "clock", "kind": "sensor", "power_w": 1},
        {"device": "gpu0", "place": "cpu", "power_w": power_w, "duty": 0.5, "temperature_c": 60},
    ]


def page(server: Server) -> dict[str, float]:
    """The values of ``/metrics``."""
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


class Account:
    """What the page says when so many ``tokens`` of each model were generated and all energy is attributed."""

    def __init__(self, server: Server, tokens: dict[str, int]) -> None:
        self.tokens = tokens
        self._readings: list[float] = []  # their times, since those tokens are known
        until_now(lambda: self._is_settled(server), "all energy is attributed", 60)

    def _is_settled(self, server: Server) -> bool:
        shown = page(server)
        self.clock_s = shown.get('inferd_device_energy_joules_total{device="clock",kind="sensor"}', 0.0)
        self.total_j = shown.get(f"inferd_device_energy_joules_total{{{LABELS}}}", 0.0)
        self.idle_j = shown.get(f"inferd_device_idle_energy_joules_total{{{LABELS}}}", 0.0)
        self.model_j = {one: shown.get(f'inferd_model_energy_joules_total{{model="{one}"}}', 0.0) for one in "ab"}
        self.model_s = {one: shown.get(f'inferd_model_device_seconds_total{{model="{one}"}}', 0.0) for one in "ab"}
        tokens = {one: shown.get(f'inferd_generation_tokens_total{{model="{one}",replica="0"}}', 0.0) for one in "ab"}
        if tokens == self.tokens and self.clock_s not in self._readings:
            self._readings.append(self.clock_s)
        spread_j = self.idle_j + sum(self.model_j.values())
        # Two more readings: the first one may have begun before the last step was known.
        return len(self._readings) > 2 and self.total_j > 0 and spread_j == pytest.approx(self.total_j, rel=1e-9)


def compute(server: Server, model: str, power_w: float, file: Path) -> int:
    """The tokens of a request of steady steps; the device draws ``power_w`` for a part of it, else ``IDLE_W``."""
    shown_w = f"inferd_device_power_watts{{{LABELS}}}"
    drawn_j = f"inferd_device_energy_joules_total{{{LABELS}}}"
    end = file.with_name(f"end-of-{model}")
    body = {"model": model, "prompt": f"pace={PACE_S} end={end}", "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line)
        received = [next(lines)]
        write(file, devices=devices(power_w))
        until_now(lambda: page(server)[shown_w] == power_w, "the device draws more", 60)
        before_j = page(server)[drawn_j]
        until_now(lambda: page(server)[drawn_j] > before_j + 1.5 * power_w, "it has done so for a while", 60)
        write(file, devices=devices(IDLE_W))
        until_now(lambda: page(server)[shown_w] == IDLE_W, "the device draws less", 60)
        end.touch()
        received += lines
    assert received.pop() == "data: [DONE]"
    return sum(len(json.loads(line.removeprefix("data: "))["choices"][0]["text"]) for line in received)


def usage(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of the ledger."""
    env = {**os.environ, "INFERD_STATE__DATA_DIR": str(folder / "data")}
    command = [sys.executable, "-m", "inferd", "keys", "usage", "--json", *options]
    found: list[dict[str, Any]] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env).stdout
    )
    return found


def status(server: Server, folder: Path, *options: str) -> str:
    """What ``inferd status`` prints: its own socket shows everything."""
    command = [sys.executable, "-m", "inferd", "status", "--port", str(server.port), *options]
    env = {**os.environ, "INFERD_STATE__DATA_DIR": str(folder / "data"), "COLUMNS": "200"}
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


@THOROUGH
def test_each_model_gets_the_energy_that_the_device_drew_for_it(tmp_path: Path) -> None:
    """The device draws more only while the model computes. So what it drew is the model's, without the time between
    steps at the power of an idle device. Both are read from the device, and do not depend on when it is read."""
    file = write(tmp_path / "devices.json", devices=devices(IDLE_W))
    config = {
        "server": {"port": 0},
        "devices": {"simulated": str(file), "interval_s": 0.1, "price_per_kwh": 0.3, "currency": "CHF"},
        "models": {name: {"source": "tiny", "device": "cpu"} for name in ("a", "b")},
    }
    (tmp_path / "inferd.yaml").write_text(json.dumps(config))
    with running(file=tmp_path / "inferd.yaml", data_dir=tmp_path / "data") as server:
        tokens = {"a": 0, "b": 0}
        accounts = [Account(server, tokens)]
        for model, power_w in (("a", 300.0), ("b", 500.0)):
            tokens = {**tokens, model: compute(server, model, power_w, file)}
            accounts.append(Account(server, tokens))
        report = json.loads(status(server, tmp_path, "--json"))["energy"]
        shown = status(server, tmp_path)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0
    ledger = usage(tmp_path, "--by", "tenant,model")
    for model, before, after in zip("ab", accounts[:-1], accounts[1:], strict=True):
        idle_s = after.clock_s - before.clock_s - (after.model_s[model] - before.model_s[model])
        drawn_j = after.total_j - before.total_j - idle_s * IDLE_W
        assert after.model_j[model] - before.model_j[model] == pytest.approx(drawn_j, rel=0.05)
        assert after.model_s[model] >= PACE_S * tokens[model] > 1, "steps last at least their pace"
    first, last = accounts[1:]
    assert first.model_j["b"] == 0.0
    assert last.model_j["a"] == first.model_j["a"]
    assert report["currency"] == "CHF"
    assert [one["name"] for one in report["models"]] == ["a", "b"]
    for one in report["models"]:
        energy_j, count = last.model_j[one["name"]], tokens[one["name"]]
        assert one["energy_j"] == pytest.approx(energy_j)
        assert one["tokens"] == count
        assert one["energy_j_per_1000_tokens"] == pytest.approx(energy_j / count * 1000)
        assert one["cost"] == pytest.approx(energy_j / 3.6e6 * 0.3)
    (tenant,) = report["tenants"]
    assert {row["tenant"] for row in ledger} == {tenant["name"]}
    assert sum(row["device_s"] for row in ledger) == pytest.approx(tenant["device_s"], rel=0.01)
    assert sum(row["energy_j"] for row in ledger) == pytest.approx(tenant["energy_j"], rel=0.01)
    for row, one in zip(ledger, report["models"], strict=True):
        assert (row["model"], row["requests"]) == (one["name"], 1)
        assert row["energy_j"] == pytest.approx(one["energy_j"], rel=0.01)
    assert "J / 1000 tokens" in shown
    assert "model a" in shown
