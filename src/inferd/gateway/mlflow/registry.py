"""The registry of versions for MLflow's client: the reading half of MLflow's registry API, below /api/2.0/mlflow/.

``MlflowClient(registry_uri="http://host:8000")`` reads models, versions, aliases and where files are. Whatever it would
change is refused: versions come into the registry with evidence, by `inferd registry`. A key that is limited to models
sees these alone.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from inferd.errors import InvalidRequest, ModelNotFound
from inferd.gateway.admin.endpoints import control_of
from inferd.gateway.body.query import query_pairs
from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import shown
from inferd.gateway.generation.writer import encode
from inferd.gateway.mlflow import wire
from inferd.gateway.mlflow.search import Order, holds, read_filter, read_orders
from inferd.lifecycle.registry import Version
from inferd.lifecycle.stages import Stage

MAX_RESULTS: Final = 1000
_MAX_PARAMETERS: Final = 200
_STAGES: Final[dict[Stage, str]] = {"canary": "Staging", "production": "Production", "archived": "Archived"}
_LISTS: Final = frozenset(("stages", "order_by"))

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R", wire.RegisteredModel, wire.ModelVersion)


async def get_model(context: Context, call: Call, rest: str) -> Response:
    """registered-models/get. Raises ModelNotFound, InvalidRequest, StateUnavailable, Unavailable."""
    query = _query(call, wire.NameQuery)
    return Response(200, encode(wire.RegisteredModelAnswer(_model(await _versions(context, call, query.name)))))


async def search_models(context: Context, call: Call, rest: str) -> Response:
    """registered-models/search. Raises InvalidRequest, StateUnavailable, Unavailable."""
    query = _query(call, wire.SearchQuery)
    conditions = read_filter(query.filter, "model")
    orders = read_orders(query.order_by, "model") or [Order("name", False)]
    by_name: dict[str, list[Version]] = {}
    for version in await _all(context, call):
        by_name.setdefault(version.name, []).append(version)
    models = [_model(versions) for versions in by_name.values()]
    found = [one for one in models if all(holds(each, {"name": one.name}, _tags(one)) for each in conditions)]
    page, token = _page(_ordered(found, orders), query)
    return Response(200, encode(wire.RegisteredModels(page, token)))


async def get_latest(context: Context, call: Call, rest: str) -> Response:
    """registered-models/get-latest-versions: the newest version of each stage. Raises as ``get_model``."""
    query = _query(call, wire.LatestQuery)
    latest = _latest(await _versions(context, call, query.name))
    wanted = {stage.lower() for stage in query.stages}
    return Response(
        200,
        encode(wire.ModelVersions([one for one in latest if not wanted or one.current_stage.lower() in wanted])),
    )


async def get_by_alias(context: Context, call: Call, rest: str) -> Response:
    """registered-models/alias. Raises as ``get_model``."""
    query = _query(call, wire.AliasQuery)
    for version in await _versions(context, call, query.name):
        if query.alias in version.aliases:
            return Response(200, encode(wire.ModelVersionAnswer(_version(version))))
    raise ModelNotFound(f"The model {shown(query.name)} has no alias {shown(query.alias)}.", param="alias")


async def get_version(context: Context, call: Call, rest: str) -> Response:
    """model-versions/get. Raises as ``get_model``."""
    return Response(200, encode(wire.ModelVersionAnswer(_version(await _one(context, call)))))


async def get_download_uri(context: Context, call: Call, rest: str) -> Response:
    """model-versions/get-download-uri: the registered file or folder. Raises as ``get_model``."""
    return Response(200, encode(wire.DownloadUri((await _one(context, call)).source)))


async def search_versions(context: Context, call: Call, rest: str) -> Response:
    """model-versions/search. Raises InvalidRequest, StateUnavailable, Unavailable."""
    query = _query(call, wire.SearchQuery)
    conditions = read_filter(query.filter, "version")
    orders = read_orders(query.order_by, "version") or [Order("last_updated_timestamp", True)]
    orders += [Order("name", False), Order("version_number", True)]
    found = []
    for version in await _all(context, call):
        one = _version(version)
        fields = {
            "name": one.name,
            "run_id": one.run_id,
            "source_path": one.source,
            "version_number": one.version,
        }
        if all(holds(each, fields, _tags(one)) for each in conditions):
            found.append(one)
    page, token = _page(_ordered(found, orders), query)
    return Response(200, encode(wire.ModelVersions(page, token)))


# -- the registry's rows in MLflow's terms --------------------------------------------------------


def _version(version: Version) -> wire.ModelVersion:
    record = version.record
    tags = {
        **version.tags,
        "inferd.stage": record.stage,
        "inferd.digest": version.digest,
        **{f"inferd.evidence.{one.kind}": "passed" if one.passed else "failed" for one in record.evidence},
        **({"inferd.approver": record.approver} if record.approver else {}),
    }
    is_rejected = record.stage == "rejected"
    return wire.ModelVersion(
        name=version.name,
        version=str(version.version),
        creation_timestamp=int(version.created_at * 1000),
        last_updated_timestamp=int(max(record.since, version.created_at) * 1000),
        user_id=record.registrant,
        current_stage=_STAGES.get(record.stage, "None"),
        description=version.description,
        source=version.source,
        run_id=version.run_id,
        status="FAILED_REGISTRATION" if is_rejected else "READY",
        status_message=f"rejected: {record.reason}" if is_rejected else "",
        tags=[wire.Tag(key, value) for key, value in sorted(tags.items())],
        aliases=list(version.aliases),
    )


def _model(versions: Sequence[Version]) -> wire.RegisteredModel:
    shown_versions = [_version(one) for one in versions]
    return wire.RegisteredModel(
        name=versions[0].name,
        creation_timestamp=min(one.creation_timestamp for one in shown_versions),
        last_updated_timestamp=max(one.last_updated_timestamp for one in shown_versions),
        user_id=shown_versions[0].user_id,
        latest_versions=_latest(versions),
        aliases=sorted(
            (wire.Alias(alias, str(one.version)) for one in versions for alias in one.aliases),
            key=lambda alias: alias.alias,
        ),
    )


def _latest(versions: Sequence[Version]) -> list[wire.ModelVersion]:
    """The newest version of each of MLflow's stages."""
    latest = {one.current_stage: one for one in map(_version, sorted(versions, key=lambda one: one.version))}
    return [latest[stage] for stage in sorted(latest)]


