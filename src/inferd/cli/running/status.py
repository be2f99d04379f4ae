"""``inferd status``: the state of a running server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click
import msgspec

from inferd import clock
from inferd.cli.ready import threads_text
from inferd.cli.running.control import Server, server_options
from inferd.cli.terminal import console
from inferd.config.units import bytes_text
from inferd.gateway.control import (
    BatchReport,
    EnergyReport,
    ModelReport,
    ReloadReport,
    ReplicaReport,
    ServerReport,
    TenantReport,
)
from inferd.nodes.listener import NodeReport
from inferd.observe.startup import LoadReport, Phase
from inferd.router.hints import HintReport
from inferd.state.group import GatewayReport

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_STYLES: Final = dict.fromkeys(("ready", "serving"), "green") | dict.fromkeys(
    ("failed", "died", "hung", "open", "unavailable", "unreachable"), "red"
)


_BAR: Final = 20
"""Columns of the bar of a load."""

_SHADES: Final = "█▒▓░"

PLAN_ERROR: Final = 1.05
"""Of the planned memory: a replica above it takes more than its plan allows for."""

MAX_JOBS: Final = 20
"""Batch jobs that are shown."""

_WIDE: Final = 110
"""Columns of a terminal from which on everything about a model fits beside its numbers."""


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print what the server said, for programs.")
@click.option("--watch", is_flag=True, help="Refresh it every second until Ctrl-C.")
@server_options
def command(server: Server, as_json: bool, watch: bool) -> int:
    """Show a server's models, replicas, queues, memory and last reload.

    Without options: the only server that runs on this machine.

    \b
    Examples:
      inferd status
      inferd status --port 8001 --watch
      inferd status --json | jq .models[].state
      inferd status --url https://gpu.example.com:8000 --key sk-inf-...

    Exit code 0 while every model can be used, 1 otherwise.
    """
    report = server.get("/admin/status", ServerReport)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return exit_code(report)
    out = console()
    if not watch:
        out.print(rendered(report, server.name, out.width))
        return exit_code(report)
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            live.update(rendered(report, server.name, out.width), refresh=True)
            time.sleep(1.0)
            report = server.get("/admin/status", ServerReport)
    return exit_code(report)


def exit_code(report: ServerReport) -> int:
    usable = ("ready", "degraded", "unloaded")
    return 0 if report.status == "serving" and all(model.state in usable for model in report.models) else 1


def rendered(report: ServerReport, name: str, width: int = _WIDE) -> RenderableType:
    """The whole status as text, for a terminal of so many columns."""
    from rich.console import Group
    from rich.text import Text

    up = duration(clock.wall() - report.started_at)
    head = Text.assemble(
        (report.status, _STYLES.get(report.status, "yellow")),
        f"  inferd {report.version} {name}, process {report.pid}, up {up}",
    )
    lines: list[RenderableType] = [head]
    if report.memory_bytes or report.memory_budget_bytes:
        budget = f" of {bytes_text(report.memory_budget_bytes)}" if report.memory_budget_bytes else ""
        lines.append(Text(f"memory   {bytes_text(report.memory_bytes)}{budget}"))
    if report.config_path is not None:
        lines.append(Text(f"config   {report.config_path}"))
    if report.reload_since is not None:
        lines.append(Text(f"reload   under way for {duration(clock.wall() - report.reload_since)}", style="yellow"))
    if report.last_reload is not None:
        lines += reload_lines(report.last_reload)
    for node in report.nodes:
        style = _STYLES.get(node.state, "yellow")
        lines.append(Text.assemble(f"node     {node.name} ", (node.state, style), f"  {_of_node(node)}"))
    lines += gateway_lines(report.gateways)
    if report.hints is not None:
        lines.append(Text(f"hints    {_of_hints(report.hints)}"))
    lines += [Text(), models_table(report.models, width)]
    lines += load_lines(report)
    if report.jobs:
        lines.append(jobs_table(report.jobs))
    if report.tenants:
        lines.append(tenants_table(report.tenants))
    if report.energy is not None:
        lines += energy_tables(report.energy)
    return Group(*lines)


def _of_node(node: NodeReport) -> str:
    labels = "".join(f", {name}={value}" for name, value in node.labels.items())
    gpus = f", {node.num_gpus} GPUs" if node.num_gpus else ""
    return (
        f"{node.workers} workers, {node.num_cores} cores, {bytes_text(node.memory_bytes)}{gpus}{labels}, "
        f"beat {node.heartbeat_age_s:.1f} s ago, from {node.address}"
    )


def _of_hints(hints: HintReport) -> str:
    lost = "".join(
        f", {count:,} {name}"
        for name, count in (
            ("of unknown servers", hints.unknown),
            ("exchanges replaced unread", hints.stale),
            ("exchanges unreadable", hints.unreadable),
        )
        if count
    )
    return f"{hints.sent:,} sent, {hints.received:,} received, {hints.used:,} requests placed by them{lost}"


def gateway_lines(gateways: Sequence[GatewayReport]) -> list[RenderableType]:
    """The gateways of one database, and the settings in which they differ; none for a gateway that is alone."""
    from rich.text import Text

    lines: list[RenderableType] = []
    for each in gateways if len(gateways) > 1 else ():
        about = f"inferd {each.version}, settings {each.digest}" if each.digest else "settings not known yet"
        lines.append(Text(f"gateway  {each.id} on {each.host}{' (this one)' * each.is_this}: {about}"))
        if each.differs:
            lines.append(Text(f"         differs from this one: {', '.join(each.differs)}", style="yellow"))
    return lines


def reload_lines(reload: ReloadReport) -> list[RenderableType]:
    from rich.text import Text

    at = datetime.fromtimestamp(reload.at, UTC).astimezone().strftime("%H:%M:%S")
    lines: list[RenderableType]
    if reload.failed:
        lines = [Text(f"reload   accepted at {at}, but not every model is what the file says", style="red")]
        lines += [Text(f"         - {sentence}", style="red") for sentence in reload.failed]
    elif reload.accepted:
        lines = [Text(f"reload   accepted at {at}" + ("" if reload.details else ": nothing changed"), style="green")]
    else:
        lines = [Text(f"reload   refused at {at}; the old configuration keeps serving", style="red")]
    return [*lines, *(Text(f"         - {detail}") for detail in reload.details)]


def models_table(models: list[ModelReport], width: int) -> RenderableType:
    """The models and their replicas. What there is to say beside the numbers is in the last column, or below the table
    on a terminal that is narrow."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    beside = width >= _WIDE
    below: list[Text] = []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("model", overflow="fold", min_width=8)
    for heading in ("state", "replicas", "waiting", "in flight", "memory"):
        table.add_column(heading, justify="left" if heading in ("state", "replicas") else "right", no_wrap=True)
    if beside:
        table.add_column("")

    def add(name: Text, about: str, *cells: Text | str) -> None:
        style = "dim" if name.style == "dim" else ""
        table.add_row(name, *cells, *([Text(about, style=style)] if beside else []))
        if about and not beside:
            below.append(Text(f"{name.plain.strip()}: {about}", style=style))

    for model in models:
        is_one = len(model.replicas) == 1 and model.replicas[0].kind == "local"
        about = [
            *_of_version(model),
            "" if model.desired is None else f"scaled to {model.desired}",
            f"one request at a time: {model.not_batched}" if model.not_batched else "",
            threads_text(model.num_threads, model.cores),
            model.detail or ("on demand" if model.load == "on_demand" else ""),
        ]
        add(
            Text(model.name, style="bold"),
            ", ".join(filter(None, about + (_about(model.replicas[0]) if is_one else []))),
            Text(model.state, style=_STYLES.get(model.state, "yellow")),
            f"{model.replicas_ready}/{len(model.replicas)}" if model.replicas else "0",
            str(model.waiting),
            str(model.in_flight),
            bytes_text(model.memory_bytes) if model.memory_bytes else "",
        )
        if not is_one:
            for replica in model.replicas:
                _add_replica(add, replica)
        for adapter in model.adapters:
            said = f"adapter, {bytes_text(adapter.memory_bytes)}" if adapter.is_loaded else "adapter, not loaded"
            said += f": {adapter.detail}" if adapter.detail else ""
            below.append(Text(f"{adapter.name}: {said} ({model.name})", style="red" if adapter.detail else ""))
        if model.verified:
            style = "red" if "FAILED" in model.verified else ""
            below.append(Text(f"{model.name}: files verified: {model.verified}", style=style))
        if model.answer_format:
            style = "yellow" if "MISMATCH" in model.answer_format else ""
            below.append(Text(f"{model.name}: tool calls and reasoning: {model.answer_format}", style=style))
    return Group(table, *below)


