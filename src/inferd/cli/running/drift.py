"""``inferd drift``: whether requests and answers are still like the reference, and the reference itself."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from inferd.cli.help import Commands
from inferd.cli.running.control import ANSWER_S, Server, server_options

if TYPE_CHECKING:
    from inferd.drift.monitors import DriftReport, StreamReport


@click.group("drift", cls=Commands)
def command() -> None:
    """Compare what models are asked, and what they answer, with a reference.

    What is watched stands in the configuration, below models.NAME.drift.

    \b
    Examples:
      inferd drift show
      inferd drift save churn --output churn.drift.json
      inferd drift reset churn
    """


@command.command("show")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print what the server said, for programs.")
@server_options
def show(server: Server, model: str | None, as_json: bool) -> None:
    """Show the drift of the models of a server; with MODEL, of one.

    \b
    Examples:
      inferd drift show
      inferd drift show churn --json
    """
    from inferd.drift.monitors import DriftReport
    from inferd.gateway.admin.drift import DriftList

    reports = server.get("/admin/drift", DriftList).data if model is None else [server.get(_path(model), DriftReport)]
    if as_json:
        shown = msgspec.json.encode(reports if model is None else reports[0])
        click.echo(msgspec.json.format(shown, indent=2).decode())
        return
    if not reports:
        click.echo("The drift of no model is watched; set models.NAME.drift.enabled.")
    for report in reports:
        _show(report)


def _path(model: str) -> str:
    from urllib.parse import quote

    return f"/admin/drift/{quote(model, safe='')}"


def _show(report: DriftReport) -> None:
    head = f"{report.model}, version {report.version}: "
    if report.reference_at is None:
        takes = "the reference is taken" if report.state == "collecting" else "another version takes the reference"
        click.echo(f"{head}{takes}, {report.requests:,} of {report.wanted:,} requests")
        return
    when = datetime.fromtimestamp(report.reference_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    drifting = [stream.stream for stream in report.streams if stream.is_drifting]
    click.echo(
        f"{head}{'drifts: ' + ', '.join(drifting) if drifting else 'like its reference'} "
        f"({report.requests:,} requests of version {report.reference_version}, {when})"
    )
    for stream in report.streams:
        click.echo(f"  {_line(stream)}")


def _line(stream: StreamReport) -> str:
    if not stream.readings:
        return f"{stream.stream:<14} no window is full yet"
    shown = next((one for one in reversed(stream.readings) if one.is_alarm), stream.readings[0])
    line = (
        f"{stream.stream:<14} {'DRIFTS' if stream.is_drifting else 'ok':<7} {stream.measure.upper()} "
        f"{shown.distance:.4f} (by chance up to {shown.by_chance:.4f})"
    )
    return f"{line}\n    {shown.sentence}" if stream.is_drifting else line


@command.command("save")
@click.argument("model")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The file that is written."
)
@server_options
def save(server: Server, model: str, output: Path) -> None:
    """Save the reference of MODEL as a file, for models.NAME.drift.reference. It has counts, and no values.

    \b
    Example:
      inferd drift save churn --output churn.drift.json
    """
    from inferd.drift.reference import Reference

    reference = server.get(f"{_path(model)}/reference", Reference)
    try:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(reference), indent=1) + b"\n")
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written ({error.strerror}).") from None
    click.echo(f"{output}: {reference.requests:,} requests of version {reference.version}")


@command.command("reset")
@click.argument("model")
@server_options
def reset(server: Server, model: str) -> None:
    """Take another reference of MODEL from the next requests.

    \b
    Example:
      inferd drift reset churn
    """
    from inferd.drift.monitors import DriftReport

    report = server.post(f"{_path(model)}/reset", DriftReport, timeout_s=ANSWER_S)
    click.echo(f"{report.model}: a reference is taken from the next {report.wanted:,} requests.")
