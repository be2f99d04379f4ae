"""Two servers on one database see each other, and name what differs in their files until it is equal."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from tests.server_process import Server, running
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

from inferd.cli.running.status import rendered
from inferd.gateway.control import ServerReport


def write(file: Path, folder: Path, max_body_bytes: int) -> Path:
    config = {
        "server": {"port": 0, "max_body_bytes": max_body_bytes},
        "state": {"data_dir": str(folder)},
        "models": {"tiny": {"source": "tiny"}},
    }
    half = file.with_suffix(".half")
    half.write_text(json.dumps(config))
    half.rename(file)
    return file


def report(server: Server, folder: Path) -> ServerReport:
    transport = httpx.HTTPTransport(uds=str(folder / "run" / f"{server.port}.sock"))
    with httpx.Client(transport=transport, base_url="http://inferd") as admin:
        return msgspec.json.decode(admin.get("/admin/status").content, type=ServerReport)


def differs(server: Server, folder: Path) -> list[list[str]]:
    """Of each other server that has written its settings: what differs from this one's."""
    return [each.differs for each in report(server, folder).gateways if each.digest and not each.is_this]


def await_difference(servers: Sequence[Server], folder: Path, paths: list[str]) -> None:
    """Wait until each server tells of the other that it differs in these settings."""
    until_now(lambda: all(differs(server, folder) == [paths] for server in servers), f"{paths} are told", 60)


@THOROUGH
def test_servers_name_what_differs_until_it_is_equal(tmp_path: Path) -> None:
    one, two = (write(tmp_path / f"{name}.yaml", tmp_path, size) for name, size in (("one", 4096), ("two", 8192)))
    with running(data_dir=tmp_path, file=one) as first, running(data_dir=tmp_path, file=two) as second:
        await_difference((first, second), tmp_path, ["server.max_body_bytes"])
        shown = io.StringIO()
        Console(file=shown, width=120).print(rendered(report(first, tmp_path), "here"))
        assert shown.getvalue().count("gateway  ") == 2
        assert "differs from this one: server.max_body_bytes" in shown.getvalue()
        metrics = httpx.get(f"{first.url}/metrics").text
        assert "inferd_gateways 2" in metrics
        assert "inferd_gateways_differing 1" in metrics
        write(two, tmp_path, 4096)
        await_difference((first, second), tmp_path, [])
