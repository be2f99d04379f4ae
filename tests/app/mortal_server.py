"""``inferd`` as a process that kills itself (SIGKILL) at a write to the registry, the rollouts or the audit log.

    mortal_server.py ARM POINTS serve inferd.yaml

While the file ARM is there, each write is a point, whose name is a line of the file POINTS: before a statement, before
and after a commit, and before, within and after a line of the audit log and its head. ARM has a number and a name, and
the process dies at that point of all points whose names begin so, counted from 0.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from inferd.cli.main import main
from inferd.state import audit, sqlite
from inferd.state.database import Value

ARM, POINTS = Path(sys.argv[1]), Path(sys.argv[2])

_TOLD = re.compile(r"\s*(INSERT|UPDATE|DELETE)\b.*?\b(registry\w*|rollouts|rollout_changes|rollout_unrecorded)\b", re.S)


class Changes:
    """Of the transaction that is under way."""

    are_some = False  # it has changed one of these tables


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
        Changes.are_some = True
        point(f"before {found[1]} {found[2]}")


def make_mortal(database: Any, transaction: Any) -> None:
    """Give the two classes of a database their points."""
    begin, execute, execute_many = database.transaction, transaction.execute, transaction.execute_many

    @contextlib.contextmanager
    @functools.wraps(begin)
    def mortal_transaction(self: Any, **durable: bool) -> Iterator[Any]:
        with begin(self, **durable) as transaction:
            Changes.are_some = False
            yield transaction
            is_told = Changes.are_some
            if is_told:
                point("before COMMIT")
        if is_told:
            point("after COMMIT")

    def mortal_execute(self: Any, sql: str, values: Sequence[Value] = ()) -> int:
        told(sql)
        return int(execute(self, sql, values))

    def mortal_execute_many(self: Any, sql: str, rows: Iterable[Sequence[Value]]) -> None:
        told(sql)
        execute_many(self, sql, rows)

    database.transaction = mortal_transaction
    transaction.execute, transaction.execute_many = mortal_execute, mortal_execute_many


def write(descriptor: int, data: bytes) -> None:
    what = "head" if data.endswith(b" \n") else "line"
    point(f"before the {what} of the audit log")
    _write(descriptor, data[: len(data) // 2])
    point(f"within the {what} of the audit log")
    _write(descriptor, data[len(data) // 2 :])
    point(f"after the {what} of the audit log")


if __name__ == "__main__":
    make_mortal(sqlite.SqliteDatabase, sqlite._Transaction)
    if os.environ.get("INFERD_STATE__URL", "").startswith("postgresql:"):
        from inferd.state import postgres

        make_mortal(postgres.PostgresDatabase, postgres._Transaction)
    audit._write = write
    sys.exit(main(sys.argv[3:]))
