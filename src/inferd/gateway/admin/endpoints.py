"""The admin API: the server's state, and changes of it. Every route here needs the scope admin.

An admin key of a tenant sees that tenant's keys and the models that it may use. The operator, at the control socket,
sees everything. ``ControlActions`` carries changes out, and refuses to make a key that allows more than the key that
makes it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import KeyNotFound, Unavailable
from inferd.gateway.admission import find_model, may_use
from inferd.gateway.body.decode import decode_body
from inferd.gateway.call import Call, Response, read_body, require_json
from inferd.gateway.context import Context
from inferd.gateway.control import ControlActions, EnergyReport, ModelReport, ReloadReport, ServerReport
from inferd.gateway.generation.writer import encode
from inferd.observe.startup import LoadReport
from inferd.tenancy.keys import KeyInfo, KeySpec, NewKey, shown_id
from inferd.tenancy.principal import Principal

MAX_BODY_BYTES: Final = 64 * 1024

_spec_decoder: Final = msgspec.json.Decoder(KeySpec)


class DrainReport(msgspec.Struct, frozen=True):
    status: str = "draining"


class KeyList(msgspec.Struct, frozen=True):
    data: list[KeyInfo]


class RotateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/keys/{id}/rotate"""

    overlap_s: float = 0.0  # seconds that the old key stays valid


_rotate_decoder: Final = msgspec.json.Decoder(RotateRequest)


def status(context: Context, call: Call) -> Response:
    """GET /admin/status: the part of the server's state that the key may see. Raises Unavailable."""
    return Response(200, encode(_shown_to(context, call.principal, control_of(context).status())))


def startup(context: Context, call: Call) -> Response:
    """GET /admin/startup: the phases of the server's start and of the last loads. Raises Unavailable."""
    report, principal = control_of(context).startup(), call.principal
    if principal.tenant:
        loads = [_load_shown_to(principal, load) for load in report.loads if may_use(context, principal, load.model)]
        report = msgspec.structs.replace(report, loads=loads)
    return Response(200, encode(report))


def _load_shown_to(principal: Principal, load: LoadReport) -> LoadReport:
    """A load, without its reason for a tenant, which may have paths of the server."""
    return msgspec.structs.replace(load, reason="") if principal.tenant else load


def _shown_to(context: Context, principal: Principal, report: ServerReport) -> ServerReport:
    """The part of a server's state that a tenant's admin key may see: the models that it may use and its own tenant's
    limits, without paths. The operator's principal has no tenant and may see everything."""
    if not principal.tenant:
        return report
    models = [_model_shown_to(principal, model) for model in report.models if may_use(context, principal, model.name)]
    reload = report.last_reload
    return msgspec.structs.replace(
        report,
        config_path=None,
        last_reload=None if reload is None else _reload_shown_to(principal, reload),
        memory_bytes=sum(model.memory_bytes for model in models),
        memory_budget_bytes=None,
        models=models,
        nodes=[],
        gateways=[],
        hints=None,
        tenants=[tenant for tenant in report.tenants if tenant.name == principal.tenant],
        jobs=[job for job in report.jobs if job.tenant == principal.tenant],
        energy=None if report.energy is None else _energy_shown_to(principal, report.energy),
    )


def _energy_shown_to(principal: Principal, report: EnergyReport) -> EnergyReport:
    """A tenant sees what it used, and not the machine or the sums of all tenants."""
    own = [use for use in report.tenants if use.name == principal.tenant]
    return msgspec.structs.replace(report, devices=[], models=[], tenants=own)


def _reload_shown_to(principal: Principal, report: ReloadReport) -> ReloadReport:
    """A reload's report, with numbers in place of the details for a tenant: the details may name other tenants, models
    and paths."""
    if not principal.tenant:
        return report
    return msgspec.structs.replace(
        report, details=_counted(report.details, "changes or mistakes"), failed=_counted(report.failed, "models")
    )


def _counted(sentences: tuple[str, ...], noun: str) -> tuple[str, ...]:
    sentence = f"Number of {noun}: {len(sentences)}. 'inferd status' on the server's machine lists them."
    return (sentence,) if sentences else ()


