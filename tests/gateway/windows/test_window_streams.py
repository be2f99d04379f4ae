"""WindowCutter over a WebSocket, with the unmodified client of ``websockets`` and real workers behind the server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes import FakeDoor
from tests.gateway.windows.window_site import SUM, Site, floats
from tests.stopwatch import Stopwatch
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import Protocol
from websockets.typing import Subprotocol

from inferd import clock
from inferd.config import PayloadsConfig
from inferd.errors import QuotaExceeded
from inferd.events import HttpServed
from inferd.gateway.call import Call
from inferd.gateway.windows.stream import WindowStream
from inferd.http.connection import Connection
from inferd.http.exchange import Exchange
from inferd.http.handshake import _Handshake
from inferd.http.websocket import WebSocket
from inferd.observe.payloads.log import PayloadLog
from inferd.observe.payloads.store import PayloadStore
from inferd.router.replicas.replica import LocalReplica
from inferd.tenancy.principal import Principal


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("windows"))
    yield site
    site.stop()


async def heard(client: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(await asyncio.wait_for(client.recv(), 10))
    return message


async def answers(client: ClientConnection, count: int) -> list[float]:
    found = []
    for _ in range(count):
        message = await heard(client)
        assert message["type"] == "window", message
        found.append(message["outputs"][0]["data"][0])
    return found


async def closed(client: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed):
        await asyncio.wait_for(client.recv(), 10)
    return client.close_code or 0, client.close_reason or ""


async def ended_by(client: ClientConnection) -> tuple[str, int]:
    """The code of the last error, and the close's."""
    message = await heard(client)
    assert message["type"] == "error", message
    code, reason = await closed(client)
    assert reason
    assert message["error"]["message"].startswith(reason[:60])
    return message["error"]["code"], code


def test_a_connection_is_a_sequence_and_every_window_has_an_answer_in_order(site: Site) -> None:
    async def then() -> None:
        async with site.connected() as one, site.connected() as other:
            await one.send(floats(1))
            assert await heard(one) == {
                "type": "window",
                "window": 0,
                "begin": 0,
                "end": 1,
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}],
            }
            await other.send(floats(10, 20))
            await one.send(floats(2, 3, 4))
            assert await answers(one, 3) == [3, 6, 10]
            assert await answers(other, 2) == [10, 30]
        async with site.connected() as again:
            await again.send(floats(5))
            assert await answers(again, 1) == [5]

    site.talk(then)
    assert [(event.status, event.model, event.route) for event in site.windows()] == [
        (200, "sum", "/v2/models/{model}/stream")
    ] * 7
    (first, second) = [
        event.request_id for event in site.events if isinstance(event, HttpServed) and event.status == 101
    ][:2]
    assert {event.request_id for event in site.windows()} >= {f"{first}-0", f"{first}-3", f"{second}-1"}


def test_windows_roll_with_their_context(site: Site) -> None:
    async def then() -> None:
        async with site.connected("window=4&hop=2&context=1&sample_rate=8", "peak") as client:
            await client.send(floats(9, 1, 2))
            await client.send(floats(3, 4, 1, 1, 1, 1))
            found = [await heard(client) for _ in range(3)]
            assert [(one["begin"], one["end"], one["begin_s"], one["end_s"]) for one in found] == [
                (0, 4, 0.0, 0.5), (2, 6, 0.25, 0.75), (4, 8, 0.5, 1.0),
            ]  # fmt: skip
            assert [one["outputs"][0]["data"] for one in found] == [[9.0], [4.0], [4.0]]
            await client.send(json.dumps({"end": True}))
            assert (await heard(client))["end"] == 9
            assert await heard(client) == {"type": "end", "windows": 4}
            assert (await closed(client))[0] == 1000

    site.talk(then)


def test_samples_come_as_json_and_as_sixteen_bit_sound(site: Site) -> None:
    async def then() -> None:
        async with site.connected("window=2", "peak") as client:
            await client.send(json.dumps({"samples": [0.5, 2, -1]}))
            await client.send(json.dumps({"samples": [-3]}))
            assert await answers(client, 2) == [2.0, -1.0]
        async with site.connected("window=2&datatype=INT16", "peak") as client:
            await client.send(struct.pack("<4h", 16384, -5, -32768, -16384))
            assert await answers(client, 2) == [0.5, -0.5]

    site.talk(then)


