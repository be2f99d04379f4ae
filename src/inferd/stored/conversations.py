"""The rows of conversations, in the caller's transaction. ``bounds.settle`` follows every change that adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from inferd.config.units import bytes_text
from inferd.state.database import Transaction, Value
from inferd.stored import refusals
from inferd.stored.documents import id_of, is_name, new_id, with_fields
from inferd.stored.port import Conversation, Page, PageQuery
from inferd.stored.totals import ROW_BYTES, Limits, add, enter

_IDS: Final = 500  # parameters of one statement


def insert_conversation(
    transaction: Transaction, tenant: str, name: str, metadata: bytes, items: Sequence[bytes], limits: Limits
) -> None:
    enter(transaction, tenant)
    num_bytes = ROW_BYTES + len(metadata)
    transaction.execute(
        "INSERT INTO conversations (tenant, id, created_at, used_at, next_position, num_bytes, metadata) "
        "VALUES (?, ?, ?, ?, 0, ?, ?)",
        (tenant, name, limits.now, limits.now, num_bytes, metadata),
    )
    add(transaction, tenant, num_bytes, conversations=1)
    append_items(transaction, tenant, name, items, limits)


def read_conversation(transaction: Transaction, tenant: str, name: str, limits: Limits) -> Conversation:
    """Raises StoredNotFound."""
    found = is_name(name) and transaction.rows(
        "SELECT id, created_at, metadata FROM conversations WHERE tenant = ? AND id = ? AND used_at > ?",
        (tenant, name, limits.oldest),
    )
    if not found:
        raise refusals.unknown_conversation(name)
    return msgspec.convert(found[0], Conversation)


def replace_metadata(transaction: Transaction, tenant: str, name: str, metadata: bytes, limits: Limits) -> Conversation:
    """Raises StoredNotFound."""
    before = read_conversation(transaction, tenant, name, limits)
    _resize(transaction, tenant, name, len(metadata) - len(before.metadata), limits)
    transaction.execute("UPDATE conversations SET metadata = ? WHERE tenant = ? AND id = ?", (metadata, tenant, name))
    return msgspec.structs.replace(before, metadata=metadata)


def append_items(
    transaction: Transaction, tenant: str, name: str, items: Sequence[bytes], limits: Limits
) -> list[bytes]:
    """Append items in their order; returns them as they are stored, each with an id that no other has. Raises
    StoredNotFound, and InvalidRequest where the conversation is too long."""
    read_conversation(transaction, tenant, name, limits)
    made = _with_free_ids(transaction, tenant, name, items)
    _resize(transaction, tenant, name, sum(ROW_BYTES + len(item) for item in made), limits)
    where = (tenant, name)
    transaction.execute(
        "UPDATE conversations SET next_position = next_position + ? WHERE tenant = ? AND id = ?", (len(made), *where)
    )
    ((behind,),) = transaction.rows("SELECT next_position FROM conversations WHERE tenant = ? AND id = ?", where)
    first = msgspec.convert(behind, int) - len(made)
    transaction.execute_many(
        "INSERT INTO conversation_items (tenant, conversation, position, id, num_bytes, item) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        [(tenant, name, first + number, id_of(item), ROW_BYTES + len(item), item) for number, item in enumerate(made)],
    )
    return made


def all_items(transaction: Transaction, tenant: str, name: str, limits: Limits) -> list[bytes]:
    """Raises StoredNotFound."""
    read_conversation(transaction, tenant, name, limits)
    rows = transaction.rows(
        "SELECT item FROM conversation_items WHERE tenant = ? AND conversation = ? ORDER BY position", (tenant, name)
    )
    return [msgspec.convert(row[0], bytes) for row in rows]


def page_of(transaction: Transaction, tenant: str, name: str, query: PageQuery, limits: Limits) -> Page:
    """Raises StoredNotFound, InvalidRequest."""
    read_conversation(transaction, tenant, name, limits)
    values: list[Value] = [tenant, name]
    beyond = ""
    if query.after:
        values.append(_position_of(transaction, tenant, name, query.after))
        beyond = f" AND position {'<' if query.is_newest_first else '>'} ?"
    rows = transaction.rows(
        f"SELECT item FROM conversation_items WHERE tenant = ? AND conversation = ?{beyond} "
        f"ORDER BY position {'DESC' if query.is_newest_first else 'ASC'} LIMIT {query.limit + 1:d}",
        values,
    )
    items = [msgspec.convert(row[0], bytes) for row in rows]
    return Page(items[: query.limit], len(items) > query.limit)


def _position_of(transaction: Transaction, tenant: str, name: str, item: str) -> int:
    found = is_name(item) and transaction.rows(
        "SELECT position FROM conversation_items WHERE tenant = ? AND conversation = ? AND id = ?", (tenant, name, item)
    )
    if not found:
        raise refusals.unknown_after(item)
    return msgspec.convert(found[0][0], int)


def read_item(transaction: Transaction, tenant: str, name: str, item: str, limits: Limits) -> bytes:
    """Raises StoredNotFound."""
    read_conversation(transaction, tenant, name, limits)
    found = is_name(item) and transaction.rows(
        "SELECT item FROM conversation_items WHERE tenant = ? AND conversation = ? AND id = ?", (tenant, name, item)
    )
    if not found:
        raise refusals.unknown_item(item)
    return msgspec.convert(found[0][0], bytes)


def remove_item(transaction: Transaction, tenant: str, name: str, item: str, limits: Limits) -> Conversation:
    """Raises StoredNotFound."""
    num_bytes = ROW_BYTES + len(read_item(transaction, tenant, name, item, limits))
    transaction.execute(
        "DELETE FROM conversation_items WHERE tenant = ? AND conversation = ? AND id = ?", (tenant, name, item)
    )
    _resize(transaction, tenant, name, -num_bytes, limits)
    return read_conversation(transaction, tenant, name, limits)


def _resize(transaction: Transaction, tenant: str, name: str, num_bytes: int, limits: Limits) -> None:
    """Add to a conversation's bytes, and note its use. Raises InvalidRequest where it becomes too long to be read."""
    transaction.execute(
        "UPDATE conversations SET num_bytes = num_bytes + ?, used_at = ? WHERE tenant = ? AND id = ?",
        (num_bytes, limits.now, tenant, name),
    )
    ((size,),) = transaction.rows("SELECT num_bytes FROM conversations WHERE tenant = ? AND id = ?", (tenant, name))
    if num_bytes > 0 and msgspec.convert(size, int) > refusals.MAX_HISTORY_BYTES:
        raise refusals.too_long(f"{bytes_text(msgspec.convert(size, int))} of items", "conversation")
    add(transaction, tenant, num_bytes)


