"""Rollouts of two real servers with one database, under load: ``python -m bench.rollouts_live``.

    python -m bench.rollouts_live --changes 200

Each of the two servers serves two versions of a small ONNX model to clients that never pause. The operator promotes,
aborts, undoes and begins again, as often as ``--changes`` says. Then the new version is replaced by one that fails for
half of the inputs, ten times, and its rollback is timed. Exit status 1 names what did not hold:

- no request failed, over all changes and rollbacks;
- from the bad event that decided to weight 0 on both servers: at most 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import yaml
from onnx import TensorProto, helper, numpy_helper

ROLLBACKS: Final = 10
CLIENTS: Final = 2  # of each server
STEPS: Final = [{"weight": 5}, {"weight": 25, "for_s": 3600}, {"weight": 50, "for_s": 3600}, {"weight": 100}]


def model(path: Path, value: int) -> None:
    """Answers with ``value``; with 2 it fails where x[0, 0] is 9, because an index is out of bounds."""
    corner = numpy_helper.from_array(np.zeros((1, 2), np.int64), "corner")
    table = numpy_helper.from_array(np.full(2 if value == 2 else 16, value, np.float32), "table")
    graph = helper.make_graph(
        [
            helper.make_node("GatherND", ["x", "corner"], ["found"]),
            helper.make_node("Cast", ["found"], ["index"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "index"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [corner, table],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(proto.SerializeToString())


class Server:
    """A server, and the clients that ask it without a pause."""

    def __init__(self, folder: Path, name: str, rollout: dict[str, Any]) -> None:
        self.log = folder / f"{name}.log"
        file = folder / f"{name}.yaml"
        settings = {
            "server": {"port": 0, "reload": False, "log_format": "json"},
            "state": {"data_dir": str(folder / name), "url": f"sqlite://{folder}/shared.db"},
            "models": {"m": {"source": str(folder / "m"), "threads": 1, "rollout": rollout}},
        }
        file.write_text(yaml.safe_dump(settings))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(file)],
            stdout=subprocess.PIPE,
            stderr=self.log.open("wb"),
            text=True,
        )
        self.pid, self.url = self._process.pid, self._address()
        self.answers: Counter[tuple[int, str]] = Counter()  # by status and version
        self._data_dir, self._is_over = str(folder / name), threading.Event()
        self.share_bad = 0.0
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def _address(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "inferd is ready at " in line:
                return line.split("inferd is ready at ")[1].split(",")[0].split()[0].rstrip(".,")
        raise RuntimeError(self.log.read_text()[-3000:])

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        random = np.random.default_rng(number)
        with httpx.Client(base_url=self.url, timeout=30) as client:
            while not self._is_over.is_set():
                value = 9.0 if random.random() < self.share_bad else 0.0
                tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, 0.0]}
                answer = client.post("/v2/models/m/infer", json={"inputs": [tensor]})
                version = answer.json().get("model_version", "") if answer.status_code == 200 else ""
                self.answers[answer.status_code, version] += 1

    def command(self, *words: str) -> dict[str, Any]:
        """An inferd command to this server; its output, where that is JSON."""
        env = {**os.environ, "INFERD_STATE__DATA_DIR": self._data_dir}
        done = subprocess.run(
            [sys.executable, "-m", "inferd", "rollout", *words], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return dict(json.loads(done.stdout)) if "--json" in words else {}

    def state(self) -> str:
        return str(self.command("status", "m", "--json")["progress"]["state"])

    def lines(self, event: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line["event"] == event]

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._process.terminate()
        self._process.communicate(timeout=30)


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.05)


def changes(servers: Sequence[Server], number: int) -> None:
    """Start, promote, undo, start, promote, abort, ... at one server and the other in turn."""
    words = ("start", "promote", "promote --full", "undo", "start", "promote", "abort")
    for index in range(number):
        server, word = servers[index % 2], words[index % len(words)]
        if word == "promote":
            until(lambda server=server: server.state() in ("running", "inconclusive"))
        verb, *flags = word.split()
        server.command(verb, "m", *flags)
    if servers[0].state() not in ("aborted", "promoted"):
        servers[0].command("abort", "m")
    elif servers[0].state() == "promoted":
        servers[0].command("undo", "m")


def rollbacks(servers: Sequence[Server], number: int) -> list[float]:
    """Seconds from the bad event that decided until both servers had weight 0, of each rollback."""
    found = []
    for _ in range(number):
        servers[0].command("start", "m")
        until(lambda: servers[1].state() in ("running", "inconclusive"))
        for server in servers:
            server.share_bad = 0.5
        until(lambda: servers[0].state() == "rolled_back")
        for server in servers:
            server.share_bad = 0.0
        decided = servers[0].command("status", "m", "--json")["changes"][0]["at"]
        time.sleep(1.5)
        at = [_seconds(server.lines("rollout")[-1]["ts"]) for server in servers]
        # The bad event that decided is the last request that failed in the new version before the decision.
        failed = [_seconds(line["ts"]) for server in servers for line in server.lines("http") if _is_bad(line)]
        found.append(max(at) - max(one for one in failed if one <= decided))
    return found


def _is_bad(line: dict[str, Any]) -> bool:
    return bool(line.get("rescued_from"))


def _seconds(ts: str) -> float:
    return datetime.fromisoformat(ts).timestamp()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--changes", type=int, default=200)
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in (1, 2):
            model(folder / "m" / str(number) / "model.onnx", number)
        rollout = {"stable": 1, "new": 2, "steps": STEPS}
        servers: list[Server] = []
        try:
            for word in ("one", "two"):
                servers.append(Server(folder, word, rollout))
            for server in servers:
                server.begin()
            changes(servers, options.changes)
            before = sum((server.answers for server in servers), Counter())
            times = rollbacks(servers, ROLLBACKS)
        finally:
            for server in servers:
                server.close()
    answers = sum((server.answers for server in servers), Counter())
    wrong = sum(count for (status, _), count in answers.items() if status != 200)
    if wrong:
        failed.append(f"{wrong} requests failed")
    if max(times) > 1.0:
        failed.append(f"a rollback took {max(times):.2f} s")
    print("| what | value |\n| --- | --- |")
    print(f"| requests during {options.changes} commands | {sum(before.values()):,} |")
    print(f"| requests in all | {answers.total():,} |")
    print(f"| of them by the new version | {answers[200, '2']:,} |")
    print(f"| failed | {wrong:,} |")
    print(f"| bad event to weight 0 on both servers, median of {len(times)} | {sorted(times)[len(times) // 2]:.3f} s |")
    print(f"| the longest | {max(times):.3f} s |")
    for sentence in failed:
        print(f"did not hold: {sentence}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
