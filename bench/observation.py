"""What observing a request costs: ``python -m bench.observation``.

The parts of observation, each alone and in this process: the event of a call's end, the record, the numbers, the line of
the access log, and the spans of a trace. A round measures every part in turn by the processor time of its thread, and
the table has the least and the median of all rounds in microseconds per request. The numbers of requests are counted
many at a time, as in a server.

With ``--server`` the same is measured at a whole gateway: the requests of ``bench.kinds`` go to servers with different
parts of observation, in turns, and the processor time of each gateway per request is compared with that of the first.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import http.server
import io
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.gateway.__main__ import GATEWAY_CORE, TRAFFIC_CORE, UPSTREAM_PORT, build, free, running, wait_ready
from bench.kinds import KINDS, load, own_cpu_s
from inferd import __version__
from inferd.config import PayloadsConfig
from inferd.events import HttpServed, RequestEnded
from inferd.gateway.call import Call, served_event
from inferd.gateway.generation.requests import forwarded_headers
from inferd.gateway.operations import CHAT
from inferd.http.head import RequestHead
from inferd.observe import Observer
from inferd.observe.logs import http_line
from inferd.observe.payloads.capture import Capture
from inferd.observe.payloads.content import record_of
from inferd.observe.payloads.log import PayloadLog, _Settings
from inferd.observe.payloads.redaction import Redactor
from inferd.observe.traces.context import Sampler
from inferd.observe.traces.conventions import SCHEMA_URL
from inferd.observe.traces.otlp import encode_request
from inferd.observe.traces.spans import spans_of
from inferd.types import End, EngineTimes, Routing, Timings, Usage

PER_ROUND = 2048
TRACE = "00-5f0c1e774bf92f3577b34da6a3ce929d-4bf92f3577b34da6-01"

_USAGE = Usage(prompt_tokens=190, completion_tokens=240, cached_tokens=32)
_TIMINGS = Timings(dispatched=0.012, tokenized=0.014, scheduled=0.016, first_token=0.08, finished=1.4, begun=0.013)
_ENGINE = EngineTimes(
    schedule_wait=0.002, prefill=0.06, prefill_shared=0.004, decode=0.9, crowding=0.3, others_prefill=0.1, slowed=0.02,
    num_steps=241,
)  # fmt: skip
_ROUTING = Routing(ahead=3, ahead_of_class=2, ahead_tenant="team-b", ahead_of_tenant=2, attempts=1, replica=0)
_END = End("done", _USAGE, _TIMINGS, engine=_ENGINE, routing=_ROUTING)


def served(number: int, trace: str = "") -> HttpServed:
    """The end of a chat that an engine of this server answered: its trace has nine spans."""
    return HttpServed(
        request_id=f"5f0c2d9be1a7{number:08x}", method="POST", route="/v1/chat/completions", operation=CHAT, status=200,
        duration_s=1.41, request_bytes=2048, response_bytes=900, model="m", tenant="team-a", key_id="k1", outcome="done",
        finish_reasons=("stop",), usage=_USAGE, timings=_TIMINGS, end=_END, started_at=time.monotonic() - 1.41,
        received_s=0.0003, submitted_s=0.0005, trace=trace, replica=0,
    )  # fmt: skip


def ended(number: int) -> RequestEnded:
    return RequestEnded(
        model="m", replica=0, request_id=f"5f0c2d9be1a7{number:08x}", tenant="team-a", outcome="done",
        finish_reasons=("stop",), usage=_USAGE, timings=_TIMINGS,
    )  # fmt: skip


def a_call() -> Call:
    head = RequestHead(
        *("POST", b"/v1/chat/completions", [(b"host", b"localhost"), (b"content-type", b"application/json")], "1.1")
    )
    call = Call(head, time.monotonic())
    call.route, call.operation, call.model, call.status = "/v1/chat/completions", CHAT, "m", 200
    call.usage, call.timings, call.end, call.outcome = _USAGE, _TIMINGS, _END, "done"
    call.received_at = call.submitted_at = call.started_at
    call.request_bytes, call.response_bytes, call.finish_reasons = 2048, 900, ("stop",)
    return call


class Nowhere(io.TextIOBase):
    """A log that is thrown away."""

    def write(self, text: str, /) -> int:
        return len(text)


def parts() -> dict[str, Callable[[], None]]:
    """The parts of observation; each does its work for ``PER_ROUND`` requests."""
    ends = [served(number) for number in range(PER_ROUND)]
    sampled = [served(number, TRACE) for number in range(PER_ROUND)]
    requests = [ended(number) for number in range(PER_ROUND)]
    call, sampler = a_call(), Sampler(0.01)
    uniques = [f"{number * 2654435761 % (1 << 96):024x}" for number in range(PER_ROUND)]
    observer = Observer(models={"m": 1}, stream=Nowhere(), access_log=False)
    logging = Observer(models={"m": 1}, stream=Nowhere())

    def emit_to(target: Observer) -> None:
        for one, other in zip(requests, ends, strict=True):
            target.emit(one)
            target.emit(other)
        target._requests.enter()

    def event() -> None:
        for _ in range(PER_ROUND):
            call.trace = None
            served_event(call, 1.0)

    def line() -> None:
        for one in ends:
            http_line(one, 1_795_457_591.76)

    def record() -> None:
        for one in ends:
            observer.explainer.recorder.served(one)

    def sampling() -> None:
        for unique in uniques:
            sampler.trace(None, unique)

    def headers_with(used: Sampler | None) -> None:
        call.sampler = used
        for _ in range(PER_ROUND):
            call.trace = None
            forwarded_headers(call)
        call.sampler = None

    spans = [span for one in sampled for span in spans_of(one, 0.0)]  # as bytes
    resource = {"service.name": "inferd", "service.version": __version__}
    body = encode_request(resource, ("inferd", __version__), SCHEMA_URL, spans)

    recording = PayloadLog(Path(os.devnull), PayloadsConfig(), lambda: None)  # without tenants no thread runs
    recording._settings = _Settings(PayloadsConfig(tenants=("*",), keep=("replay",)))
    question = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 390}]}).encode()
    answer = json.dumps({"choices": [{"index": 0, "message": {"content": "word " * 160}}]}).encode()
    captures: list[Capture] = []

    def capture() -> None:
        for number, one in enumerate(ends):
            taken = recording.begin("team-a", one.request_id, None, call.head)
            assert taken is not None
            taken.request = question
            taken.take(answer)
            taken.finish(one)
            if number % 512 == 511:  # in place of the thread
                captures[:] = [waiting[0] for waiting in recording._waiting]
                recording._waiting.clear()
                recording._num_bytes_done = recording._num_bytes

    capture()
    redact, keep = Redactor(("api_key", "email", "card", "phone")), frozenset(("replay",))

    def write() -> None:
        for one, taken in zip(ends, captures * (PER_ROUND // len(captures)), strict=True):
            record_of(taken, one, 1_795_457_591.76, redact, keep, 32_768)

    def make_spans() -> None:
        for one in sampled:
            spans_of(one, 0.0)

    def encode() -> None:
        encode_request(resource, ("inferd", __version__), SCHEMA_URL, spans)

    def compress() -> None:
        gzip.compress(body, 1)

    return {
        "the event of a call's end": event,
        "record, numbers": lambda: emit_to(observer),
        "record, numbers, line of the log": lambda: emit_to(logging),
        "of them: the record": record,
        "of them: the line": line,
        "recording a call for replay, in the event loop": capture,
        "its record, in a thread (3 KB, redacted)": write,
        "sampling decision": sampling,
        "headers for another server": lambda: headers_with(None),
        "the same with the trace context": lambda: headers_with(sampler),
        f"spans of a sampled trace ({len(spans) // PER_ROUND})": make_spans,
        "their bytes": encode,
        f"their compression ({len(body) // PER_ROUND} bytes)": compress,
    }


def alone(rounds: int) -> None:
    """The table of the parts."""
    measured = parts()
    found: dict[str, list[float]] = {name: [] for name in measured}
    gc.freeze()
    for _ in range(rounds):
        for name, work in measured.items():
            before = time.thread_time()
            work()
            found[name].append((time.thread_time() - before) / PER_ROUND * 1e6)
    print("| part | least us | median us |\n| --- | --- | --- |")
    for name, times in found.items():
        print(f"| {name} | {min(times):.2f} | {statistics.median(times):.2f} |")


# -- a whole gateway ---------------------------------------------------------------------------


class _Sink(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def collecting() -> Iterator[str]:
    """The address of a collector that takes everything."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()


