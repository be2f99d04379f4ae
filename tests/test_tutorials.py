"""Every tutorial is carried out as a reader would: its files are written, its commands run in order, its outputs seen.

The blocks of a page are read like this. A block that begins with ``# NAME`` is a file. A bash block runs in one shell
per page; a bash block of ``inferd serve`` is the first terminal, which is awaited until it is ready. A text block
after it is what the commands print, where ``...`` stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from tests.ports import free_port
from tests.tiers import sample

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
EVERYDAY = [page for page in PAGES if page.stem in ("chat-model", "triton-repository")]
NEEDED = {"triton-repository": "tritonclient.http", "chat-model": "openai"}

_BLOCK = re.compile(r"^```(bash|text|python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.(?:py|yaml|csv|pbtxt))\n")
_DONE = "-- the block is done --"


class Block(NamedTuple):
    language: str
    text: str


class Shell:
    """One bash for the page's commands. A command that fails ends it."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write("set -e -o pipefail\n")

    def run(self, commands: str) -> str:
        """What the commands print. Raises AssertionError when one fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{commands}\necho; echo '{_DONE}'\n")
        self._process.stdin.flush()
        shown: list[str] = []
        for line in self._process.stdout:
            if line.rstrip("\n") == _DONE:
                return "".join(shown).strip()
            shown.append(line)
        raise AssertionError(f"{commands}\nfailed after:\n{''.join(shown)}")

    def close(self) -> None:
        self._process.communicate(timeout=30)


def blocks(page: Path, port: int) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    for language, body in _BLOCK.findall(text):
        yield Block(language, body)


def served(commands: str, folder: Path, env: dict[str, str], port: int) -> subprocess.Popen[str]:
    """The first terminal, when every model that loads at the start is ready."""
    words = shlex.split(commands, comments=True)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, text=True
        )
    until = time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=5).status_code == 200:
                return process
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    process.kill()
    log_lines = (folder / "server.log").read_text().splitlines()
    raise AssertionError(
        "\n".join([commands, "is not ready:", *(line for line in log_lines if "/health/" not in line)])
    )


def matches(expected: str, shown: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, shown.strip(), re.DOTALL) is not None


def test_dots_stand_for_anything_and_nothing_else_does() -> None:
    assert matches("a ... c\n", "a b\nb c")
    assert not matches("a ... c", "a b")
    assert not matches("1.5", "155")


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("page", sample(PAGES, *EVERYDAY, ids={page: page.stem for page in PAGES}))
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDED:
        pytest.importorskip(NEEDED[page.stem])
    port = free_port()
    (tmp_path / "bin").mkdir()
    for name, words in {"inferd": "-m inferd", "python": ""}.items():
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        command.chmod(0o755)
    env = {
        # Variables of the tests themselves are no settings: a reader has none, and is not warned of them.
        **{name: value for name, value in os.environ.items() if not name.startswith("INFERD_")},
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "INFERD_STATE__DATA_DIR": str(tmp_path / "data"),
        "INFERD_SERVER__PORT": str(port),
        "COLUMNS": "100",
    }
    folder = tmp_path / "work"
    folder.mkdir()
    shell = Shell(folder, env)
    server: subprocess.Popen[str] | None = None
    shown, ran = "", 0
    try:
        for language, text in blocks(page, port):
            if found := _FILE.match(text):
                path = folder / found[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text if path.suffix in (".py", ".yaml") else text[found.end() :])
            elif text.startswith("inferd serve"):
                assert server is None
                server = served(text, folder, env, port)
            elif language == "bash":
                shown, ran = shell.run(text), ran + 1
            else:
                assert language == "text"
                assert matches(text, shown), f"the page says:\n{text}\nand this was shown:\n{shown}"
        assert ran >= 4
        assert server is not None
    finally:
        shell.close()
        if server is not None:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