def _of_version(model: ModelReport) -> list[str]:
    if not model.aliases and model.share is None:
        return []
    share = [] if model.share is None else [f"{100 * model.share:.3g} % of requests"]
    return [f"version {model.version}", *(f"@{alias}" for alias in model.aliases), *share]


def _add_replica(add: Callable[..., None], replica: ReplicaReport) -> None:
    from rich.text import Text

    apart = {"closed": "", "ejected": ", set aside as slow"}.get(replica.breaker, f", breaker {replica.breaker}")
    what = replica.state + apart
    add(
        Text(f"  {replica.name}", style="dim"),
        ", ".join(filter(None, _about(replica))),
        Text(what, style=_STYLES.get(replica.state if replica.breaker == "closed" else "open", "yellow")),
        replica.kind,
        "",
        str(replica.in_flight),
        bytes_text(replica.memory_bytes) if replica.memory_bytes else "",
    )


def _about(replica: ReplicaReport) -> list[str]:
    return [
        f"process {replica.pid}" if replica.pid is not None else "",
        replica.layout,
        f"on node {replica.node}" if replica.node else "",
        f"ranks also on {', '.join(replica.rank_nodes)}" if replica.rank_nodes else "",
        f"files {replica.artifact}" if replica.artifact else "",
        planned_text(replica),
        restarts_text(replica.restarts),
        replica.region,
        "" if replica.role == "both" else replica.role,
        "fallback" if replica.is_fallback else "",
        replica.detail,
    ]


