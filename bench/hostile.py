"""Every door of the gateway under the bytes that cost it most: ``python -m bench.hostile``.

Doors are the routes and methods that the code has, so a new one is among them. Printed is what each attack costs of the
gateway's processor, and the longest that another client waited for an answer of ``/health/live`` meanwhile; on a machine
that does other things as well, its first line says how long that is without an attack. ``tests/gateway/test_hostile_doors.py``
holds the turns of the event loop under the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil

from bench.grpc_floor import process, write_model
from bench.hostile_bytes import Attack, flood_attacks, grpc_attacks, http1_floods, http_attacks, strike
from inferd.config import ServerConfig
from inferd.events import ignore
from inferd.gateway.body.decode_cost import MAX_DECODE_COST
from inferd.gateway.grpc.rpc import Method
from inferd.gateway.grpc.server import GrpcServer
from inferd.gateway.routes import ROUTES
from inferd.gateway.server import create_app
from inferd.gateway.upstream import Upstream
from inferd.http.listener import reserve


class Prober:
    """Another client: asks whether the server lives, again and again, and keeps the longest wait."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self.longest_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asked = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            while not self._is_over.wait(0.002):
                began = time.perf_counter()
                connection.sendall(asked)
                if not connection.recv(65536):
                    return
                self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


class _NoModels:
    """A router that is asked for nothing but its models."""

    draining = False

    def models(self) -> tuple[()]:
        return ()


async def _methods() -> dict[bytes, Method]:
    config = ServerConfig(port=0, grpc_port=0)
    reserved = reserve(config)
    assert reserved is not None, "there is a port for gRPC"
    with reserved:
        return GrpcServer(create_app(cast(Upstream, _NoModels()), config, ignore), config, reserved).methods


def all_attacks(model: str, key: str) -> Iterator[Attack]:
    yield from http_attacks(ROUTES, lambda _: model, key, MAX_DECODE_COST, 64)
    yield from http1_floods()
    yield from flood_attacks()
    yield from grpc_attacks(asyncio.run(_methods()), model, model, key)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--door", default="", help="only doors whose name contains this")
    parser.add_argument("--worst", type=int, default=0, help="print so many lines, those with the longest waits")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        write_model(where / "mlp.onnx")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "INFERD_STATE__DATA_DIR": str(where / "state")}
        made = (sys.executable, "-m", "inferd", "keys", "create", "--tenant", "t", "--scopes", "infer,models,metrics")
        key = subprocess.run(made, check=True, capture_output=True, text=True, env=env).stdout.strip()
        flags = ("--name", "mlp", "--port", "0", "--grpc-port", "0", "--no-access-log")
        command = (sys.executable, "-m", "inferd", "serve", str(where / "mlp.onnx"), *flags)
        with process(*command, ready=r"at (?:http://)?(\S+?),? ", env=env) as (server, [http, address]):
            table(server, _port(http), _port(address), key, given.door, given.worst)


def _port(address: str) -> int:
    return int(address.rstrip("/").rpartition(":")[2])


def table(server: psutil.Process, http: int, grpc: int, key: str, door: str, worst: int) -> None:
    lines = []
    for attack in (None, *all_attacks("mlp", key)):
        if attack is not None and door not in attack.door:
            continue
        prober = Prober(http)
        before = server.cpu_times()
        if attack is None:
            time.sleep(2)
        else:
            strike(grpc if attack.is_grpc else http, attack)
            time.sleep(0.05)
        after = server.cpu_times()
        prober.stop()
        spent = after.user + after.system - before.user - before.system
        named = f"{attack.door}: {attack.bytes_of}" if attack is not None else "no attack, for two seconds"
        sent = len(attack.wire) / 1e6 if attack is not None else 0
        line = f"{named[:88]:<90}{sent:>8.2f} MB{1e3 * spent:>8.0f} ms{1e3 * prober.longest_s:>8.1f} ms"
        lines.append((prober.longest_s, line))
        if not worst:
            print(line, flush=True)
    for _, line in sorted(lines, reverse=True)[:worst]:
        print(line)


if __name__ == "__main__":
    main()
