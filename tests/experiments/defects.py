"""Mechanisms broken on purpose, each the positive control of an experiment. Never a part of the server."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

Break = Callable[[], None]


def streams_are_never_cancelled() -> None:
    """A client that leaves is not noticed by what computes for it."""
    from inferd.router.stream import Stream

    Stream.close = lambda self: None  # type: ignore[method-assign]


def dead_peers_are_not_looked_for() -> None:
    from inferd.http import listener

    listener.set_options = lambda listener: None


def remote_answers_are_not_read() -> None:
    """Whatever a remote server says is an answer."""
    from inferd.remote import openai
    from inferd.types import Usage

    vars(openai)["read_answer"] = lambda body: Usage()


def broken_remote_streams_end_silently() -> None:
    from inferd.remote.openai import Answer
    from inferd.types import End, Relayed

    def end(self: Answer, error: Exception) -> None:
        self.relayed(Relayed(self._id, end=End("done", self.usage)))

    Answer._break = end  # type: ignore[method-assign]


def every_request_asks_the_database() -> None:
    import sqlite3

    from inferd.config import load_config
    from inferd.tenancy.door import KeyDoor
    from inferd.tenancy.principal import Principal

    authenticate = KeyDoor.authenticate
    path = Path(load_config(Path(sys.argv[1]), {}, {}).state.data_dir or "") / "state.db"

    def asking(self: KeyDoor, token: str | None) -> Principal:
        connection = sqlite3.connect(path, timeout=30.0)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        connection.close()
        return authenticate(self, token)

    KeyDoor.authenticate = asking  # type: ignore[method-assign]


def lines_are_written_at_once() -> None:
    from inferd.worker.line_writer import LineWriter

    LineWriter.write = lambda self, line: print(line, file=sys.stderr, flush=True)  # type: ignore[method-assign]


def the_backlog_is_short() -> None:
    from inferd.http import listener

    listener.BACKLOG = 4  # type: ignore[misc]


def an_extra_port_is_open() -> None:
    import socket

    _OPEN.append(socket.create_server(("127.0.0.1", 0)))


_OPEN: list[object] = []


def knobs_have_no_ranges() -> None:
    from inferd.gateway import limits

    for name in limits.RANGES:
        limits.RANGES[name] = limits.Range(-math.inf, math.inf)


DEFECTS: dict[str, Break] = {
    broken.__name__: broken
    for broken in (
        streams_are_never_cancelled,
        dead_peers_are_not_looked_for,
        remote_answers_are_not_read,
        broken_remote_streams_end_silently,
        every_request_asks_the_database,
        lines_are_written_at_once,
        the_backlog_is_short,
        an_extra_port_is_open,
        knobs_have_no_ranges,
    )
}


def inject(name: str) -> None:
    DEFECTS[name]()
