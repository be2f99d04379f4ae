"""``inferd top`` with a real server: once and as JSON, on a terminal of 80 by 24, and when the server goes away."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.server_process import Server, running

from inferd import clock
from inferd.cli.running.live_figures import Figures
from inferd.cli.running.top_screen import COLUMNS, SORTS, Screen, percent, quantity, seconds
from inferd.state.folder import make_folder
from inferd.state.open import open_database
from inferd.tenancy.keys import KeySpec, create_key
from inferd.tenancy.principal import OPERATOR


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("top") / "data")


@pytest.fixture(scope="module")
def viewer_key(folder: Path) -> str:
    database = open_database(None, folder)
    try:
        spec = KeySpec(tenant="ops", scopes=("metrics",))
        return create_key(database, spec, by=OPERATOR, now=clock.wall()).key
    finally:
        database.close()


@pytest.fixture(scope="module")
def server(folder: Path, viewer_key: str) -> Iterator[Server]:
    with running({"auth": "required"}, data_dir=folder) as started:
        yield started


def command(folder: Path, *words: str) -> list[str]:
    return ["env", f"INFERD_STATE__DATA_DIR={folder}", sys.executable, "-m", "inferd", "top", *words]


def top(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *words), capture_output=True, text=True, timeout=60, check=False)


def test_once_for_programs_and_for_people(server: Server, folder: Path, viewer_key: str) -> None:
    found = top(folder, "--once", "--json")
    assert found.returncode == 0, found.stderr
    shown = json.loads(found.stdout)
    assert shown["models"]["tiny"]["state"] == "ready"
    assert shown["models"]["tiny"]["requests_s"] == 0
    assert shown["models"]["tiny"]["ttft_p50"] is None
    assert shown["machine"]["memory_limit"] > shown["machine"]["memory_used"] > 0
    assert "tiny/0 is ready" in " ".join(line["text"] for line in shown["events"])
    # Elsewhere with a key that sees numbers alone.
    text = top(folder, "--url", server.url, "--key", viewer_key)  # --once, as the output is no terminal
    assert text.returncode == 0, text.stderr
    assert re.search(r"^tiny +0", text.stdout, re.MULTILINE), text.stdout


def test_a_server_that_does_not_answer_or_refuses_is_an_error_in_a_sentence(server: Server, folder: Path) -> None:
    for words, said in (
        (("--url", "http://127.0.0.1:1"), "does not answer"),
        (("--url", server.url), "a key with the scope metrics"),
        (("--url", server.url, "--key", "sk-wrong"), "not valid"),
    ):
        failed = top(folder, "--once", *words)
        assert failed.returncode == 1
        assert said in failed.stderr
        assert "Traceback" not in failed.stderr


class Terminal:
    """``inferd top`` on a terminal of 80 columns and 24 lines."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            command(folder), stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        self._shown = ""

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def until(self, text: str, seconds: float = 20.0) -> str:
        """The screen's output up to a text, which comes after what was seen before."""
        deadline = time.monotonic() + seconds
        while text not in self._shown:
            assert time.monotonic() < deadline, self._shown[-3000:]
            if select.select([self._ours], [], [], 0.2)[0]:
                self._shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self._ours, 65536).decode())
        seen, _, self._shown = self._shown.partition(text)
        return seen + text

    def end(self) -> int:
        with contextlib.suppress(OSError):
            while select.select([self._ours], [], [], 0.5)[0] and os.read(self._ours, 65536):
                pass
        try:
            return self.process.wait(10)
        finally:
            self.process.kill()
            assert termios.tcgetattr(self._theirs)[3] == self.before[3], "the terminal is as it was"
            os.close(self._ours)
            os.close(self._theirs)


def test_the_screen_follows_the_server_and_its_keys(server: Server, folder: Path) -> None:
    terminal = Terminal(folder)
    screen = terminal.until("q quit")
    assert "tiny" in screen
    assert max(len(line.rstrip()) for line in screen.splitlines()) <= 80
    key = httpx.get(server.url + "/health").status_code  # any traffic
    assert key == 200
    terminal.press("s")
    terminal.until("sort (requests_s)")
    terminal.press("?")
    terminal.until("a dash:")
    terminal.press("q")
    assert terminal.end() == 0


def test_ctrl_c_leaves_the_terminal_as_it_was(server: Server, folder: Path) -> None:
    terminal = Terminal(folder)
    terminal.until("q quit")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0


@pytest.mark.soak
def test_a_server_that_goes_away_is_told_and_found_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data")
    with running({"auth": "off"}, data_dir=folder) as server:
        port = server.port
        terminal = Terminal(folder)
        terminal.until("q quit")
        server.signal(signal.SIGTERM)
        terminal.until("Trying again")
        server.end()
        with running({"auth": "off", "port": port}, data_dir=folder):
            terminal.until("serving")
            terminal.press("q")
            assert terminal.end() == 0


# -- the screen ----------------------------------------------------------------------------------


def figures_of(num_models: int) -> Figures:
    figures = Figures()
    series = [
        {"id": id_, "model": f"a-model-with-a-rather-long-name-{number}"}
        for number in range(num_models)
        for id_ in ("requests_s", "tokens_s", "ttft_p50", "ttft_p95", "queue", "running", "kv_use")
    ]
    series += [{"id": "cpu", "model": ""}, {"id": "device_power:gpu0", "model": "", "title": "Power of a card"}]
    values = {f"{one['id']}|{one['model']}": [[float(n)], [], []] for n, one in enumerate(series)}
    events = [{"at": 1.0, "level": "error", "text": f"event {n} \x1b[31m\u202e" + "x" * 200} for n in range(50)]
    snapshot = {"at": 1_800_000_000.0, "series": series, "values": values, "events": events}
    figures.take("snapshot", json.dumps(snapshot).encode())
    return figures


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (200, 60)])
@pytest.mark.parametrize("num_models", [1, 5, 60])
@pytest.mark.parametrize("has_help", [False, True])
def test_the_screen_fits_the_terminal(width: int, height: int, num_models: int, has_help: bool) -> None:
    from rich.console import Console

    figures, screen = figures_of(num_models), Screen("with port 8000")
    screen.has_help = has_help
    out = Console(width=width, height=height, file=io.StringIO(), record=True)
    out.print(screen.drawn(figures, width, height))
    lines = out.export_text().rstrip("\n").splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    assert "\u202e" not in "".join(lines)
    figures.lost("The server with port 8000 does not answer.")
    out.print(screen.drawn(figures, width, height))
    assert "Trying again" in out.export_text() or width < 80


def test_models_sort_by_the_column_that_was_chosen() -> None:
    figures, screen = figures_of(12), Screen("with port 8000")
    names = figures.models
    assert screen._order(figures) == names
    screen.press("s")
    assert screen.sort == COLUMNS[0].key
    assert screen._order(figures) == names[::-1]  # the highest first
    screen.press("r")
    assert screen._order(figures) == names
    for _ in SORTS[1:]:
        screen.press("s")
    assert screen.sort == ""
    assert not screen.press("q")


def test_numbers_are_short() -> None:
    assert [seconds(value) for value in (None, 0.00085, 0.0123, 1.254, 310)] == ["-", "850us", "12ms", "1.25s", "310s"]
    assert [quantity(value) for value in (None, 0, 0.52, 42.4, 1234, 12_345, 4.2e6)] == [
        "-",
        "0",
        "0.5",
        "42",
        "1234",
        "12.3k",
        "4.2M",
    ]
    assert [percent(value) for value in (None, 0.254)] == ["-", "25%"]
