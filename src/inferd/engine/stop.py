"""Stop strings: finds the first one in a growing text, across token boundaries.

Pure over strings; knows no tokens. Text that may be the start of a stop string is held back until that is decided.
"""

from __future__ import annotations


class StopBuffer:
    """Watches one answer's text. ``matched`` is the stop string that ended it.

    Of several stop strings, the one that is complete first wins; of those complete at the same character, the one that
    began first.
    """

    __slots__ = ("_held", "_include", "_longest", "_starts", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        # Every proper prefix: the held text is the longest of them that the text ends with.
        self._starts = frozenset(stop[:i] for stop in self._stops for i in range(1, len(stop)))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add new text; returns what is safe to send. After a match nothing is returned."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        first = self._find(text)
        if first is not None:
            begin, self.matched = first
            self._held = ""
            return text[: begin + len(self.matched)] if self._include else text[:begin]
        keep = min(self._longest - 1, len(text))
        while keep and text[-keep:] not in self._starts:
            keep -= 1
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def push_unchecked(self, text: str) -> str:
        """Add text that cannot stop the answer (below min_tokens); it cannot start a stop string either."""
        if self.matched is not None:
            return ""
        text, self._held = self._held + text, ""
        return text

    def flush(self) -> str:
        """The text that was held back, when generation ended for another reason."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str) -> tuple[int, str] | None:
        found = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if not found:
            return None
        _, begin, stop = min(found)
        return begin, stop