def _tags(one: wire.RegisteredModel | wire.ModelVersion) -> dict[str, str]:
    return {tag.key: tag.value for tag in one.tags}


# -- requests -------------------------------------------------------------------------------------


async def _all(context: Context, call: Call) -> list[Version]:
    found = await control_of(context).versions.versions(None)
    return [one for one in found if call.principal.may_use(one.name)]


async def _versions(context: Context, call: Call, name: str) -> Sequence[Version]:
    """A model's versions. Raises ModelNotFound, also for a model that the key may not use."""
    found = await control_of(context).versions.versions(name) if call.principal.may_use(name) else ()
    if not found:
        raise ModelNotFound(f"The registry has no model {shown(name)}.", param="name")
    return found


async def _one(context: Context, call: Call) -> Version:
    query = _query(call, wire.VersionQuery)
    for version in await _versions(context, call, query.name):
        if str(version.version) == query.version:
            return version
    raise ModelNotFound(f"The model {shown(query.name)} has no version {shown(query.version)}.", param="version")


def _query(call: Call, form: type[T]) -> T:
    """The query of a call. Raises InvalidRequest that names the field."""
    found: dict[str, Any] = {}
    for name, value in query_pairs(call.head.query, _MAX_PARAMETERS):
        if name in _LISTS:
            found.setdefault(name, []).append(value)
        else:
            found[name] = value
    try:
        return msgspec.convert(found, form, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The query cannot be read: {error}.", code="mlflow_parameter") from None


def _ordered(found: list[R], orders: Sequence[Order]) -> list[R]:
    for order in reversed(orders):
        field = "version" if order.key == "version_number" else order.key
        found.sort(
            key=lambda one: int(getattr(one, field)) if field == "version" else getattr(one, field),
            reverse=order.is_descending,
        )
    return found


def _page(found: list[R], query: wire.SearchQuery) -> tuple[list[R], str]:
    """A page, and the token of the next one; empty: it is the last. Raises InvalidRequest."""
    if query.max_results < 1:
        raise InvalidRequest("max_results must be at least 1.", param="max_results", code="mlflow_parameter")
    begin = 0
    if query.page_token:
        try:
            begin = int(base64.urlsafe_b64decode(query.page_token).decode("ascii"))
        except (ValueError, UnicodeDecodeError):
            begin = -1
        if begin < 0:
            raise InvalidRequest(
                "page_token is not one that this server gave.", param="page_token", code="mlflow_parameter"
            )
    end = begin + min(query.max_results, MAX_RESULTS)
    token = base64.urlsafe_b64encode(str(end).encode()).decode() if end < len(found) else ""
    return found[begin:end], token
