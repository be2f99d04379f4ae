"""Is the process alive, can it serve, how busy is it: the endpoints probes and dashboards ask."""

from __future__ import annotations

from typing import Literal

import msgspec

from inferd import __version__
from inferd.gateway.http import Response
from inferd.gateway.sse import encode
from inferd.gateway.upstream import ModelState, Upstream


class ModelHealth(msgspec.Struct, frozen=True):
    state: ModelState
    replicas_ready: int
    replicas: int
    detail: str


class Readiness(msgspec.Struct, frozen=True):
    """Ready: every configured model has a ready replica and the server is not leaving."""

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
    return Response(200, encode(Liveness()))


def ready(router: Upstream) -> Response:
    served = router.models()
    models = {s.name: ModelHealth(s.state, s.replicas_ready, s.replicas, s.detail) for s in served}
    if router.draining:
        return Response(503, encode(Readiness("draining", models)), headers=((b"retry-after", b"1"),))
    if not all(s.replicas_ready >= 1 for s in served):
        return Response(503, encode(Readiness("not_ready", models)), headers=((b"retry-after", b"1"),))
    return Response(200, encode(Readiness("ready", models)))


def version() -> Response:
    return Response(200, encode(Version(__version__)))


def load(router: Upstream) -> Response:
    return Response(200, encode(Load(sum(s.waiting + s.in_flight for s in router.models()))))
