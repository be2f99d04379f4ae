"""``inferd models``: what can be served."""

from __future__ import annotations

import click


@click.command("models")
def command() -> None:
    """List the bundled models and the model families that can be served.

    \b
    Example:
      inferd models
    """
    from inferd import models
    from inferd.engine.model.architecture import supported_architectures

    click.echo("Bundled (inferd serve NAME):")
    for name in models.NAMES:
        folder = models.path(name)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        click.echo(f"  {name:<14} {size / 1e6:.1f} MB" + ("" if size else "  (weights not installed)"))
    click.echo("\nArchitectures (inferd serve FOLDER, or a Hugging Face Hub id):")
    for architecture in supported_architectures():
        click.echo(f"  {architecture}")
