"""How much memory a model takes, by arithmetic, before anything is allocated.

No profiling run: weights are known from the checkpoint, KV bytes per token from the config, and the
arena gets what the operator said or a share of what is free.
"""

from __future__ import annotations

import os
from pathlib import Path

from inferd.config import KVCacheConfig
from inferd.errors import ModelLoadError
from inferd.types import MemoryPlan

_FREE_SHARE = 0.25  # of the memory that is free now; the rest is for activations and other programs


def available_bytes() -> int:
    """Memory this process may still take: the kernel's estimate, or less where a cgroup says so."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values of one token in every layer."""
    return 2 * num_layers * num_kv_heads * head_dim * itemsize


def plan_blocks(
    config: KVCacheConfig, *, bytes_per_token: int, max_model_len: int, max_num_seqs: int, free_bytes: int
) -> int:
    """Number of blocks in the arena.

    Unset: room for ``max_num_seqs`` sequences of full length, but at most a quarter of free memory;
    never less than one sequence of full length where that fits at all. Raises ModelLoadError when it
    does not.
    """
    per_block = bytes_per_token * config.block_size
    one_sequence = -(-max_model_len // config.block_size) + 1  # one more: copy-on-write needs a spare
    if config.num_blocks is not None:
        blocks = config.num_blocks
        asked = f"kv_cache.num_blocks = {config.num_blocks}"
    elif config.memory_bytes is not None:
        blocks = config.memory_bytes // per_block
        asked = f"kv_cache.memory_bytes = {config.memory_bytes}"
    else:
        share = int(free_bytes * _FREE_SHARE) // per_block
        blocks = max(min(one_sequence * max_num_seqs, share), min(one_sequence, free_bytes // per_block))
        asked = f"{free_bytes} bytes of free memory"
    if blocks < one_sequence:
        fits = max((blocks - 1) * config.block_size, 0)
        remedy = "Give" if fits == 0 else f"Set max_model_len to {fits} or less, or give"
        raise ModelLoadError(
            f"The KV cache cannot hold one sequence of max_model_len = {max_model_len} tokens "
            f"({one_sequence * per_block} bytes) within {asked}. {remedy} the KV cache more memory.",
            param="max_model_len",
        )
    return blocks


def memory_plan(
    *, weights_bytes: int, num_blocks: int, block_size: int, bytes_per_token: int, activation_bytes: int
) -> MemoryPlan:
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_bytes=num_blocks * block_size * bytes_per_token,
        kv_bytes_per_token=bytes_per_token,
        activation_bytes=activation_bytes,
    )
