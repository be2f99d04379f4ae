"""Computes the answers of one request along their tree (``answer_trie``), with ordinary sequences of the scheduler.

A sequence is at one node at a time. When its node is computed, it goes on to a child, and what else branches off there
is left for later. It then returns to the branch, whose keys and values it still holds, and goes on from there. Where
slots and blocks are free, forks of it take over a part. So one slot is enough, and nothing is computed twice unless a
sequence is preempted.
"""

from __future__ import annotations

import math

from inferd.engine.answer_trie import AnswerTrie, Node
from inferd.engine.scheduling.scheduler import Scheduler, Slice
from inferd.engine.scheduling.sequence import Sequence


class _Cursor:
    """A sequence's node, and the nodes that are left to it, the nearest last."""

    __slots__ = ("left", "node")

    def __init__(self, node: Node, left: list[Node]) -> None:
        self.node = node
        self.left = left


class AnswerScoring:
    """The sequences that compute the answers of one request."""

    __slots__ = ("_cursors", "_ends", "_num_made", "_root", "_scheduler", "num_preemptions", "num_read", "trie")

    def __init__(self, trie: AnswerTrie, root: Sequence, scheduler: Scheduler, end_ids: frozenset[int]) -> None:
        """``root`` has the tokens of the tree's root. ``end_ids``: the tokens that end an answer."""
        self.trie = trie
        self.num_read = 0  # tokens of the nodes that are computed
        self.num_preemptions = 0  # of sequences that have ended
        self._scheduler = scheduler
        self._ends = sorted(end_ids)
        self._root = root
        self._cursors = {root: _Cursor(trie.root, [])}
        self._num_made = 1

    @property
    def is_done(self) -> bool:
        return not self._cursors

    def wanted(self, part: Slice) -> list[tuple[int, list[int]]]:
        """The positions of a slice after which log-probabilities are wanted, each with the tokens."""
        node = self._cursors[part.sequence].node
        end = part.start + part.count
        found: list[tuple[int, list[int]]] = []
        if node.is_scored:
            first = node.depth + len(node.logprobs) - 1
            for at in range(max(part.start, first), min(end, node.end_depth - 1)):
                found.append((at, [node.tokens[at + 1 - node.depth]]))
        if end == node.end_depth:
            after = [child.tokens[0] for child in node.children.values() if child.is_scored]
            after += self._ends if node.ends is not None else []
            if after:
                found.append((end - 1, after))
        return found

    def record(self, sequence: Sequence, at: int, logprobs: list[float]) -> None:
        """The log-probabilities of the tokens that were wanted after a position."""
        node = self._cursors[sequence].node
        if at < node.end_depth - 1:
            node.logprobs += logprobs
            return
        values = iter(logprobs)
        for child in node.children.values():
            if child.is_scored:
                child.logprobs = [next(values)]
        if node.ends is not None:
            node.ends = _log_of_sum(list(values))

    def advance(self, sequence: Sequence) -> None:
        """The sequence's node is computed and recorded: go on, or end the sequence."""
        cursor = self._cursors[sequence]
        self.num_read += len(cursor.node.tokens)
        cursor.left += reversed(cursor.node.children.values())
        if not cursor.left:
            del self._cursors[sequence]
            self._retire(sequence)
            return
        self._share(sequence, cursor)
        self._go_on(sequence, cursor)

    def close(self) -> None:
        """Remove the sequences from the scheduler."""
        for sequence in self._cursors:
            self._retire(sequence)
        self._cursors.clear()

    def _share(self, sequence: Sequence, cursor: _Cursor) -> None:
        """Give parts of what is left to forks, where slots and blocks are free."""
        left = cursor.left
        scheduler = self._scheduler
        if len(left) == 1 or scheduler.num_spare_slots <= 0:
            return
        blocks_each = (self.trie.longest - left[0].depth) // scheduler.block_size + 2
        num_forks = min(len(left) - 1, scheduler.num_spare_slots, scheduler.pool.num_available // blocks_each)
        for number in range(num_forks):
            count = len(left) // (num_forks + 1 - number)
            given, left = left[:count], left[count:]
            fork = scheduler.fork(sequence, self._num_made)
            self._num_made += 1
            taken = self._cursors[fork] = _Cursor(cursor.node, given)
            self._go_on(fork, taken)
        cursor.left = left

    def _go_on(self, sequence: Sequence, cursor: _Cursor) -> None:
        node = cursor.node = cursor.left.pop()
        self._scheduler.redirect(sequence, node.depth, node.tokens, node.depth + 1 if node.is_scored else None)

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        if sequence is not self._root:
            self.num_preemptions += sequence.num_preemptions


def _log_of_sum(logarithms: list[float]) -> float:
    """The logarithm of the sum of the numbers with these logarithms; of none: of 0."""
    most = max(logarithms, default=-math.inf)
    if most == -math.inf:
        return most
    return most + math.log(math.fsum(math.exp(value - most) for value in logarithms))
