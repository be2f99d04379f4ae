"""Memory for weights, reserved in advance: complete, zeroed, and no two parts overlap."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.config import KVCacheConfig, ModelConfig, ScalingConfig
from inferd.engine import weight_memory as weight_memory_module
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.engine.weight_memory import reserve_weight_memory
from inferd.machine.weight_memory import WeightMemory
from inferd.native import compiled
from inferd.native.packed import PackedWeight, packing_into
from inferd.worker.main import create_backend as create_any_backend
from inferd.worker.main import prepare_for

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages to ask for")
MB = 1 << 20


@given(st.lists(st.integers(1, 9 * MB), max_size=12), st.integers(0, 40 * MB))
@settings(max_examples=15, deadline=None)
def test_parts_are_cleared_and_apart_and_what_is_written_stays(sizes: list[int], total: int) -> None:
    reserved = WeightMemory(total)
    parts: list[tuple[int, int]] = []
    end = 0
    for size in sizes:
        place = reserved.reserve(size)
        if place is None:
            assert end + size + 64 > total  # only where it does not fit
            continue
        memory, begin = place
        assert begin >= end
        assert begin % 64 == 0
        end = begin + size
        assert memory[begin:end:4096] == bytes(-(-size // 4096))
        memory[begin:end] = b"\xff" * size
        parts.append((begin, end))
    reserved.close()
    assert reserved.reserve(1) is None
    for first, last in parts:
        assert memory[first:last] == b"\xff" * (last - first)


def test_what_is_taken_while_pages_are_touched_is_not_cleared_afterwards() -> None:
    reserved = WeightMemory(128 * MB)
    written = []
    while (place := reserved.reserve(MB)) is not None:
        memory, begin = place
        memory[begin : begin + MB] = b"\xff" * MB
        written.append(begin)
    reserved.close()
    assert len(written) == 128
    assert memory[:] == b"\xff" * (128 * MB)


def test_the_rest_goes_back_and_what_was_taken_outlives_the_room() -> None:
    reserved = WeightMemory(64 * MB)
    with packing_into(reserved):
        weight = PackedWeight([torch.eye(64)]) if compiled.BUILT and compiled.level() != "generic" else None
    if weight is None:
        pytest.skip("weights are not packed here")
    rows = torch.arange(64)
    before = weight.rows(rows, torch.float32)
    memory, size = reserved._memory, 64 * MB
    del reserved
    assert memory[size - 8 :] == bytes(8)  # readable, and not resident: see below
    with open("/proc/self/smaps") as file:
        resident = _resident(file.read(), weight.parts["data"].data_ptr())
    assert resident < 8 * MB
    assert torch.equal(weight.rows(rows, torch.float32), before)
    assert torch.equal(before, torch.eye(64))


def test_pages_that_were_found_beside_the_weights_go_to_the_cache() -> None:
    reserved = WeightMemory(128 * MB)
    reserved._thread.join()  # it has come to its end
    assert reserved.spare_bytes == 128 * MB
    engine = create_backend("demo", ModelConfig(source="demo", threads=1), lambda *_: None, reserved)
    taken = reserved._reserved
    assert reserved.spare_bytes == 128 * MB - taken
    assert not engine.use_idle_time()
    engine.close()


def _resident(smaps: str, address: int) -> int:
    """Bytes in memory of the mapping that holds ``address``."""
    inside = False
    for line in smaps.splitlines():
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            first, last = (int(part, 16) for part in word.split("-"))
            inside = first <= address < last
        elif inside and word == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


def large_model(folder: Path, rows: int) -> int:
    """A checkpoint whose weights are a hole, which no test reads; the bytes of the weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "vocab_size": rows,
    }
    config |= {"num_hidden_layers": 1, "num_attention_heads": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    size = rows * 1024 * 4
    table = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [0, size]}}
    header = json.dumps(table).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    return size


def test_a_large_model_gets_room_for_its_weights_unless_the_machine_has_several_memories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = large_model(tmp_path, 40_000)
    asked = ModelConfig(source=os.fspath(tmp_path), dtype="float32")
    monkeypatch.setattr(weight_memory_module, "_SECOND_NODE", tmp_path / "none")
    reserved = reserve_weight_memory(asked)
    if not compiled.BUILT:
        assert reserved is None
        return
    assert reserved is not None
    assert reserved.reserve(size) is not None
    reserved.close()
    of_a_token = 2 * 1024 * 4
    for cache, used_first in (
        (KVCacheConfig(), 10_240 * of_a_token),
        (KVCacheConfig(num_blocks=100), 1600 * of_a_token),
        (KVCacheConfig(memory_bytes=MB), MB),
    ):
        larger = reserve_weight_memory(
            ModelConfig(source=asked.source, dtype="float32", kv_cache=cache), with_cache=True
        )
        assert larger is not None
        assert larger._size - reserved._size == used_first
        larger.close()
    monkeypatch.setattr(weight_memory_module, "_SECOND_NODE", tmp_path)
    assert reserve_weight_memory(asked) is None


def test_a_spare_worker_holds_the_memory_of_the_weights_where_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = large_model(tmp_path, 40_000)
    monkeypatch.setattr(weight_memory_module, "_SECOND_NODE", tmp_path / "none")

    def prepared(*, spare_memory: bool) -> WeightMemory | None:
        scaling = ScalingConfig(max=2, spare=True, spare_memory=spare_memory)
        return prepare_for(ModelConfig(source=os.fspath(tmp_path), dtype="float32", scaling=scaling))

    assert prepared(spare_memory=False) is None
    held = prepared(spare_memory=True)
    if not compiled.BUILT:
        assert held is None
        return
    assert held is not None
    held._thread.join()
    assert held.spare_bytes >= size, "its pages were touched"
    engine = create_any_backend("demo", ModelConfig(source="demo", threads=1), lambda *_: None, held)
    assert held._reserved > 0, "a model that is loaded then is packed into it"
    assert isinstance(engine, Engine)
    engine.close()


def test_more_memory_than_the_system_promises_is_not_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a model that is larger than the machine's memory: its load says what is wrong."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    large_model(tmp_path, 40_000)
    monkeypatch.setattr(weight_memory_module, "_SECOND_NODE", tmp_path / "none")
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert reserve_weight_memory(ModelConfig(source=os.fspath(tmp_path), dtype="float32")) is None


def test_small_models_and_those_that_are_not_there_get_no_room(tmp_path: Path) -> None:
    assert reserve_weight_memory(ModelConfig(source="demo")) is None
    assert reserve_weight_memory(ModelConfig(source=os.fspath(tmp_path))) is None
    assert reserve_weight_memory(ModelConfig(source="demo", device="cuda")) is None
