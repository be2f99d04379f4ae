"""What was deleted is overwritten once, and again until that has succeeded."""

from __future__ import annotations

from typing import cast

import pytest

from inferd.errors import StateUnavailable
from inferd.state.database import Database
from inferd.state.erasure import Erasure


class Journal:
    """A database whose journal another process reads, or that is gone, for some time."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_read = self.is_gone = False

    def erase(self) -> bool:
        self.num_asked += 1
        if self.is_gone:
            raise StateUnavailable("gone")
        return not self.is_read


@pytest.fixture
def erasure() -> Erasure:
    return Erasure()


@pytest.fixture
def journal() -> Journal:
    return Journal()


def times(erasure: Erasure, journal: Journal) -> int:
    """How often the journal is erased by three calls."""
    before = journal.num_asked
    for _ in range(3):
        erasure.erase(cast(Database, journal))
    return journal.num_asked - before


def test_it_is_erased_once_at_the_start_and_once_after_each_deletion(erasure: Erasure, journal: Journal) -> None:
    assert [times(erasure, journal), times(erasure, journal)] == [1, 0]
    erasure.note_deletion()
    assert [times(erasure, journal), times(erasure, journal)] == [1, 0]


def test_a_journal_that_is_read_or_out_of_reach_is_erased_later(erasure: Erasure, journal: Journal) -> None:
    journal.is_read = True
    assert times(erasure, journal) == 3
    journal.is_gone = True
    with pytest.raises(StateUnavailable):
        erasure.erase(cast(Database, journal))
    journal.is_read = journal.is_gone = False
    assert times(erasure, journal) == 1
