"""The tokens of answers that are scored, as a tree: what several of them share is one edge.

Pure: no tensor, no scheduler. The root holds what all answer sets share, which is the conversation. Each set has a node
from which its answers are scored. A node is computed once, however many answers pass through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple


class Node:
    """An edge of the tree with the node at its end. ``depth``: tokens before the edge."""

    __slots__ = ("children", "depth", "ends", "is_scored", "logprobs", "parent", "tokens")

    def __init__(self, tokens: list[int], depth: int, parent: Node | None) -> None:
        self.tokens = tokens
        self.depth = depth
        self.parent = parent
        self.children: dict[int, Node] = {}  # by first token
        self.is_scored = False  # the log-probabilities of its tokens are wanted
        self.logprobs: list[float] = []  # of its first tokens
        self.ends: float | None = None  # nan: the log-probability of an end after it is wanted; else that

    @property
    def end_depth(self) -> int:
        return self.depth + len(self.tokens)

    def split(self, count: int) -> Node:
        """Divide the edge after ``count`` tokens; the new node in between. The lower part keeps its identity."""
        parent = self.parent
        upper = Node(self.tokens[:count], self.depth, parent)
        if parent is not None:
            parent.children[upper.tokens[0]] = upper
        upper.children[self.tokens[count]] = self
        self.tokens = self.tokens[count:]
        self.depth += count
        self.parent = upper
        return upper


class Tokenized(NamedTuple):
    """An answer set as token ids: what precedes all of its answers, the prompt's last tokens, and each answer with the
    prompt's last tokens before it."""

    before: list[int]
    prompt: list[int]
    answers: list[list[int]]


class AnswerTrie:
    """The answers of a request. ``num_tokens`` counts every token that is computed once."""

    def __init__(self, shared: list[int], sets: Seq[Tokenized]) -> None:
        self.root = Node(shared, 0, None)
        self._starts: list[Node] = []  # of each set: its answers are scored from here
        self._leaves: list[list[Node]] = []
        for one in sets:
            common = num_common([one.prompt, *one.answers])
            start = self._insert(self.root, [*one.before, *one.prompt[:common]])
            self._starts.append(start)
            self._leaves.append([self._insert(start, ids[common:]) for ids in one.answers])
        while len(self.root.children) == 1 and self.root not in self._starts:
            (only,) = self.root.children.values()
            only.tokens = self.root.tokens + only.tokens
            only.depth, only.parent = 0, None
            self.root = only
        for start, leaves in zip(self._starts, self._leaves, strict=True):
            for leaf in leaves:
                leaf.ends = math.nan
                for node in _path(start, leaf):
                    node.is_scored = True
        self.num_tokens, self.longest = self._measure()

    def scores(self) -> tuple[tuple[float, ...], ...]:
        """The log-probability of each answer and of the end after it, when all nodes have theirs.

        The sum is exact, so it does not depend on where the edges divide.
        """
        return tuple(
            tuple(_total(start, leaf) for leaf in leaves)
            for start, leaves in zip(self._starts, self._leaves, strict=True)
        )

    def _insert(self, node: Node, tokens: list[int]) -> Node:
        """The node at the end of ``tokens`` below ``node``."""
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = node.children[tokens[at]] = Node(tokens[at:], node.end_depth, node)
                return child
            count = num_common([child.tokens, tokens[at:]])
            node = child if count == len(child.tokens) else child.split(count)
            at += count
        return node

    def _measure(self) -> tuple[int, int]:
        """The number of tokens, and the length of the longest answer with its prompt."""
        num_tokens, longest, nodes = 0, 0, [self.root]
        while nodes:
            node = nodes.pop()
            num_tokens += len(node.tokens)
            longest = max(longest, node.end_depth)
            nodes += node.children.values()
        return num_tokens, longest


def num_common(lists: Seq[list[int]]) -> int:
    """The number of first entries that all lists share."""
    least, greatest = min(lists), max(lists)  # all others are in between
    for at, (one, other) in enumerate(zip(least, greatest, strict=False)):
        if one != other:
            return at
    return min(len(least), len(greatest))


def _path(start: Node, leaf: Node) -> list[Node]:
    """The nodes below ``start`` down to ``leaf``."""
    found: list[Node] = []
    node = leaf
    while node is not start:
        found.append(node)
        assert node.parent is not None, "every leaf of a set is below its start"
        node = node.parent
    return found[::-1]


def _total(start: Node, leaf: Node) -> float:
    assert leaf.ends is not None, "every leaf ends an answer"
    return math.fsum([*(value for node in _path(start, leaf) for value in node.logprobs), leaf.ends])
