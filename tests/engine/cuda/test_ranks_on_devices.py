"""Ranks whose steps are brought to devices, over devices that are the CPU and gloo in place of NCCL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.engine.cuda.fake_device import FakeDevice
from tests.families import write_checkpoint
from tests.tiers import sample
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from inferd.engine.cuda import memory, steps
from inferd.engine.cuda.fit import part_bytes, refuse_more_than_is_free
from inferd.engine.cuda.load import DeviceLoad, device_of
from inferd.engine.cuda.steps import can_record
from inferd.engine.model.divided import DividedDecoder
from inferd.engine.model.load import load_model
from inferd.engine.model.share import Share, check_devices, own_devices
from inferd.engine.ranks.collectives import CollectivePeers
from inferd.engine.ranks.rank import cache_of, load_part
from inferd.engine.runner import Runner
from inferd.errors import ModelLoadError
from inferd.native.attention import Attention, FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import ReferenceAttention

T = TypeVar("T")

CPU = torch.device("cpu")
LAYOUTS = ((2, 1), (1, 2), (2, 2))


@pytest.fixture(autouse=True)
def _attends_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(kind: str, cache: KVCache, batch: FlatBatch) -> Attention:
        return ReferenceAttention(cache, batch)

    monkeypatch.setattr(steps, "create_attention", create)
    monkeypatch.setattr(memory, "create_attention", create)


def configured(tensor: int = 1, pipeline: int = 1, device: str = "cuda") -> ModelConfig:
    return ModelConfig(
        source="m",
        dtype="float32",
        device=device,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        kv_cache=KVCacheConfig(block_size=4),
        max_model_len=30,
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline),
    )


def hidden_of(decoder: DividedDecoder, config: ModelConfig, device: FakeDevice) -> Tensor:
    """Hidden states of a prompt of two sequences, and of a token of each behind it, with their logits in rank 0."""
    load = DeviceLoad(config, decoder, "triton", device)
    cache = cache_of(decoder, config, 9, in_rows=True)
    runner = Runner(decoder, cache, "triton", CPU, 32, load.steps(cache, 30))
    found = []
    with torch.inference_mode():
        for starts, counts in (((0, 0), (5, 3)), ((5, 3), (1, 1))):
            positions = [start + at for start, count in zip(starts, counts, strict=True) for at in range(count)]
            firsts = [16 * row for row, count in enumerate(counts) for _ in range(count)]  # four blocks for each
            slots = [first + position for first, position in zip(firsts, positions, strict=True)]
            by_row = np.array([[7 + 3 * at for at in positions], positions, slots], dtype=np.int64)
            ends = [0, counts[0], sum(counts)]
            lengths = [start + count for start, count in zip(starts, counts, strict=True)]
            table = np.arange(8, dtype=np.int32).reshape(2, 4)
            hidden = runner.compute(runner.batch(by_row, np.array(ends + lengths, dtype=np.int32), table))
            found.append(hidden.clone())
    return torch.cat(found)


def together(config: ModelConfig, folder: Path, act: Callable[[DividedDecoder, ModelConfig], T]) -> list[T]:
    """What each rank makes of its part of the model, in threads."""
    parallel, store = config.parallel, HashStore()

    def rank(number: int, store: Store = store) -> T:
        share = Share(number, parallel.tensor, parallel.pipeline)
        peers = CollectivePeers(share, store, CPU, 60)
        decoder = load_part(folder, config, share, peers)
        peers.join()
        return act(decoder, config)

    with ThreadPoolExecutor(parallel.count) as pool:
        return list(pool.map(rank, range(parallel.count)))


@pytest.mark.parametrize("name", sample(["qwen3", "gpt2", "mixtral"], "qwen3"))
def test_ranks_compute_on_devices_what_one_process_computes(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    alone = load_model(tmp_path, dtype="float32", device=CPU)
    assert isinstance(alone, DividedDecoder)
    expected = hidden_of(alone, configured(), FakeDevice())

    def computed(decoder: DividedDecoder, config: ModelConfig) -> Tensor:
        device = FakeDevice()
        hidden = hidden_of(decoder, config, device)
        assert not device.recorded, "ranks record no graphs"
        return hidden

    for tensor, pipeline in LAYOUTS:
        found = together(configured(tensor, pipeline), tmp_path, computed)[0]
        assert float((found - expected).abs().max()) <= (0 if tensor == 1 else 1e-5) * float(expected.abs().max())


def test_the_cache_of_every_rank_has_what_the_fullest_leaves(tmp_path: Path) -> None:
    """Ranks compute the largest step together. Of three layers the first stage has two."""
    write_checkpoint("qwen3", tmp_path)

    def left(decoder: DividedDecoder, config: ModelConfig) -> int:
        assert not can_record(decoder, "triton")
        return DeviceLoad(config, decoder, "triton", FakeDevice(free=500, total=1000, peak=60)).free_bytes()

    for tensor, pipeline in LAYOUTS:
        own = 500 - 60 - 1000 // 25
        by_stage = [own * tensor * 3 // layers for layers in ((3,) if pipeline == 1 else (2, 1))]
        assert together(configured(tensor, pipeline), tmp_path, left) == [
            nbytes for nbytes in by_stage for _ in range(tensor)
        ]


def test_each_rank_has_a_device_of_its_own() -> None:
    assert [str(device_of(torch.device("cuda"), rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [str(device_of(torch.device("cuda", 2), rank)) for rank in range(2)] == ["cuda:2", "cuda:3"]
    assert device_of(CPU, 3) == CPU


@pytest.mark.parametrize(
    ("device", "there", "is_enough"),
    [("cuda", 4, True), ("cuda", 3, False), ("cuda:2", 6, True), ("cuda:2", 5, False), ("auto", 3, False)],
)
def test_ranks_need_as_many_devices(device: str, there: int, is_enough: bool) -> None:
    config = configured(2, 2, device)
    check_devices(replace(config, parallel=ParallelConfig()), 1)  # one process says itself which device is missing
    if is_enough:
        check_devices(config, there)
        return
    with pytest.raises(ModelLoadError) as refused:
        check_devices(config, there)
    first = device.removeprefix("cuda:") if ":" in device else "0"
    assert f"has 4 ranks, each on a CUDA device of its own from cuda:{first} on" in refused.value.message
    assert f"this machine has {there} CUDA devices" in refused.value.message
    assert "Take fewer ranks" in refused.value.message
    assert refused.value.param == "parallel"


def test_replicas_have_devices_of_their_own_as_far_as_there_are_enough() -> None:
    def devices(config: ModelConfig, num_devices: int) -> list[str]:
        return [own_devices(config, replica, num_devices).device for replica in range(4)]

    assert devices(configured(2), 8) == ["cuda", "cuda:2", "cuda:4", "cuda:6"]
    assert devices(configured(2, 2, "cuda:1"), 9) == ["cuda:1", "cuda:5", "cuda:1", "cuda:5"]
    assert devices(configured(2, device="auto"), 5) == ["auto", "cuda:2", "auto", "cuda:2"]
    assert devices(configured(2), 1) == ["cuda"] * 4, "too few for one, which loading says"
    assert devices(configured(), 8) == ["cuda"] * 4, "one process shares a device"
    check_devices(configured(2), 4, replicas=2)
    with pytest.raises(ModelLoadError, match=r"2 ranks in each of 2 replicas, .* Take fewer ranks or replicas"):
        check_devices(configured(2), 3, replicas=2)


def test_weights_that_a_device_does_not_hold_are_refused_with_the_layout_that_does(tmp_path: Path) -> None:
    """Before they are read. Of the 4 heads of the model 3 ranks cannot have equal parts."""
    write_checkpoint("qwen3", tmp_path)
    alone, needed = Share(), part_bytes(tmp_path, configured(), on_cpu=False)
    halves, quarters = needed(Share(0, 2)), needed(Share(0, 4))
    assert quarters < halves < needed(alone)

    def said(free_bytes: int, num_devices: int, share: Share = alone, device: str = "cuda:0") -> str:
        config = configured(share.tensor, share.pipeline, device)
        with pytest.raises(ModelLoadError) as refused:
            refuse_more_than_is_free(tmp_path, config, share, free_bytes, device, num_devices)
        return refused.value.message

    refuse_more_than_is_free(tmp_path, configured(), alone, needed(alone), "cuda:0", 1)
    assert "cuda:0 has " in said(halves, 8)
    assert "Set parallel to {tensor: 2}" in said(halves, 8)
    assert "Set parallel to {tensor: 4}" in said(halves - 1, 8)
    assert "do not hold them" in said(halves - 1, 3)
    assert "do not hold them" in said(halves, 8, device="cuda:7")
    assert said(1, 8, Share(1, 2)).startswith("The part of the weights of rank 1 takes")
