"""The group of gateways that share a database: with which settings each serves, and where they differ.

Each gateway writes digests of its settings into its row of the table of gateways and compares them with those of the
others. A digest says that two values differ and not what they are. A difference changes nothing in how requests are
served: it is reported, as metrics, in the server's status and in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from inferd import __version__
from inferd.state.database import Database, Row
from inferd.state.presence import Presence
from inferd.state.thread import StateThread

EXCHANGE_S: Final = 2.0
WARN_AFTER: Final = 5
"""Comparisons in a row with the same differences before they are logged: gateways that follow one file read a change
within seconds of each other."""

MAX_LOGGED: Final = 20
VERSION: Final = "inferd version"
"""The name of a difference in the program itself."""

_log = logging.getLogger("inferd.state")


class Told(msgspec.Struct, frozen=True):
    """What a gateway writes of itself."""

    version: str  # of inferd
    settings: dict[str, str]  # digests by path


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway of the group, as this one sees it."""

    id: str  # of the process; another one after a restart
    host: str
    is_this: bool  # the gateway that answers
    version: str = ""  # of inferd; empty: not known yet
    digest: str = ""  # of all compared settings; equal digests are equal settings; empty: not known yet
    differs: list[str] = []  # the paths of settings that are not those of this gateway


class Group:
    """This gateway among those that share its database. Call ``configure``, then ``schedule``."""

    def __init__(
        self,
        state: StateThread,
        presence: Presence,
        told: Callable[[Sequence[GatewayReport]], None] = lambda reports: None,
    ) -> None:
        """``told`` is called in the database's thread with the reports whenever they change."""
        self._state = state
        self._presence = presence
        self._tell = told
        self._own = Told(__version__, {})
        self._num_alike = 0
        self._logged: list[str] = []
        self.reports: tuple[GatewayReport, ...] = ()
        """The living gateways by id, this one among them; empty before the first comparison."""

    def configure(self, settings: Mapping[str, str]) -> None:
        """Serve with these settings, digests by path, from now on."""
        self._own = Told(__version__, dict(settings))

    def schedule(self) -> None:
        self._state.run_every(EXCHANGE_S, self.exchange)

    def exchange(self, database: Database) -> None:
        """Write this gateway's digests where they have changed, and compare all. Raises StateUnavailable."""
        own, me = self._own, self._presence.id
        with database.reading() as transaction:
            living = self._presence.members(transaction).living
            rows = transaction.rows("SELECT id, host, settings FROM gateways ORDER BY id")
        written = {row[0]: row[2] for row in rows}
        if me not in written:
            return  # it was taken for dead; its next heartbeat writes the row again
        encoded = msgspec.json.encode(own)
        if written[me] != encoded:
            with database.transaction(durable=False) as transaction:
                transaction.execute("UPDATE gateways SET settings = ? WHERE id = ?", (encoded, me))
        reports = tuple(_report(row, own, me) for row in rows if row[0] in living)
        if reports != self.reports:
            self.reports = reports
            self._num_alike = 0
            self._tell(reports)
        self._num_alike += 1
        if self._num_alike == WARN_AFTER:
            self._log_differences()

    def _log_differences(self) -> None:
        lines = [
            f"gateway {each.id} on {each.host} serves with other settings than this one: {_listed(each.differs)}"
            for each in self.reports
            if each.differs
        ]
        if lines != self._logged:
            for line in lines:
                _log.warning("%s", line)
            if not lines:
                _log.info("no gateway of this database serves with other settings than this one any more")
        self._logged = lines


def digest_of(settings: Mapping[str, str]) -> str:
    """One digest of all settings, 12 hexadecimal digits."""
    return blake2b(msgspec.json.encode(settings, order="deterministic"), digest_size=6).hexdigest()


def differences(mine: Told, other: Told) -> list[str]:
    """The paths of the settings in which two gateways differ. Of an entry that only one of them has, such as a model,
    the entry is named and not each of its settings."""
    unequal = {
        path
        for path in mine.settings.keys() | other.settings.keys()
        if mine.settings.get(path) != other.settings.get(path)
    }
    paths = sorted(path for path in unequal if path.rpartition(".")[0] not in unequal)
    return paths if mine.version == other.version else [VERSION, *paths]


def _report(row: Row, own: Told, me: str) -> GatewayReport:
    gateway, host, settings = msgspec.convert(row, tuple[str, str, bytes | None])
    told = own if gateway == me else None if settings is None else msgspec.json.decode(settings, type=Told)
    if told is None:  # it started a moment ago, or its inferd is older and writes none
        return GatewayReport(id=gateway, host=host, is_this=False)
    return GatewayReport(
        id=gateway,
        host=host,
        is_this=gateway == me,
        version=told.version,
        digest=digest_of(told.settings),
        differs=differences(own, told),
    )


def _listed(paths: Sequence[str]) -> str:
    more = len(paths) - MAX_LOGGED
    return ", ".join(paths[:MAX_LOGGED]) + (f" and {more} more" if more > 0 else "")
