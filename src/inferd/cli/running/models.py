"""``inferd models``: what can be served, and the models of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from inferd.cli.help import Commands
from inferd.cli.running.control import Server, model_path, server_options, working
from inferd.cli.terminal import console
from inferd.config.units import bytes_text
from inferd.events import state_words

if TYPE_CHECKING:
    from inferd.gateway.control import ModelReport


@click.group("models", cls=Commands, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """List the models that can be served; with a command, show and change those of a running server.

    \b
    Examples:
      inferd models
      inferd models list
      inferd models load chat
      inferd models unload chat
      inferd models restart chat --port 8001
    """
    if context.invoked_subcommand is None:
        _servable()


def _servable() -> None:
    from inferd import models
    from inferd.checkpoints.architecture import supported_architectures
    from inferd.predict.encoder.config import supported_architectures as supported_encoders

    click.echo("Bundled (inferd serve NAME):")
    for name in models.NAMES:
        folder = models.path(name)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        click.echo(f"  {name:<14} {bytes_text(size)}" + ("" if size else "  (weights not installed)"))
    for name in models.CLASSIFIERS:
        size = (models.path(name) / "model.onnx").stat().st_size
        click.echo(f"  {name:<14} {bytes_text(size)}")
    click.echo("\nArchitectures of language models (inferd serve FOLDER, or a Hugging Face Hub id):")
    for architecture in supported_architectures():
        click.echo(f"  {architecture}")
    click.echo("\nArchitectures of text encoders (decoders: with --task embed, or modules.json in the folder):")
    for kind in supported_encoders():
        click.echo(f"  {kind.architecture}")
    click.echo("\nThe models of a server that runs: inferd models list")


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print what the server said, for programs.")
@server_options
def list_models(server: Server, as_json: bool) -> None:
    """Show the models of a server, with their states, queues and memory.

    \b
    Example:
      inferd models list
    """
    from inferd.cli.running.status import models_table
    from inferd.gateway.control import ServerReport

    report = server.get("/admin/status", ServerReport)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report.models), indent=2).decode())
    else:
        out = console()
        out.print(models_table(report.models, out.width))


@command.command("load")
@click.argument("name")
@server_options
def load(server: Server, name: str) -> int:
    """Load the model NAME and wait until each of its replicas is ready or cannot be.

    \b
    Example:
      inferd models load chat

    Exit code 1 when not all of them are ready.
    """
    from inferd.gateway.control import ModelReport

    with working(f"Loading {name}"):
        report = server.post(model_path(name, "load"), ModelReport)
    return _said(report)


@command.command("unload")
@click.argument("name")
@server_options
def unload(server: Server, name: str) -> None:
    """Unload the model NAME once its requests have ended, and say what memory came back.

    It is loaded again by inferd models load, or by the next request when it is an on-demand model.

    \b
    Example:
      inferd models unload chat
    """
    from inferd.gateway.control import UnloadReport

    with working(f"Unloading {name}"):
        report = server.post(model_path(name, "unload"), UnloadReport)
    back = f"; {bytes_text(report.freed_bytes)} came back" if report.freed_bytes else ""
    click.echo(f"{name} is unloaded{back}.")


@command.command("restart")
@click.argument("name")
@server_options
def restart(server: Server, name: str) -> int:
    """Replace the replicas of the model NAME one by one, without a dropped request.

    \b
    Example:
      inferd models restart chat

    Exit code 1 when not all of them are ready.
    """
    from inferd.gateway.control import ModelReport

    with working(f"Replacing the replicas of {name}"):
        report = server.post(model_path(name, "restart"), ModelReport)
    return _said(report)


def _said(report: ModelReport) -> int:
    """Prints the states of a model's replicas; returns the exit code."""
    held = f", {bytes_text(report.memory_bytes)}" if report.memory_bytes else ""
    num_all = len(report.replicas)
    click.echo(
        f"{report.name} is {report.state}: {report.replicas_ready} of {num_all} replica{'s' * (num_all != 1)} "
        f"ready{held}."
    )
    for replica in report.replicas:
        if replica.state != "ready":
            why = f": {replica.detail}" if replica.detail else ""
            click.echo(f"  {replica.name} {state_words(replica.state)}{why}")
    return 0 if report.replicas_ready >= num_all else 1
