"""How much memory a model takes, by arithmetic, before anything is allocated.

There is no profiling run. The checkpoint gives the weights and the configuration the KV bytes per token. The KV cache
gets the configured size, or a share of the free memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.config import KVCacheConfig, ModelConfig
from inferd.config.units import bytes_text, enough_text
from inferd.errors import ModelLoadError
from inferd.machine.torch_build import cuda_build_bytes
from inferd.native.kv_sizes import kv_bytes_per_token
from inferd.types import MemoryPlan

FREE_SHARE = 0.25  # of the memory that is free now; the rest is for activations and other programs

_LEAST_SAMPLED_ROWS = 32  # of a step, so that a server of few sequences has room to speculate

_RUNTIME_BYTES = 250_000_000


@dataclass(frozen=True, slots=True)
class Arena:
    """A model's KV cache, and what it may hold."""

    max_model_len: int  # tokens
    num_blocks: int
    block_size: int  # tokens
    bytes_per_token: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_size * self.bytes_per_token


def runtime_bytes() -> int:
    """Resident memory of a worker before it has a model: Python, torch and the tokenizer's library (measured: 240 MB
    with the CPU build of torch, of which replicas share 80 with each other, and 540 MB with a CUDA build)."""
    return _RUNTIME_BYTES + cuda_build_bytes()


def most_sampled_rows(config: ModelConfig) -> int:
    """The most rows of a step whose logits are needed at once: one per sequence, and those of guessed tokens."""
    most = config.scheduler.max_num_seqs
    return most if config.speculation.method == "none" else max(most, _LEAST_SAMPLED_ROWS)


def headroom_bytes(config: ModelConfig, dims: DecoderConfig, *, itemsize: int) -> int:
    """An upper estimate of what a replica needs beside weights and cache, in all its ranks together.

    It counts the processes, and for each the rotary tables and the temporary tensors of a step's rows; and logits with
    the sampler's copies.
    """
    others = rank_headroom_bytes(config, dims, itemsize=itemsize, samples=False)
    first = rank_headroom_bytes(config, dims, itemsize=itemsize, samples=True)
    return first + (config.parallel.count - 1) * others


