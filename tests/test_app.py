"""A whole server as a process: start, serve, leave. Real signals, real sockets, the tiny backend below."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import httpx
import pytest
from tests.server_process import Server, running
from tests.stopwatch import Stopwatch
from tests.tiers import THOROUGH
from tests.worker.watching import children, until_now


def test_an_idle_server_leaves_within_2_s_of_sigterm() -> None:
    with running() as server:
        assert server.status("/health/ready") == 200
        with httpx.Client(base_url=server.url) as keeps_its_connection:
            keeps_its_connection.get("/health/live")
            watch = Stopwatch()
            server.signal(signal.SIGTERM)
            code, errors = server.end()
        assert watch.seconds < 2
        assert code == 0
        assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_under_load_refuses_new_work_and_finishes_the_old(number: signal.Signals) -> None:
    with running() as server, server.stream("pace=0.05", 20) as response:
        lines = response.iter_lines()
        next(lines)
        server.signal(number)
        until_now(lambda: server.status("/health/ready") == 503, "the server says that it is leaving")
        assert server.status("/health/live") == 200
        refused = httpx.post(server.url + "/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=10)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert refused.headers["connection"] == "close"
        assert [line for line in lines if line][-1] == "data: [DONE]"
        code, errors = server.end()
        assert code == 0
        assert "Traceback" not in errors


def test_during_the_drain_delay_requests_are_still_accepted() -> None:
    with running({"drain_delay_s": 3.0}) as server:
        server.signal(signal.SIGTERM)
        until_now(lambda: server.status("/health/ready") == 503, "the server says that it is leaving")
        answer = httpx.post(server.url + "/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=10)
        assert answer.status_code == 200
        assert server.end()[0] == 0


@THOROUGH
def test_work_that_outlives_the_grace_period_ends_with_an_error_and_more_signals_do_not_prolong_it() -> None:
    with running({"grace_s": 1.0}) as server, server.stream("pace=0.05", 100_000) as response:
        lines = response.iter_lines()
        next(lines)
        watch = Stopwatch()
        server.signal(signal.SIGTERM)
        until_now(lambda: server.status("/health/ready") == 503, "the server says that it is leaving")
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
        assert "shutting_down" in last
        code, errors = server.end()
        assert watch.seconds < 4
        assert code == 0
        assert "Traceback" not in errors


def test_more_signals_to_terminate_do_not_cut_a_drain_short() -> None:
    with running({"grace_s": 60.0}) as server, server.stream("pace=0.05", 30) as response:
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        until_now(lambda: server.status("/health/ready") == 503, "the server says that it is leaving")
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            server.signal(number)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.end()[0] == 0


def test_signals_that_never_end_do_not_begin_the_grace_period_again() -> None:
    with running({"grace_s": 1.0}) as server, server.stream("pace=0.05", 100_000) as response:
        lines = response.iter_lines()
        next(lines)

        def is_gone() -> bool:
            server.signal(signal.SIGTERM)
            return server.process.poll() is not None

        until_now(is_gone, "the server is gone although it is told to leave all the time", 30)
        assert "shutting_down" in [line for line in lines if line][-1]
        assert server.end()[0] == 0


def test_ctrl_c_three_times_leaves_at_once_and_cleanly() -> None:
    with running({"grace_s": 600.0}) as server, server.stream("pace=0.05", 100_000) as response:
        lines = response.iter_lines()
        next(lines)
        watch = Stopwatch()
        server.signal(signal.SIGINT)
        until_now(lambda: server.status("/health/ready") == 503, "the server says that it is leaving")
        server.signal(signal.SIGINT)
        server.signal(signal.SIGINT)
        last = [line for line in lines if line][-1]
        assert "shutting_down" in last
        code, errors = server.end()
        assert watch.seconds < 5
        assert code == 0
        assert "Traceback" not in errors


def test_a_port_in_use_is_told_before_any_worker_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        watch = Stopwatch()
        server = Server({"port": port}, source="die")
        code, errors = server.end()
        assert watch.seconds < 3
        assert code == 1
        assert f"Port {port}" in errors
        assert "server.port" in errors
        assert "worker" not in errors


def test_a_server_whose_only_model_cannot_be_loaded_does_not_start() -> None:
    code, errors = Server(source="missing").end()
    assert code == 1
    assert "Error: The folder has no config.json." in errors
    assert "Traceback" not in errors


def test_the_port_answers_while_the_model_loads_and_sigterm_ends_the_loading(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server({"port": port}, source=f"gate={tmp_path / 'never'}")
    server.url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return server.status("/health/live") == 200
        except httpx.TransportError:
            return False

    try:
        until_now(answers, "the port answers")
        assert server.status("/health/ready") == 503
        server.workers = children(server.process.pid)
        assert server.workers
        watch = Stopwatch()
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0
        assert watch.seconds < 2
    finally:
        server.process.kill()
        server.process.communicate()


def test_workers_do_not_outlive_a_killed_server_and_its_port_is_free_again() -> None:
    with running() as server:
        port = int(server.url.rpartition(":")[2])
        os.kill(server.workers[0], signal.SIGSTOP)  # it cannot even notice that its channel is closed
        server.signal(signal.SIGKILL)
        server.end()
        with running({"port": port}) as next_server:
            assert next_server.status("/health/ready") == 200


def test_killing_the_worker_mid_stream_ends_the_stream_with_an_error_and_the_server_recovers() -> None:
    with running() as server:
        with server.stream("pace=0.05", 100_000) as response:
            lines = response.iter_lines()
            next(lines)
            watch = Stopwatch()
            os.kill(server.workers[0], signal.SIGKILL)
            last = [line for line in lines if line][-1]
            assert "worker_died" in last
            assert watch.seconds < 2
        until_now(lambda: server.status("/health/ready") == 200, "the server is ready again")
        answer = httpx.post(server.url + "/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=10)
        assert answer.status_code == 200
        server.workers = children(server.process.pid)
        metrics = httpx.get(server.url + "/metrics", timeout=10).text
        assert 'state="died"' in metrics
