"""``inferd top``: the live numbers of a running server in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Final

import click

from inferd.cli.running.control import Server, server_options
from inferd.cli.running.live_figures import Figures, Follower, read_once
from inferd.cli.running.top_screen import Screen
from inferd.cli.terminal import console

_DRAW_S: Final = 1.0


@click.command("top")
@click.option("--once", is_flag=True, help="Show one second, and end.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each second, for programs.")
@server_options
def command(server: Server, once: bool, as_json: bool) -> None:
    """Show a server's live numbers: requests, tokens, latencies, queues, memory, events and the slowest requests.

    Without options: the only server that runs on this machine. A key needs the scope metrics; with admin the states of
    models and the slowest requests are shown, too.

    \b
    Examples:
      inferd top
      inferd top --port 8001
      inferd top --once --json | jq '.models[].requests_s'
      inferd top --url https://gpu.example.com:8000 --key sk-inf-...

    Keys: q quits, s sorts by the next column, r turns the order round, ? explains. Without a terminal it shows one
    second, as --once does.
    """
    figures = Figures()
    read_once(server, figures)  # a server that does not answer now is an error, and no screen
    if once or not (as_json or sys.stdout.isatty()):
        _print_once(server, figures, as_json)
        return
    follower = Follower(server, figures)
    follower.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            if as_json:
                _print_lines(figures)
            else:
                _draw(Screen(server.name), figures)
    finally:
        follower.stop()


def _print_once(server: Server, figures: Figures, as_json: bool) -> None:
    if as_json:
        click.echo(figures.as_json())
        return
    out = console()
    out.print(Screen(server.name).drawn(figures, out.width, max(shutil.get_terminal_size().lines, 24)))


def _print_lines(figures: Figures) -> None:
    click.echo(figures.as_json())
    last = figures.at
    while True:
        figures.changed.wait()
        figures.changed.clear()
        if figures.at != last and not figures.problem:
            last = figures.at
            click.echo(figures.as_json())


def _draw(screen: Screen, figures: Figures) -> None:
    """Draw on the whole screen, which is as before afterwards."""
    from rich.live import Live

    out = console()
    with _keys() as has_keys, Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(screen.drawn(figures, out.width, out.height), refresh=True)
            if not has_keys:
                figures.changed.wait(_DRAW_S)
                figures.changed.clear()
                continue
            key = _pressed(_DRAW_S)
            if key and not screen.press(key):
                return


@contextlib.contextmanager
def _keys() -> Iterator[bool]:
    """Read keys as they are pressed. False: stdin is no terminal."""
    if not sys.stdin.isatty():
        yield False
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield True
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _pressed(timeout_s: float) -> str:
    """The next key; empty: none was pressed in time."""
    number = sys.stdin.fileno()
    if not select.select([number], [], [], timeout_s)[0]:
        return ""
    return os.read(number, 1).decode("ascii", "ignore") or "q"  # the end of the input
