"""Predictions over REST: each request gets its answer when requests fail, workers die or clients disconnect.

A real worker with a small Python class. Clients keep their connections, so that the heads of their requests are cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gateway.twice import MODEL
from tests.remote.test_relays import Client, Reply
from tests.worker.watching import until

from inferd import clock
from inferd.config import Config, ModelConfig, ServerConfig
from inferd.errors import QuotaExceeded
from inferd.events import Event, HttpServed, RequestEnded
from inferd.gateway.admission import SDK_GRACE_S
from inferd.gateway.http_call import HttpCall
from inferd.gateway.server import create_app
from inferd.http.head import HeadCache
from inferd.http.listener import HttpServer
from inferd.router.router import Router
from inferd.tenancy.principal import LOCAL, OpenDoor, Permit, Principal

PATH = "/v2/models/twice/infer"


def body(*values: float, **more: object) -> dict[str, Any]:
    values = values or (1.0, 2.0)
    tensor = {"name": "x", "shape": [len(values) // 2, 2], "datatype": "FP32", "data": list(values)}
    return {"inputs": [tensor], **more}


class Held:
    """Requests with a 13 keep the model busy until they are let go."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "twice.py.held"
        self._busy = folder / "twice.py.busy"
        self._file.touch()

    async def is_computing(self) -> None:
        await until(self._busy.exists, "the model is busy")

    def let_go(self) -> None:
        self._file.unlink()


class Site:
    def __init__(self, server: HttpServer, router: Router, events: list[Event]) -> None:
        self.server = server
        self.router = router
        self.events = events

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    async def served(self, number: int) -> list[HttpServed]:
        async with asyncio.timeout(10):
            while len(found := [event for event in self.events if isinstance(event, HttpServed)]) < number:
                await asyncio.sleep(0.01)
        return found


class Narrow(OpenDoor):
    """Lets so many requests in."""

    def __init__(self) -> None:
        self.left = 1000

    def admit(
        self, principal: Principal, request_id: str, model: str, *, prompt_tokens: int, max_tokens: int
    ) -> Permit:
        self.left -= 1
        if self.left < 0:
            raise QuotaExceeded("enough", retry_after_s=1)
        return super().admit(principal, request_id, model, prompt_tokens=prompt_tokens, max_tokens=max_tokens)


def through(folder: Path, then: Callable[[Site], Awaitable[None]], door: OpenDoor | None = None) -> None:
    file = folder / "twice.py"
    file.write_text(MODEL)

    async def main() -> None:
        model = ModelConfig(source=f"{file}:Model", allow_code=True)
        config = Config(server=ServerConfig(port=0, grace_s=5), models={"twice": model})
        events: list[Event] = []
        router = Router(config, events.append)
        await router.start()
        await asyncio.wait_for(router.settled(), 30)
        assert not router.load_failures()
        gateway = HttpServer(create_app(router, config, events.append, door=door), config.server)
        try:
            async with gateway.running():
                await then(Site(gateway, router, events))
        finally:
            await router.stop()

    asyncio.run(main())


def seen(reply: Reply) -> tuple[int, dict[str, str], bytes]:
    headers = {name: value for name, value in reply.headers.items() if name not in ("date", "x-request-id")}
    return reply.status, headers, reply.body


def told(events: list[Event]) -> list[dict[str, Any]]:
    found = []
    for event in events:
        if isinstance(event, HttpServed | RequestEnded):
            fields = msgspec.to_builtins(event)
            fields.pop("duration_s", None)
            fields.pop("request_id")
            for name in ("started_at", "received_s", "submitted_s"):
                fields.pop(name, None)
            fields["timings"] = [at is not None for at in fields["timings"]] if fields["timings"] else None
            if fields.get("end"):
                fields["end"] = [fields["timings"] if place == 2 else part for place, part in enumerate(fields["end"])]
            found.append({"kind": type(event).__name__, **fields})
    return sorted(found, key=lambda fields: str(fields["kind"]))  # which of the two is told first does not matter


