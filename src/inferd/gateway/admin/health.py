"""The endpoints for probes and dashboards: liveness, readiness, version and load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from inferd import __version__
from inferd.errors import Unauthenticated
from inferd.gateway.admission import principal_of, visible_models
from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.generation.writer import encode
from inferd.gateway.upstream import ModelState, ModelStatus, Upstream


class ModelHealth(msgspec.Struct, frozen=True):
    state: ModelState
    replicas_ready: int
    replicas: int
    detail: str


class Readiness(msgspec.Struct, frozen=True):
    """Ready: every model that is loaded at the start has a ready replica, and the server is not leaving.

    ``models`` shows those that the client may use, and none to a client without a key where keys are needed.
    """

    status: Literal["ready", "not_ready", "draining"]
    models: dict[str, ModelHealth]


class Liveness(msgspec.Struct, frozen=True):
    status: Literal["alive"] = "alive"


class Version(msgspec.Struct, frozen=True):
    version: str


class Load(msgspec.Struct, frozen=True):
    """Requests inside the server: waiting for a replica and being worked on."""

    server_load: int


def live() -> Response:
    """The answer to a liveness probe, which is always 200."""
    return Response(200, encode(Liveness()))


def ready(context: Context, call: Call) -> Response:
    """The answer to a readiness probe: 200, or 503 with ``retry-after``."""
    models = {s.name: ModelHealth(s.state, s.replicas_ready, s.replicas, s.detail) for s in _shown(context, call)}
    if context.router.draining:
        return Response(503, encode(Readiness("draining", models)), headers=((b"retry-after", b"1"),))
    if not is_ready(context.router):
        return Response(503, encode(Readiness("not_ready", models)), headers=((b"retry-after", b"1"),))
    return Response(200, encode(Readiness("ready", models)))


def is_ready(router: Upstream) -> bool:
    """Whether requests should be sent here.

    A remote server that does not answer makes its own models unavailable. This server stays ready, because a balancer
    that stops using it would lose the other models as well. Without any ready model the server is not ready.
    """
    if router.draining:
        return False
    served = router.models()
    has_ready = any(s.replicas_ready >= 1 for s in served)
    return all(_may_be_away(s) or s.replicas_ready >= 1 or (has_ready and not s.has_local) for s in served)


def _may_be_away(status: ModelStatus) -> bool:
    return status.load == "on_demand" or status.state == "unloaded"


def _shown(context: Context, call: Call) -> Sequence[ModelStatus]:
    """The models that a probe's answer lists: those that its key may use. A probe without a key is answered, and lists
    none where keys are needed."""
    try:
        principal = principal_of(context, call)
    except Unauthenticated:
        return ()
    return visible_models(context, principal) if principal.may("models") else ()


def version() -> Response:
    """GET /version."""
    return Response(200, encode(Version(__version__)))


def load(router: Upstream) -> Response:
    """GET /load: the number of requests that wait or run."""
    return Response(200, encode(Load(sum(s.waiting + s.in_flight for s in router.models()))))
