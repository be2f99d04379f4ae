"""The numbers of replicas that follow the load, in the admin API. Every route here needs the scope admin."""

from __future__ import annotations

import msgspec

from inferd.autoscale.controller import ScalingReport
from inferd.gateway.admin.endpoints import control_of
from inferd.gateway.admission import find_model, may_use
from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.generation.writer import encode


class ScalingList(msgspec.Struct, frozen=True):
    """GET /admin/scaling"""

    data: list[ScalingReport]


async def list_scaling(context: Context, call: Call, rest: str) -> Response:
    """GET /admin/scaling: the models that the key may use. Raises Unavailable."""
    reports = control_of(context).scaling.reports()
    return Response(200, encode(ScalingList([one for one in reports if may_use(context, call.principal, one.model)])))


async def get_scaling(context: Context, call: Call, name: str) -> Response:
    """GET /admin/scaling/{model}. Raises ModelNotFound, InvalidRequest, Unavailable."""
    model = find_model(context, call, name)
    return Response(200, encode(control_of(context).scaling.report(model.name)))
