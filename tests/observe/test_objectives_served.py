"""Objectives of a whole server: counted from its requests, and changed by its file without another worker."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server_process import Server
from tests.test_reload import outcome_after, replace, serving, text


def told(server: Server, name: str) -> dict[str, float]:
    """A metric's values by objective."""
    families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    return {s.labels["objective"]: s.value for f in families for s in f.samples if s.name == name}


def restarts_and_loads(server: Server) -> list[str]:
    """What would be different if a worker had been replaced."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return [line for line in lines if line.startswith(("inferd_replica_restarts_total", "inferd_replica_load_seconds"))]


def test_requests_are_counted_and_a_changed_objective_holds_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def content(objectives: str) -> str:
        return text("a").replace("drain_s: 20", f"drain_s: 20, objectives: {objectives}")

    def ask(**changes: object) -> int:
        body = {"model": "a", "prompt": "x", "max_tokens": 4, **changes}
        return httpx.post(server.url + "/v1/completions", json=body).status_code

    with serving(tmp_path, monkeypatch, content("{availability: 0.99, ttft_ms: 60000}")) as (server, path):
        assert told(server, "inferd_objective_requests_total") == {"availability": 0, "ttft": 0}
        assert [ask(), ask(), ask(max_tokens=-1)] == [200, 200, 400]
        assert told(server, "inferd_objective_requests_total") == {"availability": 2, "ttft": 2}
        assert told(server, "inferd_objective_good_total") == {"availability": 2, "ttft": 2}
        before, began = restarts_and_loads(server), time.time()
        replace(path, content("{availability: 0.99, ttft_ms: 0.001, ttft_fraction: 0.5}"))
        accepted, details = outcome_after(began)
        assert accepted, details
        assert told(server, "inferd_objective_target_ratio") == {"availability": 0.99, "ttft": 0.5}
        assert ask() == 200
        assert told(server, "inferd_objective_requests_total") == {"availability": 3, "ttft": 3}
        assert told(server, "inferd_objective_good_total") == {"availability": 3, "ttft": 2}
        assert restarts_and_loads(server) == before
