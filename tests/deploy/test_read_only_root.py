"""A server as the image runs it: user 10001, no capabilities, a root that cannot be written. A soak test for root."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.deploy.chart import ROOT
from tests.deploy.read_only import USER, script, why_not
from tests.ports import free_port
from tests.worker.watching import children, until_now

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@contextlib.contextmanager
def running(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    config = folder / "etc"
    config.mkdir()
    server = f"{{host: 127.0.0.1, port: {port}, auth: 'off', grace_s: 20}}"
    (config / "inferd.yaml").write_text(f"server: {server}\nmodels: {{chat: {{source: demo}}}}\n")
    packages = {Path(path) for path in sys.path if path.endswith("site-packages")}
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/srv/lib",
        "INFERD_STATE__DATA_DIR": "/srv/lib/state",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": ":".join(str(path) for path in (ROOT / "src", *sorted(packages))),
    }
    readable = [Path(sys.base_prefix), Path(sys.prefix), *sorted(packages), ROOT]
    words = [str(Path(sys.executable)), "-m", "inferd", "serve", "/srv/etc/inferd.yaml"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(script(words, readable, config, environment), stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=20).status_code
    except httpx.TransportError:
        return 0


def test_a_server_starts_answers_and_stops_without_writing_to_its_root(tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(tmp_path, port) as process:

        def is_ready() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            return status(f"{url}/health/ready") == 200

        until_now(is_ready, "the server is ready", 300)
        pids = [process.pid, *children(process.pid)]
        assert len(pids) > 1, "there is a worker"
        for pid in pids:
            told = dict(
                line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
            )
            assert set(told["Uid"].split()) == {str(USER)}
            assert int(told["CapEff"], 16) == 0
        root = next(
            line.split()
            for line in Path(f"/proc/{process.pid}/mounts").read_text().splitlines()
            if line.split()[1] == "/"
        )
        assert "ro" in root[3].split(",")
        asked = {"model": "chat", "prompt": "Once", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=120).status_code == 200
        process.terminate()
        assert process.wait(120) == 0, (tmp_path / "log").read_text()
