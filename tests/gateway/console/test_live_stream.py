"""The stream of live numbers on real sockets: one encoding for all viewers, what a key may see, and slow viewers."""

from __future__ import annotations

import concurrent.futures
import io
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, running

from inferd.config import Config, ModelConfig, ServerConfig
from inferd.events import ConfigReloaded, QueueChanged, ReplicaChanged
from inferd.gateway.console import live_stream
from inferd.gateway.console.live_stream import View
from inferd.gateway.console.parts import Console
from inferd.observe import Observer
from inferd.tenancy.principal import Principal, Scope

METRICS: frozenset[Scope] = frozenset(("metrics",))
ADMIN: frozenset[Scope] = frozenset(("admin",))
KEYS = {
    "sk-view": Principal(key_id="view", tenant="ops", scopes=METRICS),
    "sk-admin": Principal(key_id="admin", tenant="ops", scopes=ADMIN),
    "sk-narrow": Principal(key_id="narrow", tenant="team", scopes=METRICS, models=("b*",)),
    "sk-infer": Principal(key_id="infer", tenant="team", scopes=frozenset(("infer", "models"))),
}
CONFIG = Config(
    server=ServerConfig(port=0, grace_s=1, console_viewers=4),
    models={name: ModelConfig(source="tiny") for name in ("a", "b")},
)


class Event(msgspec.Struct):
    name: str
    data: Any
    raw: bytes