def planned_text(replica: ReplicaReport) -> str:
    """What of the memory that was planned for a replica it takes; empty where nothing was planned."""
    if not replica.planned_bytes or not replica.memory_bytes:
        return ""
    share = replica.memory_bytes / replica.planned_bytes
    above = ", MORE THAN PLANNED" if share > PLAN_ERROR else ""
    return f"{100 * share:.0f} % of the planned {bytes_text(replica.planned_bytes)}{above}"


def restarts_text(count: int) -> str:
    """How often a replica was restarted; empty when it never was."""
    return f"{count} restart{'s' * (count != 1)}" if count else ""


def load_lines(report: ServerReport) -> list[RenderableType]:
    """The phases of the server's start, and of the last load of each local replica: a bar and the seconds."""
    from rich.text import Text

    rows: list[tuple[str, str, float, list[Phase]]] = []
    if report.start is not None:
        word = "start" if report.start.is_over else "starting"
        rows.append(("server", word, report.start.seconds, report.start.phases))
    loads = [replica.load for model in report.models for replica in model.replicas if replica.load is not None]
    rows += [(f"{load.model}/{load.replica}", _of_load(load), load.seconds, load.phases) for load in loads]
    if not rows:
        return []
    name_width = max(len(name) for name, *_ in rows)
    word_width = max(len(word) for _, word, *_ in rows)
    lines: list[RenderableType] = [Text("starts and loads", style="bold")]
    for name, word, total, phases in rows:
        style = _STYLES.get(word.partition(" ")[0], "")
        line = Text.assemble(f"  {name:<{name_width}}  ", (f"{word:<{word_width}}", style), f" {total:7.2f} s  ")
        line.append_text(_bar(phases, total))
        told = [f"{phase.name} {phase.seconds:.2f}" for phase in phases if phase.seconds >= 0.005]
        lines.append(line.append("  " + ", ".join(told)))
    return lines


def _of_load(load: LoadReport) -> str:
    return load.state if load.cause == "load" else f"{load.state} ({restarts_text(load.restarts)})"


