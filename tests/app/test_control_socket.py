"""The operator's socket: private, replaced when stale, never taken from a server that lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.http.test_http_framing import InTasks, echo

from inferd.app.control_socket import ControlSocket, NoControlSocketError, connect, open_control_socket
from inferd.config import ServerConfig
from inferd.errors import ConfigError
from inferd.http.listener import HttpServer


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_socket_and_its_folders_are_the_users_alone(tmp_path: Path) -> None:
    made = open_control_socket(tmp_path / "data", 8000)
    assert made.path == tmp_path / "data" / "run" / "8000.sock"
    assert [mode(path) for path in (tmp_path / "data", made.path.parent, made.path)] == [0o700, 0o700, 0o600]
    connect(made.path, 1.0).close()
    made.close()
    made.close()
    assert not made.path.exists()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what is open is told by /proc")
def test_a_connection_waits_as_long_as_it_was_told_and_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = open_control_socket(tmp_path, 8000)
    connection = connect(made.path, 1.5)
    assert connection.gettimeout() == 1.5
    connection.close()
    made.close()
    with pytest.raises(OSError, match=r"No such file"):
        connect(made.path, 1.5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_others_could_enter_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    made = open_control_socket(tmp_path, 8000)
    assert mode(tmp_path / "run") == 0o700
    made.close()


def test_a_live_socket_is_refused_and_unharmed(tmp_path: Path) -> None:
    first = open_control_socket(tmp_path, 8000)
    with pytest.raises(ConfigError, match=r"Another server uses .*8000.sock"):
        open_control_socket(tmp_path, 8000)
    connect(first.path, 1.0).close()
    second = open_control_socket(tmp_path, 8001)
    second.close()
    first.close()


def test_a_live_socket_whose_server_does_not_accept_is_live(tmp_path: Path) -> None:
    first = open_control_socket(tmp_path, 8000)
    waiting = []
    try:
        for _ in range(200):  # fill its backlog
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            probe.setblocking(False)
            waiting.append(probe)
            try:
                probe.connect(str(first.path))
            except BlockingIOError:
                break
        with pytest.raises(ConfigError):
            open_control_socket(tmp_path, 8000)
    finally:
        for probe in waiting:
            probe.close()
        first.close()


def test_a_socket_left_by_a_killed_server_is_replaced(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from inferd.app.control_socket import open_control_socket as o;"
        f"made = o(Path({str(tmp_path)!r}), 8000); os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode < 0
    assert (tmp_path / "run" / "8000.sock").exists()
    made = open_control_socket(tmp_path, 8000)
    connect(made.path, 1.0).close()
    made.close()


def test_of_many_starting_at_once_exactly_one_gets_the_socket(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "run" / "8000.sock"))
    stale.close()
    outcomes: list[ControlSocket | ConfigError] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        try:
            outcomes.append(open_control_socket(tmp_path, 8000))
        except ConfigError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if isinstance(outcome, ControlSocket)]
    assert len(outcomes) == 8
    assert len(winners) == 1
    connect(winners[0].path, 1.0).close()
    winners[0].close()


def test_closing_late_leaves_the_next_servers_socket_alone(tmp_path: Path) -> None:
    first = open_control_socket(tmp_path, 8000)
    first.listener.close()
    second = open_control_socket(tmp_path, 8000)
    first.close()
    connect(second.path, 1.0).close()
    second.close()


def test_a_path_longer_than_the_kernel_takes_works_all_the_same(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    made = open_control_socket(deep, 8000)
    assert len(os.fsencode(made.path)) > 200
    connect(made.path, 1.0).close()
    with pytest.raises(ConfigError):
        open_control_socket(deep, 8000)
    made.close()
    assert not made.path.exists()


def test_a_server_serves_such_a_path_when_what_its_alias_named_is_another_file(tmp_path: Path) -> None:
    made = open_control_socket(tmp_path / ("d" * 100), 8000)
    alias = Path(made.listener.getsockname())
    with contextlib.ExitStack() as others:
        while not os.path.lexists(alias.parent):
            others.enter_context(open(os.devnull))

        async def scenario() -> None:
            server = HttpServer(InTasks(echo), ServerConfig(), made.listener)
            serving = asyncio.create_task(server.serve())
            reader, writer = await asyncio.open_unix_connection(sock=await asyncio.to_thread(connect, made.path, 1.0))
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            server.stop()
            await serving
            assert made.path.exists(), "its owner removes it"

        asyncio.run(scenario())
    made.close()
    assert not made.path.exists()


def test_where_no_folder_can_be_made_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoControlSocketError, match="File exists"):
        open_control_socket(tmp_path / "file", 8000)


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoControlSocketError):
        open_control_socket(tmp_path, 8000)
    assert list((tmp_path / "elsewhere").iterdir()) == []
