"""``inferd why``: where the time of a request went."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlencode

import click
import msgspec

from inferd.cli.running.control import Server, server_options
from inferd.cli.terminal import console, note, print_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

    from inferd.gateway.admin.requests import RecordList
    from inferd.observe.why import RecordReport

_BAR: Final = 40
"""Columns of a waterfall."""


@click.command("why")
@click.argument("request_id", required=False)
@click.option("--model", default=None, help="Without REQUEST_ID: only requests of this model.")
@click.option("--tenant", default=None, help="Without REQUEST_ID: only requests of this tenant.")
@click.option("--errors", is_flag=True, help="Without REQUEST_ID: the last requests that failed.")
@click.option("--recent", is_flag=True, help="Without REQUEST_ID: the last requests.")
@click.option("--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="The most that are listed.")
@click.option("--json", "as_json", is_flag=True, help="Print what the server said, for programs.")
@server_options
def command(
    server: Server,
    request_id: str | None,
    model: str | None,
    tenant: str | None,
    errors: bool,
    recent: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Show why the request REQUEST_ID took so long: one sentence, and the parts of its time.

    The id is in the header x-request-id of its answer; the id of an answer's body works as well. Without an
    id: the slowest requests.

    \b
    Examples:
      inferd why 5f0c2d9be1a7
      inferd why
      inferd why --errors --model chat
      inferd why --json | jq '.data[0].sentence'
    """
    from inferd.gateway.admin.requests import RecordList
    from inferd.observe.why import RecordReport

    if request_id is not None:
        if model or tenant or errors or recent:
            raise click.UsageError("REQUEST_ID names one request: leave out --model, --tenant, --errors and --recent.")
        report = server.get(f"/admin/requests/{quote(request_id, safe='')}", RecordReport)
        if as_json:
            _print_json(report)
        else:
            console().print(rendered(report))
        return
    if errors and recent:
        raise click.UsageError("--errors and --recent exclude each other: the last that failed, or the last.")
    order = "errors" if errors else "recent" if recent else "slowest"
    query = {"order": order, "limit": str(limit), "model": model, "tenant": tenant}
    path = "/admin/requests?" + urlencode({name: value for name, value in query.items() if value is not None})
    found = server.get(path, RecordList)
    if as_json:
        _print_json(found)
    elif found.data:
        _print_list(found)
    else:
        note("No such request is known; the server keeps those since its start (server.request_records).")


def _print_json(answer: msgspec.Struct) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())


def rendered(report: RecordReport) -> RenderableType:
    """The sentence, the facts and the waterfall of one request."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(report.sentence, style="bold"), Text(_facts(report), style="dim"), Text(), _waterfall(report))


def _facts(report: RecordReport) -> str:
    usage = report.usage
    facts = [
        report.id,
        f"{report.model or 'no model'}{'' if report.replica is None else f'/{report.replica}'}",
        f"{report.route}{' (stream)' if report.stream else ''}",
        f"status {report.status}",
        f"class {report.priority_class}",
        _at(report.arrived_at),
    ]
    if report.tenant:
        facts.append(f"tenant {report.tenant}")
    if usage.prompt_tokens or usage.completion_tokens:
        facts.append(f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens ({usage.cached_tokens:,} cached)")
    if report.ttft_s is not None and report.tpot_s is not None:
        facts.append(f"first token after {_seconds(report.ttft_s)}, then {_seconds(report.tpot_s)} per token")
    return " · ".join(facts)


def _waterfall(report: RecordReport) -> RenderableType:
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column("part", no_wrap=True)
    made.add_column("time", justify="right", no_wrap=True)
    made.add_column("share", justify="right", no_wrap=True, style="dim")
    made.add_column("bar", no_wrap=True)
    total = report.total_s or 1.0
    for part in report.parts:
        share = part.seconds / total
        style = "green" if part.seconds < 0 else "cyan"
        made.add_row(
            part.name, _seconds(part.seconds), f"{share:.0%}", f"[{style}]{bar(part.begin_s, part.seconds, total)}[/]"
        )
    made.add_row("total", _seconds(report.total_s), "", "", style="bold")
    return made


def bar(begin_s: float, seconds: float, total_s: float, width: int = _BAR) -> str:
    """A part of the whole as a bar of at least one column, at its place."""
    first, last = sorted((begin_s, begin_s + seconds))
    left = min(max(int(first / total_s * width), 0), width - 1)
    right = min(max(round(last / total_s * width), left + 1), width)
    return " " * left + "█" * (right - left)


def _print_list(found: RecordList) -> None:
    rows = []
    for line in found.data:
        usual = "" if line.usual_s is None else _seconds(line.usual_s)
        times = (_at(line.arrived_at), line.model, line.tenant, _seconds(line.total_s), usual)
        rows.append((line.id, *times, line.cause or "", line.sentence))
    heads = ("id", "arrived", "model", "tenant", "total", "usual", "cause", "sentence")
    print_rows(heads, rows, ("total", "usual"))


def _seconds(seconds: float) -> str:
    from inferd.observe.why.words import seconds_text

    return seconds_text(seconds)


def _at(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
