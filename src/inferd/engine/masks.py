"""The masks of a step's constrained rows.

A mask depends on the tokens before its row alone, guessed ones included, so it is known before the row's logits are.
Masks that take longer than a handover to another thread are computed in one, beside the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inferd import clock
from inferd.structured.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MOST_THREADS = 8
_HANDOVER_S = 0.0003  # what a thread that starts and ends within a step costs it, while others want the interpreter
_FADING = 0.98  # of what a mask took, for each step whose masks are computed in the thread: its time is not comparable


class Wanted(NamedTuple):
    """The masks of one sequence: after its known tokens, and after each of its guessed ones.

    The end of the answer (``end_ids``) is banned at the first ``num_endless`` of them, unless it alone is allowed.
    """

    guide: Guide
    draft: tuple[int, ...]
    num_endless: int
    end_ids: Seq[int]


@dataclass(slots=True)
class Masks:
    """``bits`` [M, W] int32; one row for each row of logits that is constrained."""

    bits: Tensor
    first: list[int]  # by wanted: its first row of ``bits``
    counts: list[int]  # by wanted: its rows that were computed


class MaskThread:
    """``begin`` and ``wait`` belong to the step loop, and alternate. The thread begins with the first long masks."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._masks: Future[Masks] | None = None
        self._short: list[Wanted] = []  # to be computed in ``wait``
        self._mask_s = 0.0  # what a mask usually takes

    def begin(self, wanted: list[Wanted]) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, min(_MOST_THREADS, torch.get_num_threads())))
        if self._masks is not None:  # of a step that failed: its matchers may be the same
            wait([self._masks])
            self._masks = None
        if self._mask_s * sum(1 + len(one.draft) for one in wanted) < _HANDOVER_S:
            self._short = wanted
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "inferd-masks")
        self._masks = self._thread.submit(_compute, self._executor, wanted, self._num_words)
        self._mask_s *= _FADING

    def wait(self) -> Masks:
        if self._masks is not None:
            masks, self._masks = self._masks, None
            return masks.result()
        assert self._executor is not None
        began = clock.now()
        short = _compute(self._executor, self._short, self._num_words, is_parallel=False)
        self._mask_s += ((clock.now() - began) / short.bits.shape[0] - self._mask_s) / 8
        return short

    def close(self) -> None:
        """Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _compute(executor: LLExecutor, wanted: list[Wanted], num_words: int, *, is_parallel: bool = True) -> Masks:
    first: list[int] = []
    counts: list[int] = []
    plain: list[tuple[LLMatcher, int]] = []
    drafted: list[tuple[LLMatcher, int, list[int]]] = []
    total = 0
    for one in wanted:
        first.append(total)
        counts.append(1 + len(one.draft))
        matcher = one.guide.matcher
        if one.draft:
            # A copy, so that guesses that exhaust the matcher's limits do not end the answer.
            drafted.append((matcher.deep_copy(), total, list(one.draft)))
        else:
            plain.append((matcher, total))
        total += 1 + len(one.draft)
    rows = np.full((total, num_words), -1, dtype=np.int32)
    address, row_bytes = rows.ctypes.data, rows.strides[0]
    if drafted:
        for some in [drafted] if is_parallel else [[one] for one in drafted]:
            executor.unsafe_compute_mask_ptr_with_draft_token(some, address, row_bytes, total)
        failed = {row for matcher, row, _ in drafted if matcher.is_error()}
        for i, one in enumerate(wanted):
            if first[i] in failed:
                counts[i] = 1
                plain.append((one.guide.matcher, first[i]))
    if is_parallel and plain:
        executor.unsafe_compute_mask_ptr(plain, address, row_bytes, total)
    elif plain:
        for matcher, row in plain:
            matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
    for one, at, count in zip(wanted, first, counts, strict=True):
        one.guide.ban_repeated_names(rows[at : at + count], one.draft)
        endless = min(one.num_endless, count)
        if endless > 0:
            _ban_end(rows[at : at + endless], one.end_ids)
    return Masks(torch.from_numpy(rows), first, counts)


def _ban_end(rows: np.ndarray, end_ids: Seq[int]) -> None:
    """Clear the bits of the tokens that end an answer, in rows that have other bits."""
    kept = np.full(rows.shape[1], -1, dtype=np.int32)
    for token in end_ids:
        kept.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFF_FFFF)
    rest = rows & kept
    rows[:] = np.where(rest.any(axis=1, keepdims=True), rest, rows)
