"""The table of models that ``inferd serve`` shows while they load, and its plain lines where nobody watches.

Knows events and how they look, not who emits them.
"""

from __future__ import annotations

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
    from rich.live import Live
    from rich.table import Table

REFRESHES_PER_S: Final = 8
_PHASES: Final = {"weights": "reading the weights", "tokenizer": "reading the tokenizer"}
_COLOURS: Final = {"ready": "green", "failed": "red", "died": "red", "hung": "red", "remote": "green"}
_OVER: Final = ("ready", "failed")


class Row:
    """What is known of one model."""

    def __init__(self, model: ModelConfig) -> None:
        self.num_local = model.num_local if model.load == "startup" else 0
        self.num_remote = len(model.upstreams)
        self.is_on_demand = model.num_local > 0 and model.load == "on_demand"
        self.states: dict[int, str] = {}
        self.rss: dict[int, int] = {}
        self.progress: dict[int, LoadProgress] = {}
        self.reason = ""
        self.waiting = 0
        self.in_flight = 0

    @property
    def state(self) -> str:
        states = list(self.states.values())
        if self.num_local == 0:
            return "on demand" if self.is_on_demand else "remote"
        if states.count("ready") == self.num_local:
            return "ready"
        if states.count("failed") == self.num_local:
            return "failed"
        return "loading" if not set(states) & {"hung", "died", "failed"} else "degraded"

    @property
    def replicas(self) -> str:
        local = f"{list(self.states.values()).count('ready')}/{self.num_local}" if self.num_local else ""
        remote = f"{self.num_remote} remote" if self.num_remote else ""
        return " + ".join(filter(None, (local, remote))) or "0"

    @property
    def doing(self) -> tuple[str, int, int]:
        """Phase, done and total of the replica that is least far."""
        under_way = [told for index, told in self.progress.items() if self.states.get(index) not in _OVER]
        if not under_way:
            return "", 0, 0
        told = min(under_way, key=lambda told: told.done / told.total if told.total else 0.0)
        return _PHASES.get(told.phase, told.phase), told.done, told.total


class Board:
    """Rows by model. ``take`` is called from the event loop, drawing happens in a thread of rich's."""

    def __init__(self, models: Mapping[str, ModelConfig]) -> None:
        self._rows = {name: Row(model) for name, model in models.items()}
        self._began_at = clock.now()
        self._live: Live | None = None
        self._told: set[tuple[str, str]] = set()
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
            row.reason = event.reason
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
        if self._live is None and not is_live() and (model, text) not in self._told:
            self._told.add((model, text))
            click.echo(f"Loading {model}: {text}", err=True)

    def _seconds(self) -> str:
        return f"{clock.now() - self._began_at:.1f} s"

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw until the block ends; the last state stays on the screen."""
        if not is_live():
            yield
            return
        from rich.live import Live

        with Live(
            get_renderable=self.table,
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

    def table(self) -> Table:
        from rich import box
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("model", "state", "replicas", "progress", "memory", "queue"):
            table.add_column(heading, justify="right" if heading in ("memory", "queue") else "left", no_wrap=True)
        for name, row in self._rows.items():
            phase, done, total = row.doing
            progress = Table.grid(padding=(0, 1))
            if phase:
                count = f"{bytes_text(done)} of {bytes_text(total)}" if phase == _PHASES["weights"] and total else ""
                progress.add_row(
                    ProgressBar(total=total or None, completed=done, width=16, pulse=not total), phase, count
                )
            elif row.state == "failed" and row.reason:
                progress.add_row(Text(row.reason[:60], style="red"))
            memory = sum(row.rss.values())
            table.add_row(
                Text(name, overflow="ellipsis"),
                Text(row.state, style=_COLOURS.get(row.state, "yellow")),
                row.replicas,
                progress,
                bytes_text(memory) if memory else "",
                f"{row.waiting} waiting" if row.waiting else str(row.in_flight or ""),
            )
        return table

    # -- the log, beside the table ------------------------------------------------------------

    def write(self, text: str) -> int:
        """Where the log goes: above the table while there is one, else straight to stderr."""
        with self._writing:
            live = self._live
            if live is not None:
                live.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        if live is None:
            write_all(sys.stderr.fileno(), text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""
