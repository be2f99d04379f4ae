"""``inferd audit``: the log of admin actions. Reads the files, with or without a running server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from inferd import clock
from inferd.cli import terminal
from inferd.cli.help import Commands
from inferd.config import Config, load_config
from inferd.errors import InferdError
from inferd.state.audit import AuditEntry, AuditLog, AuditRecord
from inferd.state.folder import data_folder
from inferd.worker.log_lines import neutral
from inferd.worker.timestamp import timestamp

_CONFIG = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="The server's config file, where it names the folder of the state (state.data_dir).",
)


class Outcome:
    """What is recorded of an action when it is done."""

    detail = ""


@contextmanager
def recorded(config: Config, action: str, target: str) -> Iterator[Outcome]:
    """Carry out an admin action of this command line between its two lines in the audit log. Raises StateUnavailable,
    with nothing done, where the first cannot be written."""
    audit, outcome = AuditLog(data_folder(config.state)), Outcome()

    def record(word: str, detail: str = "", of: int = 0) -> int:
        entry, _ = audit.append(
            AuditRecord(
                at=timestamp(clock.wall()),
                actor=f"user:{os.getuid()}",
                action=action,
                target=target,
                outcome=word,
                detail=detail,
                of=of,
            )
        )
        return entry.seq

    begun = record("begun")
    try:
        yield outcome
    except InferdError as error:
        record("refused", error.code or error.kind, begun)
        raise
    except BaseException:
        record("failed", "", begun)
        raise
    record("done", outcome.detail, begun)


@click.group("audit", cls=Commands)
def command() -> None:
    """See and check the log of admin actions.

    Every change that was asked for with an admin key, at the control socket or with 'inferd keys' has a line, with the
    hash of the line before it. The files are in the folder audit of state.data_dir.

    \b
    Examples:
      inferd audit show
      inferd audit verify
      inferd audit verify --head 1041:5d1e...
    """


@command.command("show")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, help="Newest actions.  [default: 50]")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as JSON, for programs.")
@_CONFIG
def show(limit: int, as_json: bool, file: Path | None) -> None:
    """Show the newest actions: when, by which key or user, on what, and with which outcome.

    \b
    Example:
      inferd audit show --limit 200
    """
    audit = _audit(file)
    try:
        found = audit.entries(limit=limit if as_json else 2 * limit)
    except OSError as error:
        raise click.ClickException(f"{audit.folder} cannot be read ({error.strerror}).") from None
    if as_json:
        for entry in reversed(found):
            click.echo(msgspec.json.encode(entry).decode().encode("ascii", "backslashreplace").decode())
        return
    if not found:
        click.echo(f"There are no entries in {audit.folder}.", err=True)
        return
    _print_actions(found, limit)


def _print_actions(found: list[AuditEntry], limit: int) -> None:
    """One row per action, the newest last: its last line has the outcome."""
    ended = {entry.of for entry in found if entry.of}
    actions = [entry for entry in found if entry.seq not in ended][:limit]
    rows = []
    for entry in reversed(actions):
        words = (entry.actor, entry.tenant, entry.action, entry.target, entry.outcome, entry.detail, entry.request_id)
        rows.append((str(entry.seq), entry.at, *(neutral(word).replace("\n", " ") for word in words)))
    heads = ("entry", "at", "actor", "tenant", "action", "target", "outcome", "detail", "request")
    terminal.print_rows(heads, rows)


@command.command("verify")
@click.option(
    "--head",
    metavar="NUMBER:HASH",
    help="An entry's number and hash that were recorded elsewhere, as 'verify' prints them and the server's log has "
    "them.",
)
@_CONFIG
def verify(head: str | None, file: Path | None) -> int:
    """Check that no entry was changed, removed or added between others, and that the end was not cut off.

    Prints the number and hash of the last entry. Keep them on another machine: together with --head they show a log
    that was cut off or written anew, also with the right to write to the folder.

    \b
    Examples:
      inferd audit verify
      inferd audit verify --head 1041:5d1e0c...

    Exit code 1 when the chain is broken; the first entry that is wrong is named.
    """
    known = None
    if head is not None:
        number, _, digest = head.partition(":")
        if not number.isdecimal() or len(digest) != 64:
            raise click.BadParameter("it is NUMBER:HASH, with a hash of 64 characters.", param_hint="--head")
        known = (int(number), digest.lower())
    audit = _audit(file)
    try:
        verdict = audit.verify(known)
    except OSError as error:
        raise click.ClickException(f"{audit.folder} cannot be read ({error.strerror}).") from None
    if verdict.problem:
        terminal.fail(f"{audit.folder} is not whole: {verdict.problem}.")
        return 1
    if not verdict.last:
        click.echo(f"There are no entries in {audit.folder}.", err=True)
        return 0
    click.echo(f"{verdict.last}:{verdict.hash}")
    earlier = f" Entries before {verdict.first} are not there." if verdict.first > 1 else ""
    click.echo(f"Entries {verdict.first} to {verdict.last} are whole.{earlier}", err=True)
    return 0


def _audit(file: Path | None) -> AuditLog:
    return AuditLog(data_folder(load_config(file, os.environ, {}).state))
