"""The exporter against collectors that are well, slow, full, broken or gone."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.certificates import made_certificate
from tests.observe.traces.collector import Collector, Reply, attributes, collecting
from tests.stopwatch import Stopwatch

from inferd import __version__
from inferd.errors import ConfigError
from inferd.observe.traces.context import Sampler
from inferd.observe.traces.conventions import SCHEMA_URL
from inferd.observe.traces.exporter import Counts, Exporter
from inferd.observe.traces.otlp import (
    ERROR,
    SERVER,
    Attributes,
    attribute,
    context_fields,
    name_field,
    parent_field,
    span_field,
    status_field,
)
from inferd.observe.traces.settings import Settings

TRACE, SPAN, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "b7ad6b7169203331"


def named(name: str, offset_s: float) -> list[bytes]:
    if name == "defect":
        raise ZeroDivisionError
    context = context_fields(bytes.fromhex(TRACE), "", 1)
    return [span_field(context, bytes.fromhex(SPAN), SERVER, 1.0, 2.0, name_field(name))]


class Sent:
    """An exporter, and what became of what was put into it."""

    def __init__(self, url: str, **changes: object) -> None:
        self.counts: Counter[str] = Counter()
        resource = (("service.name", "test"),)
        settings = Settings(url + "/v1/traces", (("api-key", "k"),), Sampler(1.0), resource, delay_s=0.02)
        self.exporter: Exporter[str] = Exporter(
            settings._replace(**changes),  # type: ignore[arg-type]
            named,
            Counts(self._add("exported"), lambda reason, count: self._add(reason)(count), self._add("rejected")),
        )

    def _add(self, name: str):  # type: ignore[no-untyped-def]
        return lambda count: self.counts.update({name: count})

    def put(self, *names: str) -> None:
        for name in names:
            self.exporter.put(name)

    def until(self, name: str, count: int, seconds: float = 10.0) -> None:
        watch = Stopwatch()
        while self.counts[name] < count:
            assert not watch.is_past(seconds), f"{name} is {self.counts[name]}, not {count}: {self.counts}"
            time.sleep(0.01)


@contextmanager
def sending(url: str, **changes: object) -> Iterator[Sent]:
    sent = Sent(url, **changes)
    try:
        yield sent
    finally:
        sent.exporter.close(0.2)


def names(collector: Collector) -> list[str]:
    return [span.name for span in collector.spans]


def test_every_field_of_a_span_arrives() -> None:
    told: Attributes = {"text": "a\ud800", "number": -5, "share": 0.25, "yes": True, "list": ("a", "b")}
    context = context_fields(bytes.fromhex(TRACE), "congo=t61", 3, is_parent_remote=True)
    rest = [name_field("chat demo"), parent_field(bytes.fromhex(CALLER)), status_field(ERROR, "oom")]
    rest += [attribute(key, value) for key, value in told.items()]
    whole = span_field(context, bytes.fromhex(SPAN), SERVER, 1700000000.25, 1700000001.5, b"".join(rest))
    with collecting() as collector, sending(collector.url) as sent:
        sent.exporter._make_spans = lambda item, offset_s: [whole]
        sent.put("any")
        sent.until("exported", 1)
        (post,) = collector.posts
        assert post.path == "/v1/traces"
        assert post.headers["content-type"] == "application/x-protobuf"
        assert (post.headers["content-encoding"], post.headers["api-key"]) == ("gzip", "k")
        (resource,) = post.message.resource_spans
        assert attributes(resource.resource) == {"service.name": "test"}
        (scope,) = resource.scope_spans
        assert (scope.scope.name, scope.scope.version) == ("inferd", __version__)
        assert scope.schema_url == resource.schema_url == SCHEMA_URL
        (span,) = scope.spans
    assert (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN, CALLER)
    assert (span.name, span.kind, span.trace_state, span.flags) == ("chat demo", SERVER, "congo=t61", 0x303)
    assert abs(span.start_time_unix_nano - 1700000000250000000) < 1000  # a double has no finer time
    assert abs(span.end_time_unix_nano - 1700000001500000000) < 1000
    assert (span.status.code, span.status.message) == (ERROR, "oom")
    assert attributes(span) == {"text": "a?", "number": -5, "share": 0.25, "yes": True, "list": ["a", "b"]}


def test_without_compression_the_body_is_plain() -> None:
    with collecting() as collector, sending(collector.url, is_compressed=False) as sent:
        sent.put("one")
        sent.until("exported", 1)
        assert "content-encoding" not in collector.posts[0].headers
        assert names(collector) == ["one"]


def test_what_ends_together_is_sent_together_on_one_connection() -> None:
    with collecting() as collector, sending(collector.url, max_batch=4, delay_s=0.3) as sent:
        sent.put(*"abcdefgh")
        sent.until("exported", 8)
        assert names(collector) == list("abcdefgh")
        assert len(collector.posts) <= 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_collector_gets_the_batch_again(status: int) -> None:
    with collecting(Reply(status)) as collector, sending(collector.url) as sent:
        sent.put("one")
        sent.until("exported", 1)
        assert names(collector) == ["one", "one"]
        assert sum(sent.counts.values()) == 1


def test_retry_after_is_waited_for() -> None:
    with collecting(Reply(503, {"retry-after": "1"})) as collector, sending(collector.url) as sent:
        sent.put("one")
        sent.until("exported", 1)
        first, second = collector.posts
        assert second.at - first.at >= 0.95


@pytest.mark.parametrize("status", [400, 401, 404, 500, 302])
def test_a_collector_that_refuses_gets_nothing_twice(status: int) -> None:
    with collecting(Reply(status, {"location": "/elsewhere"})) as collector, sending(collector.url) as sent:
        sent.put("one")
        sent.until("refused", 1)
        sent.put("two")
        sent.until("exported", 1)
        assert names(collector) == ["one", "two"]


def test_rejected_spans_are_counted() -> None:
    with collecting(Reply(rejected=3)) as collector, sending(collector.url) as sent:
        sent.put("one")
        sent.until("rejected", 3)
        assert sent.counts["exported"] == 1


def test_an_answer_that_is_no_message_is_no_rejection() -> None:
    with collecting(Reply(body=b"\xff" * 200_000)) as collector, sending(collector.url) as sent:
        sent.put("one")
        sent.until("exported", 1)
        sent.put("two")
        sent.until("exported", 2)
        assert sent.counts == {"exported": 2}


def test_a_collector_that_is_down_is_given_up_and_found_again() -> None:
    collector = Collector()
    collector.close()
    with sending(collector.url, give_up_s=0.1) as sent:
        sent.put("lost")
        sent.until("unavailable", 1)
    with collecting() as up, sending(up.url) as again:
        again.put("kept")
        again.until("exported", 1)


def test_putting_never_waits_for_a_collector_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with sending(address, max_queue=100, max_batch=10, timeout_s=30.0) as sent:
            putting = Stopwatch()
            sent.put(*["x"] * 10_000)
            assert putting.seconds < 2.0
            sent.until("queue_full", 9_000)
            closing = Stopwatch()
            sent.exporter.close(0.3)
            assert closing.seconds < 2.0
            assert sent.counts["queue_full"] + sent.counts["shutdown"] >= 9_980
            assert not sent.counts["exported"]


def test_a_slow_collector_loses_only_what_does_not_fit() -> None:
    with collecting(Reply(wait_s=0.3)) as collector, sending(collector.url, max_queue=8, max_batch=8) as sent:
        sent.put("first")
        while not collector.posts:
            time.sleep(0.005)
        sent.put(*["kept"] * 8, *["lost"] * 5)
        sent.until("exported", 9)
        assert sent.counts == {"exported": 9, "queue_full": 5}
        assert Counter(names(collector)) == {"first": 1, "kept": 8}


def test_the_end_sends_what_waits() -> None:
    with collecting() as collector:
        sent = Sent(collector.url, delay_s=60.0)
        sent.put("late")
        sent.exporter.close()
        assert names(collector) == ["late"]
        sent.put("too late")
        assert sent.counts == {"exported": 1, "queue_full": 1}


def test_a_defect_loses_the_spans_of_one_request() -> None:
    with collecting() as collector, sending(collector.url) as sent:
        sent.put("before", "defect", "after")
        sent.until("exported", 2)
        assert names(collector) == ["before", "after"]
        assert sent.counts["defect"] == 1


def test_over_tls_only_a_trusted_collector_gets_spans(tmp_path: Path) -> None:
    certificate = made_certificate(tmp_path)
    with collecting(certificate=certificate) as collector:
        with sending(collector.url, give_up_s=0.1) as wary:
            wary.put("lost")
            wary.until("unavailable", 1)
        assert collector.posts == []
        with sending(collector.url, ca_file=str(certificate)) as trusting:
            trusting.put("kept")
            trusting.until("exported", 1)
        assert names(collector) == ["kept"]


def test_a_collector_without_tls_gets_nothing_over_https() -> None:
    with collecting() as collector, sending(collector.url.replace("http:", "https:"), give_up_s=0.1) as sent:
        sent.put("lost")
        sent.until("unavailable", 1)
        assert collector.posts == []


def test_certificates_that_are_none_stop_the_start(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("rubbish")
    with pytest.raises(ConfigError, match="certificates for the collector"):
        Sent("https://127.0.0.1:1", ca_file=str(tmp_path / "ca.pem"))
