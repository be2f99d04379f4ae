"""The KV cache in memory: keys and values of all blocks, one pair of arrays for each layer.

Knows layouts and number formats. Does not know which sequence owns a block; see ``engine.scheduling.blocks``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.native import compiled
from inferd.native.kv_sizes import ahead_bytes, key_groups

# Blocks of a few kB are spread over an array, so small pages cause many page table lookups. Large pages save a tenth of
# the time of attention over 4,000 tokens. Arrays that are not much larger than such a page would only take more memory.
_WORTH_LARGE_PAGES_BYTES = 32 * 1024 * 1024
_LARGE_PAGE_BYTES = 2 * 1024 * 1024


class KVCache:
    """The keys and values of all blocks, layer by layer.

    The layout is that of the kernels (kernels/cache.h): lanes of 32 bits with ``lane`` numbers side by side. The shape
    of keys is [num_blocks, kv_heads, head_dim / lane, block_size, lane]. The shape of values is [num_blocks, kv_heads,
    block_size / lane, head_dim, lane]. Both have the model's number format ``dtype``.

    ``in_bytes``: keys and values are 8-bit integers. Values have a float32 scale for each token and head; keys have one
    for each token, head and ``KEY_GROUP`` columns, because channels of keys differ more (Liu et al. 2024).

    ``in_rows``: both are [num_blocks, kv_heads, block_size, head_dim], the layout that a GPU's threads read side by
    side.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        in_bytes: bool = False,
        in_rows: bool = False,
    ) -> None:
        self.in_rows = in_rows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.in_bytes = in_bytes
        self.key_groups = key_groups(head_dim) if in_bytes else 1
        lane = 4 if in_bytes else 4 // dtype.itemsize
        if head_dim % lane:  # the kernels take no such heads
            lane = 1
        heads = (num_blocks, num_kv_heads)
        key_shape: tuple[int, ...] = (*heads, head_dim // lane, block_size, lane)
        value_shape: tuple[int, ...] = (*heads, -(-block_size // lane), head_dim, lane)
        if in_rows:
            key_shape = value_shape = (*heads, block_size, head_dim)

        def arenas(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
            # Not cleared: only written parts are read, and untouched pages cost no memory.
            made = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            for arena in made:
                if arena.nbytes >= _WORTH_LARGE_PAGES_BYTES:
                    compiled.prefer_large_pages(arena)
            return made

        self.keys = arenas(key_shape, torch.uint8 if in_bytes else dtype)
        self.values = arenas(value_shape, torch.int8 if in_bytes else dtype)
        scales = num_layers if in_bytes else 0
        self.key_scales = arenas((*heads, self.key_groups, block_size), torch.float32)[:scales]
        self.value_scales = arenas((*heads, block_size), torch.float32)[:scales]
        self._untouched = self._touching()

    def touch_more(self) -> int:
        """Get pages for about 2 MB of the blocks that are used first, in a few milliseconds. Returns the bytes; 0 when
        done."""
        return next(self._untouched, 0)

    def _touching(self) -> Iterator[int]:
        large = [arena for arena in (*self.keys, *self.values) if arena.nbytes >= _WORTH_LARGE_PAGES_BYTES]
        if not large:
            return
        of_a_block = sum(arena[0].nbytes for arena in large)
        last = min(self.num_blocks, -(-ahead_bytes(of_a_block // self.block_size) // of_a_block))
        blocks = max(1, _LARGE_PAGE_BYTES // large[0][0].nbytes)  # at once; the pool hands them out from the first on
        for begin in range(0, last, blocks):
            for arena in large:
                piece = arena[begin : min(begin + blocks, last)]
                if not compiled.touch_pages(piece):
                    return
                yield piece.nbytes

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, kv_heads, head_dim] to the slots [T]."""
        block, offset = slots // self.block_size, slots % self.block_size
        keys, values, lane = self.keys[layer], self.values[layer], self.keys[layer].shape[-1]
        if self.in_bytes:
            k, key_scale = to_bytes(k, self.key_groups)
            v, value_scale = to_bytes(v, 1)
            self.key_scales[layer][block, :, :, offset] = key_scale
            self.value_scales[layer][block, :, offset] = value_scale.squeeze(-1)
            k = k + 128  # unsigned: the kernels multiply unsigned by signed bytes
        if self.in_rows:
            keys[block, :, offset], values[block, :, offset] = k.to(keys.dtype), v.to(values.dtype)
            return
        keys[block, :, :, offset] = k.reshape(*k.shape[:2], -1, lane).to(keys.dtype)
        values[block, :, offset // lane, :, offset % lane] = v.to(values.dtype)

    def read(self, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first ``length`` keys and values of a sequence with these blocks: float32 [kv_heads, length,
        head_dim]."""
        heads, dim, size = self.num_kv_heads, self.head_dim, self.block_size
        k, v = self.keys[layer][table], self.values[layer][table]
        if self.in_rows:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        else:
            k = k.permute(1, 0, 3, 2, 4)
            v = v.permute(1, 0, 2, 4, 3).reshape(heads, len(table), -1, dim)[:, :, :size]
        k, v = (part.reshape(heads, -1, dim)[:, :length].float() for part in (k, v))
        if self.in_bytes:
            scale = self.key_scales[layer][table].permute(1, 0, 3, 2).reshape(heads, -1, self.key_groups)[:, :length]
            k = (k - 128) * scale.repeat_interleave(dim // self.key_groups, -1)
            v = v * self.value_scales[layer][table].transpose(0, 1).reshape(heads, -1)[:, :length].unsqueeze(-1)
        return k, v

    @property
    def layout(self) -> str:
        """What the bytes of a block are: caches with equal texts can exchange blocks."""
        parts = ("keys", self.keys), ("values", self.values), ("scales", [*self.key_scales, *self.value_scales])
        shapes = (f"{name} {len(made)} x {made[0].dtype} {list(made[0].shape[1:])}" for name, made in parts if made)
        return f"{self.block_size} tokens: {', '.join(shapes)}".replace("torch.", "")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(arena[0].nbytes for arena in self._arenas)

    @property
    def _arenas(self) -> tuple[Tensor, ...]:
        return (*self.keys, *self.values, *self.key_scales, *self.value_scales)

    def read_blocks(self, blocks: list[int]) -> list[bytes]:
        """The contents of blocks, in the layout of this cache."""
        chosen = torch.tensor(blocks, device=self.keys[0].device)
        rows = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8)
        at = 0
        for arena in self._arenas:
            size = arena[0].nbytes
            rows[:, at : at + size] = arena[chosen].reshape(len(blocks), -1).view(torch.uint8)
            at += size
        return [row.tobytes() for row in rows.numpy()]

    def write_blocks(self, blocks: list[int], contents: list[bytes]) -> None:
        """Replace blocks by contents that a cache of the same layout gave."""
        device = self.keys[0].device
        chosen = torch.tensor(blocks, device=device)
        rows = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8).reshape(len(blocks), -1).to(device)
        at = 0
        for arena in self._arenas:
            size = arena[0].nbytes
            part = rows[:, at : at + size].contiguous().view(arena.dtype)
            arena[chosen] = part.reshape(len(blocks), *arena.shape[1:])
            at += size

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer: copy-on-write of shared blocks."""
        if not pairs:
            return
        src = torch.tensor([p[0] for p in pairs], device=self.keys[0].device)
        dst = torch.tensor([p[1] for p in pairs], device=self.keys[0].device)
        for arena in self._arenas:
            arena[dst] = arena[src]


def to_bytes(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """[..., D] in ``groups`` parts with a scale each: (whole numbers in -127..127, scales [..., groups] float32)."""
    parts = x.float().reshape(*x.shape[:-1], groups, -1)
    highest = parts.abs().amax(-1, keepdim=True)
    # Not 127.0 / highest, which torch computes as a reciprocal times 127.
    inverse = torch.where(highest > 0, torch.full_like(highest, 127.0) / highest, 0.0)
    return (parts * inverse).round().reshape(x.shape), (highest / 127.0).squeeze(-1)
