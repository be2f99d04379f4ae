"""``inferd serve`` as a process with the bundled model, a real client, and a collector."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.gateway.grpc.messages import message_type
from tests.observe.traces.collector import Collector, attributes, collecting
from tests.ports import free_port

from inferd.observe.traces.conventions import SCHEMA_URL, TABLE

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "xyzzy-prompt"


class Far:
    """A remote server that records the headers of what it is sent."""

    def __init__(self) -> None:
        far = self
        self.headers: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                far.headers.append({name.lower(): value for name, value in self.headers.items()})
                answer = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}}
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is logged."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command that finds the server by its folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(folder)}


class Served:
    """The server's address, and the remote server and the collector beside it."""

    def __init__(self, url: str, far: Far, collector: Collector, folder: Path, grpc_port: int) -> None:
        self.url = url
        self.grpc_port = grpc_port
        self.folder = folder
        self.far = far
        self.collector = collector

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("traces")
    far = Far()
    file, log, port = folder / "inferd.yaml", folder / "stderr", free_port()
    models = {
        "chat": {"source": "demo", "threads": 1},
        "digits": {"source": "demo-digits"},
        "broken": {"source": str(folder / "broken.onnx")},
        "far": {"source": f"openai:{far.url}", "remote": {"probe": False}},
    }
    (folder / "broken.onnx").write_bytes(b"\x08\x07" + b"rubbish" * 100)
    file.write_text(
        json.dumps({"server": {"port": 0, "grpc_port": port}, "state": {"data_dir": str(folder)}, "models": models})
    )
    with collecting() as collector, log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(file)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={
                **environment(folder),
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_BSP_SCHEDULE_DELAY": "50",
                "OTEL_SERVICE_NAME": "inference",
            },
        )
        assert process.stdout is not None
        try:
            ready = next((line for line in process.stdout if "at http://" in line), "")
            assert ready, log.read_text(encoding="utf-8")
            yield Served(re.findall(r"http://[^\s,]+", ready)[0], far, collector, folder, port)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
            assert "Traceback" not in log.read_text(encoding="utf-8")
        finally:
            process.kill()
            process.communicate()
            far.server.shutdown()
            far.server.server_close()


def parts(spans: list[Span]) -> tuple[Span, dict[str, Span]]:
    """The root and the spans below it by name, of one trace. Children lie within their parents."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    roots = [span for span in spans if span.parent_span_id not in by_id]
    assert len(roots) == 1
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        parent = by_id.get(span.parent_span_id)
        if parent is not None:
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano
        _check_attributes(span)
    return roots[0], {span.name: span for span in spans if span is not roots[0]}


def _check_attributes(span: Span) -> None:
    """Only attributes of the table, with its types."""
    types = {"string": str, "int": int, "double": float, "boolean": bool, "string[]": list}
    known = {row.key: types[row.type] for row in TABLE}
    told = attributes(span)
    assert {key: type(value) for key, value in told.items()} == {key: known[key] for key in told}


def trace_of(served: Served, name: str, request_id: str) -> tuple[Span, dict[str, Span]]:
    """The trace of one request, by its id."""
    for _ in range(100):
        spans = served.collector.await_spans(name)
        for root in spans:
            if attributes(root).get("gen_ai.request.id") == request_id:
                return parts([span for span in spans if span.trace_id == root.trace_id])
        threading.Event().wait(0.05)
    raise AssertionError(f"no span {name!r} of the request {request_id}")


def test_a_streamed_chat_has_its_stages_and_the_callers_trace(served: Served) -> None:
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "congo=t61rcWkgMzE", "x-request-id": "streamed"}
    chunks = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": SECRET}],
        max_tokens=8,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers=headers,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    root, below = trace_of(served, "chat chat", "streamed")
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == SPAN
    assert (root.trace_state, root.flags) == ("congo=t61rcWkgMzE", 0x301)
    assert root.kind == Span.SPAN_KIND_SERVER
    assert root.status.code == 0
    assert {"receive", "tokenize", "prefill", "decode"} <= below.keys()
    order = [below[name].start_time_unix_nano for name in ("receive", "tokenize", "prefill", "decode")]
    assert order == sorted(order)
    assert all(span.parent_span_id == root.span_id and span.flags == 0x101 for span in below.values())
    told = attributes(root)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "inferd"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "chat"
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.usage.completion_tokens"] == 8
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["http.response.status_code"] == 200
    assert told["inferd.stream"] is True
    assert told["inferd.outcome"] == "done"
    assert told["inferd.class"] == "normal"
    first, total = told["gen_ai.latency.time_to_first_token"], told["gen_ai.latency.e2e"]
    assert isinstance(first, float)
    assert isinstance(total, float)
    assert 0 < first <= total
    assert text
    sent = b"".join(post.message.SerializeToString() for post in served.collector.posts)
    assert SECRET.encode() not in sent
    assert text.encode() not in sent


def test_the_resource_names_the_server_and_the_conventions(served: Served) -> None:
    served.post("/v1/completions", {"model": "chat", "prompt": "a", "max_tokens": 1})
    served.collector.await_spans("text_completion chat")
    for post in served.collector.posts:
        (whole,) = post.message.resource_spans
        assert attributes(whole.resource)["service.name"] == "inference"
        assert whole.scope_spans[0].schema_url == SCHEMA_URL


def digits(served: Served) -> dict[str, Any]:
    """The name, type and shape of the model's input, for one row."""
    (wanted,) = httpx.get(served.url + "/v2/models/digits", timeout=10).json()["inputs"]
    shape = [1 if size == -1 else size for size in wanted["shape"]]
    return {"name": wanted["name"], "datatype": wanted["datatype"], "shape": shape}


