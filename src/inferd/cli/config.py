"""``inferd config``: show the configuration without serving it."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from inferd.cli.help import Commands
from inferd.config import load_config


@click.group("config", cls=Commands)
def command() -> None:
    """Show, check and describe the configuration.

    \b
    Examples:
      inferd config show inferd.yaml
      inferd config schema > inferd.schema.json
    """


@command.command("show")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def show(file: Path | None) -> None:
    """Print the configuration that FILE and the environment make, defaults included, as YAML.

    \b
    Example:
      INFERD_SERVER__PORT=9000 inferd config show inferd.yaml
    """
    import yaml

    config = load_config(file, os.environ, {})
    click.echo(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True), nl=False)


@command.command("check")
@click.argument("file")
@click.pass_context
def check(context: click.Context, file: str) -> int:
    """The same as inferd check FILE.

    \b
    Example:
      inferd config check inferd.yaml
    """
    from inferd.cli.check import command as check_command

    code: int = context.invoke(check_command, file=file)
    return code


@command.command("schema")
def schema() -> None:
    """Print the JSON schema of config files, for editors and linters.

    \b
    Example:
      inferd config schema > inferd.schema.json
    """
    from inferd.cli import reference

    click.echo(reference.schema(), nl=False)
