"""A real ``inferd serve`` with Prometheus, Alertmanager and a receiver of webhooks around it, and traffic."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.http_server import answering
from tests.observe.live.rules import shortened
from tests.observe.prometheus_server import asked, free_port

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCRAPE_S = 1
"""Between two scrapes."""

ALERTMANAGER = ROOT / "deploy" / "alertmanager" / "alertmanager.yml"


@dataclass(frozen=True)
class Raised:
    """An alert as the receiver got it."""

    name: str
    labels: dict[str, str]
    runbook: str
    receiver: str
    at: float  # on the monotonic clock


@dataclass
class Receiver:
    """A server that takes Alertmanager's webhooks."""

    raised: list[Raised] = field(default_factory=list)

    @contextlib.contextmanager
    def listening(self) -> Iterator[int]:
        raised = self.raised

        class Hook(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                for alert in body["alerts"]:
                    labels, notes = alert["labels"], alert["annotations"]
                    if alert["status"] == "firing":
                        raised.append(
                            Raised(labels["alertname"], labels, notes["runbook_url"], self.path[1:], time.monotonic())
                        )
                self.send_response(200)
                self.end_headers()

        with answering(Hook) as port:
            yield port


def installed(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@contextlib.contextmanager
def alertmanager(folder: Path, hooks: int) -> Iterator[int]:
    """The configuration of deploy/ with shorter waits, whose webhooks are the receiver's."""
    config = yaml.safe_load(ALERTMANAGER.read_text(encoding="utf-8"))
    for route in (config["route"], *config["route"]["routes"]):
        route |= {"group_wait": "1s", "group_interval": "1s"}
    for receiver in config["receivers"]:
        receiver["webhook_configs"] = [{"url": f"http://127.0.0.1:{hooks}/{receiver['name']}", "send_resolved": False}]
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        installed("prometheus-alertmanager"),
        f"--config.file={folder}/alertmanager.yml",
        f"--storage.path={folder}/alerts",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        "--log.level=error",
    ]
    log = folder / "alertmanager.log"
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, stdout=stderr) as process:
        try:
            deadline = time.monotonic() + 30
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(f"http://127.0.0.1:{port}/-/ready").raise_for_status()
                    break
                if process.poll() is not None and "default.tmpl: no such file" in log.read_text():
                    pytest.skip("Alertmanager is unpacked and not installed: its templates are not in their place")
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait(timeout=30)


@contextlib.contextmanager
def prometheus(folder: Path, page: int, alerts: int, rules: str) -> Iterator[int]:
    """Scrapes every second: the time for a scrape is its interval, and the machine is busy."""
    (folder / "rules.yml").write_text(rules)
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alerts}"]}]}]},
        "scrape_configs": [{"job_name": "inferd", "static_configs": [{"targets": [f"127.0.0.1:{page}"]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        installed("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data-prometheus",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with (folder / "prometheus.log").open("w") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            yield port
        finally:
            process.terminate()
            process.wait(timeout=30)


@dataclass
class Site:
    """The running parts."""

    folder: Path
    port: int
    prometheus: int
    receiver: Receiver

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def inferd(self, *words: str) -> str:
        env = {**os.environ, "INFERD_STATE__DATA_DIR": str(self.folder / "data")}
        command = [sys.executable, "-m", "inferd", *words, "--port", str(self.port)]
        return subprocess.run(command, env=env, check=False, stdout=subprocess.PIPE, text=True).stdout

    def workers(self, model: str) -> list[int]:
        """The processes of a model's replicas that live now."""
        status = json.loads(self.inferd("status", "--json"))
        (found,) = [one for one in status["models"] if one["name"] == model]
        return [replica["pid"] for replica in found["replicas"] if replica.get("pid")]

    def values(self, expression: str) -> list[float]:
        """What Prometheus answers now, without what is not a number."""
        result = asked(self.prometheus, "query", query=expression)["result"]
        values = [float(one["value"][1]) for one in result]
        return [value for value in values if value == value]

    def firing(self) -> set[tuple[str, str]]:
        alerts = asked(self.prometheus, "alerts")["alerts"]
        return {
            (one["labels"]["alertname"], one["labels"].get("model", "")) for one in alerts if one["state"] == "firing"
        }


@contextlib.contextmanager
def serving(folder: Path, config: dict[str, Any], rules: Callable[[Path], str]) -> Iterator[Site]:
    """``rules``: the text of the rules for the configuration's file."""
    port = free_port()
    config = {**config, "server": {"port": port, "access_log": False, "grace_s": 1}}
    file = folder / "inferd.yaml"
    file.write_text(yaml.safe_dump(config))
    env = {**os.environ, "INFERD_STATE__DATA_DIR": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    receiver = Receiver()
    with contextlib.ExitStack() as stack:
        hooks = stack.enter_context(receiver.listening())
        alerts = stack.enter_context(alertmanager(folder, hooks))
        log = stack.enter_context((folder / "server.log").open("w"))
        command = [sys.executable, "-m", "inferd", "serve", str(file)]
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=5).status_code == 200:
                    break
            assert time.monotonic() < deadline, (folder / "server.log").read_text()[-5000:]
            assert process.poll() is None, (folder / "server.log").read_text()[-5000:]
            time.sleep(0.2)
        scraping = stack.enter_context(prometheus(folder, port, alerts, shortened(rules(file))))
        yield Site(folder, port, scraping, receiver)


class Traffic:
    """Requests from threads, until it is stopped. What is answered does not matter here."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, path: str, body: Callable[[int], dict[str, Any]], *, threads: int = 1, pause_s: float = 0.1) -> None:
        def run(number: int) -> None:
            with httpx.Client(timeout=60) as client:
                while not self._stopping.is_set():
                    with contextlib.suppress(httpx.HTTPError):
                        client.post(self._url + path, json=body(number))
                    self._stopping.wait(pause_s)

        for number in range(threads):
            thread = threading.Thread(target=run, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=70)
