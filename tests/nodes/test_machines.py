"""The choice of a machine: allowed by the settings, with room, spread; and never a machine that lacks one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import ModelConfig, ParallelConfig, PlacementConfig, RolesConfig
from inferd.nodes.life import RankLife
from inferd.router.replicas.machines import (
    HERE,
    Machine,
    Machines,
    allows,
    allows_ranks,
    choose,
    choose_for_ranks,
    has_room,
)
from inferd.worker.messages import FromWorker, Load
from inferd.worker.process import Life
from inferd.worker.supervisor import NoMachineError

LABELS = st.dictionaries(st.sampled_from(["zone", "region"]), st.sampled_from(["a", "b"]), max_size=2)
PLACEMENTS = st.builds(PlacementConfig, nodes=st.sampled_from(["any", "local", "only", "ray"]), labels=LABELS)
MODELS = st.builds(
    ModelConfig,
    source=st.just("tiny"),
    placement=PLACEMENTS,
    region=st.sampled_from([None, "a"]),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    parallel=st.builds(ParallelConfig, tensor=st.integers(1, 2)),
)
COUNTS = st.integers(0, 3)


def machine(name: str) -> st.SearchStrategy[Machine]:
    return st.builds(
        Machine,
        name=st.just(name),
        num_cores=st.integers(1, 4),
        free_bytes=st.none() | st.integers(-10, 10) if name == HERE else st.integers(-10, 10),
        num_replicas=COUNTS,
        num_of_model=COUNTS,
        num_gpus=st.integers(0, 2),
        labels=st.just({}) if name == HERE else LABELS,
        is_reserved=st.just(False) if name == HERE else st.booleans(),
    )


MACHINES = st.tuples(machine(HERE), machine("one"), machine("two"), machine("three"))
AVOIDED = st.frozensets(st.sampled_from([HERE, "one", "two"]))


@given(MACHINES, MODELS, st.integers(0, 10), AVOIDED)
def test_the_machine_is_allowed_has_room_and_no_other_such_has_fewer_of_the_model(
    machines: tuple[Machine, ...], model: ModelConfig, need_bytes: int, avoid: frozenset[str]
) -> None:
    fit = [m for m in machines if allows(model, m) and has_room(m, need_bytes) and m.name not in avoid]
    if not fit:
        with pytest.raises(NoMachineError):
            choose(machines, model, need_bytes, avoid)
        return
    chosen = choose(machines, model, need_bytes, avoid)
    assert chosen in fit
    assert chosen.num_of_model == min(m.num_of_model for m in fit)
    assert choose(machines[::-1], model, need_bytes, avoid) == chosen, "the order of the machines does not count"


@given(MACHINES, MODELS, st.integers(2, 5), st.integers(0, 30))
def test_the_ranks_of_a_replica_are_placed_together_or_not_at_all(
    machines: tuple[Machine, ...], model: ModelConfig, count: int, need_bytes: int
) -> None:
    model = msgspec.structs.replace(model, parallel=ParallelConfig(pipeline=count, machines=count))
    each = -(-need_bytes // count)
    fit = [m.name for m in machines if m.name != HERE and allows_ranks(model, m) and has_room(m, each)]
    if len(fit) < count - 1 or not has_room(machines[0], each):
        with pytest.raises(NoMachineError):
            choose_for_ranks(machines, model, need_bytes)
        return
    chosen = choose_for_ranks(machines, model, need_bytes)
    assert len(chosen) == len(set(chosen)) == count - 1
    assert set(chosen) <= set(fit)
    assert choose_for_ranks(machines[::-1], model, need_bytes) == chosen, "the order of the machines does not count"


def test_what_is_missing_for_the_ranks_of_a_replica_is_said() -> None:
    here = Machine(name=HERE, num_cores=2, free_bytes=None)
    small = Machine(name="small", num_cores=2, free_bytes=10, labels={"zone": "a"})
    model = ModelConfig(
        source="tiny", parallel=ParallelConfig(pipeline=2, machines=2), placement=PlacementConfig(labels={"zone": "a"})
    )
    with pytest.raises(NoMachineError, match="its ranks need 1 node with zone=a beside this machine, and none joined"):
        choose_for_ranks([here], model, 60)
    with pytest.raises(NoMachineError, match=r"a part of a replica takes 30 .*, and free are small 10 "):
        choose_for_ranks([here, small], model, 60)
    assert choose_for_ranks([here, small], model, 20) == ["small"]


@given(MODELS, machine("one"))
def test_what_the_settings_name_is_what_the_node_has(model: ModelConfig, node: Machine) -> None:
    if allows(model, node):
        assert model.placement.nodes != "local"
        assert all(node.labels.get(name) == value for name, value in model.placement.labels.items())
        assert model.region is None or node.labels.get("region") == model.region
        assert model.device != "cuda" or node.num_gpus >= model.parallel.count
        assert node.is_reserved == (model.placement.nodes == "ray"), "a reservation is for a model on Ray alone"


def test_without_nodes_every_replica_is_here() -> None:
    here = Machine(name=HERE, num_cores=2, free_bytes=None, num_of_model=64)
    assert choose([here], ModelConfig(source="tiny"), 10**15) is here


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"nodes": "only"}, "no node has joined; it starts when one does"),
        ({"labels": {"zone": "a"}}, "no node with zone=a has joined; it starts when one does"),
        ({}, "a replica takes 2.00 GiB, and no machine has so much free (this machine 1.00 GiB)"),
    ],
)
def test_what_is_missing_is_said(model: Mapping[str, object], said: str) -> None:
    here = Machine(name=HERE, num_cores=2, free_bytes=1 << 30)
    placement = PlacementConfig(**model)  # type: ignore[arg-type]
    with pytest.raises(NoMachineError) as error:
        choose([here], ModelConfig(source="tiny", placement=placement), 2 << 30)
    assert str(error.value) == said


class FakeNode:
    """A node of so many bytes on which nothing runs."""

    num_cores = 1
    num_gpus = 0
    labels: Mapping[str, str] = {}
    reserved_for = ""
    takes_replicas = True

    def __init__(self, name: str, memory_bytes: int) -> None:
        self.name = name
        self.memory_bytes = memory_bytes
        self.launched: list[str] = []

    def launch(
        self, name: str, load: Load, on_messages: Callable[[list[FromWorker]], None], on_writable: Callable[[], None]
    ) -> Life:
        self.launched.append(name)
        return None  # type: ignore[return-value]

    def launch_rank(
        self, name: str, load: Load, rank: int, on_messages: Callable[[list[FromWorker]], None]
    ) -> RankLife:
        raise AssertionError("a model of one machine has no ranks on nodes")


def test_a_spot_keeps_its_machine_and_takes_another_when_that_is_gone() -> None:
    async def scenario() -> None:
        machines = Machines(())
        one, two = FakeNode("one", 100), FakeNode("two", 100)
        machines.add_node(one)
        config = ModelConfig(source="tiny", placement=PlacementConfig(nodes="only"))

        def launch() -> None:
            spot.launch("tiny/0", Load("tiny", config), lambda messages: None, lambda: None)

        spot = machines.spot("tiny", lambda: config, 60)
        launch()
        machines.add_node(two)
        launch()
        assert (spot.node, len(one.launched)) == ("one", 2)
        assert machines.room_on_nodes("tiny", config, 60) == 1, "of 100 bytes 40 are left on one"
        machines.remove_node(one)
        launch()
        assert (spot.node, two.launched) == ("two", ["tiny/0"])
        assert machines.room_on_nodes("tiny", config, 60) == 0
        spot.leave()
        assert machines.room_on_nodes("tiny", config, 60) == 1

    asyncio.run(scenario())


def test_a_worker_that_took_more_than_planned_counts_with_what_it_took() -> None:
    async def scenario() -> None:
        machines = Machines(())
        machines.add_node(FakeNode("one", 100))
        config = ModelConfig(source="tiny", placement=PlacementConfig(nodes="only"))
        spot = machines.spot("tiny", lambda: config, 10)
        spot.launch("tiny/0", Load("tiny", config), lambda messages: None, lambda: None)
        spot.rss_bytes = lambda: 90
        with pytest.raises(NoMachineError, match="a replica takes 11 "):
            machines.choose(machines.spot("tiny", lambda: config, 11), ())
        assert machines.choose(machines.spot("tiny", lambda: config, 10), ()) == "one"

    asyncio.run(scenario())


def test_where_a_model_did_not_load_it_is_not_tried_again_until_all_were_tried() -> None:
    async def scenario() -> None:
        machines = Machines(())
        machines.add_node(FakeNode("one", 100))
        machines.add_node(FakeNode("two", 100))
        config = ModelConfig(source="tiny", placement=PlacementConfig(nodes="only"))
        spot = machines.spot("tiny", lambda: config, 0)
        places, moved = [], True
        while moved:
            spot.launch("tiny/0", Load("tiny", config), lambda messages: None, lambda: None)
            places.append(spot.node)
            moved = spot.may_move()
        assert places == ["one", "two"]
        assert not spot.avoided

    asyncio.run(scenario())


class FullCluster:
    """A cluster without room."""

    def awaited(self, model: str) -> tuple[str, bool]:
        return "no room", False

    def has_room(self, model: str) -> bool:
        return False


def test_a_cluster_is_asked_for_room_by_the_models_that_are_placed_in_it_alone() -> None:
    machines = Machines(())
    near = ModelConfig(source="x", placement=PlacementConfig(nodes="any"))
    far = ModelConfig(source="x", placement=PlacementConfig(nodes="ray"))
    spots = {"any": machines.spot("near", lambda: near, 1), "ray": machines.spot("far", lambda: far, 1)}
    assert {where: machines.may_add(spot) for where, spot in spots.items()} == {"any": True, "ray": True}
    machines.reserver = FullCluster()
    assert {where: machines.may_add(spot) for where, spot in spots.items()} == {"any": True, "ray": False}


def test_replicas_that_hand_blocks_over_run_on_this_machine() -> None:
    config = ModelConfig(source="x", roles=RolesConfig(), placement=PlacementConfig(nodes="any"))
    here, there = (Machine(name=name, num_cores=4, free_bytes=100) for name in (HERE, "one"))
    assert (allows(config, here), allows(config, there)) == (True, False)
    assert choose([there, here], config, 1).name == HERE
    assert allows(msgspec.structs.replace(config, roles=None), there)


def test_nodes_have_room_for_as_many_replicas_as_their_memory_holds_each() -> None:
    machines = Machines(())
    for name, memory_bytes in (("one", 250), ("two", 199), ("three", 99)):
        machines.add_node(FakeNode(name, memory_bytes))
    config = ModelConfig(source="tiny", placement=PlacementConfig(nodes="only"))
    assert machines.room_on_nodes("tiny", config, 100) == 2 + 1 + 0


def test_a_node_that_is_reserved_for_a_model_is_no_other_models() -> None:
    machines = Machines(())
    node = FakeNode("one", 100)
    node.reserved_for = "tiny"
    machines.add_node(node)
    assert [[one.name for one in machines.machines(model)] for model in ("tiny", "other")] == [[HERE, "one"], [HERE]]


def test_a_replica_that_waits_for_a_machine_looks_again_when_another_one_is_gone() -> None:
    async def scenario() -> None:
        machines = Machines(())
        config = ModelConfig(source="tiny")
        gone, waiting = (machines.spot("tiny", lambda: config, 60) for _ in range(2))
        waits = asyncio.create_task(waiting.wait_for_change())
        await asyncio.sleep(0)
        gone.leave()
        for _ in range(5):
            await asyncio.sleep(0)
        assert waits.done()

    asyncio.run(scenario())
