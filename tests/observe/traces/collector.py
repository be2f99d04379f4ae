"""A collector of traces as the tests need it: answers as told, and decodes what arrives with OpenTelemetry's messages."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Reply(NamedTuple):
    """How the collector answers one request."""

    status: int = 200
    headers: Mapping[str, str] = {}
    wait_s: float = 0.0  # before the answer
    rejected: int = 0
    body: bytes | None = None


class Post(NamedTuple):
    """A request that arrived."""

    at: float
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> ExportTraceServiceRequest:
        raw = gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body
        return ExportTraceServiceRequest.FromString(raw)


class Collector:
    """Takes spans on a port of its own. ``replies``: the answers to the first requests; the rest get 200."""

    def __init__(self, *replies: Reply, certificate: Path | None = None) -> None:
        collector = self
        self.replies = list(replies)
        self.posts: list[Post] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                collector.posts.append(Post(time.monotonic(), self.path, headers, body))
                reply = collector.replies.pop(0) if collector.replies else Reply()
                time.sleep(reply.wait_s)
                answer = ExportTraceServiceResponse()
                if reply.rejected:
                    answer.partial_success.rejected_spans = reply.rejected
                    answer.partial_success.error_message = "too old"
                text = answer.SerializeToString() if reply.body is None else reply.body
                self.send_response(reply.status)
                for name, value in {"content-length": str(len(text)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        scheme = "http"
        if certificate is not None:
            import ssl

            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.parent / "key.pem")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for post in list(self.posts)
            for whole in post.message.resource_spans
            for scope in whole.scope_spans
            for span in scope.spans
        ]

    def await_spans(self, name: str, count: int = 1, seconds: float = 10.0) -> list[Span]:
        """The spans of the traces that have a root of this name, once there are as many such roots."""
        until = time.monotonic() + seconds
        while True:
            spans = self.spans
            traces = [span.trace_id for span in spans if span.name == name]
            if len(traces) >= count:
                return [span for span in spans if span.trace_id in traces]
            assert time.monotonic() < until, f"{name!r} did not come, only {sorted({span.name for span in spans})}"
            time.sleep(0.02)


@contextmanager
def collecting(*replies: Reply, certificate: Path | None = None) -> Iterator[Collector]:
    collector = Collector(*replies, certificate=certificate)
    try:
        yield collector
    finally:
        collector.close()


def attributes(span: Any) -> dict[str, object]:
    """The attributes of a span or a resource, as Python's values."""
    return {pair.key: _value(pair.value) for pair in span.attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    found: object = getattr(value, kind)
    return found
