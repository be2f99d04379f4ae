"""Where set-up takes torch from: the script itself, with an index on this machine and a pip that only notes its words."""

from __future__ import annotations

import glob
import http.server
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WHEEL = f"torch-2.13.0%2Bcpu-cp{sys.version_info[0]}{sys.version_info[1]}"
WHEEL = f"{WHEEL}-cp{sys.version_info[0]}{sys.version_info[1]}-manylinux_2_28_{platform.machine()}.whl"

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has builds of torch for GPUs"),
    pytest.mark.skipif(
        bool(glob.glob("/dev/nvidia*")) or shutil.which("nvidia-smi") is not None, reason="has an NVIDIA device"
    ),
]

_PYTHON = f"""#!/bin/bash
# The interpreter of the environment: pip notes its words, and whether torch is installed is the test's to say.
case "$1 $2" in
  "-m pip")
    echo "$@" >>"$(dirname "$0")/pip.words"
    [[ "$*" != *" torch" ]] || echo "  Downloading https://host/whl/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (191.0 MB)"
    ;;
  "- "*) exit "${{NO_TORCH:-1}}" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of set-up, and an environment whose pip is the fake one."""
    folder = tmp_path / "checkout"
    (folder / ".ci").mkdir(parents=True)
    for name in (".ci/setup", ".ci/torch_index.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(_PYTHON)
    (binaries / "python").chmod(0o755)
    return folder


def set_up(checkout: Path, **env: str) -> tuple[str, list[str]]:
    """What set-up says, and the words that pip gets for torch."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "PIP_"))}
    done = subprocess.run(
        [str(checkout / ".ci" / "setup"), "llm"],
        env={**clean, "no_proxy": "*", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    lines = (checkout / ".venv" / "bin" / "pip.words").read_text().splitlines()
    (words,) = [line.split() for line in lines if line.endswith(" torch")]
    return done.stdout, words[words.index("constraints.txt") + 1 :]


@contextmanager
def index(page: str | None) -> Iterator[str]:
    """An index whose page of torch is ``page`` (None: it has none); yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (page or "").encode()
            self.send_response(404 if page is None else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "191000000")
            self.end_headers()

        def log_message(self, *about: object) -> None:
            """Not among the test's own output."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        finally:
            server.shutdown()
            thread.join()


def test_without_a_gpu_torch_comes_from_the_index_for_the_cpu(checkout: Path) -> None:
    with index(f'<a href="/whl/cpu/{WHEEL}#sha256=0">{WHEEL}</a>') as address:
        said, words = set_up(checkout, TORCH_CPU_INDEX=address)
    assert words == ["--index-url", address, "torch"]
    assert f"No NVIDIA device: torch for the CPU, from {address}, 191 MB." in said


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (None, "answered with status 404"),
        (f'<a href="/{WHEEL.replace("2.13.0", "2.1.0")}">old</a>', "has no torch"),
        ("<html>a portal's page</html>", "has no torch"),
    ],
)
def test_an_index_without_the_pinned_build_is_left_alone(checkout: Path, page: str | None, why: str) -> None:
    with index(page) as address:
        said, words = set_up(checkout, TORCH_CPU_INDEX=address)
    assert words == ["torch"]
    assert f"{address} {why}" in said
    assert "from where pip is configured to look" in said


def test_an_index_that_refuses_connections_is_left_alone(checkout: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/whl/cpu"
    said, words = set_up(checkout, TORCH_CPU_INDEX=address)
    assert words == ["torch"]
    assert f"{address} does not answer" in said


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n<a"])
def test_an_index_that_hangs_is_left_alone(checkout: Path, sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def hold() -> None:
            connection, _ = listener.accept()
            held.append(connection)
            connection.sendall(sent)

        thread = threading.Thread(target=hold)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/whl/cpu"
        said, words = set_up(checkout, TORCH_CPU_INDEX=address)
        thread.join()
        held[0].close()
    assert words == ["torch"]
    assert f"{address} did not answer within 2 s" in said
    assert "from where pip is configured to look" in said


def test_the_users_own_arguments_for_torch_are_taken_as_they_are(checkout: Path) -> None:
    said, words = set_up(checkout, TORCH_ARGS="--index-url https://mine.example/simple", TORCH_CPU_INDEX="http://[")
    assert words == ["--index-url", "https://mine.example/simple", "torch"]
    assert "NVIDIA" not in said


def test_a_machine_with_a_gpu_is_not_given_the_build_for_the_cpu(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    with index(f'<a href="/whl/cpu/{WHEEL}">{WHEEL}</a>') as address:
        said, words = set_up(checkout, TORCH_CPU_INDEX=address, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert words == ["torch"]
    assert "An NVIDIA device is here" in said


def test_a_torch_that_is_installed_and_fits_is_kept_without_asking(checkout: Path) -> None:
    said, words = set_up(checkout, NO_TORCH="0", TORCH_CPU_INDEX="http://127.0.0.1:1")
    assert words == ["torch"]
    assert "NVIDIA" not in said


def test_what_was_fetched_is_told_with_its_size(checkout: Path) -> None:
    said, _ = set_up(checkout, TORCH_CPU_INDEX="http://127.0.0.1:1")
    assert "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl: 191.0 MB" in said
