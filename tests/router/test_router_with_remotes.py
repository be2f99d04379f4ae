"""The router in front of remote servers over real sockets: what fails is left alone, what can be saved is saved."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from tests.remote.fault_server import CHUNKED, FaultServer, Script, Talk, completion, piece
from tests.stopwatch import Stopwatch
from tests.worker.watching import Witness, ask, routing, text_of, until

from inferd import clock
from inferd.config import BreakerConfig, Config, ModelConfig, RemoteConfig, RemoteSettings, RetryConfig, RoutingConfig
from inferd.errors import InvalidRequest, Unavailable
from inferd.events import BreakerChanged, Retried
from inferd.router.replicas.remote_replica import RemoteReplica
from inferd.router.router import Router
from inferd.router.status import Applied
from inferd.router.stream import Stream, open_stream
from inferd.types import End, Output, Relay, Relayed, Request

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CALM = BreakerConfig(failures=1000)


async def well(talk: Talk) -> None:
    await talk.answer(completion("well"))


async def badly(talk: Talk) -> None:
    await talk.answer(b"{}", 500)


async def never(talk: Talk) -> None:
    await talk.gone()


async def slowly(talk: Talk) -> None:
    await asyncio.sleep(0.1)
    await talk.answer(completion("slow"))


@contextlib.asynccontextmanager
async def remotes(
    scripts: Sequence[Script],
    *,
    retry: RetryConfig = RetryConfig(),
    breaker: BreakerConfig = CALM,
    routing_config: RoutingConfig = RoutingConfig(),
    settings: Sequence[dict[str, object]] = (),
    local: bool = False,
) -> AsyncIterator[tuple[Router, Witness, list[FaultServer]]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FaultServer(script).running()) for script in scripts]
        configs = [RemoteConfig(url=server.url) for server in servers]
        for number, changes in enumerate(settings):
            configs[number] = msgspec.structs.replace(configs[number], **changes)
        model = ModelConfig(source="tiny" if local else f"openai:{configs[0].url}", retry=retry, breaker=breaker)
        model = msgspec.structs.replace(model, routing=routing_config, remotes=tuple(configs[0 if local else 1 :]))
        if settings and not local:
            model = msgspec.structs.replace(model, remote=msgspec.convert(settings[0], RemoteSettings))
        router, witness = await stack.enter_async_context(routing(Config(models={"tiny": model})))
        yield router, witness, servers


def send(
    router: Router, name: str, *, idempotent: bool = True, region: str = "", deadline_s: float | None = None
) -> Stream:
    request = Request(id=name, model="tiny", idempotent=idempotent, region=region, deadline_s=deadline_s)
    return open_stream(router, request, Relay(path="/chat/completions", body=BODY))


async def answer(stream: Stream) -> tuple[bytes, End]:
    items = [item async for item in stream]
    assert items[-1].end is not None
    return b"".join(item.data for item in items if isinstance(item, Relayed)), items[-1].end


def retried(witness: Witness) -> list[tuple[str, bool]]:
    return [(event.kind, event.granted) for event in witness.events if isinstance(event, Retried)]


def test_a_server_that_fails_costs_its_requests_a_second_try_elsewhere() -> None:
    async def scenario() -> None:
        async with remotes((badly, well), retry=RetryConfig(budget=1.0)) as (router, witness, servers):
            for number in range(20):
                data, end = await answer(send(router, f"r{number}"))
                assert b"well" in data
                assert end.outcome == "done"
                met, timings = end.routing, end.timings
                assert met is not None
                assert timings.dispatched is not None
                assert timings.finished is not None
                assert met.was_remote
                assert 0.0 <= met.lost_s <= timings.finished - timings.dispatched
                assert (met.lost_s > 0.0) == (met.attempts == 2)
                assert end.engine is None, "only a worker of this server measures it"
            assert retried(witness) == [("retry", True)] * len(servers[0].talks)
            assert servers[0].talks
            assert len(witness.ended()) == 20

    asyncio.run(scenario())


async def busy(talk: Talk) -> None:
    await talk.answer(b"{}", 429)


@pytest.mark.parametrize(
    ("script", "outcome", "kind"), [(busy, "refused", "overloaded"), (badly, "failed", "upstream_failed")]
)
def test_a_request_is_refused_by_a_busy_server_and_fails_with_a_server_that_fails(
    script: Script, outcome: str, kind: str
) -> None:
    """What was refused costs its tenant nothing."""

    async def scenario() -> None:
        async with remotes((script,)) as (router, _, _):
            _, end = await answer(send(router, "once", idempotent=False))
            assert end.failure is not None
            assert (end.outcome, end.failure.kind) == (outcome, kind)

    asyncio.run(scenario())


def test_retries_are_a_part_of_live_traffic_and_none_for_what_may_not_run_twice() -> None:
    async def scenario() -> None:
        async with remotes((badly, badly), retry=RetryConfig(budget=0.2)) as (router, witness, servers):
            await answer(send(router, "once", idempotent=False))
            assert sum(len(server.talks) for server in servers) == 1
            assert retried(witness) == [], "it asks for none, although the budget would grant it"
            ends = [(await answer(send(router, f"r{number}")))[1] for number in range(40)]
            assert all(end.failure is not None and end.failure.kind == "upstream_failed" for end in ends)
            granted = [granted for _, granted in retried(witness)]
            assert 1 <= sum(granted) <= 0.2 * 40 + 3

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
def test_what_a_server_refuses_as_the_clients_fault_opens_no_breaker_and_is_not_tried_again(status: int) -> None:
    async def refuses(talk: Talk) -> None:
        await talk.answer(b'{"error":{"message":"no"}}', status)

    async def scenario() -> None:
        async with remotes((refuses, refuses), breaker=BreakerConfig(failures=1)) as (router, witness, servers):
            for number in range(6):
                assert (await answer(send(router, f"r{number}")))[1].outcome == "refused"
            assert [replica.breaker for replica in router.replica_statuses("tiny")] == ["closed", "closed"]
            assert not [event for event in witness.events if isinstance(event, BreakerChanged)]
            assert (sum(len(server.talks) for server in servers), retried(witness)) == (6, [])

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("script", [badly, never])
def test_a_request_goes_to_each_server_once_and_no_more(script: Script, count: int) -> None:
    async def scenario() -> None:
        impatient: list[dict[str, object]] = [{"first_byte_timeout_s": 0.1}] * count
        retry = RetryConfig(max_attempts=10, budget=1.0)
        async with remotes([script] * count, retry=retry, settings=impatient) as (router, witness, servers):
            _, end = await answer(send(router, "r"))
            assert end.failure is not None
            assert end.failure.code == ("upstream_error" if script is badly else "upstream_first_byte_timeout")
            assert [len(server.talks) for server in servers] == [1] * count
            assert retried(witness) == [("retry", True)] * (count - 1)

    asyncio.run(scenario())


def test_a_second_try_waits_for_a_server_that_has_not_failed_it() -> None:
    async def scenario() -> None:
        let_go = asyncio.Event()

        async def waits(talk: Talk) -> None:
            await let_go.wait()
            await talk.answer(completion("well"))

        one_at_a_time: list[dict[str, object]] = [{}, {"max_in_flight": 1}]
        retry = RetryConfig(budget=1.0)
        async with remotes((badly, waits), retry=retry, settings=one_at_a_time) as (router, witness, servers):
            streams = [send(router, f"r{number}") for number in range(5)]
            await until(
                lambda: bool(servers[1].talks) and len(servers[0].talks) == 4, "one is busy, one failed the others"
            )
            let_go.set()
            for stream in streams:
                data, end = await answer(stream)
                assert b"well" in data
                assert end.outcome == "done"
            assert retried(witness) == [("retry", True)] * 4
            assert [len(server.talks) for server in servers] == [4, 5]

    asyncio.run(scenario())


def test_a_second_try_for_which_no_server_is_left_ends_with_what_the_first_one_said() -> None:
    async def scenario() -> None:
        one_at_a_time: list[dict[str, object]] = [{}, {"max_in_flight": 1}]
        retry = RetryConfig(budget=1.0)
        async with remotes((badly, never), retry=retry, settings=one_at_a_time) as (router, _, servers):
            streams = [send(router, f"r{number}") for number in range(4)]
            await until(
                lambda: router.models()[0].waiting == 3 and bool(servers[1].talks), "three wait for the other one"
            )
            pool = router._pools["tiny"]
            (_, leaving) = pool.fleet.members
            retiring = asyncio.ensure_future(pool.fleet._retire(leaving))
            await until(
                lambda: sum(stream.request.end is not None for stream in streams) == 3, "nothing is left to wait for"
            )
            for stream in streams:
                if stream.request.end is None:
                    stream.close()
            ends = [(await answer(stream))[1] for stream in streams]
            codes = [end.failure.code for end in ends if end.failure is not None]
            assert codes == ["upstream_error"] * 3
            await retiring

    asyncio.run(scenario())


@pytest.mark.parametrize("deadline_s", [None, 0.2])
def test_requests_that_are_given_up_do_not_close_a_breaker(deadline_s: float | None) -> None:
    async def scenario() -> None:
        breaker = BreakerConfig(failures=3, cooldown_s=0.1, successes=1)
        async with remotes((badly,), breaker=breaker, retry=RetryConfig(max_attempts=1)) as (router, witness, servers):
            for number in range(3):
                await answer(send(router, f"r{number}"))
            await until(lambda: router.replica_statuses("tiny")[0].breaker == "open", "the breaker is open")
            servers[0].script = never
            while len(servers[0].talks) < 8:
                with contextlib.suppress(Unavailable):
                    stream = send(router, f"probe-{time.monotonic()}", deadline_s=deadline_s)
                    seen = len(servers[0].talks)
                    await until(lambda seen=seen: len(servers[0].talks) > seen, "it is let through")  # type: ignore[misc]
                    if deadline_s is None:
                        stream.close()
                    await answer(stream)
                await asyncio.sleep(0.01)
            assert [event.state for event in witness.events if isinstance(event, BreakerChanged)] == ["open"]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_server_slower_than_every_deadline_is_set_aside(is_cancelled: bool) -> None:
    async def scenario() -> None:
        async with remotes((never, well, well)) as (router, _, servers):

            async def ask(name: str) -> None:
                stream = send(router, name, deadline_s=None if is_cancelled else 0.3)
                if is_cancelled:
                    asyncio.get_running_loop().call_later(0.3, stream.close)
                await answer(stream)

            while not any(status.ejected for status in router.replica_statuses("tiny")):
                await asyncio.gather(*(ask(f"{time.monotonic()}-{number}") for number in range(9)))
            before = len(servers[0].talks)
            for number in range(20):
                assert (await answer(send(router, f"r{number}")))[1].outcome == "done"
            assert len(servers[0].talks) == before
            assert [status.ejected for status in router.replica_statuses("tiny")] == [True, False, False]

    asyncio.run(scenario())


def test_a_request_that_was_given_up_is_no_work_done() -> None:
    async def scenario() -> None:
        one: list[dict[str, object]] = [{"max_in_flight": 1}]
        async with remotes((never,), settings=one) as (router, _, servers):
            streams = [send(router, f"r{number}") for number in range(30)]
            for number, stream in enumerate(streams[:20]):
                await until(lambda number=number: len(servers[0].talks) > number, "it is under way")  # type: ignore[misc]
                stream.close()
                await answer(stream)
            assert router._pools["tiny"].availability.drain_rate.per_s(clock.now()) is None
            for stream in streams[20:]:
                stream.close()

    asyncio.run(scenario())


def test_when_every_breaker_is_open_requests_are_refused_at_once_until_a_probe_succeeds() -> None:
    async def scenario() -> None:
        breaker = BreakerConfig(failures=3, cooldown_s=0.5, successes=1)
        async with remotes((badly,), breaker=breaker, retry=RetryConfig(max_attempts=1)) as (router, witness, servers):
            for number in range(3):
                await answer(send(router, f"r{number}"))
            await until(lambda: router.replica_statuses("tiny")[0].breaker == "open", "the breaker is open")
            watch = Stopwatch()
            for number in range(20):
                with pytest.raises(Unavailable) as refused:
                    send(router, f"refused-{number}")
                assert refused.value.code == "breaker_open"
                assert (refused.value.retry_after_s or 0) >= 1
            assert watch.seconds < 20 * 0.05
            assert len(servers[0].talks) == 3
            servers[0].script = well

            async def passes() -> bool:
                try:
                    return (await answer(send(router, f"probe-{time.monotonic()}")))[1].outcome == "done"
                except Unavailable:
                    return False

            while not await passes():
                await asyncio.sleep(0.02)
            states = [event.state for event in witness.events if isinstance(event, BreakerChanged)]
            assert states == ["open", "closed"]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_broken", [True, False], ids=["broken", "deadline"])
def test_an_answer_that_breaks_off_counts_as_a_failure_and_one_past_its_deadline_does_not(is_broken: bool) -> None:
    async def begins(talk: Talk) -> None:
        await talk.send(CHUNKED)
        await talk.event(piece("begun"))
        if is_broken:
            talk.close()
        else:
            await talk.gone()

    async def scenario() -> None:
        async with remotes((begins,), breaker=BreakerConfig(failures=2)) as (router, witness, servers):
            for number in range(2):
                request = Request(id=f"r{number}", model="tiny", deadline_s=None if is_broken else 0.3)
                relay = Relay(path="/chat/completions", body=b'{"stream":true,' + BODY[1:], stream=True)
                data, end = await answer(open_stream(router, request, relay))
                assert (b"begun" in data or not is_broken, end.outcome) == (True, "failed")
            assert len(servers[0].talks) == 2
            opened = [(event.state, event.reason) for event in witness.events if isinstance(event, BreakerChanged)]
            assert opened == ([("open", "an answer broke off")] if is_broken else [])

    asyncio.run(scenario())


def test_a_hedge_takes_the_answer_that_begins_first_and_cancels_the_other() -> None:
    async def scenario() -> None:
        retry = RetryConfig(hedge_after_s=0.02, budget=1.0)
        async with remotes((never, well), retry=retry) as (router, witness, servers):
            for number in range(10):
                data, end = await answer(send(router, f"r{number}"))
                assert b"well" in data
                assert end.outcome == "done"
            assert retried(witness) == [("hedge", True)] * len(servers[0].talks)
            assert servers[0].talks
            await until(
                lambda: all(not r.num_in_flight for r in router.replicas("tiny")), "the abandoned attempts are gone"
            )
            assert len(witness.ended()) == 10

    asyncio.run(scenario())


def test_a_slow_server_is_set_aside() -> None:
    async def scenario() -> None:
        async with remotes((slowly, well, well)) as (router, witness, servers):

            async def is_ejected() -> bool:
                await asyncio.gather(*(answer(send(router, f"{time.monotonic()}-{number}")) for number in range(6)))
                return any(status.ejected for status in router.replica_statuses("tiny"))

            while not await is_ejected():
                pass
            before = len(servers[0].talks)
            for number in range(20):
                await answer(send(router, f"r{number}"))
            assert len(servers[0].talks) == before
            assert "ejected" in [event.state for event in witness.events if isinstance(event, BreakerChanged)]

    asyncio.run(scenario())


def test_requests_that_are_given_up_at_once_do_not_make_a_slow_server_look_quick() -> None:
    async def scenario() -> None:
        async with remotes((slowly, well, well)) as (router, _, _):
            for turn in range(100):
                given_up = [send(router, f"given up {turn} {number}") for number in range(12)]
                await asyncio.sleep(0.005)
                for stream in given_up:
                    stream.close()
                await asyncio.gather(*(answer(stream) for stream in given_up))
                await asyncio.gather(*(answer(send(router, f"{turn} {number}")) for number in range(6)))
                if router.replica_statuses("tiny")[0].ejected:
                    break
            assert [status.ejected for status in router.replica_statuses("tiny")] == [True, False, False]

    asyncio.run(scenario())


def test_a_server_that_was_set_aside_is_back_in_time_without_any_request() -> None:
    async def scenario() -> None:
        briefly = RoutingConfig(eject_s=0.3)
        async with remotes((slowly, well, well), routing_config=briefly) as (router, witness, _):

            def states() -> list[str]:
                return [event.state for event in witness.events if isinstance(event, BreakerChanged)]

            while "ejected" not in states():
                await asyncio.gather(*(answer(send(router, f"{time.monotonic()}-{number}")) for number in range(6)))
            await until(lambda: states()[-1] == "closed", "it is back")
            assert not any(status.ejected for status in router.replica_statuses("tiny"))

    asyncio.run(scenario())


def test_a_fallback_and_another_region_get_nothing_while_there_is_better() -> None:
    async def scenario() -> None:
        settings: list[dict[str, object]] = [{"region": "eu"}, {"fallback": True, "region": "us"}]
        async with remotes((well, well), settings=settings) as (router, _, servers):
            for number in range(10):
                await answer(send(router, f"r{number}"))
            assert (len(servers[0].talks), len(servers[1].talks)) == (10, 0)
            await answer(send(router, "there", region="us"))
            assert len(servers[1].talks) == 1
            with pytest.raises(Unavailable) as refused:
                send(router, "nowhere", region="mars")
            assert refused.value.code == "region_unavailable"

    asyncio.run(scenario())


def test_a_request_that_has_to_stay_in_a_region_stays_there_even_when_it_fails() -> None:
    """``eu`` is here and works, ``us`` is a server that fails: neither stands in for the other."""

    async def scenario() -> None:
        async with FaultServer(badly).running() as server:
            there = RemoteConfig(url=server.url, region="us")
            model = ModelConfig(
                source="tiny", region="eu", remotes=(there,), breaker=CALM, retry=RetryConfig(budget=1.0)
            )
            async with routing(Config(models={"tiny": model})) as (router, _):
                for number in range(10):
                    relay = Relay(path="/completions", body=BODY)
                    request = msgspec.structs.replace(ask(name=f"here-{number}"), region="eu")
                    items = [item async for item in open_stream(router, request, relay)]
                    assert text_of([item for item in items if isinstance(item, Output)]) == "abcd"
                assert not server.talks
                request = msgspec.structs.replace(ask(name="there"), region="us")
                (end,) = [
                    item.end async for item in open_stream(router, request, Relay(path="/completions", body=BODY))
                ]
                assert end is not None
                assert end.failure is not None
                assert end.failure.kind == "upstream_failed"
                assert server.talks

    asyncio.run(scenario())


def test_a_local_model_stands_in_for_a_remote_one_that_fails() -> None:
    async def scenario() -> None:
        retry = RetryConfig(budget=1.0)
        async with remotes((badly,), retry=retry, local=True) as (router, _, servers):
            for number in range(10):
                relay = Relay(path="/completions", body=BODY)
                items = [item async for item in open_stream(router, ask(name=f"r{number}"), relay)]
                assert text_of([item for item in items if isinstance(item, Output)]) == "abcd"
            assert servers[0].talks

    asyncio.run(scenario())


def test_remote_servers_come_and_go_under_load() -> None:
    async def scenario() -> None:
        async with remotes((well, slowly)) as (router, _, servers):
            sent = [send(router, f"r{number}") for number in range(30)]
            only = ModelConfig(source=f"openai:{servers[0].url}", breaker=CALM)
            said = await router.apply(Config(models={"tiny": only}))
            assert said == Applied(done=["tiny: 0 remote server(s) added, 1 removed"], failed=[])
            for stream in sent:
                assert (await answer(stream))[1].outcome == "done"
            assert [status.kind for status in router.replica_statuses("tiny")] == ["remote"]

    asyncio.run(scenario())


def test_a_model_whose_servers_are_away_is_unavailable_and_says_why() -> None:
    async def scenario() -> None:
        ill = True

        async def probe(talk: Talk) -> None:
            await talk.answer(b"{}", 503 if ill else 200)

        async with FaultServer(well, probe).running() as server:
            config = Config(models={"tiny": ModelConfig(source=f"openai:{server.url}")})
            async with routing(config, until_ready=False) as (router, _):
                assert router.models()[0].state == "loading"
                await asyncio.wait_for(router.settled(), 5)
                (status,) = router.models()
                assert (status.state, status.detail) == ("unavailable", "replica 0 is unreachable")
                assert router.replica_statuses("tiny")[0].detail == "The remote server answers a probe with status 503."
                with pytest.raises(Unavailable):
                    send(router, "a")
                ill = False
                await until(lambda: router.models()[0].state == "ready", "it is back")
                assert router.replica_statuses("tiny")[0].detail == ""
                for ask_for in (router.unload, router.restart):
                    with pytest.raises(InvalidRequest, match="runs on remote servers alone"):
                        await ask_for("tiny")
                assert (await router.load("tiny")).replicas_ready == 1
                assert (await answer(send(router, "b")))[1].outcome == "done"

    asyncio.run(scenario())


def conversation(number: int, turns: int) -> bytes:
    """The bytes of a chat that has gone on for so many turns."""
    said = [{"role": "user", "content": f"{number} and turn {turn} " + "x" * 400} for turn in range(turns)]
    return msgspec.json.encode({"model": "tiny", "temperature": turns / 8, "messages": said})


def where(servers: Sequence[FaultServer], body: bytes) -> list[int]:
    """The servers that were asked this, by index."""
    asked = msgspec.json.decode(body)["messages"]
    return [
        index
        for index, server in enumerate(servers)
        for talk in server.talks
        if msgspec.json.decode(talk.body)["messages"] == asked
    ]


def test_a_conversation_goes_on_where_it_began() -> None:
    async def scenario() -> None:
        async with remotes((well, well, well)) as (router, _, servers):
            homes = []
            for turns in range(1, 6):
                for number in range(8):
                    body = conversation(number, turns)
                    request = Request(id=f"r{number}-{turns}", model="tiny")
                    await answer(open_stream(router, request, Relay(path="/chat/completions", body=body)))
                homes.append([where(servers, conversation(number, turns)) for number in range(8)])
            assert all(home == homes[0] for home in homes)
            assert len({server for home in homes[0] for server in home}) > 1, "they are shared out"

    asyncio.run(scenario())


def test_a_stream_that_was_paused_while_it_waited_is_paused_where_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[str] = []
    pause = RemoteReplica.pause

    def noted(replica: RemoteReplica, request_id: str) -> None:
        paused.append(request_id)
        pause(replica, request_id)

    monkeypatch.setattr(RemoteReplica, "pause", noted)

    async def scenario() -> None:
        async with remotes((well,), settings=({"max_in_flight": 1},)) as (router, _, _):
            first, second = send(router, "first"), send(router, "second")
            second.request.pause()
            assert paused == [], "it waits"
            assert (await answer(first))[1].outcome == "done"
            assert paused == ["second"]
            second.request.resume()
            assert (await answer(second))[1].outcome == "done"

    asyncio.run(scenario())


def test_a_conversation_goes_anywhere_where_that_is_wanted() -> None:
    async def scenario() -> None:
        routing_config = RoutingConfig(prefix_affinity=False)
        async with remotes((well, well, well), routing_config=routing_config) as (router, _, servers):
            for number in range(24):
                request = Request(id=f"r{number}", model="tiny")
                await answer(open_stream(router, request, Relay(path="/chat/completions", body=conversation(0, 1))))
            assert len(set(where(servers, conversation(0, 1)))) == 3

    asyncio.run(scenario())
