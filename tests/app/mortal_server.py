"""``inferd`` as a process that kills itself (SIGKILL) at a write to the registry, the rollouts or the audit log.

    mortal_server.py ARM POINTS serve inferd.yaml

While the file ARM is there, each write is a point, whose name is a line of the file POINTS: before a statement, before
and after a commit, and before, within and after a line of the audit log and its head. ARM has a number and a name, and
the process dies at that point of all points whose names begin so, counted from 0.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from inferd.cli.main import main
from inferd.state import audit, sqlite
from inferd.state.database import Value

ARM, POINTS = Path(sys.argv[1]), Path(sys.argv[2])

_TOLD = re.compile(r"\s*(INSERT|UPDATE|DELETE)\b.*?\b(registry\w*|rollouts|rollout_changes|rollout_unrecorded)\b", re.S)


class Transaction:
    """The one that is under way."""

    is_changing = False  # it has changed one of these tables


_run = sqlite.SqliteDatabase._run
_execute = sqlite._Transaction.execute
_execute_many = sqlite._Transaction.execute_many
_write = audit._write


def point(name: str) -> None:
    if not ARM.exists():
        return
    with POINTS.open("a") as points:
        points.write(f"{name}\n")
    number, _, wanted = ARM.read_text().partition(" ")
    seen = [line for line in POINTS.read_text().splitlines() if line.startswith(wanted)]
    if name.startswith(wanted) and len(seen) == int(number) + 1:
        os.kill(os.getpid(), signal.SIGKILL)


def told(statement: str) -> None:
    found = _TOLD.match(statement)
    if found is not None:
        Transaction.is_changing = True
        point(f"before {found[1]} {found[2]}")


def execute(self: sqlite._Transaction, sql: str, values: Sequence[Value] = ()) -> int:
    told(sql)
    return _execute(self, sql, values)


def execute_many(self: sqlite._Transaction, sql: str, rows: Iterable[Sequence[Value]]) -> None:
    told(sql)
    _execute_many(self, sql, rows)


def run(self: sqlite.SqliteDatabase, statement: str) -> None:
    ends = statement == "COMMIT" and Transaction.is_changing
    if ends:
        point("before COMMIT")
    _run(self, statement)
    if statement in ("BEGIN", "BEGIN IMMEDIATE", "COMMIT"):
        Transaction.is_changing = False
    if ends:
        point("after COMMIT")


def write(descriptor: int, data: bytes) -> None:
    what = "head" if data.endswith(b" \n") else "line"
    point(f"before the {what} of the audit log")
    _write(descriptor, data[: len(data) // 2])
    point(f"within the {what} of the audit log")
    _write(descriptor, data[len(data) // 2 :])
    point(f"after the {what} of the audit log")


if __name__ == "__main__":
    sqlite.SqliteDatabase._run = run  # type: ignore[method-assign]
    sqlite._Transaction.execute = execute  # type: ignore[method-assign]
    sqlite._Transaction.execute_many = execute_many  # type: ignore[method-assign]
    audit._write = write
    sys.exit(main(sys.argv[3:]))
