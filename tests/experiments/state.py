"""The database, the log's reader, keys, quotas and deadlines (F44, F51, F54, F55, F58 to F60)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.experiments.catalogue import experiment
from tests.experiments.client import JSON, Client
from tests.experiments.field import Field, Server, together
from tests.stopwatch import Stopwatch

WITH_KEYS: JSON = {"server": {"auth": "required", "public_metrics": True}}


def as_admin(server: Server) -> Server:
    """Where keys are required the experiment's own questions need one as well."""
    key = server.key("operators", scopes=["infer", "models", "metrics", "admin"])
    server.client = server.client.with_key(key)
    return server


@contextlib.contextmanager
def guarded(field: Field, config: JSON | None = None, **options: bool) -> Iterator[Server]:
    """A server that wants keys; its own client has an admin's."""
    with field.serve({**WITH_KEYS, **(config or {})}, wait=False) as server:
        server.await_ready()
        as_admin(server).begin()
        yield server
        if options.get("checked", True):
            server.check()
            assert server.stop()[0] == 0


@experiment(
    "F44",
    injects="the database is locked by another process for 3 s",
    holds="known keys are served as before; unknown ones are refused; changing keys fails within bounded time; all is well after it",
    control="every request asks the database",
    red="known key",
)
def locked_database(field: Field) -> None:
    with field.serve(WITH_KEYS, defects=("every_request_asks_the_database",), wait=False) as server:
        server.await_ready()
        as_admin(server).begin()
        with _locked(Path(server.config["state"]["data_dir"]) / "state.db"):
            for _ in range(10):
                began = Stopwatch()
                try:
                    answer = server.client.complete("hello", seconds=1.0)
                except TimeoutError:
                    raise AssertionError("a known key was not served within 1 s") from None
                assert answer.status == 200, f"a known key: {answer}"
                assert began.seconds < 0.5, "a known key waited for the database"
            assert server.client.with_key("sk-inf-nobody-0123").complete("hello").status == 401
            began = Stopwatch()
            refused = server.operator.post("/admin/keys", {"tenant": "late"}, seconds=15)
            assert refused.status == 503, refused
            assert began.seconds < 10.0
            assert server.client.get("/health/ready").status == 200
        server.until(lambda: server.operator.post("/admin/keys", {"tenant": "late"}).status == 201, "keys are made", 10)
        server.check()
        assert server.stop()[0] == 0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """No other process can read or write: the test holds SQLite's own locks of a database in WAL mode."""
    with open(f"{path}-shm", "rb+") as shared:
        fcntl.lockf(shared, fcntl.LOCK_EX, 8, 120)  # the locks' place in the file: sqlite.org/walformat.html
        yield


@experiment(
    "F54",
    injects="the log's pipe is not read",
    holds="requests are served as fast as before; lines are dropped and counted",
    control="lines are written when they are said",
    red="blocked",
    tier="thorough",
)
def blocked_log(field: Field) -> None:
    reading, writing = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.enter_context(open(reading, "rb"))
        log = stack.enter_context(open(writing, "wb"))
        broken = ("lines_are_written_at_once",)
        with field.serve(defects=broken, log=log, wait=False, checked=False) as server:
            server.await_ready()
            filling = Stopwatch()
            try:
                # The pipe takes 64 KiB and the queue 4096 lines.
                while server.metrics().sum("inferd_log_lines_dropped_total") == 0:
                    assert not filling.is_past(20.0), "the log never filled"
                    together(8, lambda _: _burst(server))
                began = Stopwatch()
                assert server.client.complete("hello").status == 200
                assert began.seconds < 0.5
            except (TimeoutError, ConnectionError):
                raise AssertionError("requests are blocked by the log") from None
            assert server.end()[0] == 0


def _burst(server: Server) -> None:
    import http.client

    connection = http.client.HTTPConnection(server.host, server.port, timeout=3)
    try:
        for _ in range(150):
            connection.request("GET", "/health/live")
            connection.getresponse().read()
    finally:
        connection.close()


@experiment(
    "F55",
    injects="one Idempotency-Key: again, 20 times at once, with another body, and after kill -9",
    holds="computed once; the same answer each time; 422 for the other body",
    control="no key is sent",
    red="computed",
    tier="thorough",
)
def idempotency(field: Field) -> None:
    with field.serve(checked=False) as server:
        again: JSON = {"idempotency-key": "order-1"} if not field.is_control else {}
        first = server.client.complete("pace=0.01", headers=again)
        assert first.status == 200
        done = server.metrics().sum("inferd_requests_total", outcome="done")
        second = server.client.complete("pace=0.01", headers=again)
        assert server.metrics().sum("inferd_requests_total", outcome="done") == done, "it was computed again"
        assert second.body == first.body
        assert second.headers.get("idempotent-replayed") == "true"
        many = {"idempotency-key": "order-2"}
        answers = together(20, lambda _: server.client.complete("pace=0.05", headers=many))
        assert {answer.status for answer in answers} <= {200, 409}, answers
        assert len({answer.body for answer in answers if answer.status == 200}) == 1
        assert server.metrics().sum("inferd_requests_total", outcome="done") == done + 1, (
            "it was computed more than once"
        )
        assert server.client.complete("something else", headers=again).status == 422
        time.sleep(1.5)  # answers are kept beyond a crash a moment after they were given
        state = server.config["state"]
        server.process.send_signal(signal.SIGKILL)
        server.ended()
    with field.serve({"state": state}, checked=False) as server:
        done = server.metrics().sum("inferd_requests_total", outcome="done")
        third = server.client.complete("pace=0.01", headers=again)
        assert third.body == first.body, "after a crash it was computed again"
        assert server.metrics().sum("inferd_requests_total", outcome="done") == done