def rank_headroom_bytes(config: ModelConfig, dims: DecoderConfig, *, itemsize: int, samples: bool) -> int:
    """The part of ``headroom_bytes`` that one rank needs. ``samples``: it has the logits, as rank 0 does."""
    scheduler = config.scheduler
    widest = max(dims.hidden_size, 2 * dims.intermediate_size, (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim)
    rows = scheduler.max_num_batched_tokens * (4 * dims.hidden_size + 3 * widest) * itemsize
    logits = most_sampled_rows(config) * dims.vocab_size * 4 * 4 if samples else 0
    longest = min(config.max_model_len or dims.max_position_embeddings, dims.max_position_embeddings)
    tables = sum(longest * rope.dim * 4 for rope in {id(r): r for r in dims.ropes if r is not None}.values())
    return runtime_bytes() + rows + tables + logits


def adapters_bytes(config: ModelConfig, configured_bytes: int) -> int:
    """Memory that the plan keeps for adapters. ``configured_bytes``: of those that the configuration names."""
    return max(configured_bytes, config.adapter_memory_bytes or 0)


def plan_arena(
    config: ModelConfig,
    dims: DecoderConfig,
    *,
    itemsize: int,
    weights_bytes: int,
    free_bytes: int,
    draft_bytes_per_token: int = 0,
    share: float = FREE_SHARE,
) -> Arena:
    """The size of a model's KV cache. The planner and the loader both use it, so their figures agree.

    ``free_bytes``: free memory beside the weights and the worker itself. ``memory_bytes`` of the model bounds weights,
    cache and headroom together; where no cache size is configured, the cache gets the rest. A draft model has as many
    blocks as its target: a token then takes ``draft_bytes_per_token`` more, and ``weights_bytes`` counts both models.
    A token's bytes are those in all ranks together. ``share``: part of the free memory that a cache without a
    configured size may take.

    Raises ModelLoadError with the remedy where not even one sequence fits.
    """
    size = config.kv_cache.block_size
    per_token = kv_bytes_per_token(
        num_layers=dims.num_layers,
        num_kv_heads=max(dims.num_kv_heads, config.parallel.tensor),  # ranks may have the same heads
        head_dim=dims.head_dim,
        itemsize=itemsize,
        dtype=config.kv_cache.dtype,
    )
    per_token += draft_bytes_per_token
    cache, allowed = config.kv_cache, None
    if config.memory_bytes is not None:
        rest = headroom_bytes(config, dims, itemsize=itemsize)
        allowed = config.memory_bytes - weights_bytes - rest
        smallest = 2 * size * per_token
        if allowed < smallest:
            raise ModelLoadError(
                f"memory_bytes is {bytes_text(config.memory_bytes)}, but weights ({bytes_text(weights_bytes)}) and a "
                "worker's own needs "
                f"({bytes_text(rest)}) leave nothing of it for the KV cache. Give the model at least "
                f"{enough_text(weights_bytes + rest + smallest)}.",
                param="memory_bytes",
            )
        if cache.num_blocks is None and cache.memory_bytes is None:
            cache = KVCacheConfig(memory_bytes=allowed, block_size=size, dtype=cache.dtype)
    max_model_len = _max_model_len(config.max_model_len, cache, dims.max_position_embeddings, per_token)
    try:
        num_blocks = plan_blocks(
            cache,
            bytes_per_token=per_token,
            max_model_len=max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            free_bytes=free_bytes,
            share=share,
        )
    except ModelLoadError as error:
        if cache is config.kv_cache:
            raise
        raise ModelLoadError(
            f"{error.message} (That is what memory_bytes = {bytes_text(config.memory_bytes or 0)} leaves for it.)",
            param="memory_bytes",
        ) from error
    arena = Arena(max_model_len, num_blocks, size, per_token)
    if config.memory_bytes is not None and allowed is not None and arena.nbytes > allowed:
        raise ModelLoadError(
            f"memory_bytes is {bytes_text(config.memory_bytes)}, but the KV cache that kv_cache asks for takes "
            f"{bytes_text(arena.nbytes)} "
            f"and only {bytes_text(max(allowed, 0))} are left for it. Lower kv_cache, or give the model at least "
            f"{enough_text(config.memory_bytes + arena.nbytes - allowed)}.",
            param="memory_bytes",
        )
    return arena


def refuse_more_than_is_free(arena: Arena, config: ModelConfig, free_bytes: int) -> None:
    """Raises ModelLoadError for a configured cache that is larger than the free memory.

    The system would grant it, and end the process when the memory is used.
    """
    if arena.nbytes <= free_bytes:
        return
    cache = config.kv_cache
    name, asked = "memory_bytes", bytes_text(config.memory_bytes or 0)
    if cache.num_blocks is not None:
        name, asked = "kv_cache.num_blocks", str(cache.num_blocks)
    elif cache.memory_bytes is not None:
        name, asked = "kv_cache.memory_bytes", bytes_text(cache.memory_bytes)
    raise ModelLoadError(
        f"{name} is {asked}, which makes a KV cache of {bytes_text(arena.nbytes)}, "
        f"but only {bytes_text(free_bytes)} of memory are free. "
        f"Lower {name}, or leave it out: then the cache takes what fits.",
        param=name,
    )


def _max_model_len(asked: int | None, cache: KVCacheConfig, trained: int, bytes_per_token: int) -> int:
    if asked is None:
        if cache.num_blocks is None and cache.memory_bytes is None:
            return trained
        # The cache's size is configured and the length is not: take the longest that fits.
        blocks = cache.num_blocks or (cache.memory_bytes or 0) // (bytes_per_token * cache.block_size)
        return min(trained, max((blocks - 1) * cache.block_size, 1))
    if asked > trained:
        raise ModelLoadError(
            f"max_model_len is {asked}, but the checkpoint was made for {trained} positions "
            f"(max_position_embeddings in config.json). Set max_model_len to {trained} or less.",
            param="max_model_len",
        )
    return asked


def plan_blocks(
    config: KVCacheConfig,
    *,
    bytes_per_token: int,
    max_model_len: int,
    max_num_seqs: int,
    free_bytes: int,
    share: float = FREE_SHARE,
) -> int:
    """Number of blocks in the KV cache.

    Without a configured size: enough for ``max_num_seqs`` sequences of full length, but at most ``share`` of the free
    memory, and never less than one sequence of full length. Raises ModelLoadError where that does not fit.
    """
    per_block = bytes_per_token * config.block_size
    one_sequence = -(-max_model_len // config.block_size) + 1  # one more: copy-on-write needs a spare
    more = "give the KV cache more memory"
    if config.num_blocks is not None:
        blocks = config.num_blocks
        asked = f"kv_cache.num_blocks = {config.num_blocks}"
        more = f"set kv_cache.num_blocks to {one_sequence} or more"
    elif config.memory_bytes is not None:
        blocks = config.memory_bytes // per_block
        asked = f"kv_cache.memory_bytes = {bytes_text(config.memory_bytes)}"
        more = f"set kv_cache.memory_bytes to {enough_text(one_sequence * per_block)} or more"
    else:
        most = int(free_bytes * share) // per_block
        blocks = max(min(one_sequence * max_num_seqs, most), min(one_sequence, free_bytes // per_block))
        asked = f"{bytes_text(free_bytes)} of free memory"
    if blocks < one_sequence:
        fits = max((blocks - 1) * config.block_size, 0)
        remedy = more if fits == 0 else f"set max_model_len to {fits} or less, or {more}"
        raise ModelLoadError(
            f"The KV cache cannot hold one sequence of max_model_len = {max_model_len} tokens "
            f"({bytes_text(one_sequence * per_block)}) within {asked}. {remedy[0].upper()}{remedy[1:]}.",
            param="max_model_len",
        )
    return blocks


def memory_plan(arena: Arena, *, weights_bytes: int, activations: int, num_processes: int) -> MemoryPlan:
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_bytes=arena.nbytes,
        kv_bytes_per_token=arena.bytes_per_token,
        activation_bytes=activations,
        process_bytes=num_processes * runtime_bytes(),
    )
