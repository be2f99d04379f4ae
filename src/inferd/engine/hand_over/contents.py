"""The contents of blocks as hand-overs exchange them: of a replica of several ranks the parts of all, in their order.

Knows KV caches and, of the ranks, that they give and take their parts of named blocks. Does not know hand-overs, keys
or what a block is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from inferd.native.kv_cache import KVCache

if TYPE_CHECKING:
    from inferd.engine.ranks.lead import Lead


def cut(contents: Sequence[bytes], sizes: Sequence[int]) -> list[list[bytes]]:
    """The contents of blocks as the parts of each rank. ``sizes``: bytes of each rank's part of one block."""
    ends = list(accumulate(sizes))
    return [[content[end - size : end] for content in contents] for end, size in zip(ends, sizes, strict=True)]


def joined(parts: Sequence[Sequence[bytes]]) -> list[bytes]:
    """The contents of blocks from the parts of each rank: the reverse of ``cut``."""
    return [b"".join(of_block) for of_block in zip(*parts, strict=True)]


class Contents:
    """The contents of one replica's blocks. Everything here belongs to the thread that computes.

    ``layout``: what the bytes are; replicas with equal texts can exchange blocks. ``block_bytes``: of one block.
    """

    def __init__(self, cache: KVCache, ranks: Lead | None) -> None:
        """``cache``: of this rank. ``ranks``: the other ones; None: this process has whole blocks."""
        self._cache = cache
        self._ranks = ranks
        self._sizes = [cache.block_bytes]
        self.layout = cache.layout
        if ranks is not None:
            self._sizes += [part.block_bytes for part in ranks.parts]
            division = f"tensor {ranks.share.tensor} x pipeline {ranks.share.pipeline}"
            self.layout = f"{division}: {'; '.join([cache.layout, *(part.layout for part in ranks.parts)])}"
        self.block_bytes = sum(self._sizes)

    def read(self, blocks: list[int], then: Callable[[list[bytes]], None]) -> None:
        """Call ``then`` with the contents that the blocks have now: at once, or from a thread when all ranks have given
        their parts. Blocks may be released at once."""
        own = self._cache.read_blocks(blocks)
        if self._ranks is None:
            then(own)
            return
        self._ranks.read_blocks(blocks, lambda others: then(joined([own, *others])))

    def after_reads(self, then: Callable[[], None]) -> None:
        """Call ``then`` after the contents of all reads so far were given."""
        if self._ranks is None:
            then()
        else:
            self._ranks.after_reads(then)

    def write(self, blocks: list[int], contents: list[bytes]) -> None:
        """Replace blocks by contents of ``block_bytes`` each, which a replica of the same layout gave."""
        own, *others = cut(contents, self._sizes)
        self._cache.write_blocks(blocks, own)
        if self._ranks is not None:
            self._ranks.write_blocks(blocks, others)