def remove_conversation(transaction: Transaction, tenant: str, name: str) -> bool:
    if not is_name(name):
        return False
    found = transaction.rows("SELECT num_bytes FROM conversations WHERE tenant = ? AND id = ?", (tenant, name))
    if not found:
        return False
    transaction.execute("DELETE FROM conversation_items WHERE tenant = ? AND conversation = ?", (tenant, name))
    transaction.execute("DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, name))
    add(transaction, tenant, -msgspec.convert(found[0][0], int), conversations=-1)
    return True


def _with_free_ids(transaction: Transaction, tenant: str, name: str, items: Sequence[bytes]) -> list[bytes]:
    """The items, with new ids for those without one and for those whose id the conversation has."""
    ids = [id_of(item) for item in items]
    taken: set[str] = {""}
    for start in range(0, len(ids), _IDS):
        some = ids[start : start + _IDS]
        marks = ", ".join("?" * len(some))
        rows = transaction.rows(
            f"SELECT id FROM conversation_items WHERE tenant = ? AND conversation = ? AND id IN ({marks})",
            (tenant, name, *some),
        )
        taken.update(msgspec.convert(row[0], str) for row in rows)
    made = []
    for item, given in zip(items, ids, strict=True):
        free = given
        if given in taken:
            free = new_id(given.partition("_")[0] or "item")
            item = with_fields(item, id=msgspec.json.encode(free))
        taken.add(free)
        made.append(item)
    return made
