"""One law for every door: what a key may use is listed to it, found by it and computed for it; all else does not exist.

A key names models, versions, aliases or patterns of them. Doors are those of OpenAI's API, of KServe v2 over HTTP and over gRPC.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import grpc
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, FakeStatus, Running, info
from tests.gateway.fakes import running as http_running
from tests.gateway.grpc.messages import message_type
from tests.gateway.grpc.running import SERVICE, GrpcRunning, PredictingRouter
from tests.gateway.grpc.running import running as grpc_running

from inferd.config import Config, ModelConfig, ServerConfig, VersionsConfig
from inferd.tenancy.principal import Principal
from inferd.types import End, ModelInfo, Relay, Relayed, RelayHead, Request, TensorSpec, Usage

KEY = "sk-drawn"
BEARER = {"authorization": f"Bearer {KEY}"}
DIGITS = VersionsConfig(policy="all", aliases={"stable": 1, "canary": 3})
MODELS = {
    "chat@1": ModelConfig(source="chat/1", version="1", versions=VersionsConfig(policy="all", aliases={"old": 1})),
    "chat": ModelConfig(source="chat/2", version="2", versions=VersionsConfig(policy="all", aliases={"old": 1})),
    "digits@1": ModelConfig(source="digits/1", version="1", versions=DIGITS),
    "digits@2": ModelConfig(source="digits/2", version="2", versions=DIGITS),
    "digits": ModelConfig(source="digits/3", version="3", versions=DIGITS),
    "far": ModelConfig(source="openai:http://127.0.0.1:9/v1", versions=VersionsConfig(aliases={"there": 1})),
}
NAMES = {  # of each entry all that stand for it
    "chat@1": ("chat@1", "chat@old"),
    "chat": ("chat", "chat@2"),
    "digits@1": ("digits@1", "digits@stable"),
    "digits@2": ("digits@2",),
    "digits": ("digits", "digits@3", "digits@canary"),
    "far": ("far", "far@1", "far@there"),
}
PATTERNS = (*(name for names in NAMES.values() for name in names), "dig*", "digits@*", "*@stable", "*@1", "nothing")
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TENSORS = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


def base(entry: str) -> str:
    return entry.partition("@")[0]


def usable(patterns: tuple[str, ...]) -> set[str]:
    """The law, as it is written: an entry may be used where one of its names, or its model's, is among the key's."""
    return {
        entry
        for entry, names in NAMES.items()
        if not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns for name in (*names, base(entry)))
    }


def known(name: str) -> ModelInfo:
    if not name.startswith("digits"):
        return info(name)
    return msgspec.structs.replace(
        info(name),
        kind="predict",
        tasks=("predict",),
        inputs=(TensorSpec("x", "FP32", (-1, 2)),),
        outputs=(TensorSpec("y", "FP32", (-1, 2)),),
        max_batch_size=8,
    )


def statuses() -> list[FakeStatus]:
    return [FakeStatus(name, info=None if name == "far" else known(name)) for name in MODELS]


def relayed(request: Request, relay: Relay) -> list[Relayed]:
    return [Relayed(request.id, RelayHead(200, b"application/json"), b"{}", End("done", Usage(5, 7)))]


class Sites(NamedTuple):
    door: FakeDoor
    http: Running
    grpc: GrpcRunning
    channel: grpc.Channel


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    door = FakeDoor({})
    written, computed = FakeRouter(*MODELS), PredictingRouter()
    written.statuses, computed.statuses = statuses(), statuses()
    written.relay_script = relayed
    config = Config(server=ServerConfig(port=0, grpc_port=0, grace_s=1), models=MODELS)
    with (
        http_running(written, config, door=door, control=FakeControl()) as http,
        grpc_running(computed, config, door=door) as started,
        started.channel() as channel,
    ):
        yield Sites(door, http, started, channel)


def asked(sites: Sites, method: str, path: str, body: Mapping[str, Any] | None = None) -> int:
    content = json.dumps(body).encode() if body is not None else None
    url = sites.http.url + path
    headers = {**BEARER, "content-type": "application/json"} if content is not None else BEARER
    return sites.http.http.request(method, url, content=content, headers=headers).status_code


def called(sites: Sites, method: str, **fields: Any) -> Any:
    """The answer, or the status of a refusal."""
    request: Any = message_type(f"{method}Request")(**fields)
    reply = message_type(f"{method}Response")
    call = sites.channel.unary_unary(
        f"/{SERVICE}/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=reply.FromString,
    )
    try:
        return call(request, metadata=(("authorization", f"Bearer {KEY}"),), timeout=10)
    except grpc.RpcError as error:
        return error.code()


def index_of(entries: set[str]) -> set[tuple[str, str]]:
    return {(base(entry), MODELS[entry].version) for entry in entries}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True).map(tuple))
@example(patterns=("digits@stable",))
@example(patterns=("digits@canary",))
@example(patterns=("chat@old", "far@there"))
@example(patterns=("digits@*",))
def test_what_is_listed_is_found_and_computed_and_nothing_else_exists(sites: Sites, patterns: tuple[str, ...]) -> None:
    allowed = usable(patterns)
    sites.door.keys[KEY] = Principal(key_id="k", tenant="t", models=patterns)

    listed = sites.http.http.get(sites.http.url + "/v1/models", headers=BEARER).json()["data"]
    assert {card["id"] for card in listed} == allowed
    index = sites.http.http.post(sites.http.url + "/v2/repository/index", headers=BEARER).json()
    assert {(entry["name"], entry["version"]) for entry in index} == index_of(allowed)
    told = called(sites, "RepositoryIndex")
    assert {(model.name, model.version) for model in told.models} == index_of(allowed)

    for entry, names in NAMES.items():
        is_allowed = entry in allowed
        for name in names:
            assert (asked(sites, "GET", f"/v1/models/{name}") == 200) == is_allowed, name
        name, version = base(entry), MODELS[entry].version
        if entry == "far":
            for alias in names:
                status = asked(sites, "POST", "/v1/chat/completions", {"model": alias, **CHAT_BODY})
                assert status == (200 if is_allowed else 404), alias
            continue
        path = f"/v2/models/{name}/versions/{version}"
        assert asked(sites, "GET", path) == (200 if is_allowed else 404), path
        metadata = called(sites, "ModelMetadata", name=name, version=version)
        assert (metadata is not grpc.StatusCode.NOT_FOUND) == is_allowed, path
        if is_allowed:
            there = {number for model, number in index_of(allowed) if model == name}
            assert set(metadata.versions) == there
            # Without a version the newest is meant of those that the key may use.
            assert asked(sites, "GET", f"/v2/models/{name}") == 200
            assert called(sites, "ModelMetadata", name=name).name == name
        if name == "chat":
            for alias in names:
                status = asked(sites, "POST", "/v1/chat/completions", {"model": alias, **CHAT_BODY})
                assert status == (200 if is_allowed else 404), alias
        else:
            assert asked(sites, "POST", f"{path}/infer", TENSORS) == (200 if is_allowed else 404), path
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
            answer = called(
                sites,
                "ModelInfer",
                model_name=name,
                model_version=version,
                inputs=[tensor],
                raw_input_contents=[bytes(8)],
            )
            assert (answer is not grpc.StatusCode.NOT_FOUND) == is_allowed, path
