"""Whether something was deleted that a database's journal may still have.

Used in the database's thread alone, by the transactions that delete: a request may end while it waits for its
transaction. So nothing is deleted while it is erased.
"""

from __future__ import annotations

from inferd.state.database import Database


class Erasure:
    """Overwrites what was deleted: once after each deletion, and again where it did not succeed."""

    __slots__ = ("_is_due",)

    def __init__(self) -> None:
        self._is_due = True  # an earlier process may have deleted something

    def note_deletion(self) -> None:
        """Something is deleted by this transaction."""
        self._is_due = True

    def erase(self, database: Database) -> None:
        """Overwrite it, where there is something. Raises StateUnavailable."""
        if self._is_due:
            self._is_due = not database.erase()
