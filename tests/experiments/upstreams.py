"""Remote servers that fail, hang, lie, flap or crawl (F34 to F42)."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

from tests.experiments.catalogue import experiment
from tests.experiments.client import JSON, Answer, Stream, head
from tests.experiments.field import Field, Server, together
from tests.experiments.upstream import (
    GARBAGE,
    Behaviour,
    Upstream,
    after,
    busy,
    failing,
    firehose,
    pacing,
    reset_after,
    silent,
    silent_after_two,
    well,
)
from tests.stopwatch import Stopwatch

NO_RETRIES = {"max_attempts": 1}


def remote(*upstreams: Upstream, remote: JSON | None = None, **settings: Any) -> JSON:
    """One model whose replicas are remote servers, beside the tiny one."""
    first, *others = upstreams
    own = remote or {}
    model: JSON = {
        "source": first.source,
        "remote": own,
        "remotes": [{"url": upstream.url, **own} for upstream in others],
        **settings,
    }
    return {"models": {"tiny": {"source": "tiny"}, "far": model}}


def ask(server: Server, **options: Any) -> Answer:
    return server.client.complete("hello", model="far", **options)


def timed(server: Server, **options: Any) -> tuple[Answer, float]:
    began = Stopwatch()
    return ask(server, **options), began.seconds


@experiment(
    "F34",
    injects="a burst of 500s from the only remote server",
    holds="the breaker opens: refused with 503 in 50 ms without asking it; probes close it when it is well again",
    control="breaker.enabled: false",
    red="was asked",
    tier="thorough",
)
def burst_of_errors(field: Field) -> None:
    breaker = {"enabled": field.either(True, False), "failures": 3, "cooldown_s": 0.5, "successes": 2}
    with Upstream() as upstream, field.serve(remote(upstream, breaker=breaker, retry=NO_RETRIES)) as server:
        assert ask(server).status == 200
        upstream.behaviour = failing
        for _ in range(3):
            assert ask(server).status == 502
        before = upstream.num_asked
        refused = [timed(server) for _ in range(3)]
        assert upstream.num_asked == before, "a server whose breaker should be open was asked"
        assert [answer.status for answer, _ in refused] == [503] * 3
        assert min(took for _, took in refused) < 0.05, "a refusal took longer than 50 ms"
        assert "retry-after" in refused[0][0].headers
        upstream.behaviour = well
        server.until(lambda: ask(server).status == 200, "a probe finds the server well", 5)
        server.until(lambda: ask(server).status == 200 and _state_of(server, "0") == 1, "it closes", 5)


@experiment(
    "F34b",
    injects="one of two remote servers fails every request",
    holds="retries stay within 20 % of the traffic",
    control="retry.budget: 1",
    red="retries",
)
def retries_are_bounded(field: Field) -> None:
    settings: JSON = {"breaker": {"enabled": False}, "retry": {"budget": field.either(0.2, 1.0)}}
    with Upstream() as good, Upstream(failing) as bad, field.serve(remote(good, bad, **settings)) as server:
        statuses = [ask(server).status for _ in range(200)]
        assert set(statuses) <= {200, 502, 503}
        extra = good.num_asked + bad.num_asked - len(statuses)
        assert bad.num_asked > 50, "the failing server was hardly asked, so nothing is shown"
        assert extra <= 0.2 * len(statuses) + 10, f"{extra} retries for {len(statuses)} requests"


@experiment(
    "F35a",
    injects="a remote server whose connections are never accepted",
    holds="each request fails after connect_timeout_s",
    control="connect_timeout_s: 60",
    red="no answer",
)
def hang_at_connect(field: Field) -> None:
    with _full_backlog() as port:
        own = {"connect_timeout_s": field.either(0.5, 60.0), "probe": False}
        model = {"source": f"openai:http://127.0.0.1:{port}/v1", "remote": own, "retry": NO_RETRIES}
        with field.serve({"models": {"tiny": {"source": "tiny"}, "far": model}}) as server:
            _fails_in_time(server)


@contextlib.contextmanager
def _full_backlog() -> Iterator[int]:
    """A port where the kernel lets further connections hang."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        time.sleep(0.1)
        yield port


def _fails_in_time(server: Server, most_s: float = 3.0) -> None:
    try:
        answer, took = timed(server, seconds=most_s)
    except TimeoutError:
        raise AssertionError(f"no answer within {most_s} s") from None
    assert answer.status in (502, 503, 504), answer
    assert took < most_s


