"""A server into which causes of slow requests are injected, and the table of what it named.

    python -m tests.why.lab [CAUSE ...]      runs the injections and prints the table

An injection is a function that makes some requests slow and returns their ids. The table counts in how many of them
the server names the injected cause first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.experiments.client import JSON, Answer, Client
from tests.experiments.field import Server

WORDS: Final = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "the",
    "sun",
    "go",
    "down",
    "over",
    "the",
    "old",
    "town",
    "by",
    "the",
    "sea",
    "while",
    "rain",
    "fell",
]


def text_of(num_words: int, seed: int = 0) -> str:
    return " ".join(WORDS[(place * 7 + seed * 13 + place // 11) % len(WORDS)] for place in range(num_words))


class Lab:
    """One server with the real engine, its clients, and the ids of their requests."""

    def __init__(self, server: Server, keys: Mapping[str, str]) -> None:
        self.server = server
        self.keys = keys
        self._lock = threading.Lock()
        self._num_asked = 0

    def ask(
        self,
        prompt: str = "Once upon a time",
        max_tokens: int = 20,
        *,
        tenant: str = "team-a",
        model: str = "demo",
        priority: str = "",
        name: str = "r",
        seconds: float = 60.0,
        after_s: float = 0.0,
        **options: Any,
    ) -> str:
        """One completion of exactly ``max_tokens`` tokens; its request's id."""
        with self._lock:
            self._num_asked += 1
            request_id = f"{name}-{self._num_asked}"
        time.sleep(after_s)
        headers = {"x-request-id": request_id, **({"x-inferd-priority": priority} if priority else {})}
        self.client(tenant).complete(
            *(prompt,), model=model, max_tokens=max_tokens, ignore_eos=True, headers=headers, seconds=seconds, **options
        )
        return request_id

    def client(self, tenant: str) -> Client:
        key = self.keys.get(tenant)
        return self.server.client if key is None else self.server.client.with_key(key)

    def explain(self, request_id: str) -> JSON:
        answer: Answer = self.server.operator.get(f"/admin/requests/{request_id}")
        assert answer.status == 200, answer
        return answer.json

    def worker(self) -> int:
        (pid,) = self.server.worker_pids()
        return pid


@contextlib.contextmanager
def lab(
    models: JSON | None = None, *, tenants: tuple[str, ...] = (), yields: bool = False, **sections: Any
) -> Iterator[Lab]:
    """A server around ``models``, with a key for each tenant; without tenants no request needs a key.

    Where this is allowed, the server runs before the other processes of the machine, because their load is a cause too.
    ``yields``: it does not.
    """
    config = {"models": models or {"demo": {"source": "demo"}}, "server": {"auth": "auto"}, **sections}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), config, (), {"EXPERIMENT_WORKER": "real"}, has_session=not yields)
        if not yields:
            _prefer(server.process.pid)
        try:
            server.await_ready()
            server.until(server.is_ready, "ready", 60)
            if not yields:
                for worker in server.worker_pids():  # in sessions of their own
                    _prefer(worker)
            keys = {tenant: server.key(tenant) for tenant in tenants}
            yield Lab(server, keys)
        finally:
            server.end()


def _prefer(pid: int) -> None:
    """Let a process and its children run before others, if this is allowed. Where the kernel groups processes by their
    session (``sched_autogroup_enabled``), a niceness counts within the session alone, and the group has its own."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, -15)
        with contextlib.suppress(FileNotFoundError):
            Path(f"/proc/{pid}/autogroup").write_text("-15")


def at_once(number: int, ask: Callable[[int], str]) -> list[str]:
    """Requests in threads of their own; their ids."""
    ids: list[str] = []
    threads = [threading.Thread(target=lambda n=n: ids.append(ask(n)), daemon=True) for n in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return ids


@contextlib.contextmanager
def meanwhile(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Something that goes on beside the requests until they are over."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


@dataclass
class Row:
    """What the server named first, for the requests of one injection."""

    cause: str
    affected: int = 0
    named: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.named[self.cause] / self.affected if self.affected else 0.0

    def __str__(self) -> str:
        others = ", ".join(f"{name} {count}" for name, count in self.named.most_common() if name != self.cause)
        return f"| {self.cause} | {self.affected} | {self.named[self.cause]} | {self.share:.1%} | {others or '-'} |"


HEAD: Final = "| cause | affected | named first | share | others |\n| --- | --- | --- | --- | --- |"


def row_of(cause: str, found: list[JSON]) -> Row:
    row = Row(cause, len(found))
    for record in found:
        row.named[record["cause"] or "none"] += 1
        if len(row.examples) < 2 or (record["cause"] != cause and len(row.examples) < 5):
            row.examples.append(record["sentence"])
    return row


def unaccounted(found: list[JSON]) -> list[float]:
    """The shares of the totals that no named part has: what is called rest."""
    return [
        abs(sum(part["seconds"] for part in record["parts"] if part["name"] == "rest")) / record["total_s"]
        for record in found
    ]


def main(names: list[str]) -> int:
    from tests.why.injections import INJECTIONS, idle

    print(HEAD)
    for name, inject in {**INJECTIONS, "none": idle}.items():
        if not names or name in names:
            began = time.monotonic()
            found = inject()
            row = row_of(name, found)
            print(row, flush=True)
            rests = sorted(unaccounted(found))
            high = rests[int(len(rests) * 0.99)] if rests else 0.0
            print(f"    {time.monotonic() - began:.0f} s; rest at p99: {high:.2%}", file=sys.stderr)
            for example in row.examples:
                print("   ", example, file=sys.stderr)
            sys.stderr.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
