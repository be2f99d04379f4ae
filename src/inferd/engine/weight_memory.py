"""How much memory for weights to reserve before a model is loaded (``machine.weight_memory``)."""

from __future__ import annotations

import importlib.util
import mmap
import os
from pathlib import Path

from inferd.checkpoints.architecture import ITEM_BYTES, dtype_name, read_config
from inferd.checkpoints.decoder_config import DecoderConfig, Source
from inferd.checkpoints.footprint import weight_bytes
from inferd.config import ModelConfig
from inferd.engine.memory import FREE_SHARE
from inferd.errors import ModelLoadError
from inferd.machine.memory import available_bytes
from inferd.machine.weight_memory import WeightMemory
from inferd.native.kv_sizes import ahead_bytes, kv_bytes_per_token
from inferd.registry.source import check_folder, resolve

_LEAST_BYTES = 64 << 20  # less is there at once
_SECOND_NODE = Path("/sys/devices/system/node/node1")


def reserve_weight_memory(config: ModelConfig, *, with_cache: bool = False) -> WeightMemory | None:
    """Memory for the weights of a generative model; None where it would not be used, or brings nothing.

    ``with_cache``: also for the part of the KV cache that is used first, as far as the thread gets in the meantime.
    This is for a process that computes as soon as the model is loaded; a worker gets these pages while it is idle.
    """
    has_kernels = importlib.util.find_spec("inferd._kernels") is not None
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and os.path.exists("/dev/nvidiactl"))
    if not has_kernels or on_gpu or config.parallel.count > 1 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    if _SECOND_NODE.exists():  # one thread would put everything into its own socket's memory
        return None
    try:
        folder = check_folder(resolve(config.source))
        source = Source(folder / "config.json")
        dims = read_config(source)
        itemsize = ITEM_BYTES[dtype_name(config.dtype, dims.dtype, on_cpu=True, source=source)]
        nbytes = weight_bytes(folder, source, dims, itemsize, config.quantization)
    except (ModelLoadError, OSError):  # the loader says what is wrong with it
        return None
    if nbytes < _LEAST_BYTES:
        return None
    nbytes += nbytes // 256  # what begins at whole lines takes a little more
    try:
        return WeightMemory(nbytes + (_used_first_bytes(config, dims, itemsize) if with_cache else 0))
    except OSError:  # the system promises less than that at once
        return None


def _used_first_bytes(config: ModelConfig, dims: DecoderConfig, itemsize: int) -> int:
    """Bytes of the cache that are used first, as far as known before the plan."""
    cache = config.kv_cache
    of_a_token = kv_bytes_per_token(
        num_layers=dims.num_layers,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        itemsize=itemsize,
        dtype=cache.dtype,
    )
    asked = cache.memory_bytes if cache.num_blocks is None else cache.num_blocks * cache.block_size * of_a_token
    return min(ahead_bytes(of_a_token), int(available_bytes() * FREE_SHARE) if asked is None else asked)
