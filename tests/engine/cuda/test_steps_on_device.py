"""Steps brought to a device, and those of single tokens as graphs, over a device that is the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from msgspec.structs import replace
from tests.engine.cuda.fake_device import FakeDevice
from tests.families import write_checkpoint
from torch import Tensor

from inferd.config import KVCacheConfig, ModelConfig, SchedulerConfig
from inferd.engine.cuda import memory, steps
from inferd.engine.cuda.load import DeviceLoad
from inferd.engine.cuda.steps import StepsOnDevice, can_record, graph_sizes
from inferd.engine.model.load import Decoder, load_model
from inferd.engine.runner import Runner
from inferd.engine.scheduling.scheduler import Slice, Step
from inferd.engine.scheduling.sequence import Sequence
from inferd.native.attention import Attention, FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import ReferenceAttention
from inferd.types import SamplingParams

_BLOCKS, _SIZE = 40, 4


@pytest.fixture(autouse=True)
def _attends_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's attention has tests of its own, and takes long in the interpreter."""

    def create(kind: str, cache: KVCache, batch: FlatBatch) -> Attention:
        assert kind == "triton"
        return ReferenceAttention(cache, batch)

    monkeypatch.setattr(steps, "create_attention", create)
    monkeypatch.setattr(memory, "create_attention", create)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load("qwen3", tmp_path_factory.mktemp("qwen3"))


def load(name: str, folder: Path) -> Decoder:
    write_checkpoint(name, folder)
    return load_model(folder, dtype="float32", device=torch.device("cpu"))


def cache_of(decoder: Decoder, *, spare: int = 0) -> KVCache:
    config = decoder.config
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=_BLOCKS + spare,
        block_size=_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        device=torch.device("cpu"),
        in_rows=True,
    )
    for arena in (*cache.keys, *cache.values):
        arena.fill_(7.0)
    return cache


