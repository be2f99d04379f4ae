"""The methods besides predictions: metadata and states of the server and its models, and loading and unloading models.

Each has the same answer as REST (``inferd.gateway.kserve.models``), as a message of the protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec

from inferd.errors import ModelNotFound
from inferd.gateway.admin import health
from inferd.gateway.admin.audit import carry_out
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.errors import Unsupported
from inferd.gateway.grpc.calls import FEW_BYTES, Calls, Endpoint, UnaryEndpoint
from inferd.gateway.grpc.protocol import protocol
from inferd.gateway.kserve import models as kserve
from inferd.gateway.kserve.repository import load_model, unload_model
from inferd.gateway.kserve.rest import MAX_REPOSITORY_BYTES
from inferd.gateway.kserve.served import Served, find_served, is_ready, served_models, versions_served
from inferd.gateway.kserve.statistics import statistics_of
from inferd.gateway.kserve.wire import Value
from inferd.tenancy.principal import Scope

_Response = msgspec.Struct | Mapping[str, object]
_Request = Mapping[str, object]

# Triton's methods that this server does not support, and the remedy.
_NOT_SERVED: Final = {
    **dict.fromkeys(
        [
            f"{kind}SharedMemory{action}"
            for kind in ("System", "Cuda")
            for action in ("Status", "Register", "Unregister")
        ],
        "This server reads no shared memory; send tensors in the request.",
    ),
    "TraceSetting": "This server has no trace settings; /metrics and the log have each request's times.",
    "LogSettings": "This server's log is set in its configuration (server.log_format, server.access_log).",
}


_MAX_BYTES: Final = dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), MAX_REPOSITORY_BYTES)


def management(calls: Calls) -> dict[str, UnaryEndpoint]:
    """The methods by their names."""
    served: dict[str, tuple[Scope, Callable[[Context, Call, _Request], Awaitable[_Response]]]] = {
        "ServerLive": ("public", _live),
        "ServerReady": ("public", _ready),
        "ServerMetadata": ("models", _server_metadata),
        "ModelReady": ("models", _model_ready),
        "ModelMetadata": ("models", _model_metadata),
        "ModelConfig": ("models", _model_config),
        "ModelStatistics": ("models", _model_statistics),
        "RepositoryIndex": ("models", _index),
        "RepositoryModelLoad": ("admin", _load),
        "RepositoryModelUnload": ("admin", _unload),
    }
    methods = {
        name: UnaryEndpoint(calls, name, scope, _MAX_BYTES.get(name, FEW_BYTES), _typed(name, method))
        for name, (scope, method) in served.items()
    }
    for name, sentence in _NOT_SERVED.items():
        methods[name] = UnaryEndpoint(calls, name, "infer", FEW_BYTES, _refusal(sentence))
    return methods


def _typed(name: str, method: Callable[[Context, Call, _Request], Awaitable[_Response]]) -> Endpoint:
    async def answer(context: Context, call: Call, body: bytes, remaining_s: float | None) -> bytes:
        request = protocol().read(f"{name}Request", body)
        return protocol().write(f"{name}Response", msgspec.to_builtins(await method(context, call, request)))

    return answer


def _refusal(sentence: str) -> Endpoint:
    async def answer(context: Context, call: Call, body: bytes, remaining_s: float | None) -> bytes:
        raise Unsupported(sentence)

    return answer


async def _live(context: Context, call: Call, request: _Request) -> _Response:
    return {"live": True}


async def _ready(context: Context, call: Call, request: _Request) -> _Response:
    return {"ready": health.is_ready(context.router)}


async def _server_metadata(context: Context, call: Call, request: _Request) -> _Response:
    return kserve.server_metadata(context)


async def _model_ready(context: Context, call: Call, request: _Request) -> _Response:
    """An unknown model is reported as not ready, as Triton does."""
    try:
        return {"ready": is_ready(_served(context, call, request))}
    except ModelNotFound:
        return {"ready": False}


async def _model_metadata(context: Context, call: Call, request: _Request) -> _Response:
    return kserve.model_metadata(context, call.principal, _served(context, call, request))


async def _model_config(context: Context, call: Call, request: _Request) -> _Response:
    return {"config": kserve.model_configuration(context, _served(context, call, request))}


async def _index(context: Context, call: Call, request: _Request) -> _Response:
    return {"models": kserve.repository_index(context, call.principal, ready=request.get("ready") is True)}


def _served(context: Context, call: Call, request: _Request) -> Served:
    served = find_served(context, call.principal, str(request["name"]), str(request["version"]))
    call.model = served.status.name
    return served


async def _model_statistics(context: Context, call: Call, request: _Request) -> _Response:
    if request["version"]:
        models: Sequence[Served] = [_served(context, call, request)]
    elif request["name"]:
        models = versions_served(context, call.principal, str(request["name"]))
    else:
        models = served_models(context, call.principal)
    return statistics_of(context, models)


async def _load(context: Context, call: Call, request: _Request) -> _Response:
    name = str(request["model_name"])
    parameters = _parameters(request)
    await carry_out(context, call, "load", name, lambda: load_model(context, call.principal, name, parameters))
    call.model = name
    return {}


async def _unload(context: Context, call: Call, request: _Request) -> _Response:
    name = str(request["model_name"])
    parameters = _parameters(request)
    await carry_out(context, call, "unload", name, lambda: unload_model(context, call.principal, name, parameters))
    call.model = name
    return {}


def _parameters(request: _Request) -> dict[str, Value]:
    """The request's map of ModelRepositoryParameters as values. A file's bytes are a base64 text, as in JSON."""
    given = request["parameters"]
    assert isinstance(given, dict)
    return {
        key: int(value) if choice == "int64_param" else value
        for key, chosen in given.items()
        for choice, value in chosen.items()
    }
