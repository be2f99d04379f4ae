"""A real Prometheus for the tests, where one is installed."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def asked(port: int, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def prometheus(folder: Path, page: int, rules: str = "groups: []\n", exemplars: bool = False) -> Iterator[int]:
    """The port of a Prometheus that scrapes the page, and evaluates the rules, five times a second."""
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("prometheus is not installed")
    (folder / "rules.yml").write_text(rules)
    config = f"""
        global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}
        rule_files: [rules.yml]
        scrape_configs: [{{job_name: inferd, static_configs: [{{targets: ["127.0.0.1:{page}"]}}]}}]
    """
    (folder / "prometheus.yml").write_text(config)
    port = free_port()
    stores = ["--enable-feature=exemplar-storage"] if exemplars else []
    command = [found, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with subprocess.Popen(
        [*command, *stores, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield port
        finally:
            process.terminate()
            process.communicate(timeout=30)
