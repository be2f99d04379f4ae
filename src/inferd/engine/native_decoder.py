"""Computes a step of a Llama-like decoder as one call of the kernels (kernels/decoder.h).

Knows which decoders the call supports and how to describe a loaded decoder to it. ``model.llama`` defines what is
computed, is the oracle of the tests to the bit, and computes everywhere else. Layer by layer, a step of 28 layers needs
about 340 calls from Python, which take 4 to 8 ms beside the arithmetic. With ranks, the call comes back to Python where
partial sums are added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.model.cuts import Peers
from inferd.engine.model.llama import GATES, FeedForward, Layer, LlamaDecoder
from inferd.engine.model.load import Decoder
from inferd.native import ops
from inferd.native.attention import FlatBatch
from inferd.native.compiled import ACTIVATIONS, CODES, kernels
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import native_available


class _Sums:
    """The partial sums of a step, which the kernels ask the ranks of a stage to add."""

    __slots__ = ("_peers", "partial", "total")

    def __init__(self, peers: Peers, hidden: int, dtype: torch.dtype) -> None:
        self._peers = peers
        self.partial = torch.empty((0, hidden), dtype=torch.float32)
        self.total = torch.empty((0, hidden), dtype=dtype)

    def reserve(self, rows: int) -> None:
        if rows > len(self.partial):
            self.partial = self.partial.new_empty((rows, self.partial.shape[1]))
            self.total = self.total.new_empty(self.partial.shape)

    def __call__(self, rows: int) -> None:
        self.total[:rows].copy_(self._peers.sum(self.partial[:rows]))


class NativeDecoder:
    """Computes ``LlamaDecoder.forward`` over one KV cache in one call, without the GIL."""

    __slots__ = ("_cache", "_decoder", "_plan", "_sums")

    def __init__(self, decoder: LlamaDecoder, cache: KVCache, max_rows: int) -> None:
        """``max_rows``: rows of a step, for which memory is reserved; a larger step allocates more."""
        self._decoder, self._cache = decoder, cache  # the plan is addresses into their memory
        config, share, peers = decoder.part, decoder.share, decoder.peers
        self._sums = None if peers is None else _Sums(peers, config.hidden_size, decoder.dtype)
        self._plan = kernels.Decoder(
            dtype=CODES[decoder.dtype],
            norm_dtype=CODES[decoder.norm_dtype],
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            wide=config.intermediate_size,
            eps=config.norm_eps,
            embedding_scale=decoder.embedding_scale,
            residual_multiplier=config.residual_multiplier,
            gate=ACTIVATIONS[GATES[config.activation]],
            whole_norms=decoder.family.qk_norm == "full",
            embedding=decoder.embedding.described if share.is_first and share.tensor == 1 else None,
            norm=decoder.norm.data_ptr() if share.is_last else 0,
            continues=not share.is_first,
            sum=self._sums,
        )
        for layer in decoder.layers:
            self._add(layer)
        self._plan.reserve(max_rows)
        if self._sums is not None:
            self._sums.reserve(max_rows)

    @property
    def plan(self) -> kernels.Decoder:
        """The kernels' description of the decoder; valid as long as this object lives."""
        return self._plan

    def _add(self, layer: Layer) -> None:
        assert isinstance(layer.feed_forward, FeedForward)
        config, cache, i = layer.config, self._cache, layer.index
        cos, sin = layer.table or (None, None)
        self._plan.add(
            attention_norm=_address(layer.norms.get("attention")),
            attention_out_norm=_address(layer.norms.get("after_attention")),
            feed_forward_norm=_address(layer.norms.get("feed_forward")),
            feed_forward_out_norm=_address(layer.norms.get("after_feed_forward")),
            q_norm=_address(layer.q_norm),
            k_norm=_address(layer.k_norm),
            cos=_address(cos),
            sin=_address(sin),
            half=0 if cos is None else cos.shape[1],
            qkv=_weights(layer.qkv),
            out=_weights(layer.out),
            gate_up=_weights(layer.feed_forward.gate_up),
            down=_weights(layer.feed_forward.down),
            keys=cache.keys[i].data_ptr(),
            values=cache.values[i].data_ptr(),
            key_scales=cache.key_scales[i].data_ptr() if cache.in_bytes else 0,
            value_scales=cache.value_scales[i].data_ptr() if cache.in_bytes else 0,
            key_groups=cache.key_groups,
            block_size=cache.block_size,
            scale=config.attention_scale,
            window=config.windows[i] or 0,
            softcap=config.attention_softcap or 0.0,
        )

    def forward(self, batch: FlatBatch) -> Tensor:
        """Hidden states [T, hidden] after the final norm; NaN in rows outside ``output_rows``."""
        decoder, sums, rows = self._decoder, self._sums, len(batch.token_ids)
        is_last = decoder.share.is_last
        shape = (rows, decoder.config.hidden_size)
        wanted = batch.output_rows if is_last else None
        entering = self._entering(batch.token_ids)
        if wanted is None:
            out = torch.empty(shape if is_last else (2, *shape), dtype=decoder.dtype)
        else:
            out = torch.full(shape, float("nan"), dtype=decoder.dtype)
        if sums is not None:
            sums.reserve(rows)
        self._plan.forward(
            batch.token_ids.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            batch.query_start.data_ptr(),
            batch.seq_len.data_ptr(),
            batch.block_table.data_ptr(),
            batch.block_table.stride(0),
            batch.num_sequences,
            rows,
            _address(wanted),
            -1 if wanted is None else len(wanted),
            _address(entering),
            out.data_ptr(),
            torch.get_num_threads(),
            *(([], 0) if batch.adapters is None else (batch.adapters.plans, batch.adapters.of.data_ptr())),
            *((0, 0) if sums is None else (sums.partial.data_ptr(), sums.total.data_ptr())),
        )
        return decoder.ended(out) if is_last else decoder.passed(out)

    def _entering(self, ids: Tensor) -> Tensor | None:
        """What the first layer takes, where the kernels do not embed the tokens."""
        decoder, share = self._decoder, self._decoder.share
        if not share.is_first:
            return decoder.received(len(ids))
        is_embedded_here = share.tensor == 1 and decoder.embedding.described is not None
        return None if is_embedded_here else decoder.embedded(ids)


