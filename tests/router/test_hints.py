"""Two routers that share remote servers: by hashes, and by hints, they send a prompt to the same server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from tests.remote.fault_server import FaultServer, Talk, completion
from tests.worker.watching import routing, until

from inferd.config import BreakerConfig, Config, ModelConfig, RemoteConfig, RoutingConfig
from inferd.router.choosing.affinity import prefixes, relayed_text
from inferd.router.choosing.suspects import Suspects
from inferd.router.hints import MAX_KEYS, Hints, ModelHints, adopt_hints, hints_of, num_hints
from inferd.router.pool import Pool
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import Relay, Request

NO_EJECTION = RoutingConfig(eject_factor=0)


async def well(talk: Talk) -> None:
    await talk.answer(completion("well"))


def model_of(urls: list[str]) -> ModelConfig:
    return ModelConfig(
        source=f"openai:{urls[0]}",
        remotes=tuple(RemoteConfig(url=url) for url in urls[1:]),
        breaker=BreakerConfig(failures=1, cooldown_s=60),
        routing=NO_EJECTION,
    )


@contextlib.asynccontextmanager
async def pair(num_servers: int = 4) -> AsyncIterator[tuple[list[Router], list[FaultServer]]]:
    """Two routers that name the same servers in another order, and spell their addresses otherwise."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FaultServer(well).running()) for _ in range(num_servers)]
        urls = [server.url for server in servers]
        spelled = [url.replace("http://", "HTTP://") + "/" for url in reversed(urls)]
        routers = []
        for named in (urls, spelled):
            config = Config(models={"m": model_of(named)})
            router, _ = await stack.enter_async_context(routing(config))
            await router.settled()
            routers.append(router)
        yield routers, servers


async def ask(router: Router, text: str, name: str, tenant: str = "t") -> None:
    request = Request(id=name, model="m", tenant=tenant)
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": text}]})
    items = [item async for item in open_stream(router, request, Relay(path="/chat/completions", body=body))]
    assert items[-1].end is not None
    assert items[-1].end.outcome == "done"


def asked(servers: list[FaultServer]) -> list[int]:
    """How many requests each server has got."""
    return [sum(talk.path.endswith("/chat/completions") for talk in server.talks) for server in servers]


async def where(router: Router, servers: list[FaultServer], text: str, name: str) -> int:
    """The server that gets a request."""
    before = asked(servers)
    await ask(router, text, name)
    (index,) = [index for index, (was, is_now) in enumerate(zip(before, asked(servers), strict=True)) if is_now > was]
    return index


def test_prompts_with_an_equal_beginning_go_to_one_server_from_both_without_an_exchange() -> None:
    async def scenario() -> None:
        async with pair() as ((one, two), servers):
            chosen = set()
            for number in range(12):
                text = f"{number} " * 200
                at = await where(one, servers, text, f"a{number}")
                assert await where(two, servers, text + "and more " * 100, f"b{number}") == at
                chosen.add(at)
            assert len(chosen) > 1, "different prompts are spread"

    asyncio.run(scenario())


def test_what_a_server_received_elsewhere_is_preferred_by_hints_alone() -> None:
    """The first router was forced to a server that its hash would not choose."""

    async def scenario() -> None:
        async with pair() as ((one, two), servers):
            text = "a system prompt " * 40
            home = await where(one, servers, text, "first")
            hints = one.hints()
            (keys,) = hints["m"].prompts.values()
            other = next(index for index in range(len(servers)) if index != home)
            (identity,) = {
                member.identity for member in one._pools["m"].fleet.remotes if member.replica.name in servers[other].url
            }
            assert two.adopt_hints("one", {"m": ModelHints({identity: keys})}) == len(keys) // 8
            assert two.num_by_hints() == 0
            assert await where(two, servers, text, "second") == other
            assert await where(two, servers, text, "third") == other
            assert two.num_by_hints() == 1, "the second request went there because the first one did"
            two.adopt_hints("one", {"m": ModelHints({identity: keys})})
            assert await where(two, servers, text, "fourth") == other
            assert two.num_by_hints() == 1, "what is known is no news"
            assert one.hints() == {}, "prompts are told once"

    asyncio.run(scenario())


def test_the_latest_prompts_are_told_each_key_once_and_what_does_not_fit_never() -> None:
    async def scenario() -> None:
        async with pair(2) as ((one, _), _):
            for number, text in enumerate(("first " * 600, "second " * 600, "second " * 600)):
                await ask(one, text, f"n{number}")
            body = msgspec.json.encode({"messages": [{"role": "user", "content": "second " * 600}]})
            keys = prefixes("t", relayed_text(body))
            placement = one._pools["m"].placement
            assert len(keys) > 12
            assert list(placement.take_recent(12).values()) == [keys[:12]]
            assert placement.take_recent(12) == {}

    asyncio.run(scenario())


