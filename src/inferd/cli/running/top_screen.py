"""The screen of ``inferd top``: the machine, a table of models, the last events and the slowest requests.

Fits 80 columns and 24 lines. Knows figures and how they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from inferd.cli.running.live_figures import Figures
from inferd.cli.running.status import duration
from inferd.config.units import bytes_text

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

WIDE: Final = 110
"""Columns from which on there are more figures."""

_STYLES: Final = {"ready": "green", "degraded": "yellow", "loading": "yellow"} | dict.fromkeys(
    ("failed", "unavailable"), "red"
)
_LEVELS: Final = {"error": "red", "warning": "yellow"}

_SHOWN_ALREADY: Final = ("device_duty:cpu", "device_memory:cpu")  # as the machine's

Row = dict[str, float | None]

HELP: Final = (
    "q quits, s sorts by the next column, r turns the order round, ? shows or hides this",
    "ttft: time to the first token; tpot: time per further token; each as p50/p95 of the last minute",
    "a dash: there is no such number, because nothing ended in that time or the model has no such part",
)


class Column:
    """A column of the table of models."""

    def __init__(self, heading: str, text: Callable[[Row], str], key: str, *, is_wide: bool = False) -> None:
        self.heading = heading
        self.text = text
        self.key = key  # the figure by which it sorts
        self.is_wide = is_wide  # shown on a wide terminal alone


def _pair(id_: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        if row.get(f"{id_}_p50") is None:
            return "-"
        return f"{seconds(row[f'{id_}_p50'])}/{seconds(row.get(f'{id_}_p95'))}"

    return text


def _plain(id_: str) -> Callable[[Row], str]:
    return lambda row: quantity(row.get(id_))


def _percent(id_: str) -> Callable[[Row], str]:
    return lambda row: percent(row.get(id_))


COLUMNS: Final = (
    Column("req/s", _plain("requests_s"), "requests_s"),
    Column("err/s", _plain("errors_s"), "errors_s", is_wide=True),
    Column("tok/s", _plain("tokens_s"), "tokens_s"),
    Column("ttft", _pair("ttft"), "ttft_p95"),
    Column("tpot", _pair("tpot"), "tpot_p95"),
    Column("total", _pair("total"), "total_p95", is_wide=True),
    Column("queue", _plain("queue"), "queue"),
    Column("run", _plain("running"), "running"),
    Column("batch", _plain("batch_rows"), "batch_rows", is_wide=True),
    Column("kv", _percent("kv_use"), "kv_use"),
    Column("hits", _percent("prefix_hits"), "prefix_hits", is_wide=True),
)

SORTS: Final = ("", *(column.key for column in COLUMNS))
"""What ``s`` goes through; empty: the order of the configuration."""


class Screen:
    """What the person at the terminal chose."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the server
        self.sort = ""
        self.is_reversed = False
        self.has_help = False

    def press(self, key: str) -> bool:
        """A key was pressed. False: quit."""
        match key:
            case "q" | "Q" | "\x03" | "\x04":
                return False
            case "?" | "h":
                self.has_help = not self.has_help
            case "s":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            case "r":
                self.is_reversed = not self.is_reversed
        return True

    def drawn(self, figures: Figures, width: int, height: int) -> Group:
        """Everything, within ``width`` columns and ``height`` lines."""
        from rich.console import Group
        from rich.text import Text

        with figures.lock:
            lines: list[RenderableType] = [self._head(figures), self._machine(figures)]
            left = height - 6 - (len(HELP) if self.has_help else 0)  # head, machine, blank, headings, rest, keys
            names = self._order(figures)
            num_models = min(len(names), max(1, left // 2))
            num_events = _fitting(len(figures.events), 5, left - num_models)
            num_slow = _fitting(len(figures.slowest), 3, left - num_models - _with_heading(num_events))
            num_models = max(1, left - _with_heading(num_events) - _with_heading(num_slow))
            lines += [Text(), self._models(figures, names[:num_models], width)]
            if len(names) > num_models:
                lines.append(Text(f"and {len(names) - num_models} more models", style="dim"))
            if num_events:
                lines.append(Text("events", style="bold"))
                for line in list(figures.events)[-num_events:]:
                    text = line.text + (f": {line.detail}" if line.detail else "")
                    lines.append(_cut(f"  {_clock(line.at)} {text}", width, _LEVELS.get(line.level, "")))
            if num_slow:
                lines.append(Text("slowest requests of the last hour", style="bold"))
                for slow in figures.slowest[:num_slow]:
                    said = slow.sentence or slow.cause or ""
                    lines.append(_cut(f"  {seconds(slow.total_s)} {slow.model or '-'} {slow.id} {said}", width, ""))
        if self.has_help:
            lines += [_cut(text, width, "dim") for text in HELP]
        order = self.sort or "configuration"
        lines.append(_cut(f"q quit  s sort ({order}{', reversed' if self.is_reversed else ''})  ? help", width, "dim"))
        return Group(*lines)

    def _head(self, figures: Figures) -> Text:
        from rich.text import Text

        if figures.problem:
            at = f"; the numbers are of {_clock(figures.at)}" if figures.at is not None else ""
            return Text(f"{figures.problem} Trying again{at}.", style="red", no_wrap=True, overflow="ellipsis")
        report = figures.report
        about = f"  inferd {report.version}, {report.status}" if report is not None else ""
        since = f", up {duration(figures.at - report.started_at)}" if report is not None and figures.at else ""
        at = _clock(figures.at) if figures.at is not None else "connecting"
        return Text(f"{self.name}{about}{since}  {at}", style="bold", no_wrap=True, overflow="ellipsis")

    def _machine(self, figures: Figures) -> Text:
        from rich.text import Text

        row = figures.values.get("", {})
        parts = [f"cpu {percent(row.get('cpu'))}"]
        used, limit = row.get("memory_used"), row.get("memory_limit")
        if used is not None and limit is not None:
            parts.append(f"memory {bytes_text(int(used))} of {bytes_text(int(limit))}")
        for id_, value in row.items():
            figure, _, device = id_.partition(":")
            if device and value is not None and id_ not in _SHOWN_ALREADY:
                shown = {
                    "device_duty": percent(value),
                    "device_memory": bytes_text(int(value)),
                    "device_temperature": f"{value:.0f} °C",
                    "device_power": f"{value:.0f} W",
                }.get(figure)
                if shown is not None:
                    parts.append(f"{device} {shown}")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _order(self, figures: Figures) -> list[str]:
        names = figures.models
        if self.sort:
            key = self.sort
            names.sort(key=lambda name: -(figures.values[name].get(key) or 0.0))
        return names[::-1] if self.is_reversed else names

    def _models(self, figures: Figures, names: list[str], width: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        states = {model.name: model for model in figures.report.models} if figures.report is not None else {}
        columns = [column for column in COLUMNS if width >= WIDE or not column.is_wide]
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", width=width)
        table.add_column("model", no_wrap=True, overflow="ellipsis", min_width=6, ratio=1)
        if states:
            table.add_column("state", no_wrap=True, overflow="ellipsis", min_width=5, max_width=11)
        for column in columns:
            mark = "*" if column.key == self.sort else ""
            table.add_column(column.heading + mark, justify="right", no_wrap=True)
        for name in names:
            cells: list[Text | str] = [Text(name)]
            if states:
                model = states.get(name)
                state = model.state if model is not None else "-"
                ready = f" {model.replicas_ready}/{len(model.replicas)}" if model is not None else ""
                cells.append(Text(state + ready, style=_STYLES.get(state, "")))
            cells += [column.text(figures.values[name]) for column in columns]
            table.add_row(*cells)
        return table


def _fitting(number: int, most: int, num_lines: int) -> int:
    """How many lines of a section fit below its heading."""
    return max(0, min(number, most, num_lines - 1))


def _with_heading(num_lines: int) -> int:
    return num_lines + 1 if num_lines else 0


def _cut(text: str, width: int, style: str) -> Text:
    from rich.text import Text

    cut = Text("".join(letter if letter.isprintable() else "?" for letter in text), style=style, no_wrap=True)
    cut.truncate(width, overflow="ellipsis")
    return cut


def _clock(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).astimezone().strftime("%H:%M:%S")


def seconds(value: float | None) -> str:
    """At most five characters: 850us, 12ms, 1.25s, 310s."""
    if value is None:
        return "-"
    if value < 0.001:
        return f"{value * 1e6:.0f}us"
    if value < 1:
        return f"{value * 1e3:.0f}ms"
    return f"{value:.2f}s" if value < 10 else f"{value:.0f}s"


def quantity(value: float | None) -> str:
    """At most five characters: 0, 0.5, 42, 1234, 12.3k, 4.2M."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.1f}".removesuffix(".0")
    if value < 10_000:
        return f"{value:.0f}"
    return f"{value / 1e3:.1f}k" if value < 1e6 else f"{value / 1e6:.1f}M"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
