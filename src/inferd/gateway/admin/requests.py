"""The records of recent calls, and why each of them took so long. Every route here needs the scope metrics.

A key sees the calls of its tenant; of other tenants' requests it reads classes and counts only. A request without a
key, where no keys are needed, sees the calls without a tenant. The operator, at the control socket, sees every call and
the names of tenants.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from inferd.gateway.body.query import read_query
from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import RequestNotFound, shown
from inferd.gateway.generation.writer import encode
from inferd.observe.why.explain import MAX_LISTED, RecordLine
from inferd.observe.why.store import Order
from inferd.tenancy.principal import Principal


class RequestsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GET /admin/requests"""

    model: Annotated[str | None, Meta(description="Only calls of this model.")] = None
    tenant: Annotated[str | None, Meta(description="Only calls of this tenant.")] = None
    id: Annotated[str | None, Meta(description="Only calls with this id; several may have the same.")] = None
    order: Annotated[
        Order, Meta(description="recent: the last calls. slowest: of every hour. errors: the last that failed.")
    ] = "recent"
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED, description="The most calls that are listed.")] = 50
    before: Annotated[
        float | None, Meta(description="Only calls that arrived before this time, in seconds since the epoch.")
    ] = None


class RecordList(msgspec.Struct, frozen=True):
    data: list[RecordLine]


async def list_requests(context: Context, call: Call, rest: str) -> Response:
    """GET /admin/requests. Raises InvalidRequest."""
    query = read_query(call.head.query, RequestsQuery)
    viewer = _viewer(call.principal)
    if query.id is not None:
        lines: list[RecordLine] = [*context.explainer.find(query.id, viewer)]
        lines = [line for line in lines if query.model in (None, line.model) and query.tenant in (None, line.tenant)]
        return Response(200, encode(RecordList(lines[: query.limit])), headers=_UNSTORED)
    found = context.explainer.select(
        viewer, model=query.model, tenant=query.tenant, order=query.order, limit=query.limit, before=query.before
    )
    return Response(200, encode(RecordList(found)), headers=_UNSTORED)


async def get_request(context: Context, call: Call, request_id: str) -> Response:
    """GET /admin/requests/{id}: the newest call with this id. Raises RequestNotFound."""
    found = context.explainer.find(request_id, _viewer(call.principal))
    if not found:
        kept = context.config.server.request_records
        why = f"the last {kept:,} calls are kept" if kept else "server.request_records is 0, so no call is kept"
        raise RequestNotFound(
            f"No call with the id {shown(request_id)} is known; {why}. The id is in the header x-request-id of the "
            "answer, and GET /admin/requests lists the calls.",
            param="id",
        )
    return Response(200, encode(found[0]), headers=_UNSTORED)


def _viewer(principal: Principal) -> str | None:
    """The tenant whose calls a principal may see; None: the operator."""
    return None if principal.may("admin") and not principal.tenant else principal.tenant


_UNSTORED: Final = ((b"cache-control", b"no-store"),)
