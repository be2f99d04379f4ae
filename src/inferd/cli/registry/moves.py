"""The commands that change a version: its evidence, its stage, its aliases."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from inferd import clock
from inferd.cli.registry.opened import actor, changing, common, print_json, tell
from inferd.errors import InvalidRequest
from inferd.lifecycle import registry
from inferd.lifecycle.actions import policy_of
from inferd.lifecycle.registry import MAX_REPORT_BYTES, Attachable
from inferd.lifecycle.stages import Action

_version = click.argument("version", metavar="NAME@VERSION")
_reason = click.option("--reason", default="", metavar="TEXT", help="Why; for the history.")
_override = click.option(
    "--override", default="", metavar="REASON", help="Accept a contract that differs from production's, and say why."
)


def _move(
    action: Action, version: str, file: Path | None, as_json: bool, *, reason: str = "", override: str = ""
) -> None:
    with changing(file, action, version) as (database, config, found):
        after = registry.move(
            *(database, found.name, found.version, action),
            actor=actor(),
            now=clock.wall(),
            policy=policy_of(config.registry),
            reason=reason,
            override=override,
        )
    tell(after, as_json)


@click.command("validate")
@_version
@_override
@common
def validate(version: str, override: str, file: Path | None, as_json: bool) -> None:
    """Compare a verified version's contract with production's, and check that its evidence is there.

    What is needed beside stands in registry.evidence of the config file.

    \b
    Examples:
      inferd registry validate churn@3
      inferd registry validate churn@3 --override "all clients are ready"
    """
    _move("validate", version, file, as_json, override=override)


@click.command("approve")
@_version
@_reason
@common
def approve(version: str, reason: str, file: Path | None, as_json: bool) -> None:
    """Approve a validated version. With registry.four_eyes another user than the one that registered it has to.

    \b
    Example:
      inferd registry approve churn@3 --reason "ticket 812"
    """
    _move("approve", version, file, as_json, reason=reason)


@click.command("canary")
@_version
@_reason
@_override
@common
def canary(version: str, reason: str, override: str, file: Path | None, as_json: bool) -> None:
    """Record that an approved version serves a part of the requests.

    \b
    Example:
      inferd registry canary churn@3
    """
    _move("canary", version, file, as_json, reason=reason, override=override)


@click.command("withdraw")
@_version
@_reason
@common
def withdraw(version: str, reason: str, file: Path | None, as_json: bool) -> None:
    """Record that a canary serves no requests any more; it stays approved.

    \b
    Example:
      inferd registry withdraw churn@3 --reason "slower than version 2"
    """
    _move("withdraw", version, file, as_json, reason=reason)


@click.command("promote")
@_version
@_reason
@_override
@common
def promote(version: str, reason: str, override: str, file: Path | None, as_json: bool) -> None:
    """Make an approved version the one in production; the version before it is archived.

    An archived version that was in production before can be promoted again. A server whose model has the source
    registry:NAME loads the version when it reads its configuration again.

    \b
    Example:
      inferd registry promote churn@3 --reason "canary was fine for a day"
    """
    _move("promote", version, file, as_json, reason=reason, override=override)


@click.command("archive")
@_version
@_reason
@common
def archive(version: str, reason: str, file: Path | None, as_json: bool) -> None:
    """Take a version out of production.

    \b
    Example:
      inferd registry archive churn@2
    """
    _move("archive", version, file, as_json, reason=reason)


@click.command("reject")
@_version
@click.option("--reason", required=True, metavar="TEXT", help="Why; for the history.")
@common
def reject(version: str, reason: str, file: Path | None, as_json: bool) -> None:
    """Reject a version that was not in production yet. It is never served again.

    \b
    Example:
      inferd registry reject churn@3 --reason "labels are swapped"
    """
    _move("reject", version, file, as_json, reason=reason)


@click.command("attach")
@_version
@click.option("--kind", required=True, type=click.Choice(["equivalence", "golden", "replay"]), help="What it is about.")
@click.option(
    "--report", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file with JSON."
)
@click.option("--passed/--failed", required=True, help="Whether it speaks for the version.")
@click.option("--summary", default="", metavar="TEXT", help="One sentence for listings.")
@common
def attach(
    version: str, kind: Attachable, report: Path, passed: bool, summary: str, file: Path | None, as_json: bool
) -> None:
    """Attach a report about a version. The newest one of its kind counts.

    \b
    Example:
      inferd registry attach churn@3 --kind golden --report golden.json --passed
    """
    document = _read_report(report)
    with changing(file, "attach", version) as (database, _, found):
        after = registry.attach_evidence(
            *(database, found.name, found.version, kind, document),
            passed=passed,
            actor=actor(),
            now=clock.wall(),
            summary=summary,
        )
    tell(after, as_json)


def _read_report(path: Path) -> dict[str, object]:
    """Raises InvalidRequest."""
    try:
        with path.open("rb") as file:
            document: object = json.loads(file.read(MAX_REPORT_BYTES + 1))
        return msgspec.convert(document, dict[str, object])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise InvalidRequest(
            f"{path} is no JSON object of at most {MAX_REPORT_BYTES} bytes ({error}).", param="report"
        ) from None


@click.command("alias")
@_version
@click.argument("alias_name", metavar="ALIAS")
@click.option("--remove", is_flag=True, help="Remove the alias from the version.")
@common
def alias(version: str, alias_name: str, remove: bool, file: Path | None, as_json: bool) -> None:
    """Point an alias at a version, so that registry:NAME@ALIAS names it.

    \b
    Examples:
      inferd registry alias churn@3 champion
      inferd registry alias churn@3 champion --remove
    """
    with changing(file, "alias", version) as (database, _, found):
        if remove and alias_name not in found.aliases:
            raise InvalidRequest(f"{alias_name} is no alias of {found.name}@{found.version}.", param="alias")
        number = None if remove else found.version
        after = registry.set_alias(database, found.name, alias_name, number, actor=actor(), now=clock.wall())
    if as_json:
        print_json(after)
    elif after is None:
        click.echo(f"{found.name} has no alias {alias_name} any more.")
    else:
        click.echo(f"{alias_name} is {after.name}@{after.version}.")