@experiment(
    "F58",
    injects="three times the quota, from many connections, at two servers of one database",
    holds="together they let through what the quota says; x-ratelimit-* and Retry-After tell the truth",
    control="a key without a limit",
    red="let through",
    tier="thorough",
)
def one_budget(field: Field) -> None:
    with guarded(field) as one:
        shared = {**WITH_KEYS, "state": one.config["state"]}
        with field.serve(shared, wait=False) as other:
            other.await_ready()
            text = one.key("team", **({} if field.is_control else {"rpm": 60}))
            servers = [server.client.with_key(text) for server in (one, other)]
            other.until(lambda: servers[1].complete("hello").status != 401, "the other server knows the key", 3)
            began = time.monotonic()
            answers = together(90, lambda number: servers[number % 2].complete("hello"))
            passed = sum(answer.status == 200 for answer in answers) + 1
            refilled = (time.monotonic() - began) * 1.0  # one a second
            assert passed <= 60 + refilled + 1, f"{passed} requests were let through at a limit of 60 a minute"
            assert {answer.status for answer in answers} <= {200, 429}
            refused = next(answer for answer in answers if answer.status == 429)
            assert refused.code == "rate_limit_exceeded"
            assert 0 < float(refused.headers["retry-after"]) <= 60
            for answer in answers:
                assert int(answer.headers["x-ratelimit-limit-requests"]) == 60
            one.tally.num_cut += 1  # the other server's answers are counted there
            assert other.end()[0] == 0


@experiment(
    "F58b",
    injects="waiting until the refill that a 429 names, and a restart",
    holds="the next request passes after Retry-After; a restart gives no new quota",
    control="a key with a larger limit",
    red="was not refused",
)
def refill(field: Field) -> None:
    with guarded(field) as server:
        text = server.key("team", rpm=field.either(20, 100_000))
        user = server.client.with_key(text)
        answers = [user.complete("hello") for _ in range(25)]
        refused = [answer for answer in answers if answer.status == 429]
        assert refused, "a request beyond the quota was not refused"
        wait = float(refused[-1].headers["retry-after"])
        assert wait <= 6.0
        time.sleep(wait)
        assert user.complete("hello").status == 200, "refused although Retry-After had passed"


@experiment(
    "F59",
    injects="a key is revoked while a stream of it runs",
    holds="the stream goes on to its end; new work is refused within 1 s",
    control="it is not revoked",
    red="still accepted",
    tier="thorough",
)
def revoked(field: Field) -> None:
    with guarded(field) as server:
        text = server.key("team")
        user = server.client.with_key(text)
        with user.stream("pace=0.02", max_tokens=60) as stream:
            begun = stream.first()["choices"][0]["text"]
            if not field.is_control:
                _revoke(server, text)
            began = Stopwatch()
            while user.complete("hello").status != 401:
                assert began.seconds < 1.0, "a revoked key is still accepted after 1 s"
                time.sleep(0.02)
            assert len(begun + stream.rest()) == 60
            assert stream.error is None


def _revoke(server: Server, text: str) -> None:
    keys = server.operator.get("/admin/keys").json["data"]
    identity = next(key["id"] for key in keys if text.startswith(f"sk-inf-{key['id']}-"))
    assert server.operator.request("DELETE", f"/admin/keys/{identity}").status == 200


@experiment(
    "F60",
    injects="a deadline that passes in the queue",
    holds="408 at the deadline (or 503 at once where it cannot be met), and nothing is computed for it",
    control="no deadline",
    red="not ended",
    tier="everyday",
)
def deadlines(field: Field) -> None:
    gate, mark = field.folder / "gate", field.folder / "mark"
    with field.serve() as server:
        due = {"x-inferd-timeout": field.either("0.4", "60")}
        holders = [threading.Thread(target=_hold, args=(server.client, f"gate={gate}"), daemon=True) for _ in range(12)]
        for holder in holders:
            holder.start()
        server.until(lambda: server.metrics().sum("inferd_in_flight") == 12, "the worker has all it is given", 10)
        _ends_in_time(server.client, f"mark={mark}", due)
        gate.touch()
        for holder in holders:
            holder.join(20)
        assert not mark.exists(), "a request whose deadline had passed was computed"


def _hold(client: Client, prompt: str) -> None:
    with contextlib.suppress(OSError):  # the server of a control ends under it
        client.complete(prompt, max_tokens=2)


def _ends_in_time(client: Client, prompt: str, headers: JSON) -> None:
    began = Stopwatch()
    try:
        answer = client.complete(prompt, max_tokens=400, headers=headers, seconds=3)
    except TimeoutError:
        raise AssertionError("a request was not ended at its deadline") from None
    assert answer.status == 408 or (answer.status == 503 and answer.code == "deadline_unreachable"), answer
    assert began.seconds < 1.5
    client.tally.cut()