def test_the_first_message_says_what_the_query_does_not(site: Site) -> None:
    async def then() -> None:
        async with site.connected("inputs.scale=3") as client:
            await client.send(json.dumps({"open": {"window": 1, "sample_rate": 100}}))
            assert await heard(client) == {
                "type": "open", "model": "sum", "version": "1", "input": "x", "datatype": "FP32", "window": 1, "hop": 1,
                "context": 0, "sample_rate": 100, "is_stateful": True,
            }  # fmt: skip
            await client.send(floats(1, 2))
            assert await answers(client, 2) == [3, 9]
            await client.send(json.dumps({"open": {"window": 2}}))
            assert (await heard(client))["error"]["param"] == "open"
            assert (await closed(client))[0] == 1007

    site.talk(then)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_window_whose_client_left_while_it_waited_is_never_begun(site: Site, says_so: bool) -> None:
    async def then() -> None:
        pool = site.router._pools["peak"]
        replica = pool.ready_replica()
        capacity, replica.capacity = replica.capacity, 0
        async with site.connected("window=1", "peak") as client:
            await client.send(floats(1))
            await site.until(lambda: len(pool._queue) == 1)
            if not says_so:
                client.transport.abort()
        await site.until(lambda: not len(pool._queue))
        replica.capacity = capacity
        await site.until(lambda: len(site.windows()) == 1)
        assert site.windows()[0].status == 499

    site.talk(then)


def test_a_state_is_forgotten_when_its_client_leaves(site: Site) -> None:
    async def then() -> None:
        for _ in range(12):  # of which the worker keeps eight at most
            async with site.connected() as client:
                await client.send(floats(1))
                assert await answers(client, 1) == [1]
                assert len(site.states()) == 1
            await site.until(lambda: not site.states())

    site.talk(then)


@pytest.mark.parametrize(
    ("message", "code", "close"),
    [
        ("not json", "invalid_json", 1007),
        ('{"samples": [1], "end": true}', "invalid_message", 1007),
        ('{"sample": [1]}', "unknown_parameter", 1007),
        ('{"samples": [1e400]}', "invalid_type", 1007),
        ('{"samples": [1e39]}', "invalid_value", 1007),
        (b"12345", "invalid_samples", 1007),
        ('{"samples": ["1"]}', "invalid_type", 1007),
    ],
)
def test_a_message_that_is_none_is_told_and_ends_the_stream(
    site: Site, message: str | bytes, code: str, close: int
) -> None:
    async def then() -> None:
        async with site.connected() as client:
            await client.send(message)
            assert await ended_by(client) == (code, close)

    site.talk(then)


