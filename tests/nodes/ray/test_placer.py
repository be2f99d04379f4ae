"""Replicas that a scripted Ray cluster places: asked for, lost, without room, given back; the driver's own end."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from tests.nodes.joined import tiny
from tests.nodes.ray.placed import Placed, placed
from tests.nodes.test_nodes_serve import answered, in_flight
from tests.ports import free_port
from tests.tiers import THOROUGH
from tests.worker.tiny_backend import letters
from tests.worker.watching import text_of, until

from inferd import clock
from inferd.config import Config, ModelConfig, PlacementConfig, ScalingConfig
from inferd.errors import ConfigError
from inferd.nodes.listener import NodesListener
from inferd.nodes.ray import placer
from inferd.nodes.ray.messages import Connected, Ended, Seen
from inferd.nodes.ray.reservations import COMING_S, Machine, Needs, Room, Wanted
from inferd.router.replicas.machines import Machines, Node
from inferd.types import Output

SCRIPT = Path(__file__).resolve().parent / "scripted_ray.py"
ON_RAY = PlacementConfig(nodes="ray")


class Plan:
    """The machines of the scripted cluster; written whole, as the driver reads at any time."""

    def __init__(self, path: Path, **machines: object) -> None:
        self.path = path
        self.machines: dict[str, object] = {}
        self.put(**machines)

    def put(self, **machines: object) -> None:
        self.machines |= machines
        self._write()

    def take_out(self, name: str) -> None:
        del self.machines[name]
        self._write()

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.machines))
        part.rename(self.path)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "plan.json", a={"CPU": 1}, b={"CPU": 1})


def on_ray(
    plan: Plan, model: ModelConfig, monkeypatch: pytest.MonkeyPatch, address: str = "auto"
) -> AbstractAsyncContextManager[Placed]:
    command = (sys.executable, str(SCRIPT), str(plan.path))
    return placed(plan.path.parent, model, command, address, monkeypatch)


async def waiting_on_both(plan: Plan, made: Placed) -> tuple[Path, list[asyncio.Task[list[Output]]]]:
    """Eight requests at the replicas of the machines a and b, and the file that lets them go on."""
    await until(lambda: made.machines == ["a", "b"], "each machine has a replica", 60)
    gate = plan.path.with_name("gate")
    tasks = await answered(made, f"gate={gate}", 8)
    await until(lambda: min(in_flight(made)) > 0, "both machines have requests")
    return gate, tasks


def test_replicas_are_spread_and_those_of_a_lost_machine_start_where_there_is_room(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with on_ray(plan, tiny(2, ON_RAY), monkeypatch) as made:
            gate, tasks = await waiting_on_both(plan, made)
            plan.put(c={"CPU": 1})
            plan.take_out("a")
            await until(lambda: made.machines == ["b", "c"], "the lost replica is on the new machine", 60)
            gate.touch()
            assert [text_of(await task) for task in tasks] == [letters(6)] * 8

    asyncio.run(scenario())


def test_a_cluster_without_room_is_named_and_the_rest_serves(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with on_ray(plan, tiny(3, ON_RAY), monkeypatch) as made:
            short = "no room: a replica takes 1 CPU, and 0 CPU is free on the 2 machines of the Ray cluster; "
            await until(lambda: made.reasons == [f"{short}it starts when there is room"], "the shortage is told", 60)
            await until(lambda: made.machines == ["a", "b"], "the others serve", 60)
            (task,) = await answered(made, "hello", 1)
            assert text_of(await task) == letters(6)
            plan.put(b={"CPU": 2})
            await until(lambda: made.machines == ["a", "b", "b"], "it started where there is room now", 60)

    asyncio.run(scenario())


def test_reservations_follow_the_number_of_replicas(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.nodes.ray.reservations.SPARED_S", 0.1)

    async def scenario() -> None:
        async with on_ray(plan, tiny(1, ON_RAY, scaling=ScalingConfig(max=2, spare=False)), monkeypatch) as made:
            await until(lambda: len(made.machines) == 1, "it is there", 60)
            fleet = made.router._pools["tiny"].fleet
            assert fleet.scale(2)
            await until(lambda: made.machines == ["a", "b"], "two", 60)
            assert fleet.scale(1)
            await until(lambda: len(made.names) == 1, "one reservation is given back", 60)
            assert len(made.machines) == 1

    asyncio.run(scenario())


@THOROUGH
@pytest.mark.parametrize("cores", [1, 2])
def test_a_reload_replaces_replicas_with_and_without_room_for_both(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    plan.put(a={"CPU": cores}, b={"CPU": cores})

    async def scenario() -> None:
        before = tiny(2, ON_RAY, source="demo-draft")
        async with on_ray(plan, before, monkeypatch) as made:
            await until(lambda: made.machines == ["a", "b"], "both are there", 60)
            old = {id(replica) for replica in made.router.replicas("tiny")}
            after = msgspec.structs.replace(before, seed=1)
            applied = await made.router.apply(Config(models={"tiny": after}))
            assert applied.failed == []
            await until(lambda: len(made.machines) == 2, "both are there again", 60)
            assert not old & {id(replica) for replica in made.router.replicas("tiny")}

    asyncio.run(scenario())


def test_a_driver_that_ends_is_started_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with on_ray(plan, tiny(2, ON_RAY), monkeypatch) as made:
            await until(lambda: made.machines == ["a", "b"], "both are there", 60)
            names = set(made.names)
            assert made.placer._driver is not None
            made.placer._driver.kill()
            await until(lambda: len(made.places) == 2 and not names & set(made.places), "both are there anew", 60)

    asyncio.run(scenario())


def test_replicas_of_a_machine_that_drains_move_when_others_have_joined(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with on_ray(plan, tiny(2, ON_RAY), monkeypatch) as made:
            gate, tasks = await waiting_on_both(plan, made)
            before = set(made.names)
            plan.put(a={"CPU": 1, "drains": True})
            await until(lambda: len(made.placer._reservations) == 3, "another reservation is asked for", 60)
            assert made.machines == ["a", "b"], "without room elsewhere it serves on"
            assert set(made.names) == before
            plan.put(c={"CPU": 1})
            await until(lambda: made.machines.count("c") == 1, "the successor is ready on the new machine", 60)
            assert made.machines == ["a", "b", "c"], "the replica that leaves ends its requests first"
            gate.touch()
            assert [text_of(await task) for task in tasks] == [letters(6)] * 8
            await until(lambda: made.machines == ["b", "c"], "it has left", 60)
            await until(lambda: len(made.names) == len(made.placer._reservations) == 2, "it is given back", 60)
            (left,) = before - set(made.names)
            assert made.states(left) == ["ready", "leaving", "left"]

    asyncio.run(scenario())


def test_a_machine_that_drains_without_room_elsewhere_and_ends_is_a_lost_one(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with on_ray(plan, tiny(2, ON_RAY), monkeypatch) as made:
            gate, tasks = await waiting_on_both(plan, made)
            plan.put(a={"CPU": 1, "drains": True})
            await until(lambda: len(made.placer._reservations) == 3, "another reservation is asked for", 60)
            plan.take_out("a")
            await until(lambda: made.machines == ["b"], "the loss is noticed", 60)
            gate.touch()
            assert [text_of(await task) for task in tasks] == [letters(6)] * 8
            plan.put(c={"CPU": 1})
            await until(lambda: made.machines == ["b", "c"], "it is there again", 60)
            assert len(made.placer._reservations) == 2

    asyncio.run(scenario())


def test_an_address_without_a_cluster_is_refused_within_seconds(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"

    async def scenario() -> None:
        async with on_ray(plan, tiny(1, ON_RAY), monkeypatch, address) as made:
            said = (
                f"the Ray cluster {address} is not reached: no connection to {address} (Connection refused); is "
                "nodes.ray the address that ray start --head printed (HOST:6379), and does its machine run?"
            )
            await until(lambda: bool(made.reasons), "the reason is told", 60)
            assert made.reasons == [said]

    asyncio.run(scenario())


def test_a_cluster_that_does_not_answer_is_given_up(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer, "CONNECT_S", 0.5)

    async def scenario() -> None:
        async with on_ray(plan, tiny(1, ON_RAY), monkeypatch, "mute") as made:
            said = "the Ray cluster mute is not reached: Ray did not answer within 0.5 s; is nodes.ray the address"
            await until(lambda: any(why.startswith(said) for why in made.reasons), "the reason is told", 60)

    asyncio.run(scenario())


def test_a_cluster_that_is_not_there_is_named(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with on_ray(plan, tiny(1, ON_RAY), monkeypatch, "nowhere") as made:
            said = "the Ray cluster nowhere is not reached: Could not find any running Ray instance"
            await until(lambda: made.reasons == [said], "the reason is told", 60)

    asyncio.run(scenario())


def test_a_node_of_another_version_is_refused_by_name(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.nodes.listener.__version__", "9.9")

    async def scenario() -> None:
        async with on_ray(plan, tiny(1, ON_RAY), monkeypatch) as made:
            await until(lambda: any("and the server 9.9; install the same" in why for why in made.reasons), "told", 60)
            assert made.reasons[0].startswith("Ray started its node, which did not join: ")

    asyncio.run(scenario())


class Reserving:
    """A listener that ``joined`` nodes have joined."""

    host, port = "127.0.0.1", 1

    def __init__(self) -> None:
        self.joined: set[str] = set()

    def reserve(self, name: str, model: str) -> str:
        return "token"

    def link(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(labels={}) if name in self.joined else None

    def give_back(self, name: str) -> None: ...


def test_a_machine_is_coming_until_it_is_late_or_there_is_no_room_or_it_did_not_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(clock, "now", lambda: now)
    wanted = Wanted(1, Needs(cores=2), frozenset())
    site = SimpleNamespace(wanted=lambda: {"m": wanted}, notify=lambda: None)
    made = placer.Placer("auto", cast(NodesListener, Reserving()), cast(placer.Site, site))
    is_reached = "the Ray cluster auto is being reached"
    assert made.awaited("m") == (is_reached, True)
    now += COMING_S
    assert made.awaited("m") == (is_reached, False)
    made._received(Connected("10.0.0.1"))
    assert made.awaited("m") == (is_reached, False)

    def room(free: int) -> Room:
        return Room(nodes=[Machine(resources={"CPU": 4}, labels={})], free={"CPU": free})

    made._received(Seen(room(4)))
    assert made.awaited("m") == ("a machine of the Ray cluster is being asked for", True)
    assert made.has_room("m")
    made._ask("m", wanted.needs, frozenset(), now)
    assert made.awaited("m") == ("Ray starts a node for it", True)
    assert made.has_room("m")
    assert [made.awaited("other").reason, made.has_room("other")] == [
        "a machine of the Ray cluster is being asked for",
        False,
    ]
    made._received(Seen(room(3)))
    assert not made.has_room("m"), "the machine that is coming takes two of three"
    made._received(Seen(room(1)))
    assert made.awaited("m") == ("Ray starts a node for it", True), "the report may be older than the reservation"
    now += placer.LOOK_S
    reason, is_coming = made.awaited("m")
    assert (reason.endswith("; it starts when there is room"), is_coming) == (True, False)
    made._received(Seen(room(2)))
    now += COMING_S - placer.LOOK_S
    assert made.awaited("m") == ("Ray starts a node for it", False)
    (name,) = made._reservations
    made._received(Ended(name, "it broke"))
    made._follow_nodes(set(), now)
    failed = ("Ray started its node, which did not join: it broke", False)
    assert (made.awaited("m"), made._reservations) == (failed, {})


def test_a_node_whose_end_is_told_before_its_connection_ends_is_a_lost_one() -> None:
    listener = Reserving()
    made = placer.Placer("auto", cast(NodesListener, listener), cast(placer.Site, SimpleNamespace()))
    made._ask("m", Needs(cores=1), frozenset(), 1.0)
    (name,) = made._reservations
    listener.joined.add(name)
    made._received(Ended(name, "its machine is gone"))
    made._follow_nodes({name}, 2.0)
    assert list(made._reservations) == [name], "it serves until its connection ends"
    listener.joined.remove(name)
    made._follow_nodes(set(), 3.0)
    assert (made._reservations, made._failures, made._lost) == ({}, {}, {name: 3.0})


def test_a_node_that_no_look_saw_and_that_ended_is_given_back() -> None:
    listener = Reserving()
    made = placer.Placer("auto", cast(NodesListener, listener), cast(placer.Site, SimpleNamespace()))
    made._ask("m", Needs(cores=1), frozenset(), 1.0)
    (name,) = made._reservations
    made._follow_nodes(set(), 2.0)
    assert list(made._reservations) == [name], "it may join"
    listener.joined.add(name)  # it joins, ends and is gone between two looks
    made._received(Ended(name, "its machine is gone"))
    listener.joined.remove(name)
    made._follow_nodes(set(), 3.0)
    assert (made._reservations, made._failures) == ({}, {"m": (1, 3.0, "its machine is gone")})


def test_a_node_that_joins_is_looked_at_at_once() -> None:
    machines, looks = Machines(()), list[str]()
    machines.on_wanted = lambda: looks.append("look")
    machines.add_node(cast(Node, SimpleNamespace(name="a")))
    assert looks == ["look"]


def test_without_ray_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'inferd\[ray\]'"):
        placer.check_installed()
