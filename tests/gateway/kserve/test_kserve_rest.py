"""KServe v2's endpoints: what is told of the server and its models, what is read of a request, what is refused."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, FakeStatus, Running, info, post, running, sse, words

from inferd.config import BatchingConfig, Config, ModelConfig, ServerConfig, VersionsConfig
from inferd.errors import InvalidRequest, Unavailable
from inferd.gateway.body.decode import OFF_LOOP_BYTES
from inferd.gateway.kserve.parameters import read_infer
from inferd.observe.statistics import BatchTally, ModelTally, Span
from inferd.tenancy.principal import OPERATOR, Principal
from inferd.types import ModelInfo, Prediction, PredictRequest, TensorSpec

ALL = VersionsConfig(policy="all")
MODELS = {
    "chat": ModelConfig(source="chat"),
    "digits@1": ModelConfig(source="digits/1", version="1", versions=ALL),
    "digits": ModelConfig(
        source="digits/3",
        version="3",
        versions=ALL,
        batching=BatchingConfig(preferred_sizes=(4,), max_delay_ms=5),
        device="cpu",
    ),
}
INPUTS = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


def digits(name: str) -> ModelInfo:
    return msgspec.structs.replace(
        info(name),
        kind="predict",
        platform="onnxruntime_onnx",
        tasks=("classify", "predict"),
        inputs=(TensorSpec("x", "FP32", (-1, 2)), TensorSpec("mask", "BOOL", (-1, 2), is_optional=True)),
        outputs=(TensorSpec("y", "BYTES", (-1,), labels=("no", "yes")),),
        max_batch_size=8,
    )


class Models(FakeRouter):
    """A model that writes and two versions of one that predicts."""

    def __init__(self) -> None:
        super().__init__(*MODELS)
        self.statuses[1].info, self.statuses[2].info = digits("digits@1"), digits("digits")

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    @property
    def asked(self) -> PredictRequest:
        request = self.streams[-1].given
        assert isinstance(request, PredictRequest)
        return request


TALLY = ModelTally(
    last_inference_ms=5,
    inference_count=6,
    execution_count=2,
    success=Span(3, 40),
    batches={4: BatchTally(Span(1, 2), Span(1, 3)), 2: BatchTally(Span(1, 1), Span(1, 2))},
)


def tally(model: str) -> ModelTally:
    return TALLY if model == "digits" else ModelTally()


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    config = Config(server=ServerConfig(port=0, grace_s=1, max_body_bytes=100_000), models=MODELS)
    with running(Models(), config, control=FakeControl(), principal=OPERATOR, tally_of=tally) as started:
        yield started


@pytest.fixture
def server(shared: Running) -> Running:
    return shared.reset()


def router(server: Running) -> Models:
    assert isinstance(server.router, Models)
    return server.router


def get(server: Running, path: str) -> Any:
    reply = server.http.get(server.url + path)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(reply: Any, status: int) -> str:
    assert reply.status_code == status, reply.text
    [(key, message)] = reply.json().items()
    assert key == "error"
    assert isinstance(message, str)
    return message


# -- the server and its models -------------------------------------------------------------------


def test_the_server_says_what_it_is_and_claims_no_more(server: Running) -> None:
    metadata = get(server, "/v2")
    assert metadata["name"] == "inferd"
    assert {"binary_tensor_data", "classification", "statistics"} <= set(metadata["extensions"])
    assert not {"system_shared_memory", "cuda_shared_memory", "trace", "logging"} & set(metadata["extensions"])


@pytest.mark.parametrize("kind", ["system", "cuda"])
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["status", "region/r/status", "region/r/register", "unregister"])
def test_there_are_no_routes_of_shared_memory(server: Running, kind: str, method: str, path: str) -> None:
    reply = server.http.request(method, f"{server.url}/v2/{kind}sharedmemory/{path}")
    assert "There is nothing at" in refusal(reply, 404)


def test_the_server_may_be_called_as_its_clients_insist() -> None:
    config = Config(server=ServerConfig(port=0, v2_name="triton"), models={})
    with running(config=config) as started:
        assert get(started, "/v2")["name"] == "triton"


def test_live_and_ready_say_so(server: Running) -> None:
    assert get(server, "/v2/health/live") == {"live": True}
    assert get(server, "/v2/health/ready") == {"ready": True}
    server.router.draining = True
    assert get(server, "/v2/health/live") == {"live": True}
    reply = server.http.get(server.url + "/v2/health/ready")
    assert (reply.status_code, reply.json()) == (503, {"ready": False})
    assert reply.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", ["digits", "digits/versions/3", "digits/versions/1", "digits@1"])
def test_metadata_names_tensors_and_versions(server: Running, path: str) -> None:
    metadata = get(server, f"/v2/models/{path}")
    assert metadata["name"] == "digits"
    assert metadata["versions"] == ["1", "3"]
    assert metadata["platform"] == "onnxruntime_onnx"
    assert metadata["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    assert metadata["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [-1], "parameters": {"labels": ["no", "yes"]}}
    ]
    assert metadata["parameters"]["condition"] == "warm"


def test_a_model_that_writes_has_the_fields_of_generate(server: Running) -> None:
    metadata = get(server, "/v2/models/chat")
    assert (metadata["inputs"][0]["name"], metadata["outputs"][0]["name"]) == ("text_input", "text_output")
    assert metadata["versions"] == ["1"]
    assert get(server, "/v2/models/chat/config")["model_transaction_policy"] == {"decoupled": True}


@pytest.mark.parametrize(
    ("state", "ready", "condition"),
    [
        ("ready", 1, "warm"),
        ("loading", 0, "loading"),
        ("unloaded", 0, "cold"),
        ("degraded", 1, "degraded"),
        ("failed", 0, "unavailable"),
    ],
)
def test_readiness_and_metadata_say_what_the_next_request_will_meet(
    server: Running, state: Any, ready: int, condition: str
) -> None:
    status = server.router.statuses[2]
    status.state, status.replicas_ready, status.detail = state, ready, "why"
    for path in ("digits", "digits/versions/3"):
        reply = server.http.get(f"{server.url}/v2/models/{path}/ready")
        assert reply.status_code == (200 if ready else 503)
        told = {"name": "digits", "version": "3", "ready": bool(ready), "condition": condition, "detail": "why"}
        assert reply.json() == told
    assert get(server, "/v2/models/digits")["parameters"]["condition"] == condition
    assert get(server, "/v2/models/digits/versions/1/ready")["ready"] is True


def test_a_model_that_is_not_known_yet_makes_nothing_up(server: Running) -> None:
    server.router.statuses[2] = FakeStatus("digits", state="loading", replicas_ready=0, detail="reading weights")
    for path in ("", "/config"):
        message = refusal(server.http.get(f"{server.url}/v2/models/digits{path}"), 503)
        assert "is loading (reading weights)" in message


def test_the_configuration_is_what_is_in_effect_in_triton_s_words(server: Running) -> None:
    config = get(server, "/v2/models/digits/config")
    assert config["max_batch_size"] == 8
    assert config["input"][1] == {"name": "mask", "data_type": "TYPE_BOOL", "dims": [2], "optional": True}
    assert config["output"][0]["data_type"] == "TYPE_STRING"
    assert config["version_policy"] == {"all": {}}
    assert config["instance_group"] == [{"name": "digits", "kind": "KIND_CPU", "count": 1}]
    assert config["dynamic_batching"] == {"preferred_batch_size": [4], "max_queue_delay_microseconds": 5000}
    assert config["backend"] == "onnxruntime"


UNKNOWN = ["", "/ready", "/config", "/stats", "/versions/1", "/versions/1/ready", "/versions/1/stats"]


@pytest.mark.parametrize("path", UNKNOWN)
def test_what_is_asked_of_a_model_that_is_not_there_is_not_found(server: Running, path: str) -> None:
    message = refusal(server.http.get(f"{server.url}/v2/models/other{path}"), 404)
    assert message == 'Request for unknown model: "other" is not found; this server has: chat, digits.'


@pytest.mark.parametrize("name", ["digits@9", "digits@champion"])
def test_a_version_in_the_name_that_is_not_there_is_named_with_those_that_are(server: Running, name: str) -> None:
    message = refusal(server.http.get(f"{server.url}/v2/models/{name}"), 404)
    version = name.partition("@")[2]
    assert message == f"Request for unknown model: \"digits\" version '{version}' is not found; its versions are 1, 3."


@pytest.mark.parametrize("version", ["2", "9" * 40, "x", "-1", "1%2f..%2f3", "%31"])
def test_a_version_that_is_not_served_is_not_found(server: Running, version: str) -> None:
    reply = server.http.get(f"{server.url}/v2/models/digits/versions/{version}/ready")
    assert reply.status_code == (200 if version == "%31" else 404)


def test_a_key_sees_its_models_versions_and_no_others() -> None:
    keys = {"sk-d": Principal(key_id="d", models=("digits",)), "sk-c": Principal(key_id="c", models=("chat",))}
    config = Config(server=ServerConfig(port=0), models=MODELS)
    with running(Models(), config, door=FakeDoor(keys)) as started:
        own, other = ({"authorization": f"Bearer {key}"} for key in keys)
        index = started.http.post(started.url + "/v2/repository/index", headers=own).json()
        assert [(entry["name"], entry["version"]) for entry in index] == [("digits", "1"), ("digits", "3")]
        path = started.url + "/v2/models/digits/versions/1"
        assert started.http.get(path, headers=own).status_code == 200
        assert "unknown model" in refusal(started.http.get(path, headers=other), 404)
        assert refusal(started.http.get(path), 401)
        load = started.http.post(started.url + "/v2/repository/models/digits/load", headers=own)
        assert "scope 'admin'" in refusal(load, 403)


ALIASED = {
    "chat": ModelConfig(source="chat"),
    **{
        name: msgspec.structs.replace(MODELS[name], versions=VersionsConfig(policy="all", aliases={"stable": 1}))
        for name in ("digits@1", "digits")
    },
}


@pytest.mark.parametrize("where", ["digits@stable", "digits/versions/stable", "digits/versions/1", "digits@1"])
@pytest.mark.parametrize("what", ["", "/ready", "/config", "/stats", "/infer"])
def test_a_key_for_an_alias_alone_finds_the_version_behind_it(where: str, what: str) -> None:
    """It sees that version and no other one."""
    keys = {"sk-a": Principal(key_id="a", models=("digits@1" if "1" in where else "digits@stable",))}
    with running(Models(), Config(server=ServerConfig(port=0), models=ALIASED), door=FakeDoor(keys)) as started:
        headers = {"authorization": "Bearer sk-a"}
        url = f"{started.url}/v2/models/{where}{what}"
        reply = (
            started.http.post(url, json=INPUTS, headers=headers)
            if what == "/infer"
            else started.http.get(url, headers=headers)
        )
        assert reply.status_code == 200, reply.text
        found = reply.json()
        if what == "":
            assert (found["name"], found["versions"]) == ("digits", ["1"])
        if what == "/stats":
            assert [entry["version"] for entry in found["model_stats"]] == ["1"]
        for other in ("digits/versions/3", "digits@3"):
            assert started.http.get(f"{started.url}/v2/models/{other}{what}", headers=headers).status_code in (404, 405)


@pytest.mark.parametrize("where", ["digits@stable", "digits/versions/stable", "digits/versions/1"])
def test_the_worker_is_asked_for_the_number_that_an_alias_stands_for(where: str) -> None:
    models = Models()
    with running(models, Config(server=ServerConfig(port=0), models=ALIASED)) as started:
        for _ in range(2):  # the second request has a head that is known
            post(started, f"/v2/models/{where}/infer", INPUTS)
            assert (models.asked.model, models.asked.version) == ("digits@1", "1")


# -- statistics ----------------------------------------------------------------------------------


def test_statistics_are_told_for_all_for_a_model_and_for_a_version(server: Running) -> None:
    assert [entry["name"] for entry in get(server, "/v2/models/stats")["model_stats"]] == ["chat", "digits", "digits"]
    both = get(server, "/v2/models/digits/stats")["model_stats"]
    assert [entry["version"] for entry in both] == ["1", "3"]
    [newest] = get(server, "/v2/models/digits/versions/3/stats")["model_stats"]
    assert newest["inference_stats"]["success"] == {"count": 3, "ns": 40}
    assert (newest["last_inference"], newest["inference_count"], newest["execution_count"]) == (5, 6, 2)
    assert [(batch["batch_size"], batch["compute_infer"]["ns"]) for batch in newest["batch_stats"]] == [(2, 2), (4, 3)]
    assert set(newest["inference_stats"]) == {
        "success",
        "fail",
        "queue",
        "compute_input",
        "compute_infer",
        "compute_output",
        "cache_hit",
        "cache_miss",
    }


# -- inference -----------------------------------------------------------------------------------


def test_a_request_goes_through_as_it_came_and_so_does_its_answer(server: Running) -> None:
    body = json.dumps(INPUTS).encode()
    reply = post(server, "/v2/models/digits/infer", body)
    assert (reply.status_code, reply.content) == (200, b'{"said":"this"}')
    asked = router(server).asked
    assert (asked.model, asked.version, asked.dialect, asked.body) == ("digits", "", "v2", body)
    assert asked.header_bytes == -1
    post(server, "/v2/models/digits/versions/1/infer", body)
    assert (router(server).asked.model, router(server).asked.version) == ("digits@1", "1")


def test_a_binary_request_says_where_its_json_ends(server: Running) -> None:
    server.router.prediction = Prediction(
        b"{}1234", "application/octet-stream", (("Inference-Header-Content-Length", "2"),)
    )
    body = b'{"parameters":{"priority":1},"inputs":[]}\x00\xff'
    length = {"inference-header-content-length": str(len(body) - 2), "content-type": "application/octet-stream"}
    reply = post(server, "/v2/models/digits/infer", body, **length)
    assert reply.content == b"{}1234"
    assert reply.headers["inference-header-content-length"] == "2"
    assert reply.headers["content-type"] == "application/octet-stream"
    assert (router(server).asked.header_bytes, router(server).asked.priority) == (len(body) - 2, -2)
    without_type = {"inference-header-content-length": "0", "content-type": ""}
    assert post(server, "/v2/models/digits/infer", b"raw", **without_type).status_code == 200
    assert router(server).asked.header_bytes == 0


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "9" * 19, "", "1, 2"])
def test_a_length_that_is_none_is_refused(server: Running, value: str) -> None:
    reply = post(server, "/v2/models/digits/infer", b"{}", **{"inference-header-content-length": value})
    assert "one number of bytes is expected" in refusal(reply, 400)


@pytest.mark.parametrize("media", ["text/plain", "multipart/form-data", "application/octet-stream"])
def test_bodies_that_a_web_page_may_send_anywhere_are_refused(server: Running, media: str) -> None:
    reply = post(server, "/v2/models/digits/infer", INPUTS, **{"content-type": media})
    assert f"Content-Type '{media}' is not supported" in refusal(reply, 415)


def test_a_model_that_writes_takes_no_tensors(server: Running) -> None:
    assert "cannot predict" in refusal(post(server, "/v2/models/chat/infer", INPUTS), 400)


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"sequence_id": 7, "sequence_start": True}, {"sequence": "7", "sequence_start": True}),
        ({"sequence_id": "room", "sequence_end": True}, {"sequence": "room", "sequence_end": True}),
        ({"sequence_id": 2**64 - 1}, {"sequence": str(2**64 - 1)}),
        ({"sequence_id": 0}, {}),
        ({"sequence_id": "", "sequence_start": False}, {}),
        ({"priority": 0}, {}),
        ({"priority": 1}, {"priority": -2}),
        ({"priority": 2}, {"priority": -1}),
        ({"priority": 3}, {"priority": 0}),
        ({"priority": 2**63}, {"priority": 1}),
        ({"timeout": 1500}, {"timeout": 0.0015}),
        ({"timeout": 0}, {}),
        ({"batching": False}, {"may_wait": False}),
        ({"batching": True}, {}),
        ({"anything": "else", "binary_data_output": True}, {}),
        (None, {}),
    ],
)
def test_reserved_parameters_are_the_gateway_s(parameters: object, found: dict[str, object]) -> None:
    for spaces in (None, 2):
        body = json.dumps({**INPUTS, "parameters": parameters}, indent=spaces).encode()
        asked = msgspec.structs.asdict(read_infer(body, version="3"))
        assert asked.pop("body") == body
        plain = msgspec.structs.asdict(read_infer(b"{}", version="3"))
        assert asked == {**{key: value for key, value in plain.items() if key != "body"}, **found}
    hidden = body.replace(b'"parameters"', b'"p\\u0061rameters"')
    assert msgspec.structs.asdict(read_infer(hidden, version="3")) == {**plain, **found, "body": hidden}


KNOBS = [-1, 2**64, 2**63 * 4, 1e308, 1.5, True, "x" * 129, "1e9"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sequence_id", [-1, 2**64, 1e308, 1.5, True, False, "x" * 129]),
        ("priority", KNOBS),
        ("timeout", [*KNOBS, 86_400_000_001]),
        ("sequence_start", [0, 1, "true", 1e308]),
        ("sequence_end", [0, 1, "true", 2**64]),
        ("batching", [0, 1, "off", 1e308]),
    ],
)
def test_a_knob_out_of_range_is_refused_by_name(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as refused:
            read_infer(json.dumps({"parameters": {name: value}}).encode())
        assert name in refused.value.message
        assert len(refused.value.message) < 300


def test_a_beginning_or_end_needs_a_sequence() -> None:
    with pytest.raises(InvalidRequest, match="sequence_id"):
        read_infer(b'{"parameters":{"sequence_start":true}}')


@pytest.mark.parametrize(
    "body", [b'{"parameters":', b'{"parameters":[]}', b'{"parameters":{"a":[]}}', b"\xff" + b'"parameters"', b"[" * 5]
)
def test_a_body_that_is_no_json_is_refused_here_or_by_the_worker(body: bytes) -> None:
    if b'"parameters"' in body:
        with pytest.raises(InvalidRequest):
            read_infer(body)
    else:
        assert read_infer(body).body == body


def test_what_the_model_refuses_is_told_in_v2_s_words(server: Running) -> None:
    server.router.refusal = Unavailable("No replica.", retry_after_s=3)
    reply = post(server, "/v2/models/digits/infer", INPUTS)
    assert refusal(reply, 503) == "No replica."
    assert reply.headers["retry-after"] == "3"


# -- compressed bodies ---------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_requests_are_opened_and_large_answers_compressed(server: Running, encoding: str, pack: Any) -> None:
    body = json.dumps({**INPUTS, "id": "i" * 20_000}).encode()
    server.router.prediction = Prediction(b"x" * 5000, headers=(("Inference-Header-Content-Length", "10"),))
    headers = {"content-encoding": encoding, "accept-encoding": encoding}
    with server.http.stream(
        "POST", server.url + "/v2/models/digits/infer", content=pack(body), headers=headers
    ) as reply:
        raw = b"".join(reply.iter_raw())
        assert reply.headers["content-encoding"] == encoding
        assert reply.headers["inference-header-content-length"] == "10"
        assert reply.headers["vary"] == "accept-encoding"
    assert zlib.decompress(raw, 47) == b"x" * 5000
    assert len(raw) < 200
    assert router(server).asked.body == body


@pytest.mark.parametrize("accepted", ["", "identity", "br", "gzip;q=0"])
def test_an_answer_is_compressed_only_where_the_client_accepts_it(server: Running, accepted: str) -> None:
    server.router.prediction = Prediction(b"x" * 5000)
    reply = post(server, "/v2/models/digits/infer", INPUTS, **{"accept-encoding": accepted})
    assert "content-encoding" not in reply.headers
    assert len(reply.content) == 5000


BOMB = gzip.compress(b"0" * 50_000_000, mtime=0)


@pytest.mark.parametrize(
    ("body", "encoding", "status", "said"),
    [
        (BOMB, "gzip", 413, "larger than 97.7 KiB when it is opened"),
        (zlib.compress(b"0" * 200_000), "deflate", 413, "larger than 97.7 KiB"),
        (gzip.compress(b"{}", mtime=0)[:-4], "gzip", 400, "ends before it is complete"),
        (gzip.compress(b"{}", mtime=0) + gzip.compress(b"{}", mtime=0), "gzip", 400, "something behind its end"),
        (b"{}", "gzip", 400, "not gzip"),
        (gzip.compress(b"{}", mtime=0), "deflate", 400, "not deflate"),
        (b"", "gzip", 400, "ends before it is complete"),
        (b"{}", "br", 415, "Content-Encoding 'br' is not supported"),
        (b"{}", "gzip, gzip", 415, "is not supported"),
    ],
    ids=["bomb", "large", "truncated", "two", "plain", "other", "empty", "unknown", "twice"],
)
def test_a_compressed_body_that_lies_is_refused(
    server: Running, body: bytes, encoding: str, status: int, said: str
) -> None:
    reply = post(server, "/v2/models/digits/infer", body, **{"content-encoding": encoding})
    assert said in refusal(reply, status)
    assert not server.router.streams


# -- rows ----------------------------------------------------------------------------------------


def test_predict_and_invocations_reach_their_codecs(server: Running) -> None:
    body = b'{"instances":[[1,2]]}'
    assert post(server, "/v1/models/digits:predict", body).status_code == 200
    assert (router(server).asked.dialect, router(server).asked.model) == ("v1", "digits")
    named = {"x-amzn-sagemaker-target-model": "digits"}
    assert post(server, "/invocations", body, **named).status_code == 200
    assert (router(server).asked.dialect, router(server).asked.body) == ("invocations", body)
    assert "unknown model" in refusal(post(server, "/v1/models/other:predict", body), 404)
    reply = post(server, "/invocations", body)
    assert reply.status_code == 400
    assert reply.json()["error_code"] == "BAD_REQUEST"
    assert "this server has: chat, digits." in reply.json()["message"]


def test_the_only_model_needs_no_name() -> None:
    lonely = Models()
    lonely.statuses = lonely.statuses[1:]
    config = Config(server=ServerConfig(port=0), models={key: MODELS[key] for key in ("digits@1", "digits")})
    with running(lonely, config) as started:
        assert post(started, "/invocations", b"{}").status_code == 200
        assert lonely.asked.model == "digits"


# -- the repository ------------------------------------------------------------------------------


def predict_fields_of(server: Running) -> list[str]:
    control = server.app.context.control
    assert isinstance(control, FakeControl)
    asked, control.asked = control.asked, []
    return asked


def test_the_index_names_every_version_and_its_state(server: Running) -> None:
    server.router.statuses[1].replicas_ready, server.router.statuses[1].state = 0, "loading"
    index = post(server, "/v2/repository/index", {}).json()
    assert [(entry["name"], entry["version"], entry["state"]) for entry in index] == [
        ("chat", "1", "READY"),
        ("digits", "1", "LOADING"),
        ("digits", "3", "READY"),
    ]
    ready = server.http.post(server.url + "/v2/repository/index", json={"ready": True}).json()
    assert [(entry["name"], entry["version"]) for entry in ready] == [("chat", "1"), ("digits", "3")]
    assert server.http.post(server.url + "/v2/repository/index").json() == index


def test_versions_are_loaded_and_unloaded_together(server: Running) -> None:
    predict_fields_of(server)
    assert post(server, "/v2/repository/models/digits/load", {}).json() == {}
    assert predict_fields_of(server) == ["load digits@1", "load digits"]
    unload = {"parameters": {"unload_dependents": True}}
    assert post(server, "/v2/repository/models/digits/unload", unload).json() == {}
    assert predict_fields_of(server) == ["unload digits@1", "unload digits"]


def test_a_load_may_bring_another_batch_size(server: Running) -> None:
    predict_fields_of(server)
    config = json.dumps({"max_batch_size": "16", "dynamic_batching": {"max_queue_delay_microseconds": 100}})
    post(server, "/v2/repository/models/digits/load", {"parameters": {"config": config}})
    assert predict_fields_of(server) == ["override digits@1 16", "load digits@1", "override digits 16", "load digits"]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"file:1/model.onnx": "AAAA"}, "put into place by the operator"),
        ({"config": "{"}, "config"),
        ({"config": '{"backend":"python"}'}, "backend"),
        ({"config": '{"max_batch_size":0}'}, "from 1 to 65536, not 0"),
        ({"config": '{"max_batch_size":"1e9"}'}, "from 1 to 65536"),
        ({"config": '{"max_batch_size":' + "9" * 400 + "}"}, "from 1 to 65536"),
        ({"config": 5}, "must be a JSON text"),
        ({"other": 1}, "is not known here"),
    ],
)
def test_a_load_that_cannot_be_carried_out_says_that_it_failed(
    server: Running, parameters: dict[str, object], said: str
) -> None:
    predict_fields_of(server)
    reply = post(server, "/v2/repository/models/digits/load", {"parameters": parameters})
    message = refusal(reply, 400)
    assert message.startswith('failed to load "digits"')
    assert said in message
    assert not any(asked.startswith("load") for asked in predict_fields_of(server))


def test_a_model_that_is_not_there_cannot_be_loaded(server: Running) -> None:
    for verb in ("load", "unload"):
        for name in ("other", "..%2f..%2fetc", "digits/versions/1"):
            reply = post(server, f"/v2/repository/models/{name}/{verb}", {})
            assert f"failed to {verb}" in refusal(reply, 404)


# -- texts ---------------------------------------------------------------------------------------


def test_generate_answers_with_the_whole_text(server: Running) -> None:
    server.router.script = words("Hello", " you")
    body = {"text_input": "Hi", "id": "7", "parameters": {"max_tokens": 9, "temperature": 0, "stop": ["x"]}}
    reply = post(server, "/v2/models/chat/generate", body)
    assert reply.json() == {
        "id": "7",
        "model_name": "chat",
        "model_version": "1",
        "text_output": "Hello you",
        "details": {"finish_reason": "stop"},
    }
    assert (server.router.last.sampling.max_tokens, server.router.last.sampling.stop) == (9, ("x",))
    with_input = {"text_input": "Hi", "max_tokens": 3, "parameters": {"exclude_input_in_output": False}}
    assert post(server, "/v2/models/chat/versions/1/generate", with_input).json()["text_output"] == "HiHello you"
    assert server.router.last.sampling.max_tokens == 3


def test_generate_takes_priorities_and_timeouts_in_tritons_units(server: Running) -> None:
    server.router.script = words("Hello")
    for given, expected in (({}, (0, None)), ({"priority": 1, "timeout": 1_500_000}, (-2, 1.5))):
        body = {"text_input": "Hi", "parameters": given}
        assert post(server, "/v2/models/chat/generate", body).status_code == 200
        assert (server.router.last.priority, server.router.last.deadline_s) == expected


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_parameters_without_effect_are_listed_with_their_place(server: Running, path: str) -> None:
    parameters = {"user": "u", "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}
    reply = post(server, f"/v2/models/chat/{path}", {"text_input": "Hi", "parameters": parameters})
    assert reply.headers["x-inferd-ignored-params"] == "parameters.user,parameters.response_format.json_schema.x"


def test_generate_stream_answers_in_events(server: Running) -> None:
    server.router.script = words("Hello", " you")
    reply = post(server, "/v2/models/chat/generate_stream", {"text_input": "Hi", "parameters": {"stream": True}})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = sse(reply.text)
    assert [event["text_output"] for event in events] == ["Hello", " you"]
    assert events[-1]["details"] == {"finish_reason": "stop"}
    assert {event["model_name"] for event in events} == {"chat"}


def test_what_breaks_a_stream_is_its_last_event(server: Running) -> None:
    whole = words("Hello", " you")
    server.router.script = lambda request: [*whole(request)[:1], Unavailable("Gone.")]
    events = sse(post(server, "/v2/models/chat/generate_stream", {"text_input": "Hi"}).text)
    assert events == [{"model_name": "chat", "model_version": "1", "text_output": "Hello"}, {"error": "Gone."}]


@pytest.mark.parametrize(
    ("model", "body", "said"),
    [
        ("digits", {"text_input": "Hi"}, "writes no text"),
        ("chat", {}, "text_input"),
        ("chat", {"text_input": ""}, "empty"),
        ("chat", {"text_input": "Hi", "colour": 1}, "colour"),
        ("chat", {"text_input": "Hi", "parameters": {"colour": 1}}, "colour"),
        ("chat", {"text_input": "Hi", "parameters": {"n": 2}}, "one text_output"),
        ("chat", {"text_input": "Hi", "parameters": {"max_tokens": -1}}, "max_tokens"),
        ("chat", {"text_input": "Hi", "parameters": {"temperature": 1e308}}, "temperature"),
        ("chat", {"text_input": "Hi", "parameters": {"priority": 1.5}}, "priority"),
        ("chat", {"text_input": "Hi", "parameters": {"timeout": {}}}, "timeout"),
    ],
)
def test_a_text_that_cannot_be_continued_is_refused(server: Running, model: str, body: object, said: str) -> None:
    for path in ("generate", "generate_stream"):
        assert said in refusal(post(server, f"/v2/models/{model}/{path}", body), 400)


def test_generate_refuses_a_stream_and_names_the_path_for_it(server: Running) -> None:
    body = {"text_input": "Hi", "stream": True}
    assert "generate_stream" in refusal(post(server, "/v2/models/chat/generate", body), 400)


@pytest.mark.parametrize("value", ["1,", "[],", '"",', '{"a":1},', r'"a\",[\"",'])
def test_a_body_of_more_values_than_the_model_takes_is_refused_before_it_is_stepped_over(value: str) -> None:
    """The body is bounded by the model's own numbers; what is inside strings counts as nothing."""
    known = Models()
    known.statuses[2].info = msgspec.structs.replace(digits("digits"), max_json=(40_000, 20_000))
    begin, end = '{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[', '1]}],"parameters":{"priority":1}}'
    with running(known, Config(server=ServerConfig(port=0, grace_s=1), models=MODELS)) as started:

        def asked(data: str) -> tuple[int, bool]:
            body = (begin + data + end).encode() + b" " * OFF_LOOP_BYTES
            reply = post(started, "/v2/models/digits/infer", body)
            return reply.status_code, "more than 40000 values" in reply.text

        assert asked(value * 45_000) == (400, True)
        assert not known.streams
        assert asked(value * 19_000) == (200, False)
        assert known.asked.priority == -2
        assert asked('"' + "," * 50_000 + "[" * 40_000 + '",') == (200, False)
