"""Measures how much device memory the KV cache may take: what is left after the largest step was computed once.

The planner's arithmetic knows the model, but not the device's libraries, which allocate memory at their first call.
"""

from __future__ import annotations

import torch

from inferd.engine.cuda.device import Device
from inferd.engine.model.load import Decoder
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import AttentionKind, create_attention

_MARGIN = 0.04  # of the device's memory: for fragmentation, and for other programs that allocate meanwhile
_GRAPH_BYTES = 16 << 20  # of a recorded graph beside its activations: an assumption, not yet measured
_LOGITS_COPIES = 4  # the sampler's, beside the logits: as ``headroom_bytes`` counts them


def bytes_for_cache(
    decoder: Decoder,
    kind: AttentionKind,
    device: Device,
    *,
    max_rows: int,
    max_sampled: int,
    max_positions: int,
    block_size: int,
    num_graphs: int,
    in_bytes: bool = False,
) -> int:
    """Bytes of device memory that blocks may take. The ranks of a stage call it together.

    Computes a step of ``max_rows`` tokens, ``max_sampled`` of them with logits, over a cache of one block
    (``in_bytes``: of 8-bit integers). The values are meaningless; the memory taken is real. Kernels of large steps are
    compiled here too, and not when the first long prompt arrives.
    """
    peak = device.peak_bytes(
        lambda: _largest_step(decoder, kind, device, max_rows, max_sampled, max_positions, block_size, in_bytes)
    )
    kept = int(device.total_bytes() * _MARGIN) + num_graphs * _GRAPH_BYTES
    if num_graphs:
        kept += peak  # the graphs' own pool, at most as much as a larger step takes
    return max(device.free_bytes() - peak - kept, 0)


def _largest_step(
    decoder: Decoder,
    kind: AttentionKind,
    device: Device,
    max_rows: int,
    max_sampled: int,
    max_positions: int,
    block_size: int,
    in_bytes: bool,
) -> None:
    share, where = decoder.share, device.where
    dims = share.config(decoder.config)
    cache = KVCache(
        num_layers=dims.num_layers,
        num_blocks=1,
        block_size=block_size,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        dtype=decoder.dtype,
        device=where,
        in_bytes=in_bytes,
        in_rows=True,
    )
    rows = max_rows
    positions = torch.arange(rows, device=where) % max_positions
    batch = FlatBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        query_start=torch.tensor([0, rows], dtype=torch.int32, device=where),
        seq_len=torch.tensor([rows], dtype=torch.int32, device=where),
        block_table=torch.zeros((1, -(-rows // block_size)), dtype=torch.int32, device=where),
        slots=positions % block_size,
        num_sequences=1,
    )
    shape = (decoder.num_passed, rows, dims.hidden_size)
    entering = None if share.is_first else torch.zeros(shape, dtype=decoder.dtype, device=where)
    with torch.inference_mode():
        hidden = decoder.forward(batch, create_attention(kind, cache, batch), entering)
        if not share.is_first:
            return
        hidden = hidden if share.is_last else hidden[0]  # in the shape of what the last stage sends
        logits = decoder.logits(hidden[torch.zeros(max_sampled, dtype=torch.int64, device=where)])
        copies = [logits.clone() for _ in range(_LOGITS_COPIES - 1)]
    del copies
