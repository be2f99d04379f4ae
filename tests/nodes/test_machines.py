"""The choice of a machine: allowed by the settings, with room, spread; and never a machine that lacks one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import ModelConfig, PlacementConfig
from inferd.router.replicas.machines import HERE, Machine, Machines, allows, choose, has_room
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
        num_gpus=st.integers(0, 1),
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


@given(MODELS, machine("one"))
def test_what_the_settings_name_is_what_the_node_has(model: ModelConfig, node: Machine) -> None:
    if allows(model, node):
        assert model.placement.nodes != "local"
        assert all(node.labels.get(name) == value for name, value in model.placement.labels.items())
        assert model.region is None or node.labels.get("region") == model.region
        assert model.device != "cuda" or node.num_gpus > 0
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
