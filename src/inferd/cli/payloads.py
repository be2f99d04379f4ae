"""``inferd payloads``: recorded prompts and answers. Works on the files, with or without a running server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from inferd.cli import terminal
from inferd.cli.audit import recorded
from inferd.cli.help import Commands
from inferd.cli.keys import DAY
from inferd.config import Config, load_config
from inferd.observe.payloads.store import PayloadStore
from inferd.state.folder import data_folder
from inferd.worker.log_lines import encoded, neutral

Decorated = TypeVar("Decorated", bound=Callable[..., object])
_TENANT = click.option("--tenant", metavar="NAME", help="Only this tenant's.  [default: every tenant's]")


def _common(function: Decorated) -> Decorated:
    return click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        help="The server's config file, where it names the folder of the state (state.data_dir).",
    )(function)


@click.group("payloads", cls=Commands)
def command() -> None:
    """See, export and delete recorded prompts and answers.

    Nothing is recorded unless payloads.tenants in the config file names tenants. Each use of show, export and delete is
    recorded in the audit log ('inferd audit show').

    \b
    Examples:
      inferd payloads list --tenant team-a
      inferd payloads show req-5f0c
      inferd payloads export --tenant team-a > payloads.jsonl
      inferd payloads delete --tenant team-a
      inferd payloads delete --before 2026-11-01
    """


@command.command("list")
@_TENANT
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=50, help="Newest records.  [default: 50]")
@_common
def show_all(tenant: str | None, limit: int, file: Path | None) -> None:
    """List the newest records: calls, sizes and outcomes, no texts."""
    records = sorted(_store(file)[0].records(tenant), key=lambda one: str(one.get("at")))[-limit:]
    if not records:
        click.echo("Nothing is recorded.", err=True)
        return
    heads = ("request_id", "at", "tenant", "model", "route", "status")
    rows = []
    for one in records:
        words = [neutral(str(one.get(head) if one.get(head) is not None else "-")) for head in heads]
        sizes = [f"{one.get(part, {}).get('bytes', 0):,} B" for part in ("request", "answer")]
        rows.append((*words, *sizes))
    terminal.print_rows((*heads, "request", "answer"), rows, ("request", "answer"))


@command.command("show")
@click.argument("request_id", metavar="ID")
@_common
def show(request_id: str, file: Path | None) -> int:
    """Show what was kept of a call."""
    store, config = _store(file)
    with recorded(config, "show_payloads", request_id):
        found = [one for one in store.records() if one.get("request_id") == request_id]
    for one in found:
        # ASCII, in which control characters are escaped: texts of clients are harmless for a terminal.
        click.echo(json.dumps(one, indent=2).replace("\x7f", "\\u007f"))
    if not found:
        terminal.fail(f"No record has the request id {request_id!r}; 'inferd payloads list' shows them.")
        return 1
    return 0


@command.command("export")
@_TENANT
@_common
def export(tenant: str | None, file: Path | None) -> None:
    """Print records as JSON lines, the oldest of each tenant first."""
    store, config = _store(file)
    with recorded(config, "export_payloads", "*" if tenant is None else tenant):
        for one in store.records(tenant):
            click.echo(encoded(one))


@command.command("delete")
@_TENANT
@click.option("--before", type=DAY, help="Only records from before this UTC day.")
@click.option("--all", "is_all", is_flag=True, help="Delete every record of every tenant.")
@_common
def delete(tenant: str | None, before: Any, is_all: bool, file: Path | None) -> None:
    """Delete the files of records: of a tenant, from before a day, or all."""
    if tenant is None and before is None and not is_all:
        raise click.UsageError("Say what to delete: --tenant NAME, --before YYYY-MM-DD, both, or --all.")
    store, config = _store(file)
    target = f"{'*' if tenant is None else tenant}{'' if before is None else f' before {before:%Y-%m-%d}'}"
    with recorded(config, "delete_payloads", target) as outcome:
        num_deleted = store.delete(tenant, None if before is None else before.timestamp())
        outcome.detail = f"{num_deleted} files"
    click.echo(f"{num_deleted} files of records were deleted.", err=True)


def _store(file: Path | None) -> tuple[PayloadStore, Config]:
    config = load_config(file, os.environ, {})
    return PayloadStore(data_folder(config.state)), config