GZIP = "accept-encoding: gzip"
ASKED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (body(), ()),
    (body(3, 4, 5, 6), ()),
    (body(id="mine"), ()),
    (body(parameters={"answer": 42}), ()),
    (body(*range(600)), (GZIP,)),
    (body(*range(600)), ()),
    ({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}, ()),
    ({"inputs": [{"name": "z", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}, ()),
    ({"inputs": []}, ()),
    (body(66, 0), ()),
    (body(), ()),
    (body(parameters={"timeout": 5_000_000}), ()),
    (body(parameters={"priority": 1}), ()),
    (body(parameters={"priority": -1}), ()),
]


ANSWERS = [200] * 6 + [400] * 3 + [500] + [200] * 3 + [400]


def test_what_is_asked_is_answered_the_same_each_time(tmp_path: Path) -> None:
    """With a head that is read, with a head that is known, on this connection and on another one."""

    async def asked(site: Site) -> tuple[list[Any], list[Any]]:
        site.events.clear()
        found = []
        async with site.client() as client:
            for what, headers in ASKED:
                for _ in range(2):
                    found.append(seen(await client.ask(what, PATH, *headers)))
            for raw in (b"{", b'{"inputs":[],"inputs":[]}', b"\xff"):
                for _ in range(2):
                    found.append(seen(await client.ask(raw, PATH)))
        await site.served(len(found))
        assert site.router._pools["twice"].is_idle
        return found, told(site.events)

    async def then(site: Site) -> None:
        known = await asked(site)
        assert await asked(site) == known
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeadCache, "find", lambda heads, data: None)
            read = await asked(site)
        assert known == read
        found = known[0]
        assert found[::2] == found[1::2]
        assert [status for status, _, _ in found[::2]] == [*ANSWERS, 400, 400, 400]

    through(tmp_path, then)


def test_tensors_as_bytes_are_read_by_their_own_length(tmp_path: Path) -> None:
    """Their header's length stands before the body's own, and is no such length."""
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = (f"Inference-Header-Content-Length: {len(head)}", "content-type: application/octet-stream")

    async def then(site: Site) -> None:
        async with site.client() as client:
            for number in range(4):
                reply = await client.ask(head + struct.pack("<2f", number, 5), PATH, *headers)
                assert reply.status == 200, reply.body
                assert reply.body[-8:] == struct.pack("<2f", 2 * number, 10)

    through(tmp_path, then)


def test_a_worker_that_dies_costs_no_request_its_answer(tmp_path: Path) -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            for values in ((1, 2), (1, 2), (99, 1), (1, 2)):
                reply = await client.ask(body(*values), PATH)
                assert reply.status == 200, reply.body
                assert json.loads(reply.body)["outputs"][0]["data"] == [2 * value for value in values]
        assert [event.outcome for event in site.events if isinstance(event, RequestEnded)] == ["done"] * 4

    through(tmp_path, then)


@pytest.mark.interpreted("replaces a method of a compiled class")
def test_what_is_raised_while_an_answer_is_written_ends_its_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    async def then(site: Site) -> None:
        async with site.client() as client, site.client() as other:
            for each in (client, client, other, other):
                assert (await each.ask(body(1, 2), PATH)).status == 200
            with monkeypatch.context() as patch:
                patch.setattr(HttpCall, "_deliver_prediction", broken)
                reply = await client.ask(body(1, 2), PATH)
                assert reply.status == 500, reply.body
            assert (await client.ask(body(1, 2), PATH)).status == 200
            assert (await other.ask(body(1, 2), PATH)).status == 200
        (pool,) = site.router._pools.values()
        assert pool.is_idle
        assert [member.outstanding for member in pool.fleet.members] == [0]
        assert site.router.replica_statuses("twice")[0].restarts == 0

    through(tmp_path, then)