def drain(context: Context, call: Call) -> Response:
    """POST /admin/drain: begin to shut down. Raises Unavailable."""
    control_of(context).drain()
    return Response(202, encode(DrainReport()))


def _model_shown_to(principal: Principal, model: ModelReport) -> ModelReport:
    """A model's report, without its ``detail`` texts for a tenant: they may have paths of the server and the memory of
    other models. Nor are the names of nodes a tenant's."""
    if not principal.tenant:
        return model
    replicas = [
        msgspec.structs.replace(
            replica, detail="", node="", load=None if replica.load is None else _load_shown_to(principal, replica.load)
        )
        for replica in model.replicas
    ]
    adapters = [msgspec.structs.replace(one, detail="") for one in model.adapters if principal.may_use(one.name)]
    return msgspec.structs.replace(model, detail="", replicas=replicas, adapters=adapters)


async def reload(context: Context, call: Call) -> Response:
    """Read the configuration again. 200: the report has the changes. 422: the file has mistakes and nothing changed, or
    the file was accepted and some models failed."""
    report = await control_of(context).reload()
    return Response(200 if report.is_whole else 422, encode(_reload_shown_to(call.principal, report)))


async def load(context: Context, call: Call, name: str) -> Response:
    """POST /admin/models/{model}/load. Raises ModelNotFound, ModelLoadError, Overloaded, Unavailable."""
    model = find_model(context, call, name)
    return Response(200, encode(_model_shown_to(call.principal, await control_of(context).load(model.name))))


async def unload(context: Context, call: Call, name: str) -> Response:
    """POST /admin/models/{model}/unload. Raises ModelNotFound, InvalidRequest, Unavailable."""
    model = find_model(context, call, name)
    return Response(200, encode(await control_of(context).unload(model.name)))


async def restart(context: Context, call: Call, name: str) -> Response:
    """POST /admin/models/{model}/restart. Raises ModelNotFound, InvalidRequest, Unavailable."""
    model = find_model(context, call, name)
    return Response(200, encode(_model_shown_to(call.principal, await control_of(context).restart(model.name))))


async def list_keys(context: Context, call: Call) -> Response:
    """GET /admin/keys: the keys of the caller's tenant; for the operator all keys."""
    return Response(200, encode(KeyList(list(await control_of(context).keys.list_keys(call.principal.tenant or None)))))


async def create_key(context: Context, call: Call) -> Response:
    """POST /admin/keys. Raises InvalidRequest, Forbidden, StateUnavailable."""
    require_json(call)
    spec = await decode_body(await read_body(call, MAX_BODY_BYTES, context.body_timeout_s), _spec_decoder)
    return _secret(await control_of(context).keys.create_key(spec, call.principal), 201)


async def revoke_key(context: Context, call: Call, key_id: str) -> Response:
    """DELETE /admin/keys/{id}. Raises KeyNotFound, StateUnavailable."""
    await _own_key(context, call, key_id)
    return Response(200, encode(await control_of(context).keys.revoke_key(key_id)))


async def rotate_key(context: Context, call: Call, key_id: str) -> Response:
    """POST /admin/keys/{id}/rotate. Raises KeyNotFound, InvalidRequest, Forbidden, StateUnavailable."""
    body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
    if body:
        require_json(call)
    request = await decode_body(body, _rotate_decoder) if body else RotateRequest()
    await _own_key(context, call, key_id)
    return _secret(await control_of(context).keys.rotate_key(key_id, request.overlap_s, call.principal), 201)


def _secret(key: NewKey, status: int) -> Response:
    """The answer with a new key's secret, which no cache on the way may store."""
    return Response(status, encode(key), headers=((b"cache-control", b"no-store"),))


async def _own_key(context: Context, call: Call, key_id: str) -> None:
    """Raises KeyNotFound for a key that the caller may not see, even if another tenant has it."""
    seen = await control_of(context).keys.list_keys(call.principal.tenant or None)
    if all(info.id != key_id for info in seen):
        raise KeyNotFound(f"There is no key with the id {shown_id(key_id)}; GET /admin/keys lists them.", param="id")


def control_of(context: Context) -> ControlActions:
    """The server's control actions. Raises Unavailable when the server has none."""
    if context.control is None:
        raise Unavailable("This server has no administration; start it with inferd serve.", code="no_control")
    return context.control