@pytest.mark.parametrize(
    ("query", "model", "status", "says"),
    [
        (SUM, "nope", 404, "nope"),
        ("window=0&inputs.scale=1", "sum", 400, "window"),
        ("window=1&window=2", "sum", 400, "twice"),
        ("window=1", "sum", 400, "could take windows (x, scale)"),
        ("window=1&input=x", "sum", 400, "also needs scale"),
        ("window=1&input=y&inputs.scale=1", "sum", 400, "There is no input"),
        ("window=1&inputs.scale=1&inputs.nope=1", "sum", 400, "There is no input"),
        ("window=3&inputs.scale=1&channels=2", "sum", 400, "takes [-1, 1]"),
        ("window=4&shape=3,-1", "peak", 400, "does not hold 4 samples"),
        ("window=4&datatype=INT64", "peak", 400, "takes FP32"),
        ("window=16000000&channels=100", "peak", 400, "max_body_bytes"),
        ("hops=3&window=1", "peak", 400, "hops"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_the_first_sample(
    site: Site, query: str, model: str, status: int, says: str
) -> None:
    async def then() -> None:
        found, error = await site.refused(query, model)
        assert found == status
        assert says in error

    site.talk(then)


def test_a_version_has_a_stream_of_its_own(site: Site) -> None:
    async def then() -> None:
        async with site.connected(model="sum/versions/1") as client:
            await client.send(floats(1, 2))
            assert await answers(client, 2) == [1, 3]
        assert (await site.refused(model="sum/versions/2"))[0] == 404

    site.talk(then)
    assert {event.route for event in site.windows()} == {"/v2/models/{model}/versions/{version}/stream"}


def test_what_is_missing_is_told_with_the_first_sample(site: Site) -> None:
    async def then() -> None:
        async with site.connected("inputs.scale=1") as client:
            await client.send(floats(1))
            assert await ended_by(client) == ("missing_window", 1007)

    site.talk(then)


def test_a_stream_opens_only_with_a_key_in_a_header_or_a_subprotocol(site: Site) -> None:
    door = FakeDoor({"good": Principal(key_id="k", tenant="t"), "lists": Principal(scopes=frozenset(("models",)))})

    async def then() -> None:
        assert (await site.refused())[0] == 401
        assert (await site.refused(additional_headers={"authorization": "Bearer bad"}))[0] == 401
        assert (await site.refused(additional_headers={"x-api-key": "lists"}))[0] == 403
        both = [Subprotocol("inferd"), Subprotocol("bearer.good")]
        assert (await site.refused(subprotocols=[*both, Subprotocol("bearer.bad")]))[0] == 401
        async with site.connected(additional_headers={"authorization": "Bearer good"}) as client:
            await client.send(floats(1))
            assert await answers(client, 1) == [1]
        async with site.connected(subprotocols=both) as client:
            assert client.subprotocol == "inferd"
            assert "good" not in str(client.response)
            await client.send(floats(1, 1))
            assert await answers(client, 2) == [1, 2]
            door.keys.pop("good")
            await client.send(floats(1))
            assert (await ended_by(client))[1] == 1008

    site.talk(then, door)
    assert [permit.principal.tenant for permit in door.permits] == ["t"] * 3
    assert all(permit.settled for permit in door.permits)


def test_every_window_is_paid_for_and_one_too_many_costs_only_itself(site: Site) -> None:
    door = FakeDoor({"good": Principal(key_id="k", tenant="t")})

    async def then() -> None:
        key = {"authorization": "Bearer good"}
        async with site.connected("window=1", "peak", additional_headers=key) as client:
            await client.send(floats(1))
            assert await answers(client, 1) == [1]
            door.refusal = QuotaExceeded("Too much.", retry_after_s=2.0)
            await client.send(floats(2))
            refused = await heard(client)
            assert (refused["type"], refused["window"], refused["retry_after_s"]) == ("error", 1, 2.0)
            assert refused["error"]["type"] == "rate_limit_error"
            door.refusal = None
            await client.send(floats(3))
            assert await answers(client, 1) == [3]
        async with site.connected(additional_headers=key) as client:
            door.refusal = QuotaExceeded("Too much.", retry_after_s=2.0)
            await client.send(floats(2))
            assert (await ended_by(client))[1] == 1013  # a state would miss it

    site.talk(then, door)
    assert [event.status for event in site.windows()] == [200, 429, 200, 429]


def test_other_pages_and_other_names_are_refused(site: Site) -> None:
    async def then() -> None:
        status, _ = await site.refused(origin="https://evil.example")
        assert status == 403
        own = f"http://127.0.0.1:{site.gateway.port}"
        async with site.connected(origin=own) as client:
            await client.send(floats(1))
            assert await answers(client, 1) == [1]
        async with site.connected(origin="https://page.example") as client:
            await client.ping()

    site.talk(then, cors_origins=("https://page.example",))

    async def renamed() -> None:
        url = site.url().replace("127.0.0.1", "rebound.example")
        with pytest.raises(InvalidStatus) as refusal:
            async with connect(url, proxy=None, host="127.0.0.1", port=site.gateway.port):
                pass
        assert refusal.value.response.status_code == 403

    site.talk(renamed)


def test_an_idle_stream_is_closed_with_the_reason(site: Site) -> None:
    async def then() -> None:
        async with site.connected("window=1", "peak") as client:
            assert await ended_by(client) == ("stream_idle", 1008)

    site.talk(then)


def test_a_server_that_leaves_answers_what_was_full_and_says_so(site: Site) -> None:
    async def then() -> None:
        async with site.connected() as client:
            await client.send(floats(1))
            assert await answers(client, 1) == [1]
            site.gateway.stop()
            code, reason = await closed(client)
            assert (code, "shutting down" in reason) == (1001, True)

    site.talk(then)


def test_sixteen_streams_at_once_have_their_answers_within_half_a_second(site: Site) -> None:
    """The bound of M05, which is hundreds of times what it takes; ``bench/stream_windows.py`` measures that."""

    async def listen() -> list[float]:
        took = []
        async with site.connected("window=512&context=64", "peak") as client:
            for number in range(20):
                watch = Stopwatch()
                await client.send(floats(*[number] * 512))
                assert await answers(client, 1) == [number]
                took.append(watch.seconds)
        return took

    async def then() -> None:
        all_of_them = await asyncio.gather(*[listen() for _ in range(16)])
        took = sorted(one for each in all_of_them for one in each)
        assert took[len(took) * 95 // 100] <= 0.5

    site.talk(then)


def socket_of(site: Site) -> WebSocket:
    (one,) = site.gateway.connections
    assert isinstance(one, WebSocket)
    return one


def test_silence_is_probed_and_a_peer_that_vanished_is_given_up(site: Site) -> None:
    async def then() -> None:
        async with site.connected() as client:
            socket = socket_of(site)
            for _ in range(2):  # a client that lives answers
                socket.check_timeouts(clock.now() + 100)
                assert socket._pinged_at
                await site.until(lambda: not socket._pinged_at)
            await client.send(floats(1))
            assert await answers(client, 1) == [1]
            client.transport.pause_reading()  # and now it does not
            socket.check_timeouts(clock.now() + 100)
            socket.check_timeouts(clock.now() + 200)
            await site.until(lambda: not site.gateway.connections)
            client.transport.resume_reading()

    site.talk(then)


def test_what_a_stream_took_is_given_back_without_the_collector(site: Site) -> None:
    async def then() -> None:
        before = kept()
        for _ in range(3):
            async with site.connected() as client:  # closes
                await client.send(floats(1))
                assert await answers(client, 1) == [1]
            async with site.connected() as client:  # is refused
                await client.send("nonsense")
                await ended_by(client)
            async with site.connected("window=1", "peak") as client:  # is cut
                await client.send(floats(*[1] * 1000))
                client.transport.abort()
            async with site.connected() as client:  # ends
                await client.send(json.dumps({"end": True}))
                assert (await heard(client))["type"] == "end"
                await closed(client)
            await site.refused("window=0")
        await site.until(lambda: not site.gateway.connections and not site.gateway._tasks)
        assert kept() == before

    gc.collect()
    gc.disable()
    try:
        site.talk(then)
    finally:
        gc.enable()


def kept() -> Counter[str]:
    """Objects of connections, of which none must stay. The client's own are not ours to free."""
    ours = {Call, Exchange, Connection, WebSocket, WindowStream, Protocol, _Handshake}
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in ours)


def test_a_client_that_does_not_read_is_not_read_from_and_delays_no_other(site: Site) -> None:
    """Pings have answers, and windows too; what waits for a client is bounded."""

    async def then() -> None:
        async with site.connected("window=1", "peak", max_queue=1) as slow, site.connected() as other:
            slow.transport.pause_reading()
            sent = 0
            async with asyncio.timeout(20):
                with contextlib.suppress(TimeoutError):
                    while sent < 64 << 20:
                        await asyncio.wait_for(slow.send(bytes(1 << 18)), 1.0)
                        sent += 1 << 18
            assert sent < 32 << 20
            await other.send(floats(1, 2))
            assert await answers(other, 2) == [1, 3]
            stuck = [one for one in site.gateway.connections if isinstance(one, WebSocket) and one._is_reading_paused]
            assert len(stuck) == 1
            assert stuck[0]._waiting_bytes < 4 << 20
            slow.transport.abort()

    site.talk(then)


def test_a_state_that_died_with_its_worker_ends_the_stream(site: Site) -> None:
    async def then() -> None:
        (replica,) = site.router.replicas("sum")
        assert isinstance(replica, LocalReplica)
        async with site.connected() as client:
            await client.send(floats(1))
            assert await answers(client, 1) == [1]
            pid = replica.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await site.until(lambda: replica.pid not in (pid, None) and replica.is_ready)
            await client.send(floats(1))
            assert await ended_by(client) == ("sequence_not_found", 1012)
        async with site.connected() as client:
            await client.send(floats(1))
            assert await answers(client, 1) == [1]

    site.talk(then)


def test_each_window_of_a_recorded_tenant_is_recorded_by_sizes_and_digests(site: Site, tmp_path: Path) -> None:
    log = PayloadLog(tmp_path, PayloadsConfig(tenants=("*",), keep=("prompts", "answers")), lambda: None)

    async def then() -> None:
        async with site.connected() as client:
            await client.send(floats(1, 2))
            assert await answers(client, 2) == [1, 3]

    site.talk(then, payloads=log)
    log.close()
    records = [record for record in PayloadStore(tmp_path).records() if record["status"] == 200]
    assert [record["request_id"].rpartition("-")[2] for record in records] == ["0", "1"]
    for record in records:
        assert (record["model"], record["route"]) == ("sum", "/v2/models/{model}/stream")
        assert record["request"]["bytes"] > 4
        assert record["answer"]["bytes"] > 4
        assert "body" not in record["request"]
        assert "body" not in record["answer"]
    assert records[0]["request"]["sha256"] != records[1]["request"]["sha256"]
