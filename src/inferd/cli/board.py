"""The table of models that ``inferd serve`` shows while they load, and its plain lines where nobody watches.

Knows events and how they look, not who emits them.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from inferd import clock
from inferd.cli.terminal import bytes_text, console, is_live
from inferd.config import ModelConfig
from inferd.events import Event, LoadProgress, QueueChanged, ReplicaChanged
from inferd.observe.logs import write_all

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

REFRESHES_PER_S: Final = 8
_BAR_WIDTH: Final = 10
_PHASES: Final = {"weights": "reading the weights", "tokenizer": "reading the tokenizer"}
_COLOURS: Final = {
    "ready": "green",
    "failed": "red",
    "unavailable": "red",
    "died": "red",
    "hung": "red",
    "remote": "green",
}
_OVER: Final = ("ready", "failed")
_SHOWN: Final = re.compile(r"[\d:]+ \S+/\d+ is (starting|loading|ready)\n")
"""Lines of the log that say what the table shows."""


class Row:
    """What is known of one model."""

    def __init__(self, model: ModelConfig) -> None:
        self.is_on_demand = model.num_local > 0 and model.load == "on_demand"
        self.num_remote = len(model.upstreams)
        self.num_replicas = self.num_remote + (0 if self.is_on_demand else model.num_local)
        self.states: dict[int, str] = {}
        self.rss: dict[int, int] = {}
        self.progress: dict[int, LoadProgress] = {}
        self.reason = ""
        self.waiting = 0
        self.in_flight = 0

    @property
    def num_ready(self) -> int:
        return list(self.states.values()).count("ready")

    @property
    def state(self) -> str:
        if self.is_on_demand and not self.states:
            return "on demand"
        broken = sum(state in ("hung", "died", "failed") for state in self.states.values())
        if self.num_ready:
            return "degraded" if broken else "ready" if self.num_ready >= self.num_replicas else "loading"
        if broken and broken == len(self.states) >= self.num_replicas:
            return "unavailable" if self.num_remote == self.num_replicas else "failed"
        return "loading"

    @property
    def is_broken(self) -> bool:
        return self.state in ("failed", "unavailable", "degraded")

    @property
    def replicas(self) -> str:
        remote = f" ({self.num_remote} remote)" if self.num_remote else ""
        total = max(self.num_replicas, len(self.states))
        return f"{self.num_ready}/{total}{remote}" if total else ""

    @property
    def doing(self) -> tuple[str, int, int]:
        """Phase, done and total of the replica that is least far."""
        under_way = [told for index, told in self.progress.items() if self.states.get(index) not in _OVER]
        if not under_way:
            return "", 0, 0
        told = min(under_way, key=lambda told: told.done / told.total if told.total else 0.0)
        return told.phase, told.done, told.total


class Board:
    """Rows by model. ``take`` is called from the event loop, drawing happens in a thread of rich's."""

    def __init__(self, models: Mapping[str, ModelConfig]) -> None:
        self._rows = {name: Row(model) for name, model in models.items()}
        self._began_at = clock.now()
        self._live: Live | None = None
        self._told: set[tuple[str, str]] = set()
        self._is_over = False
        self._writing = threading.Lock()

    def take(self, event: Event) -> None:
        """Note an event; others than a model's are not of interest."""
        row = self._rows.get(getattr(event, "model", ""))
        if row is None:
            return
        if isinstance(event, LoadProgress):
            row.progress[event.replica] = event
            self._say(event.model, _PHASES.get(event.phase, event.phase))
        elif isinstance(event, ReplicaChanged):
            is_news = row.states.get(event.replica) != event.state
            row.states[event.replica] = event.state
            row.rss[event.replica] = event.rss_bytes
            row.reason = event.reason or row.reason
            if not is_news:
                return
            if event.state == "ready":
                self._say(event.model, f"{row.replicas} ready, {self._seconds()}")
            elif event.state in ("failed", "died", "hung"):
                self._say(event.model, f"replica {event.replica} {event.state}: {event.reason}")
        elif isinstance(event, QueueChanged):
            row.waiting, row.in_flight = event.waiting, event.in_flight

    def _say(self, model: str, text: str) -> None:
        """A plain line where there is no table; each once."""
        if not self._is_over and not is_live() and (model, text) not in self._told:
            self._told.add((model, text))
            click.echo(f"Loading {model}: {text}", err=True)

    def _seconds(self) -> str:
        return f"{clock.now() - self._began_at:.1f} s"

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw, or say in lines, until the block ends; the last state stays on the screen."""
        try:
            with self._drawn() if is_live() else contextlib.nullcontext():
                yield
        finally:
            self._is_over = True

    @contextmanager
    def _drawn(self) -> Iterator[None]:
        from rich.live import Live

        with Live(
            get_renderable=self.drawing,
            console=console(stderr=True),
            refresh_per_second=REFRESHES_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live:
            with self._writing:
                self._live = live
            try:
                yield
            finally:
                with self._writing:
                    self._live = None

    def drawing(self) -> Group:
        """The table, and below it what is wrong."""
        from rich.console import Group
        from rich.text import Text

        wrong = [f"{name}: {row.reason}" for name, row in self._rows.items() if row.is_broken and row.reason]
        return Group(self.table(), *(Text(line, style="red", overflow="ellipsis", no_wrap=True) for line in wrong))

    def table(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("model", "state", "replicas", "progress", "memory", "queue"):
            table.add_column(heading, justify="right" if heading in ("memory", "queue") else "left", no_wrap=True)
        for name, row in self._rows.items():
            memory = sum(row.rss.values())
            table.add_row(
                Text(name, overflow="ellipsis"),
                Text(row.state, style=_COLOURS.get(row.state, "yellow")),
                row.replicas,
                _progress(*row.doing),
                bytes_text(memory) if memory else "",
                str(row.waiting + row.in_flight or ""),
            )
        return table

    # -- the log, beside the table ------------------------------------------------------------

    def write(self, text: str) -> int:
        """Where the log goes: above the table while there is one, else straight to stderr."""
        with self._writing:
            live = self._live
            if live is not None:
                news = "".join(line for line in text.splitlines(keepends=True) if not _SHOWN.fullmatch(line))
                live.console.print(news, end="", markup=False, highlight=False, soft_wrap=True)
        if live is None:
            write_all(sys.stderr.fileno(), text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def _progress(phase: str, done: int, total: int) -> Text:
    """A bar, the phase, and bytes where it counts bytes."""
    from rich.text import Text

    if not phase:
        return Text()
    filled = min(_BAR_WIDTH, _BAR_WIDTH * done // total) if total else 0
    count = f" {bytes_text(done)} of {bytes_text(total)}" if phase == "weights" and total else ""
    return Text.assemble(("━" * filled, "green"), ("━" * (_BAR_WIDTH - filled), "dim"), f" {phase}{count}")
