"""The prompts that a replica was sent and has not computed, as a part of its load.

A prompt of ten thousand tokens keeps a replica longer than many sequences of one token each step, and the replica says
nothing about it until it is computed. Its size is an estimate: of the bytes that the replica has not received before.
"""

from __future__ import annotations

from typing import Final

TOKENS_OF_A_SEQUENCE: Final = 1024
"""Prompt tokens that count like one sequence."""


class PromptWork:
    """The prompts by their requests. ``load``: all of them, in sequences."""

    __slots__ = ("_num_tokens", "_tokens")

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._num_tokens = 0

    @property
    def load(self) -> float:
        return self._num_tokens / TOKENS_OF_A_SEQUENCE

    def add(self, request_id: str, num_tokens: int) -> None:
        """A request with so many prompt tokens to compute was sent."""
        if num_tokens:
            self._tokens[request_id] = num_tokens
            self._num_tokens += num_tokens

    def remove(self, request_id: str) -> None:
        """The prompt was computed, or its request has left. Idempotent."""
        if self._tokens:
            self._num_tokens -= self._tokens.pop(request_id, 0)

    def clear(self) -> None:
        """All requests have left."""
        self._tokens.clear()
        self._num_tokens = 0
