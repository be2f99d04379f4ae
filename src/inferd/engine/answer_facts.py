"""The facts of a generated text for its model's drift: whether it is a refusal, and how its calls of tools are.

Reads the first choice as it is sent. Keeps the beginning of the text until the request ends, and no text after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferd.compare.refusals import READ_CHARACTERS, is_refusal
from inferd.types import CallsFact, Delta, Facts


class AnswerFacts:
    """``has_tools``: calls of tools are recognised in the answer."""

    __slots__ = ("_beginning", "_has_tools", "_is_cut", "_num_calls", "is_whole")

    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._beginning = ""
        self._num_calls = 0
        self._is_cut = False  # max_tokens or a stop string ended the answer, within or behind a call
        self.is_whole = True  # the answer was heard from its beginning

    def hear(self, deltas: Sequence[Delta]) -> None:
        """Read new parts of the answer."""
        for delta in deltas:
            if delta.index:
                continue
            if delta.text and len(self._beginning) < READ_CHARACTERS:
                self._beginning += delta.text[:READ_CHARACTERS]
            self._num_calls += sum(part.name is not None for part in delta.calls)
            self._is_cut = delta.finish_reason == "length" or isinstance(delta.stop_reason, str)

    def facts(self, num_unmatched: int | None) -> Facts:
        """``num_unmatched``: calls that do not match a schema that is not enforced; None: calls were not validated."""
        if not self.is_whole:
            return Facts(rows=0)
        return Facts(rows=0, is_refusal=is_refusal(self._beginning), calls=self._calls(num_unmatched))

    def _calls(self, num_unmatched: int | None) -> CallsFact:
        if not self._has_tools:
            return ""
        if not self._num_calls:
            return "none"
        if self._is_cut:
            return "cut"
        if num_unmatched is None:
            return "unchecked"
        return "unmatched" if num_unmatched else "valid"
