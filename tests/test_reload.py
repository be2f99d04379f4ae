"""Changing a server that runs: its file under load, and the operator's commands. Real processes throughout."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from tests.server_process import Server, running
from tests.stopwatch import Stopwatch
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

from inferd.cli.main import main
from inferd.cli.running.control import find_server
from inferd.gateway.control import ServerReport


def text(*models: str, extra: str = "", grace_s: float = 10) -> str:
    lines = "".join(f"  {name}: {{source: tiny, drain_s: 20}}\n" for name in models)
    return f"server: {{port: 0, grace_s: {grace_s}}}\nmodels:\n{lines}{extra}"


@contextlib.contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> Iterator[tuple[Server, Path]]:
    """A server of a file, in a data folder where the command line looks as well."""
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(folder / "data"))
    path = folder / "inferd.yaml"
    path.write_text(content)
    with running(file=path, data_dir=folder / "data") as server:
        yield server, path


def replace(path: Path, content: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(content)
    beside.replace(path)


class Said(NamedTuple):
    exit_code: int
    output: str


def inferd(*words: str) -> Said:
    """The command line, in this process."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = main(list(words))
    return Said(code, shown.getvalue())


def report() -> ServerReport:
    return find_server(None, None, None, None).get("/admin/status", ServerReport)


def outcome_after(at: float) -> tuple[bool, tuple[str, ...]]:
    """What came of the first reload after a point in time."""

    def is_there() -> bool:
        last = report().last_reload
        return last is not None and last.at > at

    until_now(is_there, "the file was read again")
    last = report().last_reload
    assert last is not None
    return last.accepted, last.details


class Load:
    """Clients that ask one model all the time; every answer that is no 200 is kept."""

    def __init__(self, url: str, num_clients: int = 4) -> None:
        self.url = url
        self.failures: list[str] = []
        self.num_answers = 0
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_clients)]

    def _ask(self) -> None:
        body = {"model": "a", "prompt": "pace=0.005", "max_tokens": 8}
        with httpx.Client(base_url=self.url, timeout=30) as client:
            while not self._is_over.is_set():
                answer = client.post("/v1/completions", json=body)
                self.num_answers += 1
                if answer.status_code != 200:
                    self.failures.append(answer.text)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *gone: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self) -> None:
        """Return when more answers have come than there were."""
        seen = self.num_answers
        until_now(lambda: self.num_answers > seen + 8, "answers go on")


def names(server: Server) -> set[str]:
    return {model["id"] for model in httpx.get(server.url + "/v1/models", timeout=10).json()["data"]}


@THOROUGH
def test_files_are_adopted_and_refused_under_load_without_a_dropped_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, text("a")) as (server, path), Load(server.url) as load:
        began = time.time()
        replace(path, "models: {a: {source: tiny, replicas: none, qeue: {}}}\nserver: {port: x}\n")
        accepted, details = outcome_after(began)
        assert not accepted
        assert len(details) == 3
        assert any("models.a.qeue: no such field; did you mean queue?" in detail for detail in details)
        assert 'inferd_config_reloads_total{result="refused"} 1' in httpx.get(server.url + "/metrics").text
        load.goes_on()

        began = time.time()
        replace(path, text("a", "b", extra="tenants: {t: {rpm: 5}}\n"))
        accepted, details = outcome_after(began)
        assert accepted, details
        assert "tenant t was added." in details
        until_now(lambda: names(server) == {"a", "b"}, "the new model is listed")
        page = httpx.get(server.url + "/metrics").text
        assert 'inferd_replica_state{model="b",replica="0",state="ready"} 1' in page, "its start is its own"
        assert 'inferd_replica_state{model="other"' not in page
        load.goes_on()

        began = time.time()
        path.write_text(text("a", grace_s=5).replace("tiny, drain_s", "tiny, max_model_len: 64, drain_s"))
        accepted, details = outcome_after(began)
        assert accepted, details
        until_now(lambda: names(server) == {"a"}, "the model that left is not listed")
        assert not [
            line
            for line in httpx.get(server.url + "/metrics").text.splitlines()
            if line.startswith("inferd_replica_state") and ('"b"' in line or '"other"' in line)
        ]
        load.goes_on()

        began = time.time()
        path.write_text("models: {}\nserver: {port: 0}\n")
        assert not outcome_after(began)[0]
        began = time.time()
        replace(path, text("a").replace("port: 0", "port: 9"))
        accepted, details = outcome_after(began)
        assert not accepted
        assert any("server.port: changing 0 to 9 needs a restart." in detail for detail in details)
        load.goes_on()
    assert load.failures == []
    assert load.num_answers > 40


def test_a_configmaps_links_are_followed_by_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, models in ((1, ("a",)), (2, ("a", "b"))):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "inferd.yaml").write_text(text(*models))
    (tmp_path / "..data").symlink_to("..1")
    path = tmp_path / "inferd.yaml"
    path.symlink_to("..data/inferd.yaml")
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "data"))
    with running(file=path, data_dir=tmp_path / "data") as server:
        (tmp_path / "..tmp").symlink_to("..2")
        (tmp_path / "..tmp").replace(tmp_path / "..data")
        until_now(lambda: names(server) == {"a", "b"}, "the new model is listed")


