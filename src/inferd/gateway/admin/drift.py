"""Drift in the admin API: how it is, its reference, and another reference. Every route here needs the scope admin."""

from __future__ import annotations

import msgspec

from inferd.drift.monitors import DriftReport
from inferd.gateway.admin.endpoints import control_of
from inferd.gateway.admission import find_model, may_use
from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.generation.writer import encode


class DriftList(msgspec.Struct, frozen=True):
    """GET /admin/drift"""

    data: list[DriftReport]


async def list_drift(context: Context, call: Call, rest: str) -> Response:
    """GET /admin/drift: the drift of the models that the key may use. Raises Unavailable."""
    reports = control_of(context).drift.reports()
    return Response(200, encode(DriftList([one for one in reports if may_use(context, call.principal, one.model)])))


async def get_drift(context: Context, call: Call, name: str) -> Response:
    """GET /admin/drift/{model}. Raises ModelNotFound, InvalidRequest, Unavailable."""
    model = find_model(context, call, name)
    return Response(200, encode(control_of(context).drift.report(model.name)))


async def get_reference(context: Context, call: Call, name: str) -> Response:
    """GET /admin/drift/{model}/reference. Raises ModelNotFound, InvalidRequest, Unavailable."""
    model = find_model(context, call, name)
    return Response(200, encode(control_of(context).drift.reference(model.name)))


async def reset_drift(context: Context, call: Call, name: str) -> Response:
    """POST /admin/drift/{model}/reset. Raises ModelNotFound, InvalidRequest, StateUnavailable, Unavailable."""
    model = find_model(context, call, name)
    return Response(200, encode(await control_of(context).drift.reset(model.name)))
