"""The masks of the rows whose drawn tokens are not known to be allowed.

A token is drawn without the grammar's mask first, and the grammar says at once whether it may follow. Only where it
does not say so the mask of all tokens is computed (see ``Engine._sample``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferd import clock
from inferd.native.masks import RowMasks
from inferd.structured.guide import Guide, without
from inferd.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor

_MOST_THREADS = 8
# The shortest work that several threads divide. Where other programs use the cores, each part of it waits for a turn,
# which takes milliseconds.
_DIVIDED_S = 0.002
_FADING = 0.98  # of what a mask took, for each step whose masks were divided: its time is not comparable


class MaskMaker:
    """Belongs to the step loop. The threads begin with the first step whose masks take long."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._executor: LLExecutor | None = None
        self._mask_s = 0.0  # what a mask usually takes, in processor time: other programs do not add to it
        self._num_words = vocabulary.mask_words
        self._memory = _Memory(0, self._num_words)
        self._no_ends = without(np.full(self._num_words, -1, dtype=np.int32), vocabulary.eos_ids)
        self._unended = self._no_ends[None]

    def unended(self, goes_on: Seq[bool]) -> RowMasks | None:
        """The mask of all tokens but those that end answers, for some of the rows; None: for none of them."""
        if True not in goes_on:
            return None
        return RowMasks(self._unended, self._unended.ctypes.data, [0 if is_open else -1 for is_open in goes_on])

    def compute(self, guides: Seq[Guide | None]) -> RowMasks:
        """The mask of each answer's next token, in the order of the guides; None: of all tokens but those that end
        answers. Valid until the next call."""
        count = len(guides)
        if self._memory.num_rows < count:
            self._memory = _Memory(count, self._num_words)
        memory = self._memory
        rows = [(guide, row) for row, guide in enumerate(guides) if guide is not None]
        if len(rows) < count:
            memory.words[[row for row, guide in enumerate(guides) if guide is None]] = self._no_ends
        if self._mask_s * len(rows) >= _DIVIDED_S:
            self._mask_s *= _FADING
            matchers = [(guide.matcher, row) for guide, row in rows]
            self._threads.unsafe_compute_mask_ptr(matchers, memory.address, memory.row_bytes, count)
        elif rows:
            began = clock.computing()
            for guide, row in rows:
                guide.matcher.unsafe_compute_mask_ptr(memory.address + row * memory.row_bytes, memory.row_bytes)
            self._mask_s += ((clock.computing() - began) / len(rows) - self._mask_s) / 4
        for guide, row in rows:
            if not guide.takes_whole_masks:
                guide.narrow(memory.words[row])
        return RowMasks(memory.words[:count], memory.address, list(range(count)))

    @property
    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, min(_MOST_THREADS, torch.get_num_threads())))
        return self._executor


class _Memory:
    """Rows for masks, which each step writes again: making them takes as long as a mask."""

    def __init__(self, num_rows: int, num_words: int) -> None:
        self.num_rows = num_rows
        self.words = np.empty((num_rows, num_words), dtype=np.int32)
        self.address: int = self.words.ctypes.data
        self.row_bytes: int = self.words.strides[0]
