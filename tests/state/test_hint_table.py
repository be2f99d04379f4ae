"""Gateways of one database exchange hints, each row once, and old ones never."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.state.database import Database
from inferd.state.hints import MAX_BYTES, Heard, HintTable
from inferd.state.open import open_database
from inferd.state.presence import LockedPresence
from inferd.state.thread import StateThread


class Gateway:
    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self.presence = LockedPresence(folder)
        self.presence.enter(database)
        self._table = HintTable(StateThread(lambda: database), self.presence)

    def exchange(self, hints: bytes = b"") -> list[Heard]:
        return self._table._exchange(self._database, hints)


@pytest.fixture
def database(state_url: str, tmp_path: Path) -> Iterator[Database]:
    made = open_database(state_url, tmp_path)
    yield made
    made.close()


def test_hints_are_heard_once_and_only_those_written_since_the_first_exchange(
    database: Database, tmp_path: Path
) -> None:
    one, two, three = (Gateway(database, tmp_path) for _ in range(3))
    assert one.exchange(b"old") == []
    assert two.exchange() == [], "hints from before the first exchange are old"
    assert one.exchange(b"new\0\xff") == []
    heard = Heard(one.presence.id, b"new\0\xff")
    assert two.exchange() == [heard]
    assert two.exchange(b"of two") == []
    assert three.exchange() == []
    assert one.exchange(b"1") == [Heard(two.presence.id, b"of two")]
    for hints in (b"2", b"3"):
        assert one.exchange(hints) == []
    assert three.exchange() == [Heard(one.presence.id, b"3", num_missed=2)], "what was replaced unread is counted"
    assert two.exchange() == [Heard(one.presence.id, b"3", num_missed=2)]
    two.exchange(b"x" * (MAX_BYTES + 1))
    assert one.exchange() == [], "what is too large is not written"
    for gateway in (one, two, three):
        gateway.presence.leave(database)
    assert three.exchange(b"more") == []
