"""Faults injected into a real server: each raises its alert with its runbook, and a quiet run raises none.

Real are the server (``inferd serve``), Prometheus with the rules of ``inferd alerts``, Alertmanager with the file of
deploy/, and the receiver of its webhooks. Times of the rules are shorter (``rules.py``), devices are simulated, and
Grafana is not run: the expressions of its panels are asked of Prometheus.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tests.experiments.upstream import Upstream, failing, well
from tests.observe.devices.test_device_series import GPU, write
from tests.observe.live.rules import seconds
from tests.observe.live.site import SCRAPE_S, Site, Traffic, serving
from tests.observe.prometheus_server import asked
from tests.observe.test_dashboards import NAMES, expressions

QUIET_S = 75.0
WITHIN_S = 150.0
"""The longest time until an alert: two spans of its shortened window and ``for``, on a machine that is busy."""

PACED = """
import time
from pathlib import Path

BESIDE = Path(__file__).parent


class Model:
    def load(self):
        if (BESIDE / "no-load").exists() and type(self).__name__ == "Gone":
            raise RuntimeError("the weights are gone")

    def predict(self, x: float) -> float:
        time.sleep(float((BESIDE / type(self).__name__).read_text()))
        return x


class Late(Model): ...


class Flood(Model): ...


class Crash(Model): ...


class Gone(Model): ...
"""

GOOD_GPU = {**GPU, "throttled": {"thermal": 0.0}, "errors": {"uncorrected": 0}}


def infer(number: int) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [float(number)]}]}


def completion(model: str, max_tokens: int, prompt: str = "Once upon a time") -> Callable[[int], dict[str, Any]]:
    return lambda number: {
        "model": model,
        "prompt": f"{prompt} {number}",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.7,
    }


class Fault(NamedTuple):
    """``labels``: those by which the alert is told from the same alert for another reason."""

    name: str
    alert: str
    labels: dict[str, str]
    inject: Callable[[Site], None]
    also: tuple[tuple[str, str], ...] = ()  # further alerts that this fault deserves, with their models


class Delay(NamedTuple):
    """How long an alert took, in seconds of the rules' shortened times."""

    until_true_s: float  # from the fault until Prometheus found the rule's condition true
    for_s: float  # the rule's ``for``
    held_s: float  # from then until the alert fired

    @property
    def late_s(self) -> float:
        return self.held_s - self.for_s


def delay_of(site: Site, fault: Fault, began: float) -> Delay:
    """Of the first time that the alert fired after ``began``, in seconds since the epoch, from the series in which
    Prometheus records the states of alerts."""
    labels = {"alertname": fault.alert, **fault.labels}
    chosen = ",".join(f'{name}="{value}"' for name, value in labels.items())
    times = {"start": str(began), "end": str(time.time()), "step": "0.25"}
    fired = [
        (float(series["values"][0][0]), {k: v for k, v in series["metric"].items() if k not in ("__name__", "alertstate")})
        for series in asked(site.prometheus, "query_range", query=f'ALERTS{{{chosen},alertstate="firing"}}', **times)["result"]
    ]  # fmt: skip
    at, of = min(fired, key=lambda one: one[0])
    exact = ",".join(f'{name}="{value}"' for name, value in of.items())
    since = asked(site.prometheus, "query", query=f"ALERTS_FOR_STATE{{{exact}}}", time=str(at))["result"]
    true_at = float(since[0]["value"][1])
    rules = yaml.safe_load((site.folder / "rules.yml").read_text())
    (for_s,) = {
        seconds(rule.get("for", "0s"))
        for group in rules["groups"]
        for rule in group["rules"]
        if rule.get("alert") == fault.alert and fault.labels.items() <= {**of, **rule.get("labels", {})}.items()
    }
    return Delay(true_at - began, for_s, at - true_at)