def test_hints_are_bounded_and_those_of_unknown_servers_and_models_change_nothing() -> None:
    async def scenario() -> None:
        async with pair(2) as ((one, two), _):
            for number in range(40):
                await ask(one, f"{number} " + "x" * 16_000, f"n{number}")
            packed = one.hints()["m"].prompts.values()
            assert 0 < sum(len(keys) for keys in packed) <= 8 * MAX_KEYS
            lies: Hints = {
                "m": ModelHints({"http://elsewhere m": b"\0" * 80}, ["http://elsewhere m"]),
                "n": ModelHints(),
            }
            assert two.adopt_hints("liar", lies) == 0
            await ask(two, "hello " * 100, "after")
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(
                    msgspec.msgpack.encode({"m": ModelHints({"s": b"\0" * (8 * MAX_KEYS + 8)})}), type=Hints
                )

    asyncio.run(scenario())


def test_a_server_that_fails_at_one_is_tried_last_by_the_other_and_never_excluded() -> None:
    async def broken(talk: Talk) -> None:
        await talk.answer(b"{}", 500)

    async def scenario() -> None:
        async with pair(2) as ((one, two), servers):
            text = "the same beginning " * 30
            home = await where(one, servers, text, "first")
            servers[home].script = broken
            await ask(one, text, "fails and is tried elsewhere")
            await until(lambda: bool(one.hints().get("m", ModelHints()).suspects), "the breaker is open")
            suspects = one.hints()["m"].suspects
            assert len(suspects) == 1
            two.adopt_hints("one", {"m": ModelHints(suspects=suspects)})
            before = asked(servers)[home]
            for number in range(5):
                await ask(two, text, f"avoids-{number}")
            assert asked(servers)[home] == before
            everything = [member.identity for member in two._pools["m"].fleet.remotes]
            two.adopt_hints("liar", {"m": ModelHints(suspects=everything)})
            await ask(two, text, "all are suspected")

    asyncio.run(scenario())


class Prompts:
    """The prompts of a model whose server received more of them than an exchange may tell."""

    def __init__(self) -> None:
        self.elsewhere: list[tuple[int, list[int]]] = []

    def take_recent(self, most: int) -> dict[str, list[int]]:
        return {"server0": list(range(most))}

    def received_elsewhere(self, index: int, keys: list[int]) -> None:
        self.elsewhere.append((index, keys))


def pools_of(num_remotes: Mapping[str, int], num_local: int = 0) -> dict[str, SimpleNamespace]:
    """Models with so many servers, named ``server0`` and so on."""
    pools = {}
    for name, count in num_remotes.items():
        remotes = [SimpleNamespace(identity=f"server{i}", index=i, is_suspect=i == 1) for i in range(count)]
        fleet = SimpleNamespace(
            has_remotes=count > 0,
            num_members=count + num_local,
            remotes=remotes,
            health=SimpleNamespace(suspects=Suspects()),
        )
        pools[name] = SimpleNamespace(fleet=fleet, placement=Prompts())
    return pools


def test_the_models_of_an_exchange_share_its_bound_and_those_without_a_choice_of_servers_tell_nothing() -> None:
    shared = hints_of(cast("Mapping[str, Pool]", pools_of({"a": 2, "alone": 1, "b": 3})))
    assert {name: num_hints({name: told}) for name, told in shared.items()} == {
        "a": MAX_KEYS // 2 + 1,
        "b": MAX_KEYS // 2 + 1,
    }
    assert num_hints(shared) == MAX_KEYS + 2, "the keys of both, and a suspect each"
    assert hints_of(cast("Mapping[str, Pool]", pools_of({"local": 0}, num_local=2))) == {}
    assert num_hints({}) == 0


def test_of_what_another_gateway_told_all_is_counted_that_is_about_servers_of_this_one() -> None:
    pools = pools_of({"m": 2})
    told = {
        "unknown": ModelHints({"server0": bytes(8)}, ["server0"]),
        "m": ModelHints({"elsewhere": bytes(16), "server1": bytes([7, *bytes(7), 1, 2, 3])}, ["elsewhere", "server1"]),
    }
    assert adopt_hints(cast("Mapping[str, Pool]", pools), "other", told, 1.0) == 2
    assert pools["m"].placement.elsewhere == [(1, [7])], "what is left of a key is none"
    assert pools["m"].fleet.health.suspects.now(1.0) == {"server1"}
    assert num_hints(told) == 1 + 1 + 2 + 1 + 2
