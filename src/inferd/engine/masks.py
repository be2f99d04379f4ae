"""The masks of a step's constrained rows.

A mask depends on the tokens before its row alone, guessed ones included, so it is known before the row's logits are.
The step loop computes masks when it has started the forward pass: an accelerator computes meanwhile, and a CPU has by
then ended its share. A thread beside a forward pass on the CPU takes the cores from it, and its handovers take longer
than most masks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from inferd import clock
from inferd.structured.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MOST_THREADS = 8
# The shortest work that several threads divide. Where other programs use the cores, each part of it waits for a turn,
# which takes milliseconds.
_DIVIDED_S = 0.002
_TIMED_EVERY = 16  # steps with short masks; one of so many is timed, because reading the clock takes as long as a mask
_FADING = 0.98  # of what a mask took, for each step whose masks were divided: its time is not comparable


class Wanted(NamedTuple):
    """The masks of some sequences: after the known tokens of each, and after each of its guessed ones."""

    guides: Seq[Guide]
    drafts: Seq[tuple[int, ...]]  # by guide
    num_rows: int  # one for each guide and for each guessed token


@dataclass(slots=True)
class Masks:
    """``words`` [M, W] int32; one row for each row of logits that is constrained. Valid until the next ``compute``."""

    words: np.ndarray
    address: int  # of the words
    first: Seq[int]  # by guide: its first row of ``words``
    counts: Seq[int]  # by guide: its rows that were computed


class MaskMaker:
    """Belongs to the step loop. The threads begin with the first step whose masks take long."""

    def __init__(self, num_words: int) -> None:
        self._executor: LLExecutor | None = None
        self._mask_s = 0.0  # what a mask usually takes, in processor time: other programs do not add to it
        self._num_untimed = _TIMED_EVERY
        self._num_words = num_words
        self._memory = _Memory(0, num_words)

    def compute(self, wanted: Wanted) -> Masks:
        if self._memory.num_rows < wanted.num_rows:
            self._memory = _Memory(wanted.num_rows, self._num_words)
        expected_s = self._mask_s * wanted.num_rows
        if expected_s >= _DIVIDED_S:
            self._mask_s *= _FADING
            return self._compute(wanted, is_parallel=True)
        self._num_untimed += 1
        if self._num_untimed < _TIMED_EVERY and expected_s < _DIVIDED_S / 8:
            return self._compute(wanted, is_parallel=False)
        self._num_untimed = 0
        began = clock.computing()
        masks = self._compute(wanted, is_parallel=False)
        self._mask_s += ((clock.computing() - began) / wanted.num_rows - self._mask_s) / 4
        return masks

    def _compute(self, wanted: Wanted, *, is_parallel: bool) -> Masks:
        guides, drafts, num_rows = wanted
        memory = self._memory
        address, row_bytes = memory.address, memory.row_bytes
        first: Seq[int]
        counts: Seq[int]
        if num_rows == len(guides):
            first, counts = range(num_rows), [1] * num_rows
            plain = [(guide.matcher, row) for row, guide in enumerate(guides)]
        else:
            first, counts, plain = self._compute_drafted(wanted, is_parallel=is_parallel)
        if is_parallel and plain:
            self._threads.unsafe_compute_mask_ptr(plain, address, row_bytes, num_rows)
        else:
            for matcher, row in plain:
                matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        for guide, draft, at, count in zip(guides, drafts, first, counts, strict=True):
            if draft or not guide.takes_whole_masks:
                guide.narrow(memory.words, at, count, draft)
        return Masks(memory.words[:num_rows], memory.address, first, counts)

    def _compute_drafted(
        self, wanted: Wanted, *, is_parallel: bool
    ) -> tuple[list[int], list[int], list[tuple[LLMatcher, int]]]:
        """Compute the masks of the guides with guessed tokens. Returns ``first`` and ``counts`` of ``Masks``, and the
        masks that are left, by their rows."""
        memory = self._memory
        first: list[int] = []
        counts: list[int] = []
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        at = 0
        for guide, draft in zip(wanted.guides, wanted.drafts, strict=True):
            first.append(at)
            counts.append(1 + len(draft))
            if draft:
                # A copy, so that guesses that exhaust the matcher's limits do not end the answer.
                drafted.append((guide.matcher.deep_copy(), at, list(draft)))
            else:
                plain.append((guide.matcher, at))
            at += 1 + len(draft)
        memory.words[:at] = -1  # there is no mask behind a guess that may not follow
        for some in [drafted] if is_parallel else [[one] for one in drafted]:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(some, memory.address, memory.row_bytes, at)
        failed = {row for matcher, row, _ in drafted if matcher.is_error()}
        for i, guide in enumerate(wanted.guides):
            if first[i] in failed:
                counts[i] = 1
                plain.append((guide.matcher, first[i]))
        return first, counts, plain

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
