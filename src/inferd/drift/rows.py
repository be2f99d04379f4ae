"""The references in the database: one of each model, for all of its versions and all servers that share the database.

All functions run in the database's thread and raise StateUnavailable.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from inferd.drift.reference import Reference, decode_reference
from inferd.state.database import Database, Transaction

_log = logging.getLogger("inferd.drift")


def exchange(database: Database, models: Sequence[str], taken: Mapping[str, Reference]) -> dict[str, Reference]:
    """Store the references that were taken here where there is none yet, and read those of ``models``."""
    if taken:
        with database.transaction() as transaction:
            transaction.lock()
            for model, reference in taken.items():
                if _stored(transaction, model) is None:
                    transaction.execute("DELETE FROM drift_references WHERE model = ?", (model,))
                    transaction.execute(
                        "INSERT INTO drift_references (model, reference) VALUES (?, ?)",
                        (model, msgspec.json.encode(reference)),
                    )
    with database.reading() as transaction:
        found = {model: _stored(transaction, model) for model in models}
    return {model: reference for model, reference in found.items() if reference is not None}


def forget(database: Database, model: str) -> None:
    """Remove a model's reference."""
    with database.transaction() as transaction:
        transaction.execute("DELETE FROM drift_references WHERE model = ?", (model,))


def _stored(transaction: Transaction, model: str) -> Reference | None:
    """A model's reference; None: there is none, or none that can be read."""
    for (encoded,) in transaction.rows("SELECT reference FROM drift_references WHERE model = ?", (model,)):
        try:
            return decode_reference(msgspec.convert(encoded, bytes))
        except (msgspec.MsgspecError, ValueError) as error:
            _log.error("the stored reference of %s cannot be read, so another is taken: %s", model, error)
    return None