def variants(collector: str) -> dict[str, dict[str, object]]:
    """Sections of the configuration, by what is observed."""

    def traced(ratio: float) -> dict[str, object]:
        return {"tracing": {"endpoint": collector, "sample_ratio": ratio}}

    return {
        "no traces": {},
        "traces at 0 %": traced(0.0),
        "traces at 1 %": traced(0.01),
        "traces at 100 %": traced(1.0),
        "no access log": {"server": {"access_log": False}},
        "no records": {"server": {"request_records": 0}},
        "no access log and no records": {"server": {"access_log": False, "request_records": 0}},
    }


def served_by_gateways(seconds: float, rounds: int, kind_name: str, words: Sequence[str]) -> None:
    """The table of gateways, which all run at the same time and are asked in turns."""
    (kind,) = [kind for kind in KINDS if kind.name == kind_name]
    free(UPSTREAM_PORT)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        traffic = build(folder)
        upstream = [str(traffic), "upstream", "--port", str(UPSTREAM_PORT), "--interval-us", "0"]
        stack.enter_context(running(upstream, TRAFFIC_CORE, folder / "upstream.log"))
        source = f"openai:http://127.0.0.1:{UPSTREAM_PORT}/v1"
        pids: dict[str, tuple[int, int]] = {}
        for number, (name, sections) in enumerate(variants(stack.enter_context(collecting())).items()):
            if number and not any(word in name for word in words):
                continue
            port = 9300 + number
            free(port)
            own = folder / str(number)
            own.mkdir()
            settings = {
                **sections,
                "server": {"port": port, **sections.get("server", {})},  # type: ignore[dict-item]
                "state": {"data_dir": str(own)},
                "models": {"m": {"source": source, "remote": {"max_in_flight": 1024, "model": "m"}}},
            }
            (own / "inferd.yaml").write_text(json.dumps(settings))
            command = [sys.executable, "-m", "inferd", "serve", str(own / "inferd.yaml")]
            process = stack.enter_context(running(command, GATEWAY_CORE, own / "inferd.log"))
            wait_ready(port, "/health/ready", process)
            pids[name] = (process.pid, port)
        found: dict[str, list[float]] = {name: [] for name in pids}
        for turn in range(rounds + 1):
            for name, (pid, port) in pids.items():
                before = own_cpu_s(pid)
                done = load(traffic, folder, kind, seconds, port)
                if done["errors"]:
                    raise SystemExit(f"{name}: {done['errors']} of {done['answers']} requests failed.")
                if turn:  # the first one warms up
                    found[name].append((own_cpu_s(pid) - before) / max(1, done["answers"]) * 1e6)
        first = found["no traces"]
        print(f"| {kind.name} | CPU us/request, median | beside no traces | of it, median of the turns |")
        print("| --- | --- | --- | --- |")
        for name, times in found.items():
            more = [one - other for one, other in zip(times, first, strict=True)]
            ratio = statistics.median([one / other for one, other in zip(times, first, strict=True)]) - 1
            print(f"| {name} | {statistics.median(times):.1f} | {statistics.median(more):+.2f} us | {ratio:+.1%} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="of every part")
    parser.add_argument("--server", action="store_true", help="measure whole gateways")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn of a gateway")
    parser.add_argument("--kind", default="chat", help="of bench.kinds, relayed")
    parser.add_argument("--only", help="words that the names of the gateways beside the first one have, with commas")
    options = parser.parse_args()
    if options.server:
        served_by_gateways(options.seconds, options.rounds, options.kind, (options.only or "").split(","))
    else:
        alone(options.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
