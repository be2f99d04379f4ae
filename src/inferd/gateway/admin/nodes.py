"""The machines that give memory and cores to the server, in the admin API. Every route here needs the scope admin."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import Forbidden
from inferd.gateway.admin.endpoints import MAX_BODY_BYTES, control_of
from inferd.gateway.body.decode import decode_body
from inferd.gateway.call import Call, Response, read_body, require_json
from inferd.gateway.context import Context
from inferd.gateway.generation.writer import encode
from inferd.nodes.listener import NodeReport


class NodeList(msgspec.Struct, frozen=True):
    """GET /admin/nodes"""

    data: list[NodeReport]


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/nodes/token"""

    revoke: bool = False  # let no earlier token be used again; nodes that have joined stay


_decoder: Final = msgspec.json.Decoder(TokenRequest)


async def list_nodes(context: Context, call: Call, rest: str) -> Response:
    """GET /admin/nodes. Raises Forbidden for the key of a tenant, to which machines do not belong; Unavailable."""
    _refuse_tenants(call)
    return Response(200, encode(NodeList(list(control_of(context).nodes.reports()))))


async def new_token(context: Context, call: Call, rest: str) -> Response:
    """POST /admin/nodes/token: a token, which is shown once. Raises InvalidRequest, Forbidden, Unavailable."""
    _refuse_tenants(call)
    body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
    asked = TokenRequest()
    if body:
        require_json(call)
        asked = await decode_body(body, _decoder)
    return Response(201, encode(control_of(context).nodes.new_token(revoke=asked.revoke)))


def _refuse_tenants(call: Call) -> None:
    if call.principal.tenant:
        raise Forbidden("Machines belong to no tenant; use an admin key without one, or the server's control socket.")
