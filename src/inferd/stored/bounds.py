"""The bounds of each tenant in bytes and age.

A tenant that stores more than it may loses its own oldest responses and conversations, never another's. A response that
is still computed is not lost.
"""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import InvalidRequest, Overloaded
from inferd.state.database import Transaction
from inferd.stored import refusals
from inferd.stored.conversations import remove_conversation
from inferd.stored.responses import IS_RUNNING, remove_response
from inferd.stored.totals import Limits, total_of

_BATCH: Final = 256


def settle(transaction: Transaction, tenant: str, limits: Limits, *, kept: str) -> int:
    """Delete the tenant's oldest until it has no more than it may; the number of what was deleted. ``kept`` is not.
    Raises InvalidRequest where it alone is too large, and Overloaded where what is still computed fills the rest."""
    num_deleted = 0
    while True:
        beyond = total_of(transaction, tenant) - limits.max_bytes
        if beyond <= 0:
            return num_deleted
        found = _oldest(transaction, tenant, kept)
        for _, name, is_response, num_bytes in found:
            (remove_response if is_response else remove_conversation)(transaction, tenant, name)
            num_deleted += 1
            beyond -= num_bytes
            if beyond <= 0:
                break
        else:
            if len(found) < _BATCH:
                raise _too_large(transaction, tenant, limits, kept)


def _oldest(transaction: Transaction, tenant: str, kept: str) -> list[tuple[float, str, bool, int]]:
    """The first of what a tenant loses: the last use, the id, whether it is a response, the bytes."""
    found = []
    for is_response, sql in (
        (True, f"SELECT created_at, id, num_bytes FROM responses WHERE tenant = ? AND id <> ? AND NOT {IS_RUNNING}"),
        (False, "SELECT used_at, id, num_bytes FROM conversations WHERE tenant = ? AND id <> ?"),
    ):
        for row in transaction.rows(
            f"{sql} ORDER BY {'created_at' if is_response else 'used_at'} LIMIT {_BATCH}", (tenant, kept)
        ):
            at, name, num_bytes = msgspec.convert(row, tuple[float, str, int])
            found.append((at, name, is_response, num_bytes))
    return sorted(found)[:_BATCH]


def _too_large(transaction: Transaction, tenant: str, limits: Limits, kept: str) -> InvalidRequest | Overloaded:
    ((size,),) = transaction.rows(
        "SELECT CAST(COALESCE(SUM(num_bytes), 0) AS BIGINT) FROM (SELECT num_bytes FROM responses WHERE tenant = ? AND id = ? UNION ALL "
        "SELECT num_bytes FROM conversations WHERE tenant = ? AND id = ?) AS kept",
        (tenant, kept, tenant, kept),
    )
    num_bytes = msgspec.convert(size, int, strict=False)
    if num_bytes > limits.max_bytes:
        noun, param = ("conversation", "items") if kept.startswith("conv_") else ("response", "store")
        return refusals.too_large(noun, param, num_bytes, limits.max_bytes)
    return refusals.filled_by_running(limits.max_bytes)


def remove_expired(transaction: Transaction, limits: Limits) -> int:
    """Delete some of what is too old, of every tenant; the number of what was deleted."""
    num_deleted = 0
    for (tenant,) in transaction.rows("SELECT tenant FROM stored_totals"):
        for remove, sql in (
            (remove_response, f"SELECT id FROM responses WHERE tenant = ? AND created_at <= ? AND NOT {IS_RUNNING}"),
            (remove_conversation, "SELECT id FROM conversations WHERE tenant = ? AND used_at <= ?"),
        ):
            for (name,) in transaction.rows(f"{sql} LIMIT {_BATCH}", (tenant, limits.oldest)):
                num_deleted += remove(transaction, str(tenant), str(name))
    return num_deleted
