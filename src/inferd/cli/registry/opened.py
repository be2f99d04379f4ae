"""What the commands of the registry share: the database, the audit log, and the form of a version's name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from inferd.cli.audit import recorded
from inferd.cli.keys import opened_database
from inferd.config import Config
from inferd.lifecycle import registry
from inferd.lifecycle.registry import Version
from inferd.state.database import Database

Decorated = TypeVar("Decorated", bound=Callable[..., object])


def common(function: Decorated) -> Decorated:
    """The options of every command."""
    function = click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        help="The server's config file, where it names the database (state.url or state.data_dir).",
    )(function)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)


def actor() -> str:
    """The user of this command, as the audit log names it."""
    return f"user:{os.getuid()}"


def split(text: str) -> tuple[str, str]:
    """A model and the reference to one of its versions: churn@3, churn@champion. Raises click.BadParameter."""
    name, at, ref = text.rpartition("@")
    if not at or not name or not ref:
        raise click.BadParameter(f"{text!r} names no version; write NAME@VERSION, such as churn@3.")
    return name, ref


@contextmanager
def changing(file: Path | None, action: str, text: str) -> Iterator[tuple[Database, Config, Version]]:
    """A version that is changed between the two lines of the audit log, the second of which has the head of the
    registry's history. Raises InferdError, click.ClickException."""
    name, ref = split(text)
    with opened_database(file) as (database, config), recorded(config, f"registry_{action}", text) as outcome:
        yield database, config, registry.find(database, name, ref)
        outcome.detail = head_text(database)


def head_text(database: Database) -> str:
    """The newest line of the history, for the audit log."""
    number, digest = registry.head(database)
    return f"registry line {number}:{digest}"


def print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def tell(version: Version, as_json: bool) -> None:
    """What became of a version."""
    if as_json:
        print_json(version)
    else:
        click.echo(f"{version.name}@{version.version} is {version.record.stage}.")
