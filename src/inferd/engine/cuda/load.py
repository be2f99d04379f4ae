"""Steps of loading that only CUDA devices have: measuring memory and recording graphs."""

from __future__ import annotations

import torch

from inferd.config import ModelConfig
from inferd.engine.cuda.device import CudaDevice, Device
from inferd.engine.cuda.memory import bytes_for_cache
from inferd.engine.cuda.steps import StepsOnDevice, can_record, graph_sizes
from inferd.engine.memory import most_sampled_rows
from inferd.engine.model.load import Decoder
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import AttentionKind


def device_of(wanted: torch.device, rank: int) -> torch.device:
    """The device of a rank: each has one of its own, upwards from that of rank 0. ``wanted``: by the settings."""
    return torch.device(wanted.type, (wanted.index or 0) + rank) if wanted.type == "cuda" else wanted


def device_load(config: ModelConfig, decoder: Decoder, kind: AttentionKind) -> DeviceLoad | None:
    """What loads the decoder to its CUDA device; None: it is computed without Triton, as on processors."""
    return DeviceLoad(config, decoder, kind, CudaDevice(decoder.device)) if kind == "triton" else None


def free_bytes(decoder: Decoder, load: DeviceLoad | None) -> int:
    """Bytes that the KV caches of all ranks may take, by the memory of this one's CUDA device."""
    if load is not None:
        return load.free_bytes()
    return decoder.share.in_all(int(torch.cuda.mem_get_info(decoder.device)[0]), decoder.config.num_layers)


class DeviceLoad:
    """Loads one model to one device."""

    __slots__ = ("_config", "_decoder", "_device", "_kind", "_sizes")

    def __init__(self, config: ModelConfig, decoder: Decoder, kind: AttentionKind, device: Device) -> None:
        self._config, self._decoder, self._kind, self._device = config, decoder, kind, device
        self._sizes = graph_sizes(config.scheduler.max_num_seqs) if can_record(decoder, kind) else ()

    def free_bytes(self) -> int:
        """Bytes that the KV caches of all ranks may take, by the memory of this one's device. The ranks of a stage call
        it together."""
        dims, config = self._decoder.config, self._config
        found = bytes_for_cache(
            self._decoder,
            self._kind,
            self._device,
            max_rows=config.scheduler.max_num_batched_tokens,
            max_sampled=most_sampled_rows(config),
            max_positions=min(config.max_model_len or dims.max_position_embeddings, dims.max_position_embeddings),
            block_size=config.kv_cache.block_size,
            num_graphs=len(self._sizes),
            in_bytes=config.kv_cache.dtype == "int8",
        )
        return self._decoder.share.in_all(found, dims.num_layers)

    def steps(self, cache: KVCache, max_model_len: int) -> StepsOnDevice:
        """An object that computes steps, with its graphs recorded. No sequence may use the cache's last block."""
        rows = self._config.scheduler.max_num_batched_tokens
        steps = StepsOnDevice(self._decoder, cache, self._kind, self._device, max_rows=rows)
        if self._sizes:
            steps.record(self._sizes, -(-max_model_len // cache.block_size) + 1)
        return steps
