"""``inferd scale``: how many replicas models have by their load and why, and a simulation of it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from inferd.cli.ranges import FloatRange
from inferd.cli.running.control import find_server, which_server

if TYPE_CHECKING:
    from inferd.autoscale.controller import ScalingReport
    from inferd.autoscale.simulate import Outcome

_LONG_SECONDS: Final = 3600.0
_SIMULATED: Final = ("model_seconds", "slots", "ready_seconds", "least", "most", "queue_ms", "picture")
_ASKED: Final = ("model", "explain", "as_json", "port", "config", "url", "key")
_SETTINGS: Final = {"least": "min", "most": "max", "queue_ms": "target.queue_ms"}
"""Options of a simulation that a server has as settings."""


@click.command("scale")
@click.argument("model", required=False)
@click.option("--explain", is_flag=True, help="Show what the last decision was made of, and the last changes.")
@click.option("--json", "as_json", is_flag=True, help="Print what the server said, for programs.")
@click.option(
    "--simulate",
    "trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay the arrivals of a trace (JSON lines) against the rules, without a server.",
)
@click.option(
    "--model-seconds",
    type=FloatRange(0.001, _LONG_SECONDS),
    default=1.0,
    show_default=True,
    help="Of a simulation: seconds that a mean request takes a replica.",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 4096),
    default=1,
    show_default=True,
    help="Of a simulation: requests that a replica works at together.",
)
@click.option(
    "--ready-seconds",
    type=FloatRange(0, _LONG_SECONDS),
    default=2.0,
    show_default=True,
    help="Of a simulation: seconds from the start of a replica until it is ready.",
)
@click.option(
    "--min", "least", type=click.IntRange(1, 64), default=1, show_default=True, help="Of a simulation: fewest replicas."
)
@click.option(
    "--max", "most", type=click.IntRange(1, 64), default=4, show_default=True, help="Of a simulation: most replicas."
)
@click.option(
    "--queue-ms",
    type=FloatRange(0.001, 3_600_000),
    default=200.0,
    show_default=True,
    help="Of a simulation: milliseconds that requests may wait.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Of a simulation: write it as SVG.  [default: the trace's name with .svg, in this folder]",
)
@which_server
@click.pass_context
def command(
    ctx: click.Context,
    model: str | None,
    explain: bool,
    as_json: bool,
    trace: Path | None,
    model_seconds: float,
    slots: int,
    ready_seconds: float,
    least: int,
    most: int,
    queue_ms: float,
    picture: Path | None,
    port: int | None,
    config: Path | None,
    url: str | None,
    key: str | None,
) -> None:
    """Show how many replicas the models with scaling have by their load, or simulate it.

    \b
    Examples:
      inferd scale
      inferd scale --explain chat
      inferd scale --simulate trace.jsonl --model-seconds 0.5 --max 8
    """
    _check_options(ctx, is_simulated=trace is not None)
    if trace is not None:
        if least > most:
            raise click.UsageError(f"--min {least} is above --max {most}; lower it, or raise --max.")
        _simulate(trace, model_seconds, slots, ready_seconds, least, most, queue_ms / 1000.0, picture)
        return
    from inferd.gateway.admin.scaling import ScalingList

    server = find_server(port, config, url, key)

    if model is None:
        reports = server.get("/admin/scaling", ScalingList).data
    else:
        from urllib.parse import quote

        from inferd.autoscale.controller import ScalingReport

        reports = [server.get(f"/admin/scaling/{quote(model, safe='')}", ScalingReport)]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(reports), indent=2).decode())
        return
    if not reports:
        click.echo("No model of this server has scaling; their numbers of replicas are fixed.")
    for report in reports:
        _show(report, explain=explain)


def _check_options(ctx: click.Context, *, is_simulated: bool) -> None:
    """Refuse what was given and would have no effect, by its name."""
    without_effect = _ASKED if is_simulated else _SIMULATED
    for parameter in ctx.command.params:
        name, source = parameter.name or "", ctx.get_parameter_source(parameter.name or "")
        if name not in without_effect or source is not click.core.ParameterSource.COMMANDLINE:
            continue
        if is_simulated:
            given = f"The model {ctx.params[name]!r}" if name == "model" else parameter.opts[0]
            raise click.UsageError(
                f"{given} is for a server that runs, and --simulate asks none: leave one of them out. A simulation "
                "takes its numbers from --model-seconds, --slots, --ready-seconds, --min, --max and --queue-ms."
            )
        setting = _SETTINGS.get(name)
        which = ctx.params["model"] or "NAME"
        of_server = "" if setting is None else f", or set models.{which}.scaling.{setting} for the server"
        raise click.UsageError(f"{parameter.opts[0]} is for a simulation: add --simulate TRACE{of_server}.")


def _show(report: ScalingReport, *, explain: bool) -> None:
    leaving = f", {report.leaving} leaving" if report.leaving else ""
    click.echo(
        f"{report.model}: {report.ready} ready, {report.starting} starting{leaving}; desired {report.desired} of "
        f"{report.min} to {report.max}"
    )
    click.echo(f"  {report.rule}: {report.reason}")
    if not explain:
        return
    arrivals = _known(report.requests_per_s, "{:.3g} requests/s")
    deferred = f", {report.deferred} of batch work" if report.deferred else ""
    click.echo(f"  {report.waiting} waiting, {report.in_flight} in flight{deferred}; arrivals: {arrivals}")
    click.echo(f"  one replica serves: {_known(report.served_per_s, '{:.3g} requests/s', 'until requests wait')}")
    duty = _known(None if report.duty is None else 100.0 * report.duty, "{:.0f} % of what they can")
    ready = _known(report.ready_s, "{:.2f} s", "until one starts")
    click.echo(f"  ready replicas work at: {duty}; from start to ready: {ready}")
    for need in report.needs:
        click.echo(f"  {need.name} needs {need.replicas}: {need.text}")
    if report.changes:
        click.echo("  changes, the last first:")
    for change in report.changes:
        when = datetime.fromtimestamp(change.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        click.echo(f"    {when}  {change.before} to {change.after}, {change.rule}: {change.reason}")


def _known(value: float | None, form: str, until: str = "") -> str:
    if value is None:
        return f"not measured {until}".rstrip()
    return form.format(value)


def _simulate(
    trace: Path,
    model_seconds: float,
    slots: int,
    ready_s: float,
    least: int,
    most: int,
    queue_s: float,
    picture: Path | None,
) -> None:
    from inferd.autoscale.decide import Spec
    from inferd.autoscale.picture import picture as drawn
    from inferd.autoscale.simulate import Machine, Scaler, simulate
    from inferd.autoscale.trace import check_duration, read_trace

    with trace.open("rb") as lines:
        arrivals = read_trace(lines, model_seconds)
    check_duration(arrivals, least * slots)
    outcomes = []
    for name, fewest, highest in (
        ("scaled", least, most),
        (f"{least} fixed", least, least),
        (f"{most} fixed", most, most),
    ):
        machine = Machine(slots=slots, ready_s=ready_s, begin=fewest, limit=highest)
        scaler = Scaler(Spec(least=fewest, most=highest, queue_s=queue_s))
        outcomes.append((name, simulate(arrivals, scaler, machine)))
    for at, count, reason in outcomes[0][1].decisions:
        click.echo(f"{at:10.2f} s  {count} replicas, {reason}")
    click.echo(f"{len(arrivals)} requests in {arrivals[-1].at:.0f} s, {model_seconds:g} s each in the mean")
    click.echo(f"{'':12}{'changes':>9}{'wait p95':>11}{'p50':>10}{'p95':>10}{'p99':>10}{'replica-s':>12}")
    for name, outcome in outcomes:
        click.echo(f"{name:12}{_row(outcome)}")
    path = picture if picture is not None else Path(f"{trace.stem}.svg")
    try:
        path.write_text(drawn(f"{trace.name}: {least} to {most} replicas", outcomes), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(
            f"The picture cannot be written to {path} ({error.strerror}); name another file with --picture."
        ) from None
    click.echo(f"The picture is in {path}.")


def _row(outcome: Outcome) -> str:
    from inferd.autoscale.simulate import quantile

    p50, p95, p99 = (quantile(outcome.responses, part) for part in (0.5, 0.95, 0.99))
    wait = quantile(outcome.waits, 0.95)
    return f"{outcome.changes:9}{wait:10.2f}s{p50:9.2f}s{p95:9.2f}s{p99:9.2f}s{outcome.replica_s:12.0f}"
