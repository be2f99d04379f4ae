"""A whole server and a node, by their commands: the token's line, the status, the metrics, the log, a killed node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.app.test_replaced_files import inferd
from tests.nodes.joined import SCRIPT
from tests.predict.live import serving
from tests.server_process import running
from tests.tiers import THOROUGH
from tests.worker.watching import until_now


def test_a_machine_joins_by_the_line_that_the_server_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    file = tmp_path / "inferd.yaml"
    models = {"tiny": {"source": "tiny", "replicas": 2, "placement": {"nodes": "only"}}, "here": {"source": "tiny"}}
    settings = {"server": {"port": 0, "grace_s": 10}, "nodes": {"listen": "127.0.0.1:0"}, "models": models}
    file.write_bytes(msgspec.yaml.encode(settings))
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    nodes: list[subprocess.Popen[bytes]] = []

    def join(name: str) -> None:
        code, shown = inferd("node", "token")
        assert code == 0, shown
        variable, *command = shown.splitlines()[-1].split()
        assert command[:3] == ["inferd", "node", "--join"]
        token = variable.removeprefix("INFERD_NODE_TOKEN=")
        path = os.pathsep.join(sys.path)
        options = ["--name", name, "--label", "zone=a", "--cache", str(tmp_path / name)]
        nodes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *command[2:], *options],
                env={**os.environ, "PYTHONPATH": path, "INFERD_NODE_TOKEN": token},
                stderr=subprocess.DEVNULL,
            )
        )

    def status() -> dict[str, object]:
        return dict(json.loads(inferd("status", "--json")[1]))

    def places() -> list[str]:
        models = msgspec.convert(status()["models"], list[dict[str, object]])
        (replicas,) = (model["replicas"] for model in models if model["name"] == "tiny")
        ready = [one for one in msgspec.convert(replicas, list[dict[str, object]]) if one["state"] == "ready"]
        return [str(replica["node"]) for replica in ready]

    try:
        with running(file=file, data_dir=tmp_path / "state") as server:
            join("one")
            until_now(lambda: places() == ["one", "one"], "the replicas are on the node", 60)
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.json()["choices"][0]["text"] == "abcd"
            shown = inferd("status")[1]
            assert "node     one ready  2 workers" in shown
            join("two")
            assert "zone=a" in shown
            until_now(lambda: "inferd_node_heartbeat_age_seconds" in httpx.get(f"{server.url}/metrics").text, "seen")
            nodes[0].kill()
            until_now(lambda: places() == ["two", "two"], "both are on the other node", 60)
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
            page = httpx.get(f"{server.url}/metrics").text.splitlines()
            assert "inferd_nodes_up 1" in page
            assert 'inferd_node_changes_total{state="gone"} 1' in page
            assert [line for line in page if line.startswith('inferd_node_traffic_bytes{direction="sent",node="two"}')]
            assert not [line for line in page if 'node="one"' in line]
            server.process.terminate()
            _, log = server.end()
        lines = [json.loads(line) for line in log.splitlines() if '"event":"node"' in line]
        assert [(line["node"], line["state"]) for line in lines if line["node"] == "one"] == [
            ("one", "ready"),
            ("one", "gone"),
        ]
    finally:
        for node in nodes:
            node.kill()
            node.wait()


@THOROUGH  # test_nodes_serve.py: a model that does not load on one node is tried on another
def test_a_machine_that_gives_more_memory_than_it_has_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("INFERD_NODES__LISTEN", "127.0.0.1:0")
    large = {"source": "demo", "kv_cache": {"memory_bytes": 1 << 49}, "placement": {"nodes": "only"}}
    with serving(tmp_path, {"large": large, "intents": {"source": "demo-intents"}}) as server:
        shown = inferd("node", "token")[1]
        variable, *command = shown.splitlines()[-1].split()
        environment = {**os.environ, "INFERD_NODE_TOKEN": variable.removeprefix("INFERD_NODE_TOKEN=")}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        options = ["--memory", "1024TiB", "--name", "liar"]
        words = [sys.executable, "-m", "inferd", *command[1:], *options]
        with subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL) as node:
            try:

                def found() -> str:
                    models = json.loads(inferd("status", "--json")[1])["models"]
                    ((replica,),) = (model["replicas"] for model in models if model["name"] == "large")
                    return str(replica)

                until_now(lambda: "of memory are free" in found(), "its worker does not load", 60)
                asked = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["where is it?"]}]}
                said = httpx.post(f"{server.url}/v2/models/intents/infer", json=asked, timeout=60)
                assert said.status_code == 200
            finally:
                node.kill()


def test_a_server_without_a_port_for_nodes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    with running(data_dir=tmp_path / "state"):
        code, shown = inferd("node", "token")
        assert (code, "set nodes.listen to HOST:PORT and restart it" in shown) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["node"], "Missing --join HOST:PORT"),
        (["node", "--join", "gateway:x"], "'gateway:x' is no HOST:PORT"),
        (["node", "--join", "gateway:1", "--label", "zone"], "'zone' is no label such as zone=a"),
        (["node", "--join", "gateway:1", "--memory", "much"], "'much' is not a size"),
    ],
)
def test_bad_words_are_named(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_NODE_TOKEN", f"inferd1.{'a' * 43}.{'b' * 43}")
    code, shown = inferd(*words)
    assert (code != 0, said in shown) == (True, True), shown


def test_a_missing_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFERD_NODE_TOKEN", raising=False)
    code, shown = inferd("node", "--join", "gateway:1")
    assert (code, "A token is missing" in shown) == (1, True)