@experiment(
    "F35b",
    injects="a remote server that takes a request and never answers",
    holds="each request fails after first_byte_timeout_s",
    control="first_byte_timeout_s: 60",
    red="no answer",
    tier="everyday",
)
def hang_at_first_byte(field: Field) -> None:
    own = {"first_byte_timeout_s": field.either(0.4, 60.0)}
    with Upstream(silent) as upstream, field.serve(remote(upstream, remote=own, retry=NO_RETRIES)) as server:
        _fails_in_time(server)


@experiment(
    "F35c",
    injects="a remote server that stops in the middle of a stream",
    holds="the stream ends with an error event after idle_timeout_s",
    control="idle_timeout_s: 60",
    red="no error",
    tier="everyday",
)
def hang_between_tokens(field: Field) -> None:
    own = {"idle_timeout_s": field.either(0.4, 60.0)}
    with Upstream(silent_after_two) as upstream, field.serve(remote(upstream, remote=own)) as server:
        try:
            with server.client.stream("hello", model="far", seconds=3) as stream:
                assert stream.rest() == "ab"
                assert stream.error is not None, "the stream ended without an error"
        except TimeoutError:
            raise AssertionError("no error event within 3 s") from None


@experiment(
    "F36",
    injects="answers that are none: " + ", ".join(GARBAGE),
    holds="502, or an error event where the stream had begun; counted; the server goes on",
    control="answers are forwarded without being read",
    red="was answered with 200",
)
def garbage(field: Field) -> None:
    settings: JSON = {"breaker": {"enabled": False}, "retry": NO_RETRIES}
    with (
        Upstream() as upstream,
        field.serve(remote(upstream, **settings), defects=("remote_answers_are_not_read",)) as server,
    ):
        for name, (streamed, behaviour) in GARBAGE.items():
            upstream.behaviour = behaviour
            before = server.metrics().sum("inferd_errors_total", model="far", kind="upstream_failed")
            if streamed:
                with server.client.stream("hello", model="far") as stream:
                    stream.rest()
                    assert stream.status == 502 or stream.error is not None, f"{name}: neither 502 nor an error event"
            else:
                answer = ask(server)
                assert answer.status == 502, f"{name} was answered with {answer.status}"
            after_it = server.metrics().sum("inferd_errors_total", model="far", kind="upstream_failed")
            assert after_it == before + 1, f"{name} was not counted"
        upstream.behaviour = well
        server.until(lambda: ask(server).status == 200, "the remote server is used again", 10)


@experiment(
    "F37",
    injects="a remote server resets the connection after three tokens",
    holds="the stream ends with an error event, and no other server is asked for it",
    control="a broken stream ends as if it were whole",
    red="without an error|I6",
    tier="everyday",
)
def reset_mid_stream(field: Field) -> None:
    with (
        Upstream(reset_after(3)) as breaking,
        Upstream(reset_after(3)) as other,
        field.serve(remote(breaking, other), defects=("broken_remote_streams_end_silently",)) as server,
    ):
        with server.client.stream("hello", model="far") as stream:
            assert stream.rest() == "abc"
            assert stream.error is not None, "the stream ended without an error"
        assert breaking.num_asked + other.num_asked == 1, "a request was replayed after its first byte"


@experiment(
    "F38",
    injects="a remote server that fails and works in turns, several times a second",
    holds="its breaker opens at most once per cooldown",
    control="cooldown_s: 0.01",
    red="changes of state",
)
def flapping(field: Field) -> None:
    cooldown = 1.0
    breaker = {"failures": 2, "cooldown_s": field.either(cooldown, 0.01), "successes": 1, "window_s": 5.0}
    with Upstream() as upstream, field.serve(remote(upstream, breaker=breaker, retry=NO_RETRIES)) as server:
        began = time.monotonic()
        turn = 0
        while time.monotonic() - began < 5.0:
            turn += 1
            upstream.behaviour = failing if turn // 3 % 2 else well
            ask(server)
        opened = server.metrics().sum("inferd_breaker_changes_total", model="far", state="open")
        most = 5.0 / cooldown + 1
        assert 1 <= opened <= most, f"{opened} changes of state within 5 s, at a cooldown of {cooldown} s"
        upstream.behaviour = well
        server.until(lambda: ask(server).status == 200, "it is used again", 10)


