"""Computes a step of a Llama-like decoder as one call of the kernels (kernels/decoder.h).

Knows which decoders the call supports and how to describe a loaded decoder to it. ``model.llama`` defines what is
computed, is the oracle of the tests to the bit, and computes everywhere else. Layer by layer, a step of 28 layers needs
about 340 calls from Python, which take 4 to 8 ms beside the arithmetic. With ranks that share no memory, the call comes
back to Python where the parts of all ranks are added or put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

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

MOST_PARTS: Final = 8
"""Calls into which the layers of a step that may pause are divided: it waits for an eighth of them at most."""


_Rows = tuple[int, int, int, int, int, int, int, int, int]


class _Exchange:
    """This rank's parts of a step, and what they become with those of the other ranks of its stage.

    ``add`` and ``concat`` are called by the kernels where the ranks have no ``meeting``.
    """

    __slots__ = ("_peers", "_row_bytes", "_shape", "partial", "whole")

    def __init__(self, decoder: LlamaDecoder, peers: Peers) -> None:
        config, share, item = decoder.part, decoder.share, decoder.dtype.itemsize
        hidden = config.hidden_size
        self._peers, self._shape = peers, (hidden, decoder.dtype)
        if share.by_outputs:
            widest = max(config.num_heads * config.head_dim, config.intermediate_size, hidden // share.tensor)
            self._row_bytes = widest * item, widest * share.tensor * item
        else:
            self._row_bytes = hidden * 4, hidden * item
        self.partial, self.whole = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)

    def reserve(self, rows: int) -> None:
        if rows * self._row_bytes[0] > len(self.partial):
            self.partial, self.whole = (torch.empty(rows * size, dtype=torch.uint8) for size in self._row_bytes)

    def add(self, rows: int) -> None:
        hidden, dtype = self._shape
        partial = _rows(self.partial, rows, hidden * 4).view(torch.float32)
        _rows(self.whole, rows, hidden * dtype.itemsize).view(dtype).copy_(self._peers.sum(partial))

    def concat(self, rows: int, row_bytes: int) -> None:
        together = self._peers.concat(_rows(self.partial, rows, row_bytes))
        _rows(self.whole, *together.shape).copy_(together)


def _rows(memory: Tensor, rows: int, row_bytes: int) -> Tensor:
    """uint8 [rows, row_bytes]: the beginning of ``memory``."""
    return memory[: rows * row_bytes].view(rows, row_bytes)


class Layers:
    """The layers of one step, computed in several calls. Between two of them it may pause, while other steps are
    computed. The results are those of one call, to the bit."""

    __slots__ = ("_batch", "_decoder", "_next", "_passed", "_rows")

    def __init__(self, decoder: NativeDecoder, batch: FlatBatch) -> None:
        self._decoder, self._batch, self._rows = decoder, batch, _described(batch)
        self._next = 0  # the call that is due
        self._passed: Tensor | None = None  # [2, T, hidden] branch and residual, from the call before

    def advance(self, pauses: Callable[[], bool]) -> Tensor | None:
        """The hidden states, as of ``NativeDecoder.forward``; None: ``pauses`` was true between two calls."""
        parts = self._decoder.parts
        while True:
            self._passed = self._decoder.compute(parts[self._next], self._batch, self._rows, self._passed)
            self._next += 1
            if self._next == len(parts):
                return self._passed
            if pauses():
                return None


class _Part:
    """Consecutive layers as one call."""

    __slots__ = ("is_last", "layers", "plan")

    def __init__(self, plan: kernels.Decoder, layers: range, *, is_last: bool) -> None:
        self.plan, self.layers, self.is_last = plan, layers, is_last


class NativeDecoder:
    """Computes ``LlamaDecoder.forward`` over one KV cache in one call, without the GIL."""

    __slots__ = ("_cache", "_decoder", "_exchange", "_parts", "_whole")

    def __init__(self, decoder: LlamaDecoder, cache: KVCache, max_rows: int) -> None:
        """``max_rows``: rows of a step, for which memory is reserved; a larger step allocates more."""
        self._decoder, self._cache = decoder, cache  # the plans are addresses into their memory
        self._exchange = None if decoder.peers is None else _Exchange(decoder, decoder.peers)
        self._parts: list[_Part] = []  # made when a step may pause for the first time
        self._whole = self._planned(range(len(decoder.layers)))
        self._whole.plan.reserve(max_rows)
        if self._exchange is not None:
            self._exchange.reserve(max_rows)

    def _planned(self, layers: range) -> _Part:
        """``layers``: places in this process's share of the model."""
        decoder = self._decoder
        config, share = decoder.part, decoder.share
        is_first, is_last = layers.start == 0, layers.stop == len(decoder.layers)
        is_embedded_here = is_first and share.is_first and share.tensor == 1
        meeting = None if decoder.peers is None else decoder.peers.meeting
        exchange = None if meeting is not None else self._exchange  # by the kernels themselves, or by Python
        plan = kernels.Decoder(
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
            embedding=decoder.embedding.described if is_embedded_here else None,
            norm=decoder.norm.data_ptr() if is_last and share.is_last else 0,
            continues=not (is_first and share.is_first),
            sum=None if exchange is None or share.by_outputs else exchange.add,
            meeting=None if share.by_outputs else meeting,
        )
        if share.by_outputs:
            plan.divide_by_outputs(share.tensor, None if exchange is None else exchange.concat, meeting)
        for place in layers:
            self._add(plan, decoder.layers[place])
        return _Part(plan, layers, is_last=is_last)

    @property
    def can_pause(self) -> bool:
        """Whether ``begin`` may be called: no other process computes a part of the step."""
        return self._decoder.peers is None

    @property
    def parts(self) -> Sequence[_Part]:
        """All layers, as the calls of a step that may pause. They compute in the memory of the whole: while a step has
        paused, nothing in it is needed."""
        if not self._parts:
            count = len(self._decoder.layers)
            each = -(-count // MOST_PARTS)
            self._parts = [self._planned(range(at, min(at + each, count))) for at in range(0, count, each)]
            for part in self._parts:
                part.plan.borrow(self._whole.plan)
        return self._parts

    @property
    def plan(self) -> kernels.Decoder:
        """The kernels' description of the decoder; valid as long as this object lives."""
        return self._whole.plan

    def _add(self, plan: kernels.Decoder, layer: Layer) -> None:
        assert isinstance(layer.feed_forward, FeedForward)
        config, cache, i = layer.config, self._cache, layer.index
        cos, sin = layer.table or (None, None)
        plan.add(
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

    def begin(self, batch: FlatBatch) -> Layers:
        """The same as ``forward``, in several calls. Only where ``can_pause``."""
        return Layers(self, batch)

    def forward(self, batch: FlatBatch, entering: Tensor | None = None) -> Tensor:
        """The same as of ``LlamaDecoder.forward``; NaN in hidden states outside ``output_rows``."""
        return self.compute(self._whole, batch, _described(batch), entering)

    def compute(self, part: _Part, batch: FlatBatch, rows_of: _Rows, entering: Tensor | None) -> Tensor:
        """Hidden states [T, hidden] after the final norm, where the part has it; else [2, T, hidden] branch and
        residual. ``rows_of``: the batch as ``_described``. ``entering``: of the part or stage before; None: it is the
        first."""
        decoder, exchange, rows = self._decoder, self._exchange, len(batch.token_ids)
        is_last = part.is_last and decoder.share.is_last
        shape = (rows, decoder.config.hidden_size)
        wanted = batch.output_rows if is_last else None
        if entering is None:
            entering = self._embedded(batch.token_ids)
        if wanted is None:
            out = torch.empty(shape if is_last else (2, *shape), dtype=decoder.dtype)
        else:
            out = torch.full(shape, float("nan"), dtype=decoder.dtype)
        if exchange is not None:
            exchange.reserve(rows)
        adapters = batch.adapters
        part.plan.forward(
            *rows_of,
            _address(wanted),
            -1 if wanted is None else len(wanted),
            _address(entering),
            out.data_ptr(),
            torch.get_num_threads(),
            *(([], 0) if adapters is None else (adapters.plans(part.layers), adapters.of.data_ptr())),
            *((0, 0) if exchange is None else (exchange.partial.data_ptr(), exchange.whole.data_ptr())),
        )
        return out

    def _embedded(self, ids: Tensor) -> Tensor | None:
        """What the first layer takes; None: the kernels embed the tokens."""
        decoder = self._decoder
        is_embedded_here = decoder.share.tensor == 1 and decoder.embedding.described is not None
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
    """Whether every layer is dense with packed products, and the cache has the decoder's format.

    Norms over heads that are divided among ranks need an exchange that the call does not ask for.
    """
    return (
        cache.keys[0].is_cpu
        and not (decoder.family.qk_norm == "full" and decoder.peers is not None)
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


def _described(batch: FlatBatch) -> _Rows:
    """A step's rows for the kernels; valid as long as the batch lives."""
    return (
        batch.token_ids.data_ptr(),
        batch.positions.data_ptr(),
        batch.slots.data_ptr(),
        batch.query_start.data_ptr(),
        batch.seq_len.data_ptr(),
        batch.block_table.data_ptr(),
        batch.block_table.stride(0),
        batch.num_sequences,
        len(batch.token_ids),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _weights(linear: ops.Linear) -> kernels.Weights:
    assert linear.described is not None, "covers() was not asked"
    return linear.described
