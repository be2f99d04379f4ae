"""The port for gRPC: taken before any worker starts, served by the same process, given back at the end."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.server_process import Server

from inferd.config import Config, ModelConfig, ServerConfig
from inferd.config.rules import problems_between
from inferd.errors import ConfigError
from inferd.http.listener import reserve


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def test_a_port_in_use_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port {port} on 127.0.0.1 cannot be opened.*server.grpc_port"):
            reserve(ServerConfig(grpc_port=port))


def test_both_ports_are_not_one() -> None:
    config = Config(server=ServerConfig(port=8000, grpc_port=8000), models={"m": ModelConfig(source="demo")})
    assert any(problem.path == ("server", "grpc_port") for problem in problems_between(config, {}))


def test_no_port_is_kept_where_none_is_wanted() -> None:
    assert reserve(ServerConfig()) is None


def test_a_whole_server_listens_where_it_says_and_leaves_nothing(tmp_path: Path) -> None:
    server = Server({"grpc_port": 0}, data_dir=tmp_path)
    try:
        server.await_ready()
        assert server.process.stdout is not None
        address = server.process.stdout.readline().strip()
        assert all("cygrpc" not in maps(pid) for pid in (server.process.pid, *server.workers)), "that is for clients"
        with grpc.insecure_channel(address) as channel:
            ready: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
            assert ready(b"", timeout=10) == b"\x08\x01"
            server.signal(signal.SIGTERM)
            code, errors = server.end()
        assert code == 0
        assert "Traceback" not in errors
    finally:
        server.process.kill()
        server.process.wait()
