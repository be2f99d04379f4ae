"""``inferd rollout``: how a new version of a model comes to serve, and the operator's commands to it."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import zip_longest
from typing import TYPE_CHECKING

import click
import msgspec

from inferd.cli.help import Commands
from inferd.cli.running.control import ANSWER_S, Server, server_options

if TYPE_CHECKING:
    from inferd.rollout.golden import GoldenReport
    from inferd.rollout.rollouts import RolloutReport

_JSON = {"content-type": "application/json"}


@click.group("rollout", cls=Commands)
def command() -> None:
    """Bring a new version of a model to all requests, step by step, or take it back.

    The steps and what is watched stand in the configuration, below models.NAME.rollout.

    \b
    Examples:
      inferd rollout status
      inferd rollout start churn
      inferd rollout promote churn --reason "looks good"
      inferd rollout abort churn
    """


@command.command("status")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print what the server said, for programs.")
@server_options
def status(server: Server, model: str | None, as_json: bool) -> None:
    """Show the rollouts of a server; with MODEL, one rollout with its evidence and its changes.

    \b
    Examples:
      inferd rollout status
      inferd rollout status churn --json
    """
    from inferd.gateway.admin.rollouts import RolloutList
    from inferd.rollout.rollouts import RolloutReport

    if model is None:
        reports = server.get("/admin/rollouts", RolloutList).data
        if as_json:
            _print_json(reports)
        elif not reports:
            click.echo("No model of this server has a rollout.")
        for report in reports if not as_json else ():
            click.echo(_head(report))
        return
    report = server.get(_path(model), RolloutReport)
    if as_json:
        _print_json(report)
    else:
        _show(report)


def _print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _path(model: str) -> str:
    from urllib.parse import quote

    return f"/admin/rollouts/{quote(model, safe='')}"


def _head(report: RolloutReport) -> str:
    progress = report.progress
    paused = ", paused" if progress.is_paused else ""
    return (
        f"{report.model} from version {report.stable} to {report.new}: {progress.state.replace('_', ' ')}{paused}, "
        f"{100 * progress.share:g} % of the units"
    )


def _step(weight: float, shadow: float | None) -> str:
    return f"{weight:g} % and copies of {shadow:g} %" if shadow else f"{weight:g} %"


def _copies(report: RolloutReport) -> str:
    """What became of the requests of shadowed units: how many were compared, and why others were not."""
    counts = report.copies
    compared = [f"{counts.get('equal', 0)} equal", f"{counts.get('differs', 0)} different"]
    others = {name: count for name, count in counts.items() if name not in ("equal", "differs")}
    words = {"failed": "not answered", "busy": "dropped (busy)", "memory": "dropped (memory)", "late": "dropped (late)"}
    words |= {"unavailable": "dropped (unavailable)"}
    said = [f"{count} {words.get(name, f'not compared ({name})')}" for name, count in sorted(others.items())]
    return ", ".join([*compared, *said])


def _show(report: RolloutReport) -> None:
    from inferd.rollout.judge import reading_text

    progress = report.progress
    click.echo(_head(report))
    at = f" (now in step {progress.step + 1})" if progress.step >= 0 else ""
    click.echo(f"  steps: {', '.join(_step(*step) for step in zip_longest(report.steps, report.shadows))}{at}")
    if not report.is_ready:
        click.echo(f"  version {report.new} is not ready at every server")
    if report.deaths:
        click.echo(f"  workers of version {report.new} that died: {report.deaths}")
    for reading in report.readings:
        click.echo(f"  {reading_text(reading)}")
    if report.copies:
        click.echo(f"  copied requests at this server: {_copies(report)}")
    for one in report.differing:
        where = "gave no answer" if not one.part else f"differs in {one.part}"
        at = "" if one.position is None else f" from position {one.position} on"
        click.echo(f"    {one.request_id}: {where}{at}")
    if report.golden is not None:
        _show_golden(report.golden)
    if report.changes:
        click.echo("changes, the last first:")
    for change in report.changes:
        when = datetime.fromtimestamp(change.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        state = change.progress.state.replace("_", " ") + (", paused" if change.progress.is_paused else "")
        click.echo(f"  {when}  {state}, {100 * change.progress.share:g} %: {change.progress.reason}")


def _show_golden(golden: GoldenReport) -> None:
    dropped = f", {golden.dropped} dropped, the last: {golden.problem}" if golden.dropped else ""
    click.echo(
        f"  golden set of {golden.questions} at this server: {golden.asked} answers of the new version, "
        f"{golden.wrong} of them wrong{dropped}"
    )
    for one in golden.last_wrong:
        click.echo(f"    {one.name}: {one.reason}")


def _send(server: Server, model: str, word: str, **body: object) -> None:
    from inferd.rollout.rollouts import RolloutReport

    given = {name: value for name, value in body.items() if value}
    answer = server.send(f"{_path(model)}/{word}", json.dumps(given).encode(), _JSON, ANSWER_S)
    report = msgspec.json.decode(answer.body, type=RolloutReport)
    click.echo(f"{_head(report)}: {report.progress.reason}")


_reason = click.option("--reason", default="", help="Why, in at most 200 characters; for the audit log.")


@command.command("start")
@click.argument("model")
@_reason
@server_options
def start(server: Server, model: str, reason: str) -> None:
    """Begin the rollout of MODEL, or begin it anew after its end.

    Its counts begin anew as well.

    \b
    Example:
      inferd rollout start churn
    """
    _send(server, model, "start", reason=reason)


@command.command("pause")
@click.argument("model")
@_reason
@server_options
def pause(server: Server, model: str, reason: str) -> None:
    """Keep the rollout of MODEL at its step; the guards still take a bad version back.

    \b
    Example:
      inferd rollout pause churn
    """
    _send(server, model, "pause", reason=reason)


@command.command("resume")
@click.argument("model")
@_reason
@server_options
def resume(server: Server, model: str, reason: str) -> None:
    """Let the paused rollout of MODEL go on, by the plan that the configuration has now.

    \b
    Example:
      inferd rollout resume churn
    """
    _send(server, model, "resume", reason=reason)


@command.command("promote")
@click.argument("model")
@click.option("--full", is_flag=True, help="To all units at once, past all steps.")
@_reason
@server_options
def promote(server: Server, model: str, full: bool, reason: str) -> None:
    """Go on to the next step of the rollout of MODEL now, or approve it.

    \b
    Examples:
      inferd rollout promote churn
      inferd rollout promote churn --full --reason "the old version is broken"
    """
    _send(server, model, "promote", reason=reason, full=full)


@command.command("abort")
@click.argument("model")
@_reason
@server_options
def abort(server: Server, model: str, reason: str) -> None:
    """End the rollout of MODEL: the stable version serves all units from now on.

    \b
    Example:
      inferd rollout abort churn --reason "wrong labels"
    """
    _send(server, model, "abort", reason=reason)


@command.command("undo")
@click.argument("model")
@_reason
@server_options
def undo(server: Server, model: str, reason: str) -> None:
    """Take the promoted version of MODEL back: the stable version serves all units from now on.

    \b
    Example:
      inferd rollout undo churn
    """
    _send(server, model, "undo", reason=reason)


@command.command("report")
@click.argument("model")
@click.argument("request_id")
@server_options
def report(server: Server, model: str, request_id: str) -> None:
    """Tell the rollout of MODEL that the answer with the x-request-id REQUEST_ID was bad.

    The guard 'reported' counts it.

    \b
    Example:
      inferd rollout report churn 4f1c0d
    """
    server.send(f"{_path(model)}/bad", json.dumps({"request_id": request_id}).encode(), _JSON, ANSWER_S)
    click.echo(f"{request_id} is counted as bad.")
