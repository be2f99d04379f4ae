"""The memory plan is arithmetic, and says what to change when something does not fit."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import KVCacheConfig, ModelConfig
from inferd.engine.memory import Arena, plan_blocks, refuse_more_than_is_free
from inferd.errors import ModelLoadError
from inferd.machine.memory import available_bytes
from inferd.native.kv_cache import KVCache
from inferd.native.kv_sizes import ahead_bytes, kv_bytes_per_token

GIB = 1024**3


def test_bytes_per_token_of_known_models() -> None:
    # Llama-2-13B: 40 layers, 40 heads of 128, float16 -> 819,200 bytes; 32 sequences of 2,048 are 53.7 GB.
    assert kv_bytes_per_token(num_layers=40, num_kv_heads=40, head_dim=128, itemsize=2) == 819_200
    # Qwen3-0.6B: 28 layers, 8 KV heads of 128, bfloat16.
    assert kv_bytes_per_token(num_layers=28, num_kv_heads=8, head_dim=128, itemsize=2) == 114_688
    # The same in 8 bits: a byte for each number, four scales for a key of 128 columns and one for a value.
    eight = kv_bytes_per_token(num_layers=28, num_kv_heads=8, head_dim=128, itemsize=2, dtype="int8")
    assert eight == 28 * 8 * (2 * 128 + 5 * 4)


@pytest.mark.parametrize("head_dim", [128, 80, 12])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_the_plan_counts_the_bytes_that_the_arena_takes(head_dim: int, dtype: Literal["auto", "int8"]) -> None:
    cache = KVCache(
        num_layers=3,
        num_blocks=2,
        block_size=16,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        in_bytes=dtype == "int8",
    )
    parts = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
    per_token = kv_bytes_per_token(num_layers=3, num_kv_heads=2, head_dim=head_dim, itemsize=2, dtype=dtype)
    assert sum(part.nbytes for part in parts) == 32 * per_token


def test_unset_takes_full_sequences_but_at_most_a_quarter_of_free_memory() -> None:
    config = KVCacheConfig(block_size=16)
    small = plan_blocks(config, bytes_per_token=1000, max_model_len=160, max_num_seqs=4, free_bytes=GIB)
    assert small == 4 * 11
    large = plan_blocks(config, bytes_per_token=114_688, max_model_len=4096, max_num_seqs=64, free_bytes=8 * GIB)
    assert large == 2 * GIB // (114_688 * 16)


def test_a_cache_that_cannot_hold_one_sequence_is_refused_with_the_length_that_fits() -> None:
    with pytest.raises(
        ModelLoadError, match=r"Set max_model_len to 144 or less, or set kv_cache\.num_blocks to 257 or more\."
    ):
        plan_blocks(KVCacheConfig(num_blocks=10), bytes_per_token=8, max_model_len=4096, max_num_seqs=4, free_bytes=GIB)
    with pytest.raises(ModelLoadError, match=r"memory_bytes = 0\.98 KiB\. Set kv_cache\.memory_bytes to 1MiB or more"):
        plan_blocks(
            KVCacheConfig(memory_bytes=1000), bytes_per_token=800, max_model_len=64, max_num_seqs=4, free_bytes=GIB
        )


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ModelConfig(source="m", kv_cache=KVCacheConfig(memory_bytes=100 * GIB)), "kv_cache.memory_bytes"),
        (ModelConfig(source="m", kv_cache=KVCacheConfig(num_blocks=100)), "kv_cache.num_blocks"),
        (ModelConfig(source="m", memory_bytes=100 * GIB), "memory_bytes"),
    ],
)
def test_a_cache_larger_than_what_is_free_is_refused_with_the_setting_that_asks_for_it(
    config: ModelConfig, name: str
) -> None:
    arena = Arena(max_model_len=64, num_blocks=100, block_size=16, bytes_per_token=1000)
    refuse_more_than_is_free(arena, config, arena.nbytes)
    with pytest.raises(ModelLoadError, match=rf"^{name} is \d+.*, .* of 1\.53 MiB, .* 1\.52 MiB .* Lower {name}"):
        refuse_more_than_is_free(arena, config, arena.nbytes - 10_000)


def test_what_gets_pages_ahead_is_what_a_first_wave_takes_and_at_most_a_gigabyte() -> None:
    of_qwen3_600m = kv_bytes_per_token(num_layers=28, num_kv_heads=8, head_dim=128, itemsize=2)
    of_the_demo = kv_bytes_per_token(num_layers=5, num_kv_heads=4, head_dim=32, itemsize=2)
    assert 32 * (128 + 64) * of_qwen3_600m < ahead_bytes(of_qwen3_600m) <= GIB
    assert ahead_bytes(of_the_demo) < GIB // 32
    assert ahead_bytes(10 * of_qwen3_600m) == GIB


@given(
    bytes_per_token=st.integers(1, 10**6),
    max_model_len=st.integers(1, 10**5),
    max_num_seqs=st.integers(1, 256),
    free_bytes=st.integers(0, 64 * GIB),
    block_size=st.integers(1, 64),
)
def test_a_plan_holds_one_full_sequence_and_never_more_than_is_free(
    bytes_per_token: int, max_model_len: int, max_num_seqs: int, free_bytes: int, block_size: int
) -> None:
    config = KVCacheConfig(block_size=block_size)
    try:
        blocks = plan_blocks(
            config,
            bytes_per_token=bytes_per_token,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            free_bytes=free_bytes,
        )
    except ModelLoadError:
        assert (
            max_model_len // block_size
        ) * block_size * bytes_per_token > free_bytes - 3 * block_size * bytes_per_token
        return
    assert blocks * block_size > max_model_len
    assert blocks * block_size * bytes_per_token <= free_bytes


def test_this_machine_has_some_memory() -> None:
    assert available_bytes() > 0