def sequence(number: int, num_tokens: int) -> Sequence:
    made = Sequence(
        request_id=str(number),
        index=0,
        prompt_ids=[(31 * number + 7 * i) % 90 for i in range(num_tokens)],
        sampling=SamplingParams(),
        seed=0,
    )
    made.blocks = [number * 8 + (5 * i + 3) % 8 for i in range(-(-num_tokens // _SIZE))]
    return made


def step_of(*parts: tuple[Sequence, int, int]) -> Step:
    return Step(slices=[Slice(*part) for part in parts])


def on_device(decoder: Decoder, device: FakeDevice, sizes: tuple[int, ...], max_blocks: int = 8) -> Runner:
    cache = cache_of(decoder, spare=1)
    brought = StepsOnDevice(decoder, cache, "triton", device, max_rows=4)
    if sizes:
        brought.record(sizes, max_blocks)
    return Runner(decoder, cache, "triton", torch.device("cpu"), on_device=brought)


def run(runner: Runner, step: Step) -> Tensor:
    with torch.inference_mode():
        return runner.run(step).clone()


def test_recorded_steps_compute_what_steps_compute(decoder: Decoder) -> None:
    """With any other sequences and any padding in the batch; and sequences write no block but their own."""
    device = FakeDevice()
    ours, plain = (
        on_device(decoder, device, (1, 2, 4)),
        Runner(decoder, cache_of(decoder), "reference", torch.device("cpu")),
    )
    assert device.recorded == [4, 2, 1]
    sequences = [sequence(i, length) for i, length in enumerate((13, 9, 22, 6, 3))]
    a, b, c, d, e = sequences
    work = [
        step_of((a, 0, 12), (b, 0, 8)),  # chunks
        step_of((a, 12, 1), (b, 8, 1)),  # fills the graph
        step_of((c, 0, 21), (d, 0, 5), (e, 0, 2)),
        step_of((e, 2, 1), (c, 21, 1), (d, 5, 1)),  # one row is made up, and a longer table is behind a shorter one
        step_of((d, 5, 1)),
        step_of(*((one, len(one.tokens) - 1, 1) for one in sequences)),  # more than any graph has
        step_of((a, 11, 2)),
    ]
    for step in work:
        torch.testing.assert_close(run(ours, step), run(plain, step), rtol=1e-5, atol=1e-5)
    assert device.replayed == [2, 4, 1]
    for mine, theirs in zip(
        (*ours.cache.keys, *ours.cache.values), (*plain.cache.keys, *plain.cache.values), strict=True
    ):
        torch.testing.assert_close(mine[:_BLOCKS], theirs, rtol=1e-5, atol=1e-5)
        assert not bool((mine[_BLOCKS] == 7.0).all())  # the unused block took the rest


def test_without_graphs_every_step_is_computed_as_it_comes(decoder: Decoder) -> None:
    device = FakeDevice()
    ours, plain = on_device(decoder, device, ()), Runner(decoder, cache_of(decoder), "reference", torch.device("cpu"))
    a, b = sequence(0, 9), sequence(1, 5)
    for step in (step_of((a, 0, 8), (b, 0, 4)), step_of((a, 8, 1), (b, 4, 1))):
        torch.testing.assert_close(run(ours, step), run(plain, step))
    assert device.replayed == []


def test_a_sequence_that_is_longer_than_the_graphs_foresaw_is_computed_without(decoder: Decoder) -> None:
    device = FakeDevice()
    ours, plain = (
        on_device(decoder, device, (1,), max_blocks=2),
        Runner(decoder, cache_of(decoder), "reference", torch.device("cpu")),
    )
    long = sequence(0, 9)
    for step in (step_of((long, 0, 8)), step_of((long, 8, 1))):
        torch.testing.assert_close(run(ours, step), run(plain, step))
    assert device.replayed == []


def test_a_buffer_is_written_again_when_the_device_has_read_it(decoder: Decoder) -> None:
    device = FakeDevice()
    ours = on_device(decoder, device, (1,))
    long = sequence(0, 20)
    before = device.num_marks
    for at in range(20):
        run(ours, step_of((long, at, 1)))
    assert device.num_marks == before + 20
    assert device.num_selected == 20, "a thread's device is its own"
    assert device.waited[-18:] == list(range(before + 1, before + 19))  # always the one before the last


def test_few_rows_are_filled_up() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(40) == (1, 2, 4, 8, 16, 32, 40)
    assert graph_sizes(256)[-3:] == (224, 240, 256)
    assert graph_sizes(4000)[-1] == 512
    for most in range(1, 300):
        sizes = graph_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        for count in range(1, most + 1):
            size = next(size for size in sizes if size >= count)
            assert size - count < max(16, count)


def test_what_waits_for_the_device_is_not_recorded(decoder: Decoder, tmp_path: Path) -> None:
    assert can_record(decoder, "triton")
    assert not can_record(decoder, "reference")
    assert not can_record(load("mixtral", tmp_path / "m"), "triton")
    assert can_record(load("gpt2", tmp_path / "g"), "triton")


def model(max_num_seqs: int) -> ModelConfig:
    return ModelConfig(
        source="somewhere",
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        kv_cache=KVCacheConfig(block_size=_SIZE),
        max_model_len=30,
    )


def test_the_cache_has_what_the_largest_step_leaves(decoder: Decoder) -> None:
    """Less a margin, and as much again for graphs, whose activations stay."""
    free, total, peak = 500 << 20, 1000 << 20, 30 << 20
    config = model(max_num_seqs=4)

    def left(**other: int) -> int:
        device = FakeDevice(**{"free": free, "total": total, "peak": peak, **other})
        return DeviceLoad(config, decoder, "triton", device).free_bytes()

    assert left() == free - 2 * peak - total // 25 - 3 * (16 << 20)
    assert left(peak=0) == left() + 2 * peak
    assert left(free=10 << 20) == 0


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_the_largest_step_is_tried_over_a_cache_of_the_same_form(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, dtype: Literal["auto", "int8"]
) -> None:
    seen: list[bool] = []

    def create(kind: str, cache: KVCache, batch: FlatBatch) -> Attention:
        seen.append(cache.in_bytes)
        return ReferenceAttention(cache, batch)

    monkeypatch.setattr(memory, "create_attention", create)
    config = replace(model(max_num_seqs=4), kv_cache=KVCacheConfig(block_size=_SIZE, dtype=dtype))
    DeviceLoad(config, decoder, "triton", FakeDevice()).free_bytes()
    assert seen == [dtype == "int8"]


def test_a_loaded_model_has_its_graphs(decoder: Decoder) -> None:
    device = FakeDevice()
    cache = cache_of(decoder, spare=1)
    brought = DeviceLoad(model(max_num_seqs=3), decoder, "triton", device).steps(cache, 30)
    assert brought.sizes == (1, 2, 3)
    runner = Runner(decoder, cache, "triton", torch.device("cpu"), on_device=brought)
    run(runner, step_of((sequence(0, 5), 0, 1), (sequence(1, 5), 0, 1)))
    assert device.replayed == [2]
