"""``inferd version``: what is installed, for a bug report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

import click

from inferd import __version__

_SHOWN = ("torch", "tokenizers", "safetensors", "msgspec", "httptools", "uvloop", "numpy")

COMPILED = "inferd._compiled__mypyc"
"""The library that a build installs with all compiled modules, or with none (``compiled/generate.py``)."""


@click.command("version")
def command() -> None:
    """Print the versions of inferd and of what it stands on.

    \b
    Example:
      inferd version
    """
    click.echo(f"inferd {__version__}")
    click.echo(f"gateway {'compiled by mypyc' if is_gateway_compiled() else 'interpreted'}")
    click.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in _SHOWN:
        try:
            click.echo(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            click.echo(f"{name} not installed")


def is_gateway_compiled() -> bool:
    """Whether the gateway's hot modules are compiled (docs/decisions/0041-compiled-gateway.md)."""
    return importlib.util.find_spec(COMPILED) is not None
