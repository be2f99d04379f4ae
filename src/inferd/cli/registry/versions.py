"""The commands that register and show versions, and check the history."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from inferd import clock
from inferd.cli import terminal
from inferd.cli.audit import recorded
from inferd.cli.keys import opened_database
from inferd.cli.registry.opened import actor, common, head_text, print_json, split, tell
from inferd.cli.registry.progress import reading
from inferd.lifecycle import registry
from inferd.lifecycle.actions import policy_of
from inferd.lifecycle.files import described
from inferd.lifecycle.registry import Version
from inferd.state.audit import AuditEntry, AuditLog
from inferd.state.folder import data_folder
from inferd.types import TensorSpec
from inferd.worker.log_lines import neutral

_HEAD: Final = re.compile(r"registry line (\d{1,18}):([0-9a-f]{64})")
_MOST_LINES: Final = 1_000_000


@click.command("register")
@click.argument("name")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--description", default="", metavar="TEXT", help="What is new about it.")
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="Metadata, such as metrics; may be repeated.")
@click.option("--run-id", default="", metavar="ID", help="The training run it comes from.")
@click.option(
    "--contract",
    "contract_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Its inputs and outputs: an answer of GET /v2/models/NAME.  [default: what the file says]",
)
@click.option("--allow-pickle", is_flag=True, help="Register a pickle too; see models.NAME.allow_pickle.")
@common
def register(
    name: str,
    source: Path,
    description: str,
    tags: tuple[str, ...],
    run_id: str,
    contract_file: Path | None,
    allow_pickle: bool,
    file: Path | None,
    as_json: bool,
) -> None:
    """Register a file or folder as the next version of the model NAME.

    Its files are hashed, so the version is verified at once. The registry keeps where they are, and a server loads them
    only with this digest.

    \b
    Examples:
      inferd registry register churn ./churn.onnx --tag auc=0.91
      inferd registry register churn /models/churn/7 --run-id 5d1e0c
    """
    registry.check_name(name)
    path = source.expanduser().absolute()
    with opened_database(file) as (database, config), recorded(config, "registry_register", name) as outcome:
        with reading(f"Reading {path.name}") as progress:
            new, read = described(
                *(name, path, config.registry.verify),
                contract=None if contract_file is None else contract_file.read_bytes(),
                allow_pickle=allow_pickle,
                description=description,
                tags=_tags(tags),
                run_id=run_id,
                progress=progress,
            )
        version = registry.register_verified(
            database, new, read.findings, actor=actor(), now=clock.wall(), policy=policy_of(config.registry)
        )
        outcome.detail = head_text(database)
    tell(version, as_json)
    if not as_json and not (read.is_whole and not read.warning):
        terminal.warn(read.words)


def _tags(words: Iterable[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{word!r} is not NAME=VALUE.", param_hint="--tag")
        found[name] = value
    return found


@click.command("list")
@click.argument("name", required=False)
@common
def list_versions(name: str | None, file: Path | None, as_json: bool) -> None:
    """List the versions of all models, or of NAME.

    \b
    Example:
      inferd registry list churn
    """
    with opened_database(file) as (database, _):
        found = registry.versions(database, name)
    if as_json:
        print_json(found)
    elif not found:
        _say_none(name)
    else:
        _table(
            ("version", "stage", "since", "aliases", "by", "approved by", "digest"),
            [
                (
                    f"{one.name}@{one.version}",
                    one.record.stage,
                    _time(one.record.since),
                    ", ".join(one.aliases),
                    one.record.registrant,
                    one.record.approver,
                    one.digest[:24],
                )
                for one in found
            ],
        )


def _say_none(name: str | None) -> None:
    which = "" if name is None else f" of {name}"
    click.echo(f"There are no versions{which}. Register one: inferd registry register NAME PATH", err=True)


@click.command("show")
@click.argument("version", metavar="NAME@VERSION")
@common
def show(version: str, file: Path | None, as_json: bool) -> None:
    """Show a version: its files, its contract and its evidence. NAME@production is the one in production.

    \b
    Examples:
      inferd registry show churn@3
      inferd registry show churn@production --json
    """
    name, ref = split(version)
    with opened_database(file) as (database, _):
        found = registry.find(database, name, ref)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _show(found: Version) -> None:
    record = found.record
    click.echo(f"{found.name}@{found.version}: {record.stage} since {_time(record.since)}")
    rows = [
        ("files", f"{found.source} ({found.num_files} files, {found.num_bytes:,} bytes)"),
        ("digest", found.digest),
        ("registered", f"{_time(found.created_at)} by {record.registrant}"),
        ("approved by", record.approver),
        ("aliases", ", ".join(found.aliases)),
        ("run", found.run_id),
        ("description", found.description),
        ("tags", ", ".join(f"{name}={value}" for name, value in found.tags.items())),
        ("inputs", _tensors(found.contract.inputs)),
        ("outputs", _tensors(found.contract.outputs)),
        ("accepted", "; ".join(record.accepted)),
    ]
    for title, text in rows:
        if text:
            click.echo(f"  {title}: {neutral(text)}")
    for one in record.evidence:
        word = "passed" if one.passed else "did not pass"
        said = f": {neutral(one.summary)}" if one.summary else ""
        click.echo(f"  evidence: {one.kind} {word}, {_time(one.at)} by {one.actor}{said}")


def _tensors(specs: Iterable[TensorSpec] | None) -> str:
    if specs is None:
        return "known when it is loaded"
    return ", ".join(f"{one.name} {one.datatype}{list(one.shape)}" for one in specs)


@click.command("history")
@click.argument("name", required=False)
@click.option("--limit", type=click.IntRange(1, registry.MAX_ENTRIES), default=50, help="Newest lines.  [default: 50]")
@common
def history(name: str | None, limit: int, file: Path | None, as_json: bool) -> None:
    """Show what happened to the versions of NAME, or of all models: when, by which user or key, and why.

    \b
    Examples:
      inferd registry history churn
      inferd registry history --json
    """
    with opened_database(file) as (database, _):
        found = registry.history(database, name, limit=limit)
    if as_json:
        print_json(found)
        return
    if not found:
        _say_none(name)
        return
    _table(
        ("line", "at", "actor", "version", "action", "stage", "reason", "detail"),
        [
            (
                str(one.number),
                one.at,
                one.actor,
                f"{one.name}@{one.version}",
                one.action + (f" {one.kind}" if one.action == "attach" else ""),
                one.stage,
                one.reason or one.override,
                one.detail,
            )
            for one in reversed(found)
        ],
    )


@click.command("verify-log")
@common
def verify_log(file: Path | None, as_json: bool) -> int:
    """Check that no line of the history was changed or removed, and that versions are as it says.

    The audit log of this data folder holds the number and hash of lines, and is compared with them. 'inferd audit
    verify' checks the audit log itself.

    \b
    Example:
      inferd registry verify-log

    Exit code 1 when something does not fit; the first such thing is named.
    """
    with opened_database(file) as (database, config):
        audit = AuditLog(data_folder(config.state))
        known = _recorded_heads(audit.entries(limit=_MOST_LINES))
        verdict = registry.verify_log(database, known)
    if as_json:
        print_json(verdict)
    elif verdict.problem:
        terminal.fail(f"The registry is not whole: {verdict.problem}.")
    else:
        click.echo(f"{verdict.last}:{verdict.hash}")
        click.echo(
            f"{verdict.last} lines and {verdict.num_versions} versions are whole; {len(known)} lines are in the audit "
            "log with the same hash.",
            err=True,
        )
    return 1 if verdict.problem else 0


def _recorded_heads(entries: Iterable[AuditEntry]) -> list[tuple[int, str]]:
    """The lines of the history that the audit log names."""
    found = (_HEAD.search(entry.detail) for entry in entries if entry.action.startswith("registry_"))
    return [(int(match[1]), match[2]) for match in found if match is not None]


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    terminal.print_rows(heads, [[neutral(text).replace("\n", " ") for text in row] for row in rows])
