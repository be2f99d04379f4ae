"""Steps of loading that only CUDA devices have: measuring memory and recording graphs."""

from __future__ import annotations

from inferd.config import ModelConfig
from inferd.engine.cuda.device import Device
from inferd.engine.cuda.memory import bytes_for_cache
from inferd.engine.cuda.steps import StepsOnDevice, can_record, graph_sizes
from inferd.engine.memory import most_sampled_rows
from inferd.engine.model.load import Decoder
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import AttentionKind


class DeviceLoad:
    """Loads one model to one device."""

    __slots__ = ("_config", "_decoder", "_device", "_kind", "_sizes")

    def __init__(self, config: ModelConfig, decoder: Decoder, kind: AttentionKind, device: Device) -> None:
        self._config, self._decoder, self._kind, self._device = config, decoder, kind, device
        self._sizes = graph_sizes(config.scheduler.max_num_seqs) if can_record(decoder, kind) else ()

    def free_bytes(self) -> int:
        """Bytes that the KV cache may take."""
        dims, config = self._decoder.config, self._config
        return bytes_for_cache(
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

    def steps(self, cache: KVCache, max_model_len: int) -> StepsOnDevice:
        """An object that computes steps, with its graphs recorded. No sequence may use the cache's last block."""
        rows = self._config.scheduler.max_num_batched_tokens
        steps = StepsOnDevice(self._decoder, cache, self._kind, self._device, max_rows=rows)
        if self._sizes:
            steps.record(self._sizes, -(-max_model_len // cache.block_size) + 1)
        return steps
