"""A served model whose number of replicas follows its load: up with the load, down by drain, from and to zero."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.test_replaced_files import inferd
from tests.predict.live import serving
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

LONG_S = 120.0


def report() -> dict[str, Any]:
    code, shown = inferd("scale", "chat", "--json")
    assert code == 0, shown
    return dict(json.loads(shown)[0])


@contextmanager
def asking(url: str, clients: int) -> Iterator[list[int]]:
    """Clients that ask one after the other; the statuses of their answers."""
    statuses: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=LONG_S) as client:
            while not stop.is_set():
                body = {"model": "chat", "prompt": "Once", "max_tokens": 24, "ignore_eos": True}
                statuses.append(client.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join(LONG_S)
        assert not any(thread.is_alive() for thread in threads)


def scaling(**settings: object) -> dict[str, dict[str, Any]]:
    # One request at a time: a few clients are enough load.
    return {"chat": {"source": "demo", "scaling": {"max": 2, **settings}, "scheduler": {"max_num_seqs": 1}}}


@THOROUGH  # the test below has one replica come and go; tests/autoscale/ has more of them decided
def test_a_second_replica_comes_with_the_load_survives_a_kill_and_leaves_without_a_failed_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    with serving(tmp_path, scaling(min=1, down_after_s=5.0)) as server:
        with asking(server.url, 6) as statuses:
            until_now(lambda: report()["starting"] + report()["ready"] == 2, "a second replica starts", LONG_S)
            code, shown = inferd("status", "--json")
            (model,) = json.loads(shown)["models"]
            pids = [replica["pid"] for replica in model["replicas"]]
            assert model["desired"] in (1, 2)  # clients that get no processor are no load
            os.kill(pids[0], signal.SIGKILL)  # while the other one loads
            until_now(lambda: report()["ready"] == 2, "both replicas are ready", LONG_S)
            many = len(statuses)
            until_now(lambda: len(statuses) > many + 20, "both serve", LONG_S)
        until_now(
            lambda: (report()["desired"], report()["ready"], report()["leaving"]) == (1, 1, 0), "one is left", LONG_S
        )
        failed = [status for status in statuses if status != 200]
        assert failed == [], "a request that was computed when its worker died ran again"
        changes = report()["changes"]
        assert (changes[0]["after"], changes[0]["rule"]) == (1, "consolidation")
        assert (changes[-1]["before"], changes[-1]["after"]) == (1, 2)
        code, shown = inferd("scale", "--explain", "chat")
        assert code == 0, shown
        assert "chat: 1 ready, 0 starting; desired 1 of 1 to 2" in shown
        assert "changes, the last first:" in shown
        page = httpx.get(f"{server.url}/metrics").text.splitlines()
        assert 'inferd_scale_desired_replicas{model="chat"} 1' in page
        assert [line for line in page if line.startswith('inferd_scale_changes_total{direction="up",model="chat"}')]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if '"event":"scale"' in line]
    assert (lines[0]["replicas"], lines[0]["desired"]) == (1, 2)
    assert all(line["reason"] and line["rule"] for line in lines)


@THOROUGH
def test_from_zero_the_first_request_waits_and_an_idle_model_goes_to_zero_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    models = scaling(min=0)
    models["chat"]["idle_after_s"] = 1.0
    with serving(tmp_path, models) as server:
        assert (report()["ready"], report()["starting"]) == (0, 0)
        body = {"model": "chat", "prompt": "Once", "max_tokens": 4, "stream": True}
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LONG_S)
            assert answer.status_code == 200, answer.text
            assert answer.text.rstrip().endswith("data: [DONE]")
            assert answer.headers["x-keda-http-cold-start"] == "true"
            until_now(lambda: (report()["ready"], report()["desired"]) == (0, 0), "it is at zero again", LONG_S)
        assert report()["changes"][0]["rule"] == "idle"
