"""``inferd reload``: have a server read its configuration file now."""

from __future__ import annotations

import click

from inferd.cli.running.control import Server, server_options, working
from inferd.cli.terminal import fail
from inferd.gateway.control import ReloadReport


@click.command("reload")
@server_options
def command(server: Server) -> int:
    """Have a server read its configuration file again, and show the outcome.

    A server does so by itself when the file changes (server.reload); this command waits for the outcome. A
    file with a mistake changes nothing: every problem is listed, and the old configuration stays in use.

    \b
    Examples:
      inferd reload
      inferd reload --port 8001

    Exit code 1 when the file was refused, or when it is in use but a model could not be loaded.
    """
    with working("Reading the configuration file"):
        report = server.post("/admin/reload", ReloadReport, accept=(422,))
    if not report.accepted:
        fail("The file was refused, and the old configuration keeps serving:\n  - " + "\n  - ".join(report.details))
        return 1
    for detail in report.details:
        click.echo(f"- {detail}")
    if report.failed:
        fail(
            "The file is in use, but not every model could be changed to what it says:\n  - "
            + "\n  - ".join(report.failed)
        )
        return 1
    click.echo("Reloaded." if report.details else "Reloaded; nothing changed.")
    return 0