def test_over_grpc_the_context_is_metadata(served: Served) -> None:
    row = digits(served)
    assert row["datatype"] == "FP32"
    ask: Any = message_type("ModelInferRequest")(model_name="digits")
    ask.inputs.add(**row)
    ask.raw_input_contents.append(bytes(4 * math.prod(row["shape"])))
    trace = "cd" * 16
    metadata = (("traceparent", f"00-{trace}-{SPAN}-01"), ("x-request-id", "called"))
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        infer: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        infer(ask.SerializeToString(), metadata=metadata, timeout=20)
    root, below = trace_of(served, "predict digits", "called")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (trace, SPAN)
    assert attributes(root)["http.route"] == "/inference.GRPCInferenceService/ModelInfer"
    assert "compute" in below


def test_a_prediction_has_its_own_stages(served: Served) -> None:
    row = digits(served)
    row["data"] = [0.0] * math.prod(row["shape"])
    answer = served.post("/v2/models/digits/infer", {"inputs": [row]}, **{"x-request-id": "predicted"})
    assert answer.status_code == 200, answer.text
    root, below = trace_of(served, "predict digits", "predicted")
    assert root.parent_span_id == b""
    assert "compute" in below
    assert not below.keys() & {"prefill", "decode", "tokenize"}


def test_a_remote_server_gets_our_span_as_its_parent(served: Served) -> None:
    body = {"model": "far", "messages": [{"role": "user", "content": SECRET}]}
    parent = f"00-{TRACE[::-1]}-{SPAN}-01"
    headers = {"traceparent": parent, "tracestate": "congo=t61", "x-request-id": "relayed"}
    assert served.post("/v1/chat/completions", body, **headers).status_code == 200
    root, below = trace_of(served, "chat far", "relayed")
    told = served.far.headers[-1]
    assert told["traceparent"] == f"00-{TRACE[::-1]}-{root.span_id.hex()}-01"
    assert told["tracestate"] == "congo=t61"
    assert root.parent_span_id.hex() == SPAN
    assert {"receive", "remote"} <= below.keys()
    assert not below.keys() & {"tokenize", "prefill", "decode"}
    assert attributes(root)["inferd.is_remote"] is True
    assert attributes(root)["inferd.attempts"] == 1


def test_a_trace_that_begins_here_goes_on_at_the_remote_server(served: Served) -> None:
    body = {"model": "far", "messages": [{"role": "user", "content": "a"}]}
    assert served.post("/v1/chat/completions", body, **{"x-request-id": "own"}).status_code == 200
    root, _ = trace_of(served, "chat far", "own")
    assert served.far.headers[-1]["traceparent"] == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
    assert "tracestate" not in served.far.headers[-1]


