"""Models on devices with budgets of memory: which layout, where, why, and what does not fit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_engine import make_request, run
from tests.worker.watching import children

from inferd import models
from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import Source
from inferd.cli.check import examine
from inferd.config import (
    Config,
    KVCacheConfig,
    ModelConfig,
    ParallelConfig,
    RolesConfig,
    SchedulerConfig,
    ServerConfig,
    ServerDevicesConfig,
)
from inferd.engine.load import create_backend
from inferd.engine.memory import runtime_bytes
from inferd.errors import ConfigError, ModelLoadError
from inferd.machine.memory import rss_bytes
from inferd.planning.memory import bind, plan_config
from inferd.planning.placing import Devices, Placed, StageNeed, find_spot

MB = 10**6
CACHE = KVCacheConfig(memory_bytes=64 * MB)
MODEL = ModelConfig(source="demo", kv_cache=CACHE, dtype="float32", threads=1)
"""With 14 MB of weights and 64 MB of cache beside the process; both are divided."""


def on_devices(count: int, spare: int, linked: int | None = None, **models: ModelConfig) -> Config:
    """Devices that have ``spare`` bytes beside the process of a rank."""
    devices = ServerDevicesConfig(count=count, memory_bytes=runtime_bytes() + spare, linked=linked)
    return Config(models=models, server=ServerConfig(devices=devices))


def placed(config: Config) -> dict[str, Placed]:
    plan = plan_config(config, free_bytes=1 << 40)
    assert plan.fits, plan.problems
    return {one.name: one.placed for one in plan.models if one.placed is not None}


def layout_of(config: Config, name: str = "m") -> tuple[int, int]:
    parallel = bind(config).models[name].parallel
    return parallel.tensor, parallel.pipeline


def test_a_model_takes_no_more_devices_than_it_needs() -> None:
    assert layout_of(on_devices(4, 100 * MB, m=MODEL)) == (1, 1)
    assert layout_of(on_devices(4, 60 * MB, m=MODEL)) == (2, 1)
    assert layout_of(on_devices(4, 60 * MB, linked=1, m=MODEL)) == (1, 2), "a layer is not divided without links"
    where = placed(on_devices(4, 60 * MB, m=MODEL))["m"]
    assert [rank.device for rank in where.ranks] == [0, 1]
    assert all(rank.total_bytes <= rank.room_bytes for rank in where.ranks)
    assert where.not_fewer[0].startswith("1 device: ")


def test_replicas_and_models_share_the_devices_that_are_left() -> None:
    small = msgspec.structs.replace(MODEL, kv_cache=KVCacheConfig(memory_bytes=8 * MB))
    two = msgspec.structs.replace(MODEL, replicas=2)
    where = placed(on_devices(5, 60 * MB, two=two, small=small))
    assert sorted(rank.device for rank in where["two"].ranks) == [0, 1, 2, 3]
    assert [rank.device for rank in where["small"].ranks] == [4]
    with pytest.raises(ConfigError) as refused:
        bind(on_devices(4, 60 * MB, two=two, small=small))
    assert refused.value.param == "server.devices"
    assert "models.small: A replica of small takes at least" in refused.value.message


def test_replicas_with_roles_are_divided_as_others() -> None:
    config = on_devices(4, 60 * MB, m=msgspec.structs.replace(MODEL, roles=RolesConfig()))
    assert layout_of(config) == (2, 1)
    assert sorted(rank.device for rank in placed(config)["m"].ranks) == [0, 1, 2, 3]


def test_a_cache_without_a_size_gets_what_its_fullest_rank_has() -> None:
    model = ModelConfig(source="demo", max_model_len=512, scheduler=SchedulerConfig(max_num_seqs=4096))
    one, two = (placed(on_devices(2, size * MB, m=model))["m"].ranks[0] for size in (200, 800))
    assert one.kv_bytes < two.kv_bytes
    assert two.total_bytes <= two.room_bytes


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (on_devices(2, 30 * MB, m=MODEL), "devices of this size (tensor"),
        (on_devices(2, 30 * MB, m=MODEL), "Give each device"),
        (
            on_devices(2, 60 * MB, m=msgspec.structs.replace(MODEL, parallel=ParallelConfig(pipeline=4))),
            "parallel divides m among 4 ranks, but server.devices has 2. Take fewer ranks",
        ),
        (on_devices(3, 60 * MB, m=msgspec.structs.replace(MODEL, roles=RolesConfig())), "take 4 devices of this size"),
    ],
)
def test_what_no_layout_holds_is_refused_with_the_remedy(config: Config, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        bind(config)
    assert words in refused.value.message


def test_the_remedy_of_a_refusal_is_enough() -> None:
    with pytest.raises(ConfigError) as refused:
        bind(on_devices(2, 30 * MB, m=MODEL))
    count = int(refused.value.message.partition("take ")[2].partition(" devices")[0])
    more = int(refused.value.message.partition("Give each device ")[2].partition("MiB")[0]) << 20
    assert layout_of(on_devices(count, 30 * MB, m=MODEL)) != (1, 1)
    assert layout_of(on_devices(2, 30 * MB + more, m=MODEL)) != (1, 1)


DEMO = read_config(Source(models.path("demo") / "config.json"))
MIB = 1 << 20


@given(
    rooms=st.lists(st.integers(20, 300), min_size=1, max_size=5), linked=st.integers(1, 5), copies=st.integers(1, 3),
    weights=st.integers(50, 900),
    asked=st.sampled_from([None, ParallelConfig(tensor=2), ParallelConfig(pipeline=2)]),
)  # fmt: skip
def test_either_remedy_is_enough_and_the_least_for_any_devices(
    rooms: list[int], linked: int, copies: int, weights: int, asked: ParallelConfig | None
) -> None:
    """Devices may have less room because of other models. ``rooms`` and ``weights`` in MiB."""

    def needs(parallel: ParallelConfig) -> tuple[StageNeed, ...]:
        part = weights * MIB // parallel.count
        return tuple(StageNeed(part + (stage == 0) * MIB, 15 * MIB, MIB, 1) for stage in range(parallel.pipeline))

    def refusal(given: list[int]) -> str:
        devices = Devices(tuple(room * MIB for room in given), linked)
        try:
            find_spot("m", DEMO, asked, copies, devices, needs)
        except ModelLoadError as error:
            return error.message
        return ""

    said = refusal(rooms)
    if not said or "Take fewer ranks" in said:
        return
    more = re.search(r"give each device (\d+)MiB more", said, re.IGNORECASE)
    assert more is not None
    assert not refusal([room + int(more[1]) for room in rooms])
    assert refusal([room + int(more[1]) - 1 for room in rooms])
    wider = re.search(r"take (\d+) devices of this size", said)
    if wider is not None:
        added = int(wider[1]) - len(rooms)
        assert not refusal([*rooms, *[max(rooms)] * added])
        assert refusal([*rooms, *[max(rooms)] * (added - 1)])


def test_check_says_the_layout_and_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "inferd.yaml"
    settings = msgspec.to_builtins(on_devices(2, 60 * MB).server.devices)
    model = {"source": "demo", "dtype": "float32", "kv_cache": {"memory_bytes": 64 * MB}}
    file.write_text(json.dumps({"server": {"devices": settings}, "models": {"m": model}}), encoding="utf-8")
    report = examine(str(file), probe=False)
    assert report.ok, report.problems
    assert report.plan is not None
    (one,) = report.plan.models
    assert one.layout == "2 ranks (tensor 2 x pipeline 1)"
    assert one.placed is not None
    assert len(one.placed.ranks) == 2


def test_devices_need_a_size(tmp_path: Path) -> None:
    file = tmp_path / "inferd.yaml"
    file.write_text("server: {devices: {count: 2}}\nmodels: {m: {source: demo}}\n", encoding="utf-8")
    (problem,) = examine(str(file), probe=False).problems
    assert "server.devices.memory_bytes" in problem
    assert "missing" in problem


def test_what_was_bound_loads_as_it_was_planned_and_answers_as_one_process() -> None:
    """The ranks of the layout that was chosen stay within the budgets of their devices."""
    config = on_devices(2, 60 * MB, m=MODEL)
    (plan,) = plan_config(config, free_bytes=1 << 40).models
    request = make_request("r", "Once upon a time", max_tokens=24)
    single = create_backend("m", MODEL, lambda *_: None)
    expected = run(single, request)[0].tokens()
    single.close()
    engine = create_backend("m", bind(config).models["m"], lambda *_: None)
    try:
        assert run(engine, request)[0].tokens() == expected
        memory = engine.info.memory
        assert (memory.weights_bytes, memory.kv_bytes) == (plan.weights_bytes, plan.kv_bytes)
        assert plan.placed is not None
        room = config.server.devices.memory_bytes
        assert room is not None
        ranks = [
            rss_bytes(pid)
            for pid in children(os.getpid())
            if b"ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(ranks) == plan.placed.count - 1
        assert all(0 < rss <= room for rss in ranks)
    finally:
        engine.close()


def test_layers_are_divided_among_linked_devices_unless_the_layout_is_configured() -> None:
    def needs(parallel: ParallelConfig) -> tuple[StageNeed, ...]:
        return (StageNeed(100 * MIB // parallel.count, 5 * MIB, MIB, 1),) * parallel.pipeline

    uneven = Devices(tuple(room * MIB for room in (10, 80, 80, 70)), linked=2)
    found = find_spot("m", DEMO, None, 1, uneven, needs)
    assert (found.parallel.tensor, found.parallel.pipeline, found.devices) == (2, 1, ((2, 3),))
    asked = find_spot("m", DEMO, ParallelConfig(tensor=2), 1, uneven, needs)
    assert asked.devices == ((1, 2),), "the emptiest, whatever joins them"
    apart = Devices(uneven.rooms, linked=1)
    assert find_spot("m", DEMO, ParallelConfig(tensor=2), 1, apart, needs).devices == ((1, 2),)
    assert find_spot("m", DEMO, None, 1, apart, needs).parallel == ParallelConfig(pipeline=2)