@experiment(
    "F39",
    injects="a remote server whose name cannot be resolved",
    holds="its requests fail within 3 s, others are answered as before, the server is up and says which model is not",
    control="the name can be resolved",
    red="was answered",
)
def no_such_name(field: Field) -> None:
    with Upstream() as upstream:
        host = field.either("no-such-host.invalid", "localhost")
        model = {"source": f"openai:http://{host}:{upstream.port}/v1", "remote": {"connect_timeout_s": 2.0}}
        with field.serve({"models": {"tiny": {"source": "tiny"}, "far": model}}, checked=False) as server:
            answer, took = timed(server, seconds=10)
            assert answer.status in (502, 503, 504), f"a name that cannot be resolved was answered with {answer.status}"
            assert took < 3.0
            began = Stopwatch()
            assert server.client.complete("hello").status == 200
            assert began.seconds < 0.5
            assert server.is_ready(), "one remote server that is away took the others' traffic with it"
            shown = json.loads(server.client.get("/health/ready").body)["models"]
            assert (shown["tiny"]["state"], shown["far"]["replicas_ready"]) == ("ready", 0)


@experiment(
    "F40",
    injects="one of three remote servers answers, but 30 times slower than its peers",
    holds="it is set aside, and the slow tail is gone within 30 s",
    control="routing.eject_factor: 0",
    red="still slow",
)
def slow_replica(field: Field) -> None:
    routing = {"eject_factor": field.either(3.0, 0.0), "slow_start_s": 0.0, "prefix_affinity": False}
    with (
        Upstream(after(0.01)) as one,
        Upstream(after(0.01)) as two,
        Upstream(after(0.3)) as slow,
        field.serve(remote(one, two, slow, routing=routing)) as server,
    ):
        began = time.monotonic()
        while time.monotonic() - began < 15.0:
            latest = [timed(server) for _ in range(30)]
            if max(took for _, took in latest) < 0.2:
                break
        else:
            raise AssertionError("requests are still slow after 15 s: the slow server was not set aside")
        assert slow.num_asked >= 1
        page = server.metrics()
        assert page.sum("inferd_breaker_changes_total", model="far", state="ejected") >= 1


@experiment(
    "F41",
    injects="every remote server of a model hangs",
    holds="refused in 100 ms once that is known; another model is served as before",
    control="breaker.enabled: false",
    red="took",
)
def all_replicas_bad(field: Field) -> None:
    settings = {
        "breaker": {"enabled": field.either(True, False), "failures": 3, "cooldown_s": 30.0},
        "retry": NO_RETRIES,
    }
    with (
        Upstream(silent) as one,
        Upstream(silent) as two,
        field.serve(remote(one, two, remote={"first_byte_timeout_s": 0.5}, **settings), checked=False) as server,
    ):
        together(12, lambda _: ask(server, seconds=20))
        refused = [timed(server, seconds=20) for _ in range(20)]
        assert all(answer.status in (502, 503, 504) for answer, _ in refused)
        slowest = max(took for _, took in refused)
        assert slowest < 0.1, f"a refusal took {slowest:.2f} s though no replica works"
        began = Stopwatch()
        assert server.client.complete("hello").status == 200
        assert began.seconds < 0.5


@experiment(
    "F42",
    injects="a remote server comes back after it was gone",
    holds="it gets its share little by little",
    control="routing.slow_start_s: 0",
    red="at once",
)
def fail_back(field: Field) -> None:
    routing = {"slow_start_s": field.either(5.0, 0.0), "prefix_affinity": False, "eject_factor": 0.0}
    settings = {"routing": routing, "breaker": {"failures": 2, "cooldown_s": 0.3, "successes": 1}}
    with (
        Upstream(after(0.005)) as stays,
        Upstream(after(0.005)) as leaves,
        field.serve(remote(stays, leaves, **settings)) as server,
    ):
        server.allow(descriptors=64)  # connections to the remote servers are kept for a while
        begun = time.monotonic()
        while time.monotonic() - begun < 5.5:  # until both have their full share
            ask(server)
        leaves.close()
        server.until(lambda: _state_of(server, "1") != 1 or ask(server) is None, "its loss is noticed", 10)
        leaves.back()
        before = leaves.num_asked
        server.until(lambda: ask(server).status == 200 and leaves.num_asked > before, "it is used again", 20)
        counts = stays.num_asked, leaves.num_asked
        for _ in range(4):
            together(16, lambda _: ask(server))
        share = (leaves.num_asked - counts[1]) / (stays.num_asked - counts[0] + leaves.num_asked - counts[1])
        assert share < 0.35, f"a server that came back got {share:.0%} of the requests at once"


