"""A server under bombs: streams go on, killed helpers end one request, and nothing is left when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.ports import free_port
from tests.tiers import THOROUGH, sample

LONG = {"oneOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(40)]}
BOMBS: list[dict[str, Any]] = [
    {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": 1}}} for i in range(14)]}] * 8}},
    {"guided_json": {"enum": [f"x{i}" for i in range(20_000)]}},
    {"guided_json": {"$ref": "#"}},
    {"guided_regex": "((a{1,300}){1,300}){1,300}"},
    {"guided_regex": "(" * 2_000 + ")" * 2_000},
    {"guided_grammar": "start: a\n" + "\n".join(f'a: "{i}" a' for i in range(3_000))},
    {"guided_grammar": "start: start start"},
]


class Serving:
    def __init__(self, folder: Path) -> None:
        port = free_port()
        config = folder / "inferd.yaml"
        config.write_text(
            f"server: {{port: {port}, grace_s: 5}}\nstate: {{data_dir: {folder}/data}}\n"
            "models: {m: {source: demo, device: cpu}}\n"
        )
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([sys.executable, "-m", "inferd", "serve", str(config)])
        until(self._is_ready)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "x", "max_tokens": 4, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def below(self) -> dict[int, str]:
        """The processes that it has started, and theirs, with their command lines."""
        parents: dict[int, int] = {}
        lines: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(folder.name)] = int(fields[1])
                    lines[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        found = {self.process.pid}
        while new := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= new
        return {pid: lines[pid] for pid in found - {self.process.pid}}

    def trying(self) -> list[int]:
        """The process that waits for trials, and those of trials."""
        return sorted(pid for pid, line in self.below().items() if "inferd.structured.trial" in line)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    made = Serving(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


@THOROUGH  # of one bomb at a time: tests/clients/test_bad_forms.py
def test_streams_go_on_beside_bombs_and_killed_trials(serving: Serving) -> None:
    body = {"model": "m", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(len(BOMBS) + 1) as threads, httpx.stream(
        "POST", f"{serving.url}/v1/completions", json=body, timeout=120
    ) as stream:  # fmt: skip
        lines = stream.iter_lines()
        assert next(lines).startswith("data:")
        answers = [threads.submit(serving.complete, **bomb) for bomb in BOMBS]
        killed = threads.submit(serving.complete, guided_json=LONG)
        waiting = until(serving.trying)[0]
        os.kill(waiting, signal.SIGKILL)
        rest = [line for line in lines if line.startswith("data:")]
        assert rest[-1] == "data: [DONE]"
        for answer in (*answers, killed):
            reply = answer.result()
            assert reply.status_code in (200, 400, 503), reply.text
    small = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    reply = serving.complete(guided_json=small, max_tokens=40)
    assert set(json.loads(reply.json()["choices"][0]["text"])) == {"a"}
    assert serving.complete(guided_regex="[ab]{2}").json()["choices"][0]["text"] in ("aa", "ab", "ba", "bb")


@THOROUGH
@pytest.mark.parametrize("number", sample([signal.SIGTERM, signal.SIGKILL], signal.SIGKILL))
def test_nothing_is_left_of_a_server_that_ends_during_a_trial(serving: Serving, number: signal.Signals) -> None:
    assert serving.complete(guided_regex="a").status_code == 200
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(serving.complete, guided_json=LONG)
        until(lambda: len(serving.trying()) == 2)
        started = serving.below()
        serving.process.send_signal(number)
        serving.process.wait(30)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
        with contextlib.suppress(httpx.TransportError):
            # A server that drains answers a request that ends within the grace.
            assert lost.result().status_code in (200, 400, 503)
