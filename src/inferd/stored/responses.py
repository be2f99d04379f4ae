"""The rows of responses, in the caller's transaction. ``bounds.settle`` follows every change that adds to them."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.config.units import bytes_text
from inferd.errors import Cancelled, InvalidRequest, StoredNotFound
from inferd.state.database import Transaction
from inferd.stored import refusals
from inferd.stored.conversations import append_items
from inferd.stored.documents import elements, is_name, split_output, with_fields
from inferd.stored.port import MAX_ATTEMPTS, RUNNING, Status, StoredResponse, Unfinished
from inferd.stored.totals import ROW_BYTES, Limits, add, enter

MAX_RUNNING_PER_TENANT: Final = 1024

GAVE_UP: Final = "The server ended twice while it computed this response; send the request again."

IS_RUNNING: Final = "status IN ('queued', 'in_progress')"

_RESPONSE: Final = "created_at, status, previous, conversation, background, input_items, output, body, events"
_IDS: Final = 500  # parameters of one statement
_BATCH: Final = 64


class _Row(msgspec.Struct, frozen=True, array_like=True):
    created_at: float
    status: Status
    previous: str
    conversation: str
    background: int
    input_items: bytes
    output: bytes
    body: bytes
    events: bytes


class Link(msgspec.Struct, frozen=True, array_like=True):
    """A response of a chain."""

    id: str
    previous: str
    status: Status
    num_bytes: int


def insert(
    transaction: Transaction,
    response: StoredResponse,
    limits: Limits,
    *,
    gateway: str = "",
    key_id: str = "",
    request: bytes = b"",
) -> None:
    """Write a new response. Raises StoredNotFound for an unknown conversation."""
    enter(transaction, response.tenant)
    body, output = split_output(response.body)
    item_bytes = len(response.input_items) + len(output)
    num_bytes = ROW_BYTES + item_bytes + len(body) + len(response.events) + len(request)
    transaction.execute(
        f"INSERT INTO responses (tenant, id, {_RESPONSE}, gateway, attempts, key_id, num_bytes, item_bytes, request) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(response.tenant, response.id, response.created_at, response.status, response.previous),
            *(response.conversation, int(response.background), response.input_items, output, body, response.events),
            *(gateway, 1, key_id, num_bytes, item_bytes, request),
        ),
    )
    add(transaction, response.tenant, num_bytes, responses=1)
    _append_response(transaction, response, output, limits)


def change(transaction: Transaction, response: StoredResponse, limits: Limits, gateway: str) -> None:
    """Write the next state of a response that ``gateway`` computes in the background. Raises Cancelled where it was
    cancelled, deleted or taken over meanwhile."""
    enter(transaction, response.tenant)
    where = (response.tenant, response.id, gateway)
    found = transaction.rows(
        f"SELECT num_bytes, length(request) FROM responses WHERE tenant = ? AND id = ? AND gateway = ? AND {IS_RUNNING}",
        where,
    )
    if not found:
        raise Cancelled("The response was cancelled or deleted while it was computed.")
    before, request_bytes = msgspec.convert(found[0], tuple[int, int])
    is_running = response.status in RUNNING
    body, output = split_output(response.body)
    item_bytes = len(response.input_items) + len(output)
    num_bytes = ROW_BYTES + item_bytes + len(body) + len(response.events) + (request_bytes if is_running else 0)
    transaction.execute(
        "UPDATE responses SET status = ?, gateway = ?, input_items = ?, output = ?, body = ?, events = ?, "
        "num_bytes = ?, item_bytes = ? WHERE tenant = ? AND id = ?",
        (
            *(response.status, gateway if is_running else "", response.input_items, output, body, response.events),
            *(num_bytes, item_bytes, response.tenant, response.id),
        ),
    )
    if not is_running:
        transaction.execute(
            "UPDATE responses SET request = ? WHERE tenant = ? AND id = ?", (b"", response.tenant, response.id)
        )
    add(transaction, response.tenant, num_bytes - before)
    _append_response(transaction, response, output, limits)


def end(transaction: Transaction, tenant: str, name: str, status: Status, error: bytes = b"null") -> None:
    """End a response that is still computed, wherever that is: as cancelled, or as failed for a reason of the server."""
    found = transaction.rows(
        "SELECT body, num_bytes, length(request) FROM responses WHERE tenant = ? AND id = ?", (tenant, name)
    )
    body, before, request_bytes = msgspec.convert(found[0], tuple[bytes, int, int])
    ended = with_fields(body, status=msgspec.json.encode(status), error=error)
    num_bytes = before - len(body) - request_bytes + len(ended)
    transaction.execute(
        "UPDATE responses SET status = ?, gateway = ?, body = ?, request = ?, num_bytes = ? WHERE tenant = ? AND id = ?",
        (status, "", ended, b"", num_bytes, tenant, name),
    )
    add(transaction, tenant, num_bytes - before)


def is_computed_by(transaction: Transaction, gateway: str, tenant: str, name: str) -> bool:
    return bool(
        transaction.rows("SELECT 1 FROM responses WHERE tenant = ? AND id = ? AND gateway = ?", (tenant, name, gateway))
    )


def computed_by(transaction: Transaction, gateway: str) -> frozenset[str]:
    found = transaction.rows("SELECT id FROM responses WHERE gateway = ? AND gateway <> ''", (gateway,))
    return frozenset(str(name) for (name,) in found)


def refuse_too_many(transaction: Transaction, tenant: str) -> None:
    """Raises Overloaded where the tenant cannot begin another background response."""
    ((count,),) = transaction.rows("SELECT count(*) FROM responses WHERE tenant = ? AND gateway <> ''", (tenant,))
    if msgspec.convert(count, int) >= MAX_RUNNING_PER_TENANT:
        raise refusals.too_many_running(MAX_RUNNING_PER_TENANT)


def take_over(transaction: Transaction, me: str, living: frozenset[str], known: frozenset[str]) -> list[Unfinished]:
    """Give ``me`` some responses of gateways that do not live, and of itself beyond those that are known. Those that
    were begun ``MAX_ATTEMPTS`` times are ended as failed."""
    others = sorted(living - {me})
    marks = "".join(" AND gateway <> ?" for _ in others)
    found = transaction.rows(
        f"SELECT tenant, id, created_at, key_id, attempts + 1 FROM responses WHERE gateway <> ''{marks}", others
    )
    taken = []
    for tenant, name, created_at, key_id, attempt in (
        msgspec.convert(row, tuple[str, str, float, str, int]) for row in found
    ):
        if name in known:
            continue
        if attempt > MAX_ATTEMPTS:
            end(transaction, tenant, name, "failed", refusals.failure("server_error", GAVE_UP))
            continue
        transaction.execute(
            "UPDATE responses SET gateway = ?, attempts = ? WHERE tenant = ? AND id = ?", (me, attempt, tenant, name)
        )
        ((request, body),) = transaction.rows(
            "SELECT request, body FROM responses WHERE tenant = ? AND id = ?", (tenant, name)
        )
        made = (tenant, name, created_at, key_id, attempt, request, body)
        taken.append(msgspec.convert(made, Unfinished))
        if len(taken) == _BATCH:
            break
    return taken


def read(transaction: Transaction, tenant: str, name: str, limits: Limits) -> StoredResponse:
    """Raises StoredNotFound."""
    found = is_name(name) and transaction.rows(
        f"SELECT {_RESPONSE} FROM responses WHERE tenant = ? AND id = ? AND (created_at > ? OR {IS_RUNNING})",
        (tenant, name, limits.oldest),
    )
    if not found:
        raise refusals.unknown_response(name)
    row = msgspec.convert(found[0], _Row)
    return StoredResponse(
        id=name,
        tenant=tenant,
        created_at=row.created_at,
        status=row.status,
        body=with_fields(row.body, output=row.output),
        input_items=row.input_items,
        previous=row.previous,
        conversation=row.conversation,
        background=bool(row.background),
        events=row.events,
    )


def remove_response(transaction: Transaction, tenant: str, name: str) -> bool:
    if not is_name(name):
        return False
    found = transaction.rows("SELECT num_bytes FROM responses WHERE tenant = ? AND id = ?", (tenant, name))
    if not found:
        return False
    transaction.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, name))
    add(transaction, tenant, -msgspec.convert(found[0][0], int), responses=-1)
    return True


def chain_of(transaction: Transaction, tenant: str, name: str, limits: Limits) -> list[Link]:
    """The responses of a chain, the newest first, without their items. Raises StoredNotFound, InvalidRequest."""
    if not is_name(name):
        raise refusals.unknown_previous(name)
    found = transaction.rows(
        "WITH RECURSIVE chain (id, previous, status, num_bytes, depth) AS ("
        "SELECT id, previous, status, item_bytes, 1 FROM responses WHERE tenant = ? AND id = ? AND created_at > ? "
        "UNION ALL SELECT r.id, r.previous, r.status, r.item_bytes, c.depth + 1 FROM chain c "
        "JOIN responses r ON r.tenant = ? AND r.id = c.previous "
        f"WHERE c.depth <= {refusals.MAX_CHAIN} AND r.created_at > ?) "
        "SELECT id, previous, status, num_bytes FROM chain ORDER BY depth",
        (tenant, name, limits.oldest, tenant, limits.oldest),
    )
    links = [msgspec.convert(row, Link) for row in found]
    if not links:
        raise refusals.unknown_previous(name)
    if links[0].status in RUNNING:
        raise InvalidRequest(
            f"The response {name!r} is not complete yet; wait for its end, or cancel it.",
            param="previous_response_id",
            code="previous_response_not_complete",
        )
    if len(links) > refusals.MAX_CHAIN:
        raise refusals.too_long(f"more than {refusals.MAX_CHAIN} responses", "previous_response_id")
    if links[-1].previous:
        raise StoredNotFound(
            f"The response {links[-1].previous!r}, which {name!r} goes on from, was deleted or is too old; send the "
            "whole conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    size = sum(link.num_bytes for link in links)
    if size > refusals.MAX_HISTORY_BYTES:
        raise refusals.too_long(f"{bytes_text(size)} of items", "previous_response_id")
    return links


def history_of(transaction: Transaction, tenant: str, name: str, limits: Limits) -> list[bytes]:
    names = [link.id for link in reversed(chain_of(transaction, tenant, name, limits))]
    items: list[bytes] = []
    for start in range(0, len(names), _IDS):
        some = names[start : start + _IDS]
        marks = ", ".join("?" * len(some))
        rows = transaction.rows(
            f"SELECT id, input_items, output FROM responses WHERE tenant = ? AND id IN ({marks})", (tenant, *some)
        )
        by_id = {each[0]: each for each in (msgspec.convert(row, tuple[str, bytes, bytes]) for row in rows)}
        for one in some:
            _, given, output = by_id[one]
            items += elements(given)
            items += elements(output)
    return items


def _append_response(transaction: Transaction, response: StoredResponse, output: bytes, limits: Limits) -> None:
    if response.conversation and response.status in ("completed", "incomplete"):
        items = [*elements(response.input_items), *elements(output)]
        append_items(transaction, response.tenant, response.conversation, items, limits)
