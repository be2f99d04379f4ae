"""What a server opens in its process is closed again, whether it served or its start was refused."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import msgspec
import pytest
from tests.heap import refreeze_heap
from tests.tiers import THOROUGH
from tests.tiny_server import TINY_WORKER, unknown

from inferd.app.control_socket import open_control_socket
from inferd.app.root import MAX_FILES, Ready, ServeOptions, Site, run
from inferd.autoscale.controller import Autoscaler
from inferd.config import CacheConfig, Config, ModelCacheConfig, NodesConfig, PlacementConfig
from inferd.drift.monitors import Monitors
from inferd.errors import ConfigError, InferdError, ModelLoadError, Unavailable
from inferd.events import ignore
from inferd.gateway.console.parts import Console
from inferd.observe import Observer
from inferd.observe.devices import Devices
from inferd.observe.payloads.log import PayloadLog
from inferd.rollout.golden import Reply
from inferd.rollout.rollouts import Rollouts
from inferd.router.router import Router
from inferd.tenancy.control import Control
from inferd.types import JSON

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what is open is told by /proc")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """A server that left ignores signals, and one that was ready keeps its objects; the process of the tests goes on."""
    before, threshold = [signal.getsignal(number) for number in SIGNALS], gc.get_threshold()
    gc.collect()  # else what earlier tests left is counted before, and gone after
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)
    refreeze_heap()
    gc.set_threshold(*threshold)
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


class Open(NamedTuple):
    """What a process holds."""

    sockets: list[str]
    files: list[str]
    threads: list[str]
    logging: list[tuple[int, bool, list[logging.Handler]]]


def held(folder: Path) -> Open:
    """``folder``: whose files count. Python's own and the tests' may come and go."""
    found: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the list's own
            continue
    loggers = [logging.getLogger(name) for name in ("inferd", "asyncio")]
    return Open(
        sorted(name for name in found if name.startswith("socket:")),
        sorted(name for name in found if name.startswith(str(folder))),
        sorted(thread.name for thread in threading.enumerate()),
        [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers],
    )


def config(folder: Path, port: int, *, source: str = "tiny", grpc_port: int | None = None) -> Config:
    """A server on this port, with its state in the folder."""
    server: dict[str, object] = {"port": port, "grace_s": 5}
    if grpc_port is not None:
        server["grpc_port"] = grpc_port
    models = {"tiny": {"source": source}}
    return msgspec.convert({"server": server, "models": models, "state": {"data_dir": str(folder)}}, Config)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        number: int = found.getsockname()[1]
        return number


def serve(wanted: Config) -> list[Ready]:
    """A whole server in this process, which is told to leave as soon as it is ready."""
    told: list[Ready] = []

    def on_ready(ready: Ready) -> None:
        told.append(ready)
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(wanted, ServeOptions(on_ready=on_ready, command=TINY_WORKER, plan=unknown)) == 0
    return told


def test_a_server_that_has_left_holds_nothing(tmp_path: Path) -> None:
    port, grpc_port = free_port(), free_port()
    before = held(tmp_path)
    (ready,) = serve(config(tmp_path, port, grpc_port=grpc_port))
    assert ready.address == f"http://127.0.0.1:{port}"
    assert ready.grpc_address == f"127.0.0.1:{grpc_port}"
    assert held(tmp_path) == before
    assert not (tmp_path / "run" / f"{port}.sock").exists()
    assert list((tmp_path / "kept").iterdir()) == []
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}, (
        "nothing is left that a signal could end"
    )


def test_a_model_that_is_loaded_on_demand_is_not_told_as_one_that_waits(tmp_path: Path) -> None:
    wanted = config(tmp_path, free_port())
    later = msgspec.structs.replace(wanted.models["tiny"], load="on_demand")
    alone = msgspec.structs.replace(wanted.models["tiny"], placement=PlacementConfig(nodes="only"))
    wanted = msgspec.structs.replace(
        wanted, models={"later": later, "alone": alone}, nodes=NodesConfig(listen="127.0.0.1:0")
    )
    (ready,) = serve(wanted)
    assert list(ready.waiting) == ["alone"]


def test_a_server_that_has_left_holds_no_connection_to_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="the package redis is not installed")
    from tests.cache.test_redis_cache import BINARY, Server

    if BINARY is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    wanted = config(tmp_path, free_port())
    cached = msgspec.structs.replace(wanted.models["tiny"], cache=ModelCacheConfig(enabled=True))
    server = Server(tmp_path)
    wanted = msgspec.structs.replace(wanted, models={"tiny": cached}, cache=CacheConfig(url=server.url))
    found: list[str | None] = []

    def ask(address: str) -> None:
        try:
            for _ in range(50):  # an answer that the busy cache does not confirm in time is not kept
                body = b'{"model": "tiny", "prompt": "hello", "temperature": 0}'
                head = {"content-type": "application/json"}
                with urlopen(HttpRequest(f"{address}/v1/completions", body, head), timeout=30) as answer:
                    found.append(answer.headers["x-inferd-cache"])
                if found[-1] == "hit":
                    break
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_ready(ready: Ready) -> None:
        threading.Thread(target=ask, args=(ready.address,)).start()

    try:
        before = held(tmp_path)
        assert run(wanted, ServeOptions(on_ready=on_ready, command=TINY_WORKER, plan=unknown)) == 0
        assert found[0] == "miss"
        assert found[-1] == "hit"
        assert held(tmp_path) == before
    finally:
        server.stop()


def test_a_server_raises_its_limit_of_open_files_and_lowers_none(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        serve(config(tmp_path, free_port()))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (highest, hard)
        if hard == resource.RLIM_INFINITY or hard > MAX_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES + 1, hard))
            serve(config(tmp_path, free_port()))
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (MAX_FILES + 1, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_event_loop_of_a_server_waits_a_millisecond_for_a_thread_in_python_code(tmp_path: Path) -> None:
    serve(config(tmp_path, free_port()))
    assert sys.getswitchinterval() == pytest.approx(0.001)


def refused(wanted: Config, kind: type[InferdError], part: str) -> None:
    """The start fails and leaves nothing, though its error is still at hand."""
    folder = Path(wanted.state.data_dir or "")
    before, signals = held(folder), [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(kind, match=part) as error:
        serve(wanted)
    assert error.value.message
    assert held(folder) == before
    assert [signal.getsignal(number) for number in SIGNALS] == signals
    with socket.create_server(("127.0.0.1", wanted.server.port)):
        """The port is free again."""


def ignored(plans: object, splits: object) -> None:
    """Takes a division of units."""


async def loaded(entry: str) -> None:
    """Loads a version."""


async def recorded(name: str, change: object) -> None:
    """Takes a change of a rollout."""


async def unanswered(path: str, body: JSON) -> Reply:
    """Answers no question of a golden set."""
    return Reply(0, b"")


def test_a_configuration_that_is_not_adopted_leaves_no_gauges_of_its_models(tmp_path: Path) -> None:
    before = config(tmp_path, 0)
    after = msgspec.structs.replace(before, models={**before.models, "another": before.models["tiny"]})
    observer = Observer(models={"tiny": 1}, stream=io.StringIO())

    async def adopt() -> None:
        router = Router(before)
        router.begin_drain()  # a server that leaves adopts nothing
        payloads = PayloadLog(tmp_path, before.payloads, observer.payload_dropped)
        control = Control(before)
        rollouts = Rollouts(control.state, control.presence, bool, loaded, ignore, ignored, recorded, unanswered)
        monitors = Monitors(control.state, ignore)
        scaling = Autoscaler(router, str, ignore)
        console = Console(before)
        site = Site(before, router, control, observer, Devices(), console, payloads, rollouts, monitors, scaling)
        with pytest.raises(Unavailable):
            await site.adopt(after)

    try:
        asyncio.run(adopt())
        lines = observer.render_metrics().decode().splitlines()
        gauges = {line.split()[2] for line in lines if line.startswith("# TYPE") and line.endswith(" gauge")}
        shown = {model: {line.partition("{")[0] for line in lines if f'"{model}"' in line} for model in after.models}
        assert gauges & shown["tiny"]
        assert not gauges & shown["another"]
    finally:
        observer.close()


def test_a_start_without_its_second_port_gives_back_the_first(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused(config(tmp_path, free_port(), grpc_port=taken.getsockname()[1]), ConfigError, "grpc_port")


def test_a_start_beside_another_server_of_its_folder_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    other = open_control_socket(tmp_path, port)
    try:
        refused(config(tmp_path, port, grpc_port=free_port()), ConfigError, "Another server uses")
        assert other.path.exists()
    finally:
        other.close()


def test_a_start_without_usable_state_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"no database" * 100)
    port = free_port()
    refused(config(tmp_path, port, grpc_port=free_port()), ConfigError, "state")
    assert not (tmp_path / "run" / f"{port}.sock").exists()


@THOROUGH
def test_a_start_whose_only_model_fails_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    refused(config(tmp_path, port, source="missing", grpc_port=free_port()), ModelLoadError, "config.json")
    assert not (tmp_path / "run" / f"{port}.sock").exists()
    assert list((tmp_path / "kept").iterdir()) == []
