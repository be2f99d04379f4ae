"""The registry of versions in the admin API: what there is, what happened, and actions. Every route here needs the
scope admin, and a key that is limited to models sees and changes these alone."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from inferd.errors import ModelLoadError, ModelNotFound
from inferd.gateway.admin.audit import actor_of
from inferd.gateway.admin.endpoints import control_of
from inferd.gateway.body.decode import decode_body
from inferd.gateway.body.query import read_query
from inferd.gateway.call import Call, Response, read_body, require_json
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.writer import encode
from inferd.gateway.route import Endpoint
from inferd.lifecycle.actions import Changed, NewFiles
from inferd.lifecycle.registry import MAX_ENTRIES, MAX_REPORT_BYTES, Attachable, Entry, Version
from inferd.lifecycle.stages import Action

MAX_BODY_BYTES: Final = MAX_REPORT_BYTES + 8192


class VersionList(msgspec.Struct, frozen=True):
    """GET /admin/registry"""

    data: list[Version]  # by name and number


class HistoryList(msgspec.Struct, frozen=True):
    """GET /admin/registry/{model}/history"""

    data: list[Entry]  # the newest first


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of GET /admin/registry/{model}/history."""

    before: Annotated[int, Meta(ge=0, lt=2**53)] | None = None  # lines with lower numbers alone
    limit: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)] = 100


class MoveCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of an action on a version, which may be left out."""

    reason: str = ""  # for the history; at most 1000 characters
    override: str = ""  # why a contract that differs from production's is accepted


class EvidenceReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/registry/{model}/versions/{version}/evidence"""

    kind: Attachable
    passed: bool
    report: dict[str, Any]  # at most 256 KiB
    summary: str = ""  # one sentence for listings


class AliasCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/registry/{model}/aliases/{alias}"""

    version: int


_files_decoder: Final = msgspec.json.Decoder(NewFiles)
_alias_decoder: Final = msgspec.json.Decoder(AliasCommand)
_move_decoder: Final = msgspec.json.Decoder(MoveCommand)
_evidence_decoder: Final = msgspec.json.Decoder(EvidenceReport)


async def list_all(context: Context, call: Call, rest: str) -> Response:
    """GET /admin/registry: the versions of all models that the key may use. Raises StateUnavailable, Unavailable."""
    found = await control_of(context).versions.versions(None)
    return Response(200, encode(VersionList([one for one in found if call.principal.may_use(one.name)])))


async def list_versions(context: Context, call: Call, name: str) -> Response:
    """GET /admin/registry/{model}. Raises ModelNotFound, StateUnavailable, Unavailable."""
    _check_use(call, name)
    found = await control_of(context).versions.versions(name)
    if not found:
        raise _missing(name)
    return Response(200, encode(VersionList(list(found))))


async def get_version(context: Context, call: Call, rest: str) -> Response:
    """GET /admin/registry/{model}/versions/{version}: by number, alias, stage or 'latest'. Raises ModelNotFound,
    StateUnavailable, Unavailable."""
    name, ref = _split(call, rest)
    return Response(200, encode(await control_of(context).versions.find(name, ref)))


async def get_history(context: Context, call: Call, name: str) -> Response:
    """GET /admin/registry/{model}/history. Raises ModelNotFound, InvalidRequest, StateUnavailable, Unavailable."""
    _check_use(call, name)
    query = read_query(call.head.query, HistoryQuery)
    found = await control_of(context).versions.history(name, query.before, query.limit)
    if not found and query.before is None:
        raise _missing(name)
    return Response(200, encode(HistoryList(list(found))))


def moving(action: Action) -> Endpoint:
    """The endpoint of POST /admin/registry/{model}/versions/{version}/ACTION."""

    async def endpoint(context: Context, call: Call, rest: str) -> Response:
        """Raises ModelNotFound, InvalidRequest, StateUnavailable, Unavailable."""
        name, ref = _split(call, rest)
        body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
        if body:
            require_json(call)
        given = await decode_body(body, _move_decoder) if body else MoveCommand()
        changed = await control_of(context).versions.move(
            name, ref, action, actor=actor_of(call), reason=given.reason, override=given.override
        )
        return Response(200, encode(changed))

    return endpoint


async def attach(context: Context, call: Call, rest: str) -> Response:
    """POST /admin/registry/{model}/versions/{version}/evidence. Raises ModelNotFound, InvalidRequest,
    StateUnavailable, Unavailable."""
    name, ref = _split(call, rest)
    require_json(call)
    body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
    given = await decode_body(body, _evidence_decoder)
    changed = await control_of(context).versions.attach(
        *(name, ref, given.kind, given.report),
        passed=given.passed,
        summary=given.summary,
        actor=actor_of(call),
    )
    return Response(200, encode(changed))


async def register(context: Context, call: Call, name: str) -> Response:
    """POST /admin/registry/{model}/versions: files of the server's machine. Raises InvalidRequest, ModelNotFound,
    StateUnavailable, Unavailable."""
    _check_use(call, name)
    require_json(call)
    body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
    given = await decode_body(body, _files_decoder)
    return Response(
        200, encode(await _reading(control_of(context).versions.register(name, given, actor=actor_of(call))))
    )


async def verify(context: Context, call: Call, rest: str) -> Response:
    """POST /admin/registry/{model}/versions/{version}/verify. Raises ModelNotFound, InvalidRequest, StateUnavailable,
    Unavailable."""
    name, ref = _split(call, rest)
    return Response(200, encode(await _reading(control_of(context).versions.verify(name, ref, actor=actor_of(call)))))


async def set_alias(context: Context, call: Call, rest: str) -> Response:
    """POST /admin/registry/{model}/aliases/{alias}. Raises ModelNotFound, InvalidRequest, StateUnavailable,
    Unavailable."""
    name, alias = _split(call, rest, "/aliases/")
    require_json(call)
    body = await read_body(call, MAX_BODY_BYTES, context.body_timeout_s)
    given = await decode_body(body, _alias_decoder)
    changed = await control_of(context).versions.alias(name, alias, str(given.version), actor=actor_of(call))
    return Response(200, encode(changed))


async def remove_alias(context: Context, call: Call, rest: str) -> Response:
    """DELETE /admin/registry/{model}/aliases/{alias}. Raises ModelNotFound, StateUnavailable, Unavailable."""
    name, alias = _split(call, rest, "/aliases/")
    return Response(200, encode(await control_of(context).versions.alias(name, alias, None, actor=actor_of(call))))


async def _reading(changing: Awaitable[Changed]) -> Changed:
    """What became of a version whose files are read. Files that cannot be read are the request's fault."""
    try:
        return await changing
    except ModelLoadError as error:
        raise invalid("source", error.message) from None


def _split(call: Call, rest: str, between: str = "/versions/") -> tuple[str, str]:
    """The model and the version, or the alias, of a path. Raises ModelNotFound for a model that the key may not use."""
    name, _, ref = rest.rpartition(between)
    _check_use(call, name)
    return name, ref


def _check_use(call: Call, name: str) -> None:
    if not call.principal.may_use(name):
        raise _missing(name)


def _missing(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"The registry has no model {shown(name)}; GET /admin/registry lists the models.", param="name"
    )
