"""The group ``inferd registry``, which imports a command's file when it is named."""

from __future__ import annotations

import click

from inferd.cli.help import Lazy

COMMANDS = {
    "digest": "registry.digest",
}
"""A command's name and its module below ``inferd.cli``."""


@click.group("registry", cls=Lazy, modules=COMMANDS)
def command() -> None:
    """Digests and signatures of models' files.

    \b
    Examples:
      inferd registry digest ./my-model
    """