@experiment(
    "F42b",
    injects="a remote server answers again after a burst of errors, reachable all the while",
    holds="when its breaker has closed it gets its share little by little",
    control="routing.slow_start_s: 0",
    red="at once",
)
def breaker_closes(field: Field) -> None:
    routing = {"slow_start_s": field.either(5.0, 0.0), "prefix_affinity": False, "eject_factor": 0.0}
    breaker = {"failures": 2, "cooldown_s": 0.5, "successes": 1}
    with (
        Upstream(after(0.005)) as stays,
        Upstream(after(0.005)) as errs,
        field.serve(remote(stays, errs, routing=routing, breaker=breaker)) as server,
    ):
        server.allow(descriptors=64)  # connections to the remote servers are kept for a while
        begun = time.monotonic()
        while time.monotonic() - begun < 5.5:  # until both have their full share
            ask(server)
        errs.behaviour = failing
        server.until(lambda: ask(server).status == 200 and _state_of(server, "1") == 0, "its breaker opens", 10)
        errs.behaviour = after(0.005)
        server.until(lambda: ask(server).status == 200 and _state_of(server, "1") == 1, "its breaker closes", 20)
        counts = stays.num_asked, errs.num_asked
        for _ in range(4):
            together(16, lambda _: ask(server))
        share = (errs.num_asked - counts[1]) / (stays.num_asked - counts[0] + errs.num_asked - counts[1])
        assert share < 0.35, f"a server that came back got {share:.0%} of the requests at once"


def _state_of(server: Server, replica: str) -> float:
    """1 while a replica is ready and its breaker closed."""
    page = server.metrics()
    ready = page.sum("inferd_replica_state", model="far", replica=replica, state="ready")
    closed = page.sum("inferd_breaker_state", model="far", replica=replica, state="closed")
    return min(ready, closed)


@experiment(
    "F23",
    injects="20 readers of endless remote streams that take nothing",
    holds="memory stays bounded, the remote server is made to wait, another client is served, the readers are cut off",
    control="send_timeout_s: an hour",
    red="laggards",
)
def slow_readers(field: Field) -> None:
    timeout = {"server": {"send_timeout_s": field.either(2.0, 3600.0)}}
    with Upstream(firehose) as upstream, field.serve({**remote(upstream), **timeout}) as server:
        body = b'{"model": "far", "prompt": "hello", "stream": true}'
        slow: list[socket.socket] = []
        try:
            rss = server.rss_bytes
            for _ in range(20):
                reader = socket.socket()
                slow.append(reader)
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.connect((server.host, server.port))
                reader.sendall(head("POST", "/v1/completions", "content-type: application/json", body=body))
                server.tally.cut()
            began = time.monotonic()
            while time.monotonic() - began < 12.0 and (time.monotonic() - began < 1.0 or _in_flight(server)):
                asked = Stopwatch()
                assert server.client.complete("hello").status == 200
                assert asked.seconds < 1.0, "another client waits for slow readers"
                time.sleep(0.2)
            grown = (server.rss_bytes - rss) >> 20
            assert grown < 100, f"memory grew by {grown} MiB"
            assert not _in_flight(server), f"{_in_flight(server)} laggards were never cut off"
        finally:
            for reader in slow:
                reader.close()


def _in_flight(server: Server) -> float:
    return server.metrics().sum("inferd_in_flight", model="far")


@experiment(
    "F20b",
    injects="a client leaves in the middle of a remote stream",
    holds="the connection to the remote server is cut within 1 s",
    control="a stream's cancellation does nothing",
    red="still in flight",
    tier="everyday",
)
def leaving_a_remote_stream(field: Field) -> None:
    with (
        Upstream(pacing(0.01)) as upstream,
        field.serve(remote(upstream), defects=("streams_are_never_cancelled",)) as server,
    ):
        stream = Stream(server.client, "hello", model="far", max_tokens=500)
        stream.first()
        stream.leave()
        began = Stopwatch()
        while _in_flight(server):
            assert began.seconds < 1.0, "the remote stream is still in flight"
            time.sleep(0.01)


@experiment(
    "F34c",
    injects="a remote server that says it is busy (503 with Retry-After)",
    holds="that is not held against it: the other one takes the request, the breaker stays closed",
    control="it answers 500 instead",
    red="breaker",
)
def busy_is_no_failure(field: Field) -> None:
    behaviour: Behaviour = field.either(busy, failing)
    settings = {"breaker": {"failures": 1, "cooldown_s": 30.0}, "retry": {"budget": 1.0}}
    with Upstream() as good, Upstream(behaviour) as busy_one, field.serve(remote(good, busy_one, **settings)) as server:
        server.until(lambda: ask(server).status == 200 and busy_one.num_asked > 0, "the busy one was asked", 10)
        opened = server.metrics().sum("inferd_breaker_changes_total", model="far", state="open")
        assert opened == 0, "a busy server opened its breaker"