def native_decoder(decoder: Decoder, cache: KVCache, max_rows: int) -> NativeDecoder | None:
    """The decoder as one call over this cache; None where the kernels do not support it. ``max_rows``: see
    NativeDecoder."""
    return (
        NativeDecoder(decoder, cache, max_rows)
        if isinstance(decoder, LlamaDecoder) and _covers(decoder, cache)
        else None
    )


def _covers(decoder: LlamaDecoder, cache: KVCache) -> bool:
    """Whether every layer is dense with packed products, and the cache has the decoder's format."""
    return (
        cache.keys[0].is_cpu
        and cache.dtype == decoder.dtype
        and native_available(decoder.dtype, decoder.config.head_dim, in_bytes=cache.in_bytes)
        and all(_covers_layer(layer, decoder.norm_dtype) for layer in decoder.layers)
    )


def _covers_layer(layer: Layer, norm_dtype: torch.dtype) -> bool:
    parts = layer.feed_forward
    norms = [*layer.norms.values(), *(n for n in (layer.q_norm, layer.k_norm) if n is not None)]
    return (
        isinstance(parts, FeedForward)
        and all(linear.described is not None for linear in (layer.qkv, layer.out, parts.gate_up, parts.down))
        and all(norm.dtype == norm_dtype and norm.is_contiguous() for norm in norms)
        and (layer.table is None or all(t.dtype == torch.float32 and t.is_contiguous() for t in layer.table))
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _weights(linear: ops.Linear) -> kernels.Weights:
    assert linear.described is not None, "covers() was not asked"
    return linear.described
