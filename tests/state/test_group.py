"""Gateways of one database tell each other digests of their settings, and name what differs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd import __version__
from inferd.state.database import Database
from inferd.state.group import VERSION, WARN_AFTER, GatewayReport, Group, Told, differences, digest_of
from inferd.state.open import open_database
from inferd.state.presence import LockedPresence
from inferd.state.thread import StateThread

SETTINGS = {"models.chat": "00", "models.chat.source": "aa", "server.max_body_bytes": "bb"}
PATHS = st.dictionaries(st.sampled_from(["models.a", "models.a.source", "models.b.c", "server.auth"]), st.text("ab"))


class Gateway:
    """A member of the group with a lock of its own, whose database is the others' too."""

    def __init__(self, database: Database, folder: Path, settings: dict[str, str]) -> None:
        self._database = database
        self.presence = LockedPresence(folder)
        self.presence.enter(database)
        self.told: list[Sequence[GatewayReport]] = []
        state = StateThread(lambda: database)
        self.group = Group(state, self.presence, self.told.append)
        self.group.configure(settings)

    def exchange(self, times: int = 1) -> None:
        for _ in range(times):
            self.group.exchange(self._database)

    def other(self) -> GatewayReport:
        (report,) = [each for each in self.group.reports if not each.is_this]
        return report


@pytest.fixture
def database(state_url: str, tmp_path: Path) -> Iterator[Database]:
    made = open_database(state_url, tmp_path)
    yield made
    made.close()


@pytest.fixture
def pair(database: Database, tmp_path: Path) -> Iterator[tuple[Gateway, Gateway]]:
    made = Gateway(database, tmp_path, SETTINGS), Gateway(database, tmp_path, SETTINGS)
    yield made
    for gateway in made:
        gateway.presence.unlock()


def test_gateways_with_the_same_settings_differ_in_nothing(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair
    one.exchange()
    assert one.other() == GatewayReport(id=two.presence.id, host=one.other().host, is_this=False), "not written yet"
    for gateway in (two, one, two):
        gateway.exchange()
    assert {each.digest for each in one.group.reports} == {digest_of(SETTINGS)}
    assert one.other().version == __version__
    assert one.other().differs == two.other().differs == []


def test_what_differs_is_named_at_both_until_it_is_equal_again(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair
    two.group.configure({**SETTINGS, "models.chat.source": "other", "tenants.a": "00", "tenants.a.rpm": "01"})
    for gateway in (one, two, one):
        gateway.exchange()
    assert one.other().differs == two.other().differs == ["models.chat.source", "tenants.a"]
    assert one.other().digest != digest_of(SETTINGS)
    two.group.configure(SETTINGS)
    for gateway in (two, one):
        gateway.exchange()
    assert one.other().differs == two.other().differs == []


def test_nothing_is_told_while_nothing_changes(pair: tuple[Gateway, Gateway], database: Database) -> None:
    one, two = pair
    for gateway in (one, two, one):
        gateway.exchange()
    told = len(one.told)
    one.exchange(3)
    assert len(one.told) == told
    two.presence.leave(database)
    one.exchange()
    assert [[each.id for each in reports] for reports in one.told[told:]] == [[one.presence.id]]


def test_gateways_that_never_differed_log_nothing(
    pair: tuple[Gateway, Gateway], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "inferd.state")
    one, two = pair
    two.exchange()
    one.exchange(2 * WARN_AFTER)
    assert not caplog.records


def test_a_difference_that_stays_is_logged_once_and_its_end_too(
    pair: tuple[Gateway, Gateway], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "inferd.state")
    one, two = pair
    two.group.configure({})
    two.exchange()
    one.exchange(WARN_AFTER - 1)
    assert not caplog.records
    one.exchange(2 * WARN_AFTER)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "models.chat, server.max_body_bytes" in warning.getMessage()
    two.group.configure(SETTINGS)
    two.exchange()
    one.exchange(2 * WARN_AFTER)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_gateway_that_was_taken_for_dead_writes_its_settings_again(
    pair: tuple[Gateway, Gateway], database: Database
) -> None:
    one, two = pair
    for gateway in (one, two, one):
        gateway.exchange()
    before = one.group.reports
    with database.transaction() as transaction:
        transaction.execute("DELETE FROM gateways WHERE id = ?", (one.presence.id,))
    one.exchange()
    assert one.group.reports == before, "without its row nothing is known anew"
    one.presence.enter(database)
    for gateway in (one, two):
        gateway.exchange()
    assert two.other().digest == digest_of(SETTINGS)


@given(PATHS, PATHS)
def test_differences_are_those_of_both_directions_and_none_of_equals(one: dict[str, str], two: dict[str, str]) -> None:
    mine, other = Told("1", one), Told("1", two)
    found = differences(mine, other)
    assert found == differences(other, mine)
    assert (found == []) == (one == two)
    assert differences(mine, Told("2", two)) == [VERSION, *found]