def test_a_caller_that_does_not_sample_is_followed_here_and_at_the_remote_server(served: Served) -> None:
    body = {"model": "far", "messages": [{"role": "user", "content": "a"}]}
    trace = "ab" * 16
    assert served.post("/v1/chat/completions", body, traceparent=f"00-{trace}-{SPAN}-00").status_code == 200
    told = served.far.headers[-1]["traceparent"]
    assert re.fullmatch(f"00-{trace}-[0-9a-f]{{16}}-00", told)
    assert SPAN not in told
    served.post("/v1/chat/completions", body, **{"x-request-id": "after"})
    trace_of(served, "chat far", "after")
    assert trace not in {span.trace_id.hex() for span in served.collector.spans}


@pytest.mark.parametrize("broken", ["rubbish", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01"])
def test_an_invalid_context_begins_a_new_trace(served: Served, broken: str) -> None:
    body = {"model": "far", "messages": [{"role": "user", "content": "a"}]}
    request_id = f"broken-{broken[:2]}"
    headers = {"traceparent": broken, "tracestate": "congo=t61", "x-request-id": request_id}
    assert served.post("/v1/chat/completions", body, **headers).status_code == 200
    root, _ = trace_of(served, "chat far", request_id)
    assert root.parent_span_id == b""
    assert root.trace_state == ""
    assert "tracestate" not in served.far.headers[-1]


def test_a_refused_request_has_a_span_with_its_code_and_is_no_error_of_the_server(served: Served) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "temperature": -1}
    assert served.post("/v1/chat/completions", body, **{"x-request-id": "refused"}).status_code == 400
    root, _ = trace_of(served, "chat", "refused")  # refused before its model was looked for
    assert attributes(root)["http.response.status_code"] == 400
    assert root.status.code == 0


def test_probes_and_scrapes_have_no_spans(served: Served) -> None:
    for path in ("/livez", "/metrics", "/v1/models"):
        assert httpx.get(served.url + path, timeout=10).status_code == 200
    served.post("/v1/completions", {"model": "chat", "prompt": "a", "max_tokens": 1}, **{"x-request-id": "later"})
    trace_of(served, "text_completion chat", "later")
    assert {str(attributes(span).get("http.route", "")) for span in served.collector.spans} <= {
        "", "/v1/chat/completions", "/v1/completions", "/v2/models/{model}/infer",
        "/inference.GRPCInferenceService/ModelInfer",
    }  # fmt: skip
    page = httpx.get(served.url + "/metrics", timeout=10).text
    assert float(re.findall(r"^inferd_traces_exported_total (\S+)", page, re.MULTILINE)[0]) > 0
    assert re.findall(r'^inferd_traces_dropped_total\{reason="(\w+)"\} (?!0)', page, re.MULTILINE) == []


def test_every_load_is_a_trace_and_a_line_of_the_status(served: Served) -> None:
    root, below = parts(served.collector.await_spans("load chat"))
    assert root.parent_span_id == b""
    told = attributes(root)
    assert (told["inferd.model"], told["inferd.load.cause"], told["inferd.outcome"]) == ("chat", "load", "ready")
    assert {"spawn", "import", "weights", "KV cache", "warm-up"} <= below.keys()
    assert root.status.code == 0
    failed, below = parts(served.collector.await_spans("load broken"))
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert attributes(failed)["error.type"] == "failed"
    assert len([span for span in below.values() if span.status.code]) == 1
    start, below = parts(served.collector.await_spans("start"))
    assert {"import", "state", "workers", "listeners"} <= below.keys()
    assert start.parent_span_id == b""
    status = subprocess.run(
        [sys.executable, "-m", "inferd", "status", "--json", "--port", served.url.rpartition(":")[2]],
        capture_output=True, text=True, check=False, env=environment(served.folder),
    )  # fmt: skip
    assert status.stdout, status.stderr
    report = json.loads(status.stdout)
    (replica,) = next(model for model in report["models"] if model["name"] == "chat")["replicas"]
    assert [phase["name"] for phase in replica["load"]["phases"]][:3] == ["spawn", "files", "import"]
    assert report["start"]["is_over"] is True
    (socket,) = served.folder.rglob("*.sock")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as client:
        loads = client.get("http://localhost/admin/startup").json()["loads"]
    assert {(load["model"], load["state"]) for load in loads} == {
        ("chat", "ready"), ("digits", "ready"), ("broken", "failed"),
    }  # fmt: skip
