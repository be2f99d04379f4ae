"""Servers around the tiny backend: one whose collector never answers, and one whose worker is killed."""

from __future__ import annotations

import os
import signal
import socket

import httpx
import pytest
from tests.observe.traces.collector import attributes, collecting
from tests.server_process import running
from tests.stopwatch import Stopwatch


def test_a_collector_that_never_answers_delays_no_request_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
        with running() as server, httpx.Client(base_url=server.url, timeout=30) as client:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
            for _ in range(40):
                assert client.post("/v1/completions", json=body).status_code == 200
            page = client.get("/metrics").text
            assert 'inferd_traces_dropped_total{reason="queue_full"} 0' not in page
            assert "inferd_traces_exported_total 0" in page
            watch = Stopwatch()
            server.signal(signal.SIGTERM)
            code, errors = server.end()
            assert code == 0
            assert watch.seconds < 15.0
            assert "were not sent" in errors


def test_a_restart_after_a_crash_is_a_load_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with running() as server:
            collector.await_spans("load tiny")
            os.kill(server.workers[0], signal.SIGKILL)
            spans = collector.await_spans("load tiny", 2, seconds=20)
            told = [attributes(span) for span in spans if span.name == "load tiny"]
    assert [(one["inferd.load.cause"], one["inferd.restarts"], one["inferd.outcome"]) for one in told] == [
        ("load", 0, "ready"),
        ("restart", 1, "ready"),
    ]
    assert len({span.trace_id for span in spans}) == 2
    assert [span.name for span in spans if span.parent_span_id].count("spawn") == 2
