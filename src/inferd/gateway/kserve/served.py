"""The versions of models as KServe v2 names them, and the choice of the version that computes a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inferd.config.versions import base_of, entry_named, versions_of
from inferd.errors import ModelNotFound
from inferd.gateway.admission import may_use, visible_models
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.errors import printable, shown
from inferd.gateway.upstream import ModelStatus
from inferd.gateway.versions import draw_version
from inferd.tenancy.principal import Principal


class Served(NamedTuple):
    """One version of a model: the router's status of its entry, and its name and version in KServe v2."""

    status: ModelStatus
    name: str
    version: str
    requested_version: str = ""  # the version that the client named


def find_served(context: Context, principal: Principal, name: str, version: str = "") -> Served:
    """The version that ``version`` (a number or an alias) names, or the newest version that the principal may use.
    Raises ModelNotFound."""
    if not version:
        entry = entry_named(context.config.models, name) if "@" in name else None
        status = context.router.model(name if entry is None else entry)
        if status is not None and may_use(context, principal, status.name):
            served = _served(context, status)
            return served if entry is None else served._replace(requested_version=served.version)
    known = [_served(context, status) for status in visible_models(context, principal)]
    if not version:
        newest = versions_among(known, name)[-1:]
        if newest:
            return newest[0]
    config = context.config.models.get(name)
    requested = version
    if config is not None and version:
        version = str(config.versions.aliases.get(version, version))
    there = versions_among(known, name)
    base, at, word = name.rpartition("@")
    if not there and at and not requested:  # digits@9, where digits has other versions
        there, name, requested = versions_among(known, base), base, word
    for served in there:
        if served.version == version:
            return served._replace(requested_version=version)
    if there:
        raise ModelNotFound(
            f"Request for unknown model: {shown(name)} version {printable(requested)!r} is not found; its versions are "
            f"{', '.join(served.version for served in there)}.",
            param="model",
        )
    names = ", ".join(map(printable, list(dict.fromkeys(served.name for served in known))[:20])) or "no model"
    raise ModelNotFound(
        f"Request for unknown model: {shown(name)} is not found; this server has: {names}.", param="model"
    )


def draw_served_version(context: Context, call: Call, served: Served, sequence: str = "") -> Served:
    """The version that computes a request. If the request names no version and the model's versions have weights, one
    is drawn. ``sequence``: the request's sequence; all its requests get the same version."""
    if served.requested_version or served.status.name != served.name:
        return served
    status = draw_version(context, call, served.status, sequence=sequence)
    if status is served.status:
        return served
    call.model = status.name
    return _served(context, status)


def served_models(context: Context, principal: Principal) -> Sequence[Served]:
    """Every version of every model that the principal may use."""
    return [_served(context, status) for status in visible_models(context, principal)]


def _served(context: Context, status: ModelStatus) -> Served:
    models, entry = context.config.models, status.name
    config = models.get(entry)
    version = config.version if config is not None else "1"
    base = base_of(entry) if "@" in entry else entry
    is_version = base != entry and versions_of(models, base).get(version) == entry
    return Served(status, base if is_version else entry, version)


def versions_served(context: Context, principal: Principal, name: str) -> list[Served]:
    """A model's versions that the principal may use, the oldest first. Raises ModelNotFound."""
    return versions_among(served_models(context, principal), name) or [find_served(context, principal, name)]


def versions_among(known: Sequence[Served], name: str) -> list[Served]:
    """The versions of one model among several, the oldest first."""
    return sorted([served for served in known if served.name == name], key=lambda served: int(served.version))


def is_ready(served: Served) -> bool:
    """Whether a replica of the version is ready."""
    return served.status.replicas_ready >= 1
