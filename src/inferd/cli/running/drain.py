"""``inferd drain``: have a server finish its requests and leave."""

from __future__ import annotations

import time

import click
import msgspec

from inferd.cli.ranges import FloatRange
from inferd.cli.running.control import ANSWER_S, Server, server_options, working
from inferd.errors import Unavailable
from inferd.gateway.control import ServerReport

_POLL_S = 0.2


class _Heard(msgspec.Struct):
    """The server's acknowledgement."""

    status: str


@click.command("drain")
@click.option("--wait", is_flag=True, help="Return when the server has left.")
@click.option(
    "--timeout",
    type=FloatRange(min=0.1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time to wait.",
)
@server_options
def command(server: Server, wait: bool, timeout: float) -> int:
    """Tell a server to leave in good order, as SIGTERM does.

    Readiness turns false at once, so that load balancers send no more. New requests are refused after
    server.drain_delay_s, those in flight get server.grace_s to finish, and the process ends.

    \b
    Examples:
      inferd drain --wait
      inferd drain --port 8001

    Exit code 1 when the server has not left in time.
    """
    server.post("/admin/drain", _Heard, timeout_s=ANSWER_S)
    if not wait:
        click.echo(f"The server {server.name} is draining; it leaves when what is in flight has ended.")
        return 0
    deadline = time.monotonic() + timeout
    in_flight = 0
    with working(f"The server {server.name} is draining"):
        while time.monotonic() < deadline:
            try:
                report = server.get("/admin/status", ServerReport)
            except Unavailable:  # no socket any more: the server has left
                click.echo(f"The server {server.name} has left.")
                return 0
            in_flight = sum(model.in_flight + model.waiting for model in report.models)
            time.sleep(_POLL_S)
    raise Unavailable(f"The server {server.name} still has {in_flight} requests after {timeout:g} s.")