def test_the_operators_commands_find_the_server_and_say_what_they_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, text("a", "b")) as (server, path):
        shown = inferd("status")
        assert shown.exit_code == 0
        assert f"with port {server.port}" in shown.output
        assert str(path) in shown.output
        assert json.loads(inferd("status", "--json").output)["pid"] == server.process.pid
        assert "1/1" in inferd("models", "list").output

        said = inferd("reload")
        assert (said.exit_code, said.output) == (0, "Reloaded; nothing changed.\n")
        good = path.read_text()
        pids = {replica.pid for model in report().models for replica in model.replicas}
        assert None not in pids
        assert all(f"process {pid}" in inferd("status").output for pid in (*pids, server.process.pid))
        path.write_text("models: 3\n")
        said = inferd("reload")
        assert said.exit_code == 1
        assert "models: 3 is not names" in said.output
        assert "refused" in inferd("status").output
        path.write_text(good)
        assert inferd("reload").exit_code == 0

        assert "a is ready: 1 of 1 replica ready" in inferd("models", "restart", "a").output
        said = inferd("models", "unload", "b")
        assert "b is unloaded" in said.output
        assert "came back" in said.output
        assert "b is ready: 1 of 1" in inferd("models", "load", "b").output

        said = inferd("drain", "--wait")
        assert "has left" in said.output
        exit_code, log = server.end()
        assert exit_code == 0
        assert "was read again: nothing changed" in log  # what went well is told as what did not
        assert "No server runs here" in inferd("status").output


def test_several_servers_are_told_apart_by_port_and_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(tmp_path, monkeypatch, text("a")) as (one, _),
        running({"port": 0}, data_dir=tmp_path / "data") as other,
    ):
        said = inferd("status")
        assert said.exit_code == 1
        assert f"ports {min(one.port, other.port)}, " in said.output
        assert "choose one with --port" in said.output
        assert json.loads(inferd("status", "--port", str(other.port), "--json").output)["pid"] == other.process.pid
        (tmp_path / "two.yaml").write_text(f"server: {{port: {one.port}, prot: 1}}\n")  # wrong, and still of use
        said = inferd("status", "--config", str(tmp_path / "two.yaml"), "--json")
        assert json.loads(said.output)["pid"] == one.process.pid
        assert "No server with port 9 answers" in inferd("status", "--port", "9").output


def test_a_second_server_on_a_port_is_refused_and_the_first_is_unharmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, text("a")) as (server, _):
        watch = Stopwatch()
        second = Server({"port": server.port}, data_dir=tmp_path / "data")
        code, errors = second.end()
        assert watch.seconds < 3
        assert code == 1
        assert f"Port {server.port}" in errors
        assert report().pid == server.process.pid
        assert server.status("/health/ready") == 200


def test_a_server_takes_the_place_of_one_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch, text("a")) as (server, path):
        server.signal(signal.SIGKILL)
        server.end()
        assert (tmp_path / "data" / "run" / f"{server.port}.sock").exists()
        path.write_text(text("a").replace("port: 0", f"port: {server.port}"))
        with running(file=path, data_dir=tmp_path / "data") as after:
            assert report().pid == after.process.pid


def wait_for(condition: Callable[[], bool]) -> None:
    until_now(condition, "the condition holds")


def test_the_control_socket_asks_for_no_key_and_the_port_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch, text("a")) as (server, _):
        assert httpx.get(server.url + "/admin/status").status_code in (401, 403)
        assert "Give an admin key" in inferd("status", "--url", server.url).output
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        made = subprocess.run(
            [sys.executable, "-m", "inferd", "keys", "create", "--tenant", "ops", "--scopes", "admin"],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        key = next(word for word in made.stdout.split() if word.startswith("sk-inf-"))
        wait_for(lambda: httpx.get(server.url + "/v1/models").status_code == 401)
        shown = inferd("status", "--url", server.url, "--key", key, "--json")
        assert json.loads(shown.output)["pid"] == server.process.pid


def test_connection_limits_are_adopted_and_refused_connections_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, text("a")) as (server, path):
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/health").status_code == 200
            began = time.time()
            replace(path, text("a").replace("port: 0", "port: 0, max_connections: 1"))
            assert outcome_after(began) == (True, ("server.max_connections is now 1.",))
            assert httpx.get(server.url + "/health").json()["error"]["code"] == "too_many_connections"
            assert client.get("/health").status_code == 200
            assert "\ninferd_http_connections_refused_total 1\n" in client.get("/metrics").text
        wait_for(lambda: httpx.get(server.url + "/health").status_code == 200)


def test_a_reload_reaches_tenants_limits_and_the_control_sockets_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tenant(rpm: int, name: str) -> str:
        return f"tenants: {{t: {{rpm: {rpm}}}}}\n" + text("a").replace("port: 0", f"port: 0, v2_name: {name}")

    with serving(tmp_path, monkeypatch, tenant(1000, "before")) as (server, path):
        made = inferd("keys", "create", "--tenant", "t")
        key = next(word for word in made.output.split() if word.startswith("sk-inf-"))
        wait_for(lambda: httpx.get(server.url + "/v1/models").status_code == 401)
        operator = httpx.HTTPTransport(uds=str(tmp_path / "data" / "run" / f"{server.port}.sock"))

        def limit() -> str:
            body = {"model": "a", "prompt": "x", "max_tokens": 1}
            answer = httpx.post(server.url + "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            return answer.headers["x-ratelimit-limit-requests"]

        def names() -> tuple[str, str]:
            with httpx.Client(transport=operator, base_url="http://localhost") as client:
                theirs = client.get("/v2").json()["name"]
            return httpx.get(server.url + "/v2", headers={"authorization": f"Bearer {key}"}).json()["name"], theirs

        assert (limit(), names()) == ("1000", ("before", "before"))
        began = time.time()
        replace(path, tenant(7, "after"))
        accepted, details = outcome_after(began)
        assert accepted, details
        assert names() == ("after", "after")
        wait_for(lambda: limit() == "7")
