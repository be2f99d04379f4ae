"""The exchange of hints between the gateways of one database: each writes its own and reads those of the others.

A gateway's hints replace its earlier ones, so the table holds one row of bounded size for each gateway. Does not know
what hints mean.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from inferd.state.database import Database
from inferd.state.presence import Presence
from inferd.state.thread import StateThread

MAX_BYTES: Final = 128 * 1024
"""Of the hints of one gateway. Larger ones are neither written nor read."""


class Heard(NamedTuple):
    """The hints that another gateway wrote since the last exchange."""

    gateway: str
    hints: bytes
    num_missed: int = 0  # that it wrote since the last exchange, and replaced by these


class HintTable:
    """This gateway's hints and those of the others, in the table of gateways."""

    def __init__(self, state: StateThread, presence: Presence) -> None:
        self._state = state
        self._presence = presence
        self._num_written = 0
        self._num_read: dict[str, int] = {}

    async def exchange(self, hints: bytes) -> list[Heard]:
        """Write this gateway's hints, empty: none, and read what others wrote since the last call. Hints that are older
        than the first call are left out. Raises StateUnavailable."""
        return await self._state.call(lambda database: self._exchange(database, hints))

    def _exchange(self, database: Database, hints: bytes) -> list[Heard]:
        me = self._presence.id
        if hints and len(hints) <= MAX_BYTES:
            self._num_written += 1
            with database.transaction(durable=False) as transaction:
                transaction.execute(
                    "UPDATE gateways SET num_hints = ?, hints = ? WHERE id = ?", (self._num_written, hints, me)
                )
        with database.reading() as transaction:
            found = transaction.rows("SELECT id, num_hints FROM gateways WHERE id <> ?", (me,))
            numbers = dict(msgspec.convert(found, list[tuple[str, int]]))
            last = {each: self._num_read.get(each, number) for each, number in numbers.items()}
            self._num_read = numbers
            rows = [
                (gateway, hints, number - last[gateway] - 1)
                for gateway, number in numbers.items()
                if number != last[gateway]
                for (hints,) in transaction.rows(
                    "SELECT hints FROM gateways WHERE id = ? AND length(hints) <= ?", (gateway, MAX_BYTES)
                )
            ]
        return [Heard(gateway, hints, missed) for gateway, hints, missed in rows if isinstance(hints, bytes)]
