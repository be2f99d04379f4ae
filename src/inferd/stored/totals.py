"""The sums over a tenant's stored responses and conversations, exact after every change."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from inferd.state.database import Transaction

ROW_BYTES: Final = 256
"""Approximate bytes of a row beside its contents."""


class Limits(NamedTuple):
    """The bounds of each tenant, and the time that ages are counted from."""

    max_bytes: int
    max_age_s: float
    now: float

    @property
    def oldest(self) -> float:
        """What was used last before this time is expired."""
        return self.now - self.max_age_s


def enter(transaction: Transaction, tenant: str) -> None:
    transaction.execute(
        "INSERT INTO stored_totals (tenant, num_bytes, num_responses, num_conversations) VALUES (?, 0, 0, 0) "
        "ON CONFLICT (tenant) DO NOTHING",
        (tenant,),
    )


def add(transaction: Transaction, tenant: str, num_bytes: int, responses: int = 0, conversations: int = 0) -> None:
    transaction.execute(
        "UPDATE stored_totals SET num_bytes = num_bytes + ?, num_responses = num_responses + ?, "
        "num_conversations = num_conversations + ? WHERE tenant = ?",
        (num_bytes, responses, conversations, tenant),
    )


class TenantTotal(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant has stored."""

    tenant: str
    num_bytes: int
    num_responses: int
    num_conversations: int


def largest(transaction: Transaction, count: int) -> list[TenantTotal]:
    """The tenants with the most bytes, the first with the most. A tenant without anything is not among them."""
    found = transaction.rows(
        "SELECT tenant, num_bytes, num_responses, num_conversations FROM stored_totals "
        "WHERE num_responses > 0 OR num_conversations > 0 ORDER BY num_bytes DESC LIMIT ?",
        (count,),
    )
    return [msgspec.convert(row, TenantTotal) for row in found]


def whole(transaction: Transaction) -> tuple[int, int, int, int]:
    """Of all tenants: their number, the bytes, the responses and the conversations."""
    (found,) = transaction.rows(
        "SELECT COUNT(*), CAST(COALESCE(SUM(num_bytes), 0) AS BIGINT), "
        "CAST(COALESCE(SUM(num_responses), 0) AS BIGINT), CAST(COALESCE(SUM(num_conversations), 0) AS BIGINT) "
        "FROM stored_totals WHERE num_responses > 0 OR num_conversations > 0"
    )
    return msgspec.convert(found, tuple[int, int, int, int], strict=False)


def total_of(transaction: Transaction, tenant: str) -> int:
    found = transaction.rows("SELECT num_bytes FROM stored_totals WHERE tenant = ?", (tenant,))
    return msgspec.convert(found[0][0], int) if found else 0
