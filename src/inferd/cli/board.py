"""The table of models that ``inferd serve`` shows on a terminal while they load. Elsewhere the log reports the
progress.

Knows events and how they are shown, and not what emits them.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from inferd.cli.terminal import console, is_live
from inferd.config import ModelConfig
from inferd.config.units import bytes_text
from inferd.events import Event, LoadProgress, QueueChanged, ReplicaChanged
from inferd.worker.line_writer import write_all

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

REFRESHES_PER_S: Final = 8
_COLOURS: Final = {
    "ready": "green",
    "failed": "red",
    "unavailable": "red",
    "died": "red",
    "hung": "red",
    "remote": "green",
}
_OVER: Final = ("ready", "failed")
_BROKEN: Final = ("hung", "died", "failed")
_SHOWN: Final = re.compile(r"[\d:]+ \S+/\d+ (is (starting|loading|ready)|failed: .*|has stopped)\n")
"""Lines of the log that say what the table shows."""


class Row:
    """What is known of one model."""

    def __init__(self, model: ModelConfig) -> None:
        self.is_on_demand = model.num_local > 0 and model.is_on_demand
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
        broken = sum(state in _BROKEN for state in self.states.values())
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
        under_way = [slowest for index, slowest in self.progress.items() if self.states.get(index) not in _OVER]
        if not under_way:
            return "", 0, 0
        slowest = min(under_way, key=lambda slowest: slowest.done / slowest.total if slowest.total else 0.0)
        return slowest.phase, slowest.done, slowest.total


class Board:
    """Rows by model. ``take`` is called from the event loop, drawing happens in a thread of rich's."""

    def __init__(self, models: Mapping[str, ModelConfig]) -> None:
        self._rows = {name: Row(model) for name, model in models.items()}
        self._live: Live | None = None
        self._is_over = False
        self._writing = threading.Lock()

    def handle(self, event: Event) -> None:
        """Show an event of a model; other events are ignored."""
        row = self._rows.get(getattr(event, "model", ""))
        if row is None:
            return
        if isinstance(event, LoadProgress):
            row.progress[event.replica] = event
        elif isinstance(event, ReplicaChanged):
            if event.state == "stopped" and row.states.get(event.replica) in _BROKEN:
                return  # the table keeps the failed state, which is why the replica was stopped
            row.states[event.replica] = event.state
            row.rss[event.replica] = event.rss_bytes
            row.reason = event.reason or row.reason
        elif isinstance(event, QueueChanged):
            row.waiting, row.in_flight = event.waiting, event.in_flight

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw until the block ends, on a terminal. The last state stays on the screen without the reasons, which are
        shown below it."""
        with self._drawn() if is_live() else contextlib.nullcontext():
            try:
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
        """The table, and below it the problems."""
        from rich.console import Group
        from rich.text import Text

        if self._is_over:
            has_begun = any(row.states for row in self._rows.values())
            return Group(self.table()) if has_begun else Group()
        wrong = [f"{name}: {row.reason}" for name, row in self._rows.items() if row.is_broken and row.reason]
        return Group(self.table(), *(Text(line, style="red") for line in wrong))

    def table(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        rows = self._rows
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("model", overflow="fold", min_width=8)
        for heading in ("state", "replicas", "progress"):
            table.add_column(heading, no_wrap=True)
        has_memory = any(any(row.rss.values()) for row in rows.values())
        has_queue = any(row.waiting + row.in_flight for row in rows.values())
        for heading, is_shown in (("memory", has_memory), ("queue", has_queue)):
            if is_shown:
                table.add_column(heading, justify="right", no_wrap=True)
        for name, row in rows.items():
            memory = sum(row.rss.values())
            cells: list[Text | str] = [
                Text(name),
                Text(row.state, style=_COLOURS.get(row.state, "yellow")),
                row.replicas,
                _progress(*row.doing),
            ]
            if has_memory:
                cells.append(bytes_text(memory) if memory else "")
            if has_queue:
                cells.append(str(row.waiting + row.in_flight or ""))
            table.add_row(*cells)
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
    """The phase and its progress, with the total when bytes are counted. Short enough for a terminal of 80 columns."""
    from rich.text import Text

    if total <= 1:  # a phase of one step has no amount
        return Text(phase)
    whole = f" of {bytes_text(total)}" if phase == "weights" else ""
    return Text.assemble(f"{phase} ", (f"{100 * done // total} %", "green"), whole)
