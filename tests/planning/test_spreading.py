"""Which models the server divides among machines or GPUs by itself, among how many, and which it leaves as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from tests.predict.row_models import cumulative_sum

from inferd.cli import check
from inferd.cli.check import examine, show
from inferd.config import (
    Config,
    KVCacheConfig,
    ModelConfig,
    NodesConfig,
    ParallelConfig,
    PlacementConfig,
    RolesConfig,
    ScalingConfig,
    SchedulerConfig,
    ServerConfig,
    ServerDevicesConfig,
    VerifyConfig,
)
from inferd.errors import ModelLoadError
from inferd.machine import gpus
from inferd.planning.memory import bind, over_gpus, over_machines, plan_config, plan_model
from inferd.planning.spreading import HELD_SHARE, spread

CACHE = KVCacheConfig(memory_bytes=10**9)
LARGE = ModelConfig(source="demo", device="cpu", kv_cache=CACHE)
SMALL = msgspec.structs.replace(LARGE, kv_cache=KVCacheConfig(memory_bytes=10**8))


def taken(model: ModelConfig) -> int:
    """The memory of a replica in one process."""
    found = plan_model("m", model, free_bytes=1 << 40)
    assert found is not None
    return found.total_bytes


def with_nodes(server: ServerConfig = ServerConfig(), **models: ModelConfig) -> Config:
    return Config(models=models, server=server, nodes=NodesConfig(listen="127.0.0.1:0"))


def machines(config: Config, whole_bytes: int) -> dict[str, int]:
    models = spread(config, whole_bytes).config.models
    assert all(model.parallel.pipeline == model.parallel.machines for model in models.values())
    return {name: model.parallel.machines for name, model in models.items()}


def test_a_model_that_fits_stays_whole_and_a_byte_more_is_divided_in_two() -> None:
    whole = taken(LARGE)
    assert machines(with_nodes(m=LARGE), whole) == {"m": 1}
    found = spread(with_nodes(m=LARGE), whole - 1)
    assert found.config.models["m"].parallel == ParallelConfig(pipeline=2, machines=2)
    (reason,) = found.reasons["m"]
    assert reason.startswith("1 machine: 1.18 GiB of ")


@pytest.mark.parametrize("permille", [500, 650, 900])
def test_the_fewest_machines_hold_their_parts_and_one_fewer_does_not(permille: int) -> None:
    each = taken(LARGE) * permille // 1000
    found = spread(with_nodes(m=LARGE), each)
    count = found.config.models["m"].parallel.machines
    fewer = [reason.partition(":")[0].partition(",")[0] for reason in found.reasons["m"]]
    assert fewer == ["1 machine", *(f"{number} machines" for number in range(2, count))]
    assert plan_config(found.config, free_bytes=each).fits
    stages = ParallelConfig(pipeline=count - 1, machines=count - 1)
    with pytest.raises(ModelLoadError, match=r"on the fullest of its \d machines, but" if count > 2 else "the process"):
        plan_model("m", msgspec.structs.replace(LARGE, parallel=stages), free_bytes=each)


def test_a_cache_without_a_size_leaves_the_fullest_machine_room_for_its_part() -> None:
    # Most memory goes to logits, which the first stage alone has: a quarter of what all machines have left is too much.
    scheduler = SchedulerConfig(max_num_seqs=4096)
    model = ModelConfig(source="demo", device="cpu", max_model_len=512, scheduler=scheduler)
    spot = over_machines(model, 1 << 40)
    assert spot is not None
    each = spot.needs[0].total_bytes - 1
    found = spread(with_nodes(m=model), each)
    assert found.config.models["m"].parallel.machines == 2
    assert plan_config(found.config, free_bytes=each).problems == ()


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"placement": PlacementConfig(nodes="local")}, {}),
        ({"placement": PlacementConfig(nodes="only")}, {}),
        ({"placement": PlacementConfig(labels={"zone": "a"})}, {}),
        ({"verify": VerifyConfig(digest="sha256:0")}, {}),
        ({"scaling": ScalingConfig(max=1)}, {}),
        ({"roles": RolesConfig()}, {}),
        ({"parallel": ParallelConfig(pipeline=2)}, {}),
        ({"device": "cuda"}, {}),
        ({}, {"nodes": NodesConfig()}),
        ({}, {"server": ServerConfig(devices=ServerDevicesConfig(count=2, memory_bytes=10**9))}),
    ],
    ids=lambda value: ",".join(map(str, value)),
)
def test_what_excludes_several_machines_keeps_its_layout(
    settings: dict[str, object], config: dict[str, object]
) -> None:
    model = msgspec.structs.replace(LARGE, **settings)
    given = msgspec.structs.replace(with_nodes(m=model), **config)
    assert spread(given, 10**9).config.models == given.models


def test_a_model_that_may_be_computed_on_a_gpu_keeps_its_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = msgspec.structs.replace(LARGE, device="auto")
    assert machines(with_nodes(m=model), 10**9) == {"m": 2}
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path)
    assert machines(with_nodes(m=model), 10**9) == {"m": 2}, "the CPU build of torch takes no GPU"
    monkeypatch.setattr(gpus, "cuda_build_bytes", lambda: 1)
    assert machines(with_nodes(m=model), 10**9) == {"m": 1}


def on_gpus(sizes: Sequence[int]) -> ParallelConfig:
    """The layout of the demo on GPUs of so many bytes."""
    given = msgspec.structs.replace(LARGE, device="cuda")
    found = spread(Config(models={"m": given}), 10**6, sizes)
    assert (found.config.models["m"] == given) == (found.reasons == {})
    return found.config.models["m"].parallel


def test_a_model_that_one_gpu_does_not_hold_is_divided_among_the_fewest_that_do() -> None:
    spot = over_gpus(LARGE, 1, 1 << 40)
    assert spot is not None
    enough = math.ceil(spot.needs[0].total_bytes / HELD_SHARE)
    assert on_gpus([enough] * 4) == ParallelConfig(), "one holds it"
    small = enough - 10
    assert on_gpus([small] * 4) == on_gpus([small] * 2) == ParallelConfig(tensor=2)
    tenths = math.ceil(enough * 0.4)
    assert on_gpus([tenths] * 2) == ParallelConfig(), "both do not hold it, which loading will say"
    count = on_gpus([tenths] * 8).count
    assert 2 < count <= 8
    assert over_gpus(LARGE, count - 1, int(tenths * HELD_SHARE)) is None
    # A GPU of another size, and what stands behind it, is not used.
    for unlike in ([small], [small, enough, small], []):
        assert on_gpus(unlike) == ParallelConfig()


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"device": "cuda:0"}, {}),
        ({"device": "cpu"}, {}),
        ({"parallel": ParallelConfig(pipeline=2)}, {}),
        ({"placement": PlacementConfig(nodes="only")}, {"nodes": NodesConfig(listen="127.0.0.1:0")}),
        ({}, {"nodes": NodesConfig(listen="127.0.0.1:0")}),
        ({}, {"server": ServerConfig(devices=ServerDevicesConfig(count=2, memory_bytes=10**9))}),
    ],
    ids=lambda value: ",".join(map(str, value)),
)
def test_what_names_a_gpu_or_may_run_elsewhere_is_not_divided_among_gpus(
    settings: dict[str, object], config: dict[str, object]
) -> None:
    model = msgspec.structs.replace(LARGE, **{"device": "cuda", **settings})
    given = msgspec.structs.replace(Config(models={"m": model}), **config)
    assert spread(given, 1 << 40, [10**9] * 2).config.models == given.models


def test_check_tells_the_gpus_that_were_chosen_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "gpu_bytes", lambda: (10**9,) * 2)
    monkeypatch.setattr(check, "num_visible_gpus", lambda: 2)
    path = tmp_path / "inferd.yaml"
    path.write_text("models: {m: {source: demo, device: cuda, kv_cache: {memory_bytes: 1000000000}}}\n")
    report = examine(str(path), probe=False)
    assert report.problems == ()
    assert report.divided == {"m": ("1 GPU: 1.18 GiB of 858 MiB.",)}
    show(report)
    said = " ".join(capsys.readouterr().out.split())
    assert "m is divided among 2 ranks (tensor 2 x pipeline 1)" in said
    assert "parallel is not set, so the fewest GPUs were chosen. 1 GPU: 1.18 GiB of 858 MiB." in said


def test_what_other_models_and_replicas_take_divides_none() -> None:
    whole = taken(LARGE)
    four = msgspec.structs.replace(LARGE, replicas=4)
    assert machines(with_nodes(large=LARGE, small=SMALL, four=four), whole) == {"large": 1, "small": 1, "four": 1}
    found = machines(with_nodes(large=LARGE, small=SMALL, four=four), whole - 1)
    assert found == {"large": 2, "small": 1, "four": 2}


def test_the_part_of_this_machine_counts_which_is_not_that_of_the_others() -> None:
    # The first stage alone has the logits of a step.
    model = ModelConfig(
        source="demo",
        device="cpu",
        max_model_len=512,
        scheduler=SchedulerConfig(max_num_seqs=16384),
        kv_cache=KVCacheConfig(memory_bytes=500_000_000),
        parallel=ParallelConfig(pipeline=2, machines=2),
    )
    found = plan_model("m", model, free_bytes=1 << 40)
    assert found is not None
    first, second = found.machines_bytes
    assert found.here_bytes == first > second + 500_000_000
    assert abs(first + second - found.total_bytes) < 0.02 * found.total_bytes
    config = with_nodes(ServerConfig(memory_bytes=first + taken(SMALL) - 1), m=model, small=SMALL)
    (problem,) = plan_config(config, free_bytes=1 << 40).problems
    assert problem.startswith("models.small: ")


def test_a_limit_of_one_replica_that_more_processes_do_not_fit_into_is_no_error_of_the_plan() -> None:
    limited = msgspec.structs.replace(LARGE, load="on_demand", memory_bytes=taken(LARGE) + 1_000_000)
    config = Config(models={"small": SMALL, "big": limited}, server=ServerConfig(memory_bytes=1500 * 2**20))
    plan = plan_config(config, free_bytes=1 << 40)
    assert [problem.partition(":")[0] for problem in plan.problems] == ["models.big"]
    assert "with so much" not in plan.problems[0]
    assert bind(config).models["small"].memory_bytes is not None


def test_a_budget_of_the_server_counts_and_is_shared_with_the_nodes() -> None:
    config = with_nodes(ServerConfig(memory_bytes=10**9), m=LARGE)
    assert machines(with_nodes(ServerConfig(memory_bytes=2 * 10**9), m=LARGE), 1 << 40) == {"m": 1}
    found = spread(config, 1 << 40).config
    model = bind(found).models["m"]
    assert model.parallel.machines == 2
    assert 10**9 < (model.memory_bytes or 0) <= 2 * 10**9, "of both machines together"


def test_what_no_number_of_machines_holds_is_refused_as_it_was() -> None:
    given = with_nodes(m=LARGE)
    found = spread(given, 10**8)
    assert (found.config.models, found.reasons) == (given.models, {})
    assert "machines" not in plan_config(found.config, free_bytes=10**8).problems[0]


def test_a_model_that_predicts_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = ModelConfig(source=str(cumulative_sum(tmp_path / "m.onnx")))
    given = with_nodes(m=model)
    found = spread(given, 10**6)
    assert found.config.models == given.models
    (problem,) = plan_config(found.config, free_bytes=10**6).problems
    assert problem.endswith(" Only models that generate text are divided among machines.")
    divided = msgspec.structs.replace(model, parallel=ParallelConfig(pipeline=2, machines=2))
    (problem,) = plan_config(with_nodes(m=divided)).problems
    assert "has parallel, but only models that generate text are divided among ranks" in problem


def test_check_tells_the_layout_that_was_chosen_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text(
        "server: {memory_bytes: 1000000000}\nnodes: {listen: '127.0.0.1:0'}\n"
        "models: {m: {source: demo, device: cpu, kv_cache: {memory_bytes: 1000000000}}}\n"
    )
    report = examine(str(path), probe=False)
    assert report.problems == ()
    assert report.divided == {"m": ("1 machine: 1.18 GiB of 954 MiB.",)}
    show(report)
    said = " ".join(capsys.readouterr().out.split())
    assert "m has rank 0 on this machine and rank 1 on a node that joins; each machine needs at most" in said
    assert "parallel is not set, so the fewest machines like this one were chosen. 1 machine: 1.18 GiB of" in said