def _bar(phases: Sequence[Phase], total: float) -> Text:
    """The phases side by side, by their share of the time."""
    from rich.text import Text

    bar, done = Text(), 0
    for number, phase in enumerate(phases):
        until = round(_BAR * min(1.0, (phase.begin_s + phase.seconds) / total)) if total > 0 else 0
        bar.append(_SHADES[number % len(_SHADES)] * max(0, until - done))
        done = max(done, until)
    return bar.append(" " * (_BAR - done))


def jobs_table(jobs: list[BatchReport]) -> RenderableType:
    """The batch jobs that have not ended, the oldest first."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("batch job", overflow="fold", min_width=8)
    for heading in ("tenant", "model", "state", "requests", "errors", "age"):
        right = heading in ("requests", "errors", "age")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for job in jobs[:MAX_JOBS]:
        state = job.status if job.is_at_work else "waits"
        done = f"{job.completed + job.failed} of {job.total}" if job.total else "-"
        age = duration(max(0.0, clock.wall() - job.created_at))
        table.add_row(job.id, job.tenant or "-", job.model or "-", state, done, str(job.failed), age)
    notes = [Text(f"{job.id}: {job.note}", style="yellow") for job in jobs[:MAX_JOBS] if job.note]
    if len(jobs) > MAX_JOBS:
        notes.append(Text(f"{len(jobs) - MAX_JOBS} more batch jobs", style="dim"))
    return Group(table, *notes)


def tenants_table(tenants: list[TenantReport]) -> Table:
    """What of each limit is in use."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tenant", overflow="fold", min_width=8)
    for heading in ("requests/min", "tokens/min", "in flight", "stored bytes"):
        table.add_column(heading, justify="right")
    for tenant in tenants:
        cells = [
            f"{tenant.used[kind]:,.0f} of {tenant.limits[kind]:,.0f}" if kind in tenant.limits else ""
            for kind in ("requests", "tokens", "in_flight", "stored_bytes")
        ]
        table.add_row(Text(tenant.name, style="bold"), *cells)
    return table


def energy_tables(report: EnergyReport) -> list[Table]:
    """The devices that tell more than memory, and what models and tenants have used of them."""
    from rich import box
    from rich.table import Table

    tables = []
    told = [one for one in report.devices if one.duty is not None or one.power_w is not None]
    if told:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("device")
        for heading in ("duty cycle", "memory", "temperature", "power", "idle energy"):
            table.add_column(heading, justify="right")
        for one in told:
            table.add_row(
                f"{one.device} {one.name}".strip(),
                "" if one.duty is None else f"{100 * one.duty:.0f} %",
                "" if one.memory_used_bytes is None else bytes_text(one.memory_used_bytes),
                "" if one.temperature_c is None else f"{one.temperature_c:.0f} °C",
                "" if one.power_w is None else f"{one.power_w:.0f} W",
                "" if one.idle_j is None else f"{one.idle_j:,.0f} J",
            )
        tables.append(table)
    used = [
        *((f"model {use.name}", use) for use in report.models),
        *((f"tenant {use.name}", use) for use in report.tenants if use.name),
    ]
    if any(use.device_s for _, use in used):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("use of devices")
        for heading in ("seconds", "energy", "s / 1000 tokens", "J / 1000 tokens", f"cost ({report.currency})"):
            table.add_column(heading, justify="right")
        for name, use in used:
            table.add_row(
                name,
                f"{use.device_s:,.1f}",
                "" if use.energy_j is None else f"{use.energy_j:,.0f} J",
                "" if use.device_s_per_1000_tokens is None else f"{use.device_s_per_1000_tokens:.3g}",
                "" if use.energy_j_per_1000_tokens is None else f"{use.energy_j_per_1000_tokens:.3g}",
                "" if use.cost is None else f"{use.cost:.4g}",
            )
        tables.append(table)
    return tables


def duration(seconds: float) -> str:
    """Two units at most: 3 d 4 h, 12 min 5 s."""
    left, parts = max(int(seconds), 0), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])