def test_a_client_that_leaves_is_not_computed_for(tmp_path: Path, dispatched: list[str], cancelled: list[str]) -> None:
    held = Held(tmp_path)

    async def then(site: Site) -> None:
        async with site.client() as busy, site.client() as client:
            for _ in range(2):
                assert (await client.ask(body(), PATH)).status == 200
            busy.send(body(13, 0), PATH)
            await busy.writer.drain()
            await held.is_computing()
            client.send(body(), PATH)
            await client.writer.drain()
            await until(lambda: len(dispatched) == 4, "it is on its way")
            client.writer.close()
            await until(lambda: cancelled == dispatched[3:], "the worker is told")
            held.let_go()
            assert (await busy.reply()).status == 200
        served = await site.served(4)
        assert sorted(event.status for event in served) == [200, 200, 200, 499]
        outcomes = [event.outcome for event in site.events if isinstance(event, RequestEnded)]
        assert sorted(outcomes) == ["cancelled", "done", "done", "done"]
        assert site.router._pools["twice"].is_idle

    through(tmp_path, then)


def test_the_timeout_that_openais_client_tells_is_a_deadline(tmp_path: Path, dispatched: list[str]) -> None:
    held = Held(tmp_path)
    patient, impatient = "x-stainless-read-timeout: 600", "x-stainless-read-timeout: 0.05"

    async def then(site: Site) -> None:
        async with site.client() as busy, site.client() as client:
            for header in (patient, impatient):
                assert (await client.ask(body(), PATH, header)).status in (200, 408)  # a loaded machine is late
            busy.send(body(13, 0), PATH)
            await busy.writer.drain()
            await held.is_computing()
            num_before = len(dispatched)
            client.send(body(), PATH, impatient)
            await client.writer.drain()
            await until(lambda: len(dispatched) > num_before, "it is on its way")
            due_at = clock.now() + 0.05 + SDK_GRACE_S
            await until(lambda: clock.now() > due_at, "its time is over")
            held.let_go()
            assert (await client.reply()).status == 408
            assert (await busy.reply()).status == 200

    through(tmp_path, then)


def test_a_server_that_is_told_to_stop_answers_what_is_on_its_way(tmp_path: Path, dispatched: list[str]) -> None:
    held = Held(tmp_path)

    async def then(site: Site) -> None:
        async with site.client() as client:
            for _ in range(2):
                assert (await client.ask(body(), PATH)).status == 200
            client.send(body(13, 0), PATH)
            await until(lambda: len(dispatched) == 3, "it is on its way")
            site.server.stop()
            held.let_go()
            reply = await client.reply()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            assert await site.router.drain(5)

    through(tmp_path, then)


def test_a_quota_is_kept(tmp_path: Path) -> None:
    door = Narrow()

    async def then(site: Site) -> None:
        async with site.client() as client:
            for _ in range(3):
                assert (await client.ask(body(), PATH)).status == 200
            door.left = 1
            assert [(await client.ask(body(), PATH)).status for _ in range(3)] == [200, 429, 429]
            reply = await client.ask(body(), PATH)
            assert json.loads(reply.body) == {"error": "enough"}
            door.left = 10
            assert (await client.ask(body(), PATH)).status == 200
        assert LOCAL.tenant == ""

    through(tmp_path, then, door)


def test_a_key_is_looked_up_for_every_request(tmp_path: Path) -> None:
    class Counting(OpenDoor):
        num_asked = 0

        def authenticate(self, token: str | None) -> Principal:
            self.num_asked += 1
            return super().authenticate(token)

    door = Counting()

    async def then(site: Site) -> None:
        async with site.client() as client:
            for number in range(4):
                await client.ask(body(), PATH)
                await client.ask(body(), PATH, f"x-request-id: r{number}")
                await client.ask(body(parameters={"priority": 1}), PATH)
        assert door.num_asked == 12

    through(tmp_path, then, door)
