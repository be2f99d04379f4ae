"""The server that a command starts for itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.worker.watching import until_now

SCRIPT = """
import time
from inferd.cli.running.own_server import own_server

with own_server("demo-intents") as address:
    print(address, flush=True)
    time.sleep(600)
"""


def is_reachable(url: str) -> bool:
    try:
        httpx.get(f"{url}/health/live", timeout=10)
    except httpx.HTTPError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="a kernel that ends a process with its parent")
def test_the_server_of_a_command_that_is_killed_ends(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, text=True) as command:
        try:
            assert command.stdout is not None
            url = command.stdout.readline().strip()
            assert is_reachable(url)
        finally:
            command.kill()
    until_now(lambda: not is_reachable(url), "the server has ended", 30)