class Viewed(Running):
    """A gateway with live numbers whose seconds a test lets pass."""

    observer: Observer
    boot: float = 100.5

    def tick(self, *events: Any) -> None:
        """Let a second pass, and wait until its frames are written."""
        done: Any = concurrent.futures.Future()

        def step() -> None:
            for event in events:
                self.observer.emit(event)
            self.boot += 1
            self.observer.live.tick()
            self.loop.call_soon(lambda: self.loop.call_soon(done.set_result, None))

        self.loop.call_soon_threadsafe(step)
        done.result(10)

    @contextmanager
    def viewer(self, key: str = "sk-view", **headers: str) -> Iterator[Callable[[], Event]]:
        """The next event of a new viewer."""
        given = {"authorization": f"Bearer {key}", **headers}
        with (
            httpx.Client(timeout=10) as client,
            client.stream("GET", self.url + "/console/live", headers=given) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["cache-control"] == "no-cache"
            lines = answer.iter_lines()

            def following() -> Event:
                found: dict[str, str] = {}
                for line in lines:
                    if not line:
                        break
                    name, _, value = line.partition(": ")
                    found[name] = value
                return Event(found.get("event", ""), json.loads(found.get("data", "null")), json.dumps(found).encode())

            yield following


@pytest.fixture
def server() -> Iterator[Viewed]:
    observer = Observer(models={"a": 1, "b": 1}, stream=io.StringIO())
    console = Console(CONFIG, observer.live)
    app = {"door": FakeDoor(dict(KEYS)), "console": console}
    made = Viewed(FakeRouter("a", "b"), CONFIG, app)
    made.observer = observer
    observer.live._since_boot = lambda: made.boot
    made.start()
    try:
        yield made
    finally:
        made.loop.call_soon_threadsafe(console.close)
        made.stop()
        observer.close()


def ids(snapshot: Event) -> list[str]:
    return [f"{series['id']}|{series['model']}" for series in snapshot.data["series"]]


def queued(model: str, waiting: int) -> QueueChanged:
    return QueueChanged(model=model, waiting=waiting, in_flight=0)


def test_a_viewer_gets_the_past_and_then_every_second(server: Viewed) -> None:
    for waiting in (3, 5):
        server.tick(queued("a", waiting))
    with server.viewer() as following:
        snapshot = following()
        assert snapshot.name == "snapshot"
        assert b'"retry": "2000"' in snapshot.raw
        assert [(r["step_s"], r["length"]) for r in snapshot.data["resolutions"]] == [(1, 300), (10, 720), (300, 2016)]
        assert snapshot.data["values"]["queue|a"] == [[3, 5], [4], [4]]
        assert snapshot.data["values"]["ttft_p50|a"] == [[], [], []]
        assert {"requests_s|a", "tokens_s|b", "cpu|", "memory_used|"} <= set(ids(snapshot))
        for waiting in (6, 7):
            server.tick(queued("a", waiting))
            tick = following()
            assert tick.name == "tick"
            values = dict(zip(ids(snapshot), tick.data["values"], strict=True))
            assert values["queue|a"] == waiting
            assert values["ttft_p50|a"] is None
            assert tick.data["at"] > snapshot.data["at"]


def test_a_server_that_has_just_started_has_a_snapshot_without_values(server: Viewed) -> None:
    with server.viewer() as following:
        assert following().data["values"]["queue|a"] == [[], [], []]
        server.tick()
        assert following().name == "tick"


def test_viewers_of_the_same_share_one_encoding(server: Viewed, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[bytes] = []
    encode = View.tick

    def counted(view: View, tick: Any) -> bytes:
        encoded.append(encode(view, tick))
        return encoded[-1]

    monkeypatch.setattr(View, "tick", counted)
    server.tick()
    with server.viewer() as one, server.viewer() as two, server.viewer("sk-narrow") as other:
        firsts = one(), two(), other()
        assert [event.name for event in firsts] == ["snapshot"] * 3
        encoded.clear()
        for second in range(1, 4):
            server.tick(queued("b", second))
            assert one().data == two().data
            assert other().name == "tick"
            assert len(encoded) == 2 * second  # one for each set of models, not for each viewer


def test_a_key_sees_the_models_that_it_may_use(server: Viewed) -> None:
    lines = (
        ReplicaChanged(model="a", replica=0, state="died", reason="/secret/a"),
        ReplicaChanged(model="b", replica=0, state="died", reason="/secret/b"),
        ConfigReloaded(accepted=False, is_whole=False, detail="/secret/config"),
    )
    server.tick(*lines)
    told = {
        "sk-admin": [("a", "/secret/a"), ("b", "/secret/b"), ("", "/secret/config")],
        "sk-view": [("a", ""), ("b", ""), ("", "")],
        "sk-narrow": [("b", "")],
    }
    for key, expected in told.items():
        with server.viewer(key) as following:
            snapshot = following()
            models = {series["model"] for series in snapshot.data["series"]}
            assert models == ({"b", ""} if key == "sk-narrow" else {"a", "b", ""})
            assert set(snapshot.data["values"]) == set(ids(snapshot))
            assert [(line["model"], line["detail"]) for line in snapshot.data["events"]] == expected
            server.tick(
                ReplicaChanged(model="a", replica=0, state="ready"), ReplicaChanged(model="b", replica=0, state="ready")
            )
            assert len(following().data["values"]) == len(snapshot.data["series"])
            seen = [following().data["model"] for _ in range(1 if key == "sk-narrow" else 2)]
            assert seen == (["b"] if key == "sk-narrow" else ["a", "b"])
            server.tick(
                ReplicaChanged(model="a", replica=0, state="died"), ReplicaChanged(model="b", replica=0, state="died")
            )
            server.observer.live.feed.lines.clear()
            server.tick(*[msgspec.structs.replace(line, replica=len(key)) for line in lines[:2]], lines[2])


def test_a_key_without_the_scope_gets_no_numbers(server: Viewed) -> None:
    for path in ("/console/live", "/console/alerts"):
        for key, status in (("sk-infer", 403), ("sk-wrong", 401), (None, 401)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert server.http.get(server.url + path, headers=headers).status_code == status


def test_viewers_are_bounded_and_the_refusal_says_so(server: Viewed) -> None:
    server.tick()
    with server.viewer() as a, server.viewer() as b, server.viewer() as c:
        with server.viewer() as d:
            for following in (a, b, c, d):
                assert following().name == "snapshot"
            refused = server.http.get(server.url + "/console/live", headers={"authorization": "Bearer sk-view"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_viewers"
            assert int(refused.headers["retry-after"]) >= 1
        for _ in range(50):  # until the server has noticed that the last one left
            server.tick()
            again = server.http.send(
                server.http.build_request(
                    "GET", server.url + "/console/live", headers={"authorization": "Bearer sk-view"}
                ),
                stream=True,
            )
            again.close()
            if again.status_code == 200:
                break
        assert again.status_code == 200


def test_a_viewer_that_does_not_read_gets_a_snapshot_later_and_costs_no_memory(server: Viewed) -> None:
    server.tick()
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # before the window is negotiated
    slow.connect(("127.0.0.1", server.port))
    slow.sendall(b"GET /console/live HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer sk-admin\r\n\r\n")
    stream = server.app.context.console.stream
    assert stream is not None
    line = ReplicaChanged(model="a", replica=0, state="died", reason="x" * 400_000)
    for _ in range(30):
        server.tick(line, msgspec.structs.replace(line, state="loading"))
        (viewer,) = stream._viewers() or (None,)
        if viewer is not None and viewer.needs_snapshot:
            break
    assert viewer is not None
    assert viewer.needs_snapshot
    assert len(viewer._pending) <= live_stream.MAX_PENDING
    slow.settimeout(10)
    last, num_snapshots = b"", 0
    while num_snapshots < 2:
        data = slow.recv(1 << 20)
        num_snapshots += (last[-20:] + data).count(b"event: snapshot")
        last = data[-15:]
    slow.close()


def test_another_set_of_models_is_told_with_a_snapshot(server: Viewed) -> None:
    server.tick(queued("a", 1))
    with server.viewer() as following, server.viewer("sk-narrow") as narrow:
        following(), narrow()
        server.loop.call_soon_threadsafe(lambda: server.observer.configure({"a": 1, "new": 1}, access_log=False))
        server.tick()
        names = [following().name, following().name]
        assert names == ["series", "snapshot"]
        server.tick()
        while (event := following()).name != "tick":
            pass
        assert len(event.data["values"]) == len(server.observer.live.series)
        assert narrow().name == "series"
        assert {series["model"] for series in narrow().data["series"]} == {""}


def test_a_stream_ends_when_the_key_is_no_longer_valid(server: Viewed) -> None:
    server.tick()
    door: FakeDoor = server.app.context.door  # type: ignore[assignment]
    with server.viewer("sk-narrow") as following:
        assert following().name == "snapshot"
        del door.keys["sk-narrow"]
        for _ in range(live_stream.CHECK_TICKS):
            server.tick()
        while (event := following()).name == "tick":
            pass
        assert event.name == "end"
        assert event.data["code"] == "invalid_api_key"
        assert following().name == ""  # the connection's end


def test_a_stream_ends_when_the_server_stops(server: Viewed) -> None:
    server.tick()
    console = server.app.context.console
    with server.viewer() as following:
        assert following().name == "snapshot"
        server.loop.call_soon_threadsafe(console.close)
        assert (last := following()).name == "end"
        assert last.data["code"] == "stopping"
        assert following().name == ""


def test_alerts_are_those_of_the_models_that_a_key_may_use(server: Viewed) -> None:
    for model in ("a", "b"):
        server.tick(
            ReplicaChanged(model=model, replica=0, state="loading"), ConfigReloaded(accepted=False, is_whole=False)
        )
    clock = server.observer.live._now
    server.observer.live._now = lambda: clock() + 20 * server.boot
    for _ in range(20):
        server.tick()
    for key, expected in (
        ("sk-view", {("InferdNotReady", "a"), ("InferdNotReady", "b"), ("InferdReloadRefused", "")}),
        ("sk-narrow", {("InferdNotReady", "b")}),
    ):
        answer = server.http.get(server.url + "/console/alerts", headers={"authorization": f"Bearer {key}"})
        assert {(alert["name"], alert["model"]) for alert in answer.json()["data"]} == expected
        for alert in answer.json()["data"]:
            assert alert["runbook"] == f"docs/runbooks/{alert['name']}.md"
            assert set(alert) == {"name", "severity", "model", "since", "summary", "runbook"}


def test_a_gateway_without_numbers_says_so() -> None:
    with running(FakeRouter("a"), CONFIG) as plain:
        for path in ("/console/live", "/console/alerts"):
            assert plain.http.get(plain.url + path).json()["error"]["code"] == "unavailable"