class Injected:
    """What was injected, and how it ends."""

    def __init__(self, folder: Path, upstream: Upstream) -> None:
        self.folder = folder
        self.upstream = upstream
        self.stopping = threading.Event()
        self.threads: list[threading.Thread] = []
        self.traffic: Traffic | None = None

    def repeat(self, act: Callable[[], None]) -> None:
        def run() -> None:
            while not self.stopping.is_set():
                act()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.threads.append(thread)

    def end(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(timeout=60)
        if self.traffic is not None:
            self.traffic.stop()

    # -- faults -----------------------------------------------------------------------------

    def crash(self, site: Site) -> None:
        def kill() -> None:
            for pid in site.workers("crash"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.stopping.wait(2.0)

        self.repeat(kill)

    def fail_to_load(self, site: Site) -> None:
        (self.folder / "no-load").touch()
        for pid in site.workers("gone"):
            os.kill(pid, signal.SIGKILL)

    def flood(self, site: Site) -> None:
        self.traffic = self.traffic or Traffic(site.url)
        self.traffic.add("/v2/models/flood/infer", infer, threads=24, pause_s=0.05)

    def break_remote(self, site: Site) -> None:
        self.upstream.behaviour = failing

    def slow_down(self, site: Site) -> None:
        (self.folder / "Late").write_text("0.4")

    def fill_cache(self, site: Site) -> None:
        self.traffic = self.traffic or Traffic(site.url)
        self.traffic.add("/v1/completions", completion("small", 220), threads=40, pause_s=0.0)

    def spoil_device(self, site: Site) -> None:
        gpu = {**GOOD_GPU, "duty": 0.97, "temperature_c": 91, "throttled": {"thermal": 0.6}}
        write(
            self.folder / "devices.json",
            devices=[{**gpu, "memory_used_bytes": 7.9e10, "errors": {"uncorrected": [[0, 0], [2, 4]]}}],
        )

    def lock_database(self, site: Site) -> None:
        held = threading.Event()

        def hold() -> None:
            other = sqlite3.connect(self.folder / "data" / "state.db", isolation_level=None, timeout=30)
            other.execute("BEGIN EXCLUSIVE")
            held.set()
            self.stopping.wait()
            other.execute("ROLLBACK")
            other.close()

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        self.threads.append(thread)
        assert held.wait(30)

    def steal_processor(self, site: Site) -> None:
        """One of the replicas stands still for most of the time, as beside a greedy neighbour."""
        pid = site.workers("chat")[0]

        def pause() -> None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.08)

        self.repeat(pause)

    def break_file(self, site: Site) -> None:
        (self.folder / "inferd.yaml").write_text("models: 3\n")


def config_of(folder: Path, upstream: Upstream) -> dict[str, Any]:
    (folder / "paced.py").write_text(PACED)
    for name, pace_s in (("Late", 0.01), ("Flood", 0.05), ("Crash", 0.01), ("Gone", 0.01)):
        (folder / name).write_text(str(pace_s))
    write(folder / "devices.json", devices=[GOOD_GPU])

    def python(name: str) -> dict[str, Any]:
        return {"source": f"{folder}/paced.py:{name}", "allow_code": True, "device": "cpu"}

    return {
        "devices": {
            "simulated": str(folder / "devices.json"),
            "interval_s": 0.5,
            "price_per_kwh": 0.3,
            "price_per_device_hour": 2.0,
        },
        "models": {
            "chat": {
                "source": "demo",
                "device": "cpu",
                "replicas": 2,
                "routing": {"eject_factor": 0, "prefix_affinity": False},
                "objectives": {"availability": 0.9, "ttft_ms": 20_000, "tpot_ms": 2_000, "total_ms": 60_000},
            },
            "small": {
                "source": "demo",
                "device": "cpu",
                "max_model_len": 256,
                "kv_cache": {"num_blocks": 96, "block_size": 16},
            },
            "late": {**python("Late"), "objectives": {"total_ms": 250, "total_fraction": 0.97}},
            "flood": {**python("Flood"), "queue": {"max_requests": 4}},
            "crash": python("Crash"),
            "gone": python("Gone"),
            "elsewhere": {
                "source": upstream.source,
                "remote": {"model": "m"},
                "breaker": {"enabled": False},
                "retry": {"max_attempts": 1},
            },
        },
    }


def rules_of(file: Path) -> str:
    command = [sys.executable, "-m", "inferd", "alerts", str(file)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextlib.contextmanager
def loaded(folder: Path) -> Iterator[tuple[Site, Injected]]:
    with Upstream(well) as upstream, serving(folder, config_of(folder, upstream), rules_of) as site:
        traffic, injected = Traffic(site.url), Injected(folder, upstream)
        traffic.add("/v1/completions", completion("chat", 24), threads=3, pause_s=0.1)
        traffic.add("/v1/completions", completion("small", 16), pause_s=0.5)
        traffic.add("/v1/completions", lambda number: {**completion("chat", 24)(number), "stream": True}, pause_s=0.3)
        traffic.add("/v1/completions", completion("elsewhere", 4), threads=2, pause_s=0.1)
        for model in ("late", "flood", "crash", "gone"):
            traffic.add(f"/v2/models/{model}/infer", infer, pause_s=0.1)
        try:
            yield site, injected
        finally:
            injected.end()
            traffic.stop()


def faults_of(injected: Injected) -> list[Fault]:
    device = {"device": "gpu0"}
    return [
        Fault("a worker dies again and again", "InferdReplicaRestarting", {"model": "crash"}, injected.crash,
              (("InferdNotReady", "crash"), ("InferdReplicaAway", "crash"), ("InferdErrors", "crash"))),
        Fault("a model fails to load", "InferdNotReady", {"model": "gone"}, injected.fail_to_load,
              (("InferdReplicaAway", "gone"), ("InferdErrors", "gone"), ("InferdReplicaRestarting", "gone"))),
        Fault("a queue is flooded", "InferdQueueFull", {"model": "flood"}, injected.flood),
        Fault("a remote server fails", "InferdErrors", {"model": "elsewhere"}, injected.break_remote,
              (("InferdHttpErrors", ""),)),
        Fault("an objective of latency is missed", "InferdErrorBudgetBurnFast", {"model": "late", "objective": "total"},
              injected.slow_down, (("InferdErrorBudgetBurn", "late"), ("InferdErrorBudgetBurnSlow", "late"))),
        Fault("the KV cache is full", "InferdKvSaturated", {"model": "small"}, injected.fill_cache,
              (("InferdKvPressure", "small"), ("InferdQueueFull", "small"), ("InferdTpotSubset", "small"))),
        Fault("a device is throttled", "InferdDeviceThrottled", {**device, "reason": "thermal"}, injected.spoil_device),
        Fault("a device is hot", "InferdDeviceHot", device, lambda site: None),
        Fault("a device has no reserve", "InferdDeviceBusy", device, lambda site: None),
        Fault("memory of a device is full", "InferdGpuMemoryHigh", {"gpu": "0"}, lambda site: None),
        Fault("memory of a device has errors", "InferdDeviceErrors", device, lambda site: None),
        Fault("the database does not answer", "InferdStateUnavailable", {}, injected.lock_database),
        Fault("a replica is slow", "InferdTpotDeviation", {"model": "chat"}, injected.steal_processor,
              (("InferdTpotSubset", "chat"),)),
        Fault("the configuration is broken", "InferdReloadRefused", {}, injected.break_file),
    ]  # fmt: skip


NOT_OF_EVERY_PANEL = {
    "Accepted of guessed tokens": "a rate of guesses that were not made is not a number",
    "Accepted tokens per guess": "likewise",
}
"""Panels that may be empty in this load, and why."""


def dead_panels(site: Site) -> tuple[int, list[str]]:
    """The number of expressions, and those to which Prometheus has no answer for any model."""
    dead, count = [], 0
    for name in NAMES:
        for title, expression in expressions(name):
            count += 1
            filled = expression.replace("$__rate_interval", "20s").replace("$__range", "60s").replace("$instance", ".*")
            models = ("chat", "late", "small") if "$model" in filled else ("",)
            if not any(site.values(filled.replace("$model", model)) for model in models):
                dead.append(f"{name}: {title}: {expression}")
    return count, dead


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_each_fault_raises_its_alert_with_its_runbook_and_a_quiet_run_raises_none(tmp_path: Path) -> None:
    with loaded(tmp_path) as (site, injected):
        time.sleep(QUIET_S)
        assert [raised.name for raised in site.receiver.raised] == [], site.receiver.raised
        assert site.firing() == set()
        num_expressions, dead = dead_panels(site)
        print(f"\n{num_expressions} expressions of panels, without an answer: {dead}")

        faults, began, wall = faults_of(injected), {}, {}
        for fault in faults:
            began[fault.name], wall[fault.name] = time.monotonic(), time.time()
            fault.inject(site)

        def found(fault: Fault) -> list[float]:
            return [
                raised.at - began[fault.name]
                for raised in site.receiver.raised
                if raised.name == fault.alert and fault.labels.items() <= raised.labels.items()
            ]

        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline and not all(found(fault) for fault in faults):
            time.sleep(0.5)
        delays = {fault.name: delay_of(site, fault, wall[fault.name]) for fault in faults if found(fault)}
        print("\n| fault | alert | until true | for | until it fires | until received |\n| --- " + "| --- " * 5 + "|")
        for fault in faults:
            delay = delays.get(fault.name, Delay(nan, nan, nan))
            raised_s = min(found(fault), default=nan)
            print(f"| {fault.name} | {fault.alert} | {delay.until_true_s:.1f} s | {delay.for_s:.0f} s "
                  f"| {delay.held_s:.1f} s | {raised_s:.1f} s |")  # fmt: skip
        deserved = {(fault.alert, fault.labels.get("model", "")) for fault in faults}
        deserved |= {pair for fault in faults for pair in fault.also}
        others = {(r.name, r.labels.get("model", "")) for r in site.receiver.raised} - deserved
        assert [fault.name for fault in faults if not found(fault)] == []
        assert {name: delay for name, delay in delays.items() if delay.late_s > 2 * SCRAPE_S} == {}
        assert {r.runbook for r in site.receiver.raised} == {f"docs/runbooks/{r.name}.md" for r in site.receiver.raised}
        assert {r.receiver for r in site.receiver.raised if r.labels["severity"] == "page"} == {"pages"}
        assert {r.receiver for r in site.receiver.raised if r.labels["severity"] == "ticket"} == {"tickets"}
        assert others == set()
        assert [one for one in dead if one.split(": ")[1] not in NOT_OF_EVERY_PANEL] == []
