"""Texts in the tokens of a vocabulary, whatever its tokenizer does."""

from __future__ import annotations

from collections.abc import Set as AbstractSet


class LongestTokens:
    """The bytes of all tokens, and always the longest that fits: the interface that ``LLTokenizer`` asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes], eos_ids: AbstractSet[int]) -> None:
        self.eos_token_id = min(eos_ids)
        self.tokens = tokens
        self._by_bytes: dict[bytes, int] | None = None
        self._most = 0  # bytes of a token

    def __call__(self, text: str | bytes) -> list[int]:
        return self.longest(text.encode() if isinstance(text, str) else text)

    def longest(self, text: bytes) -> list[int]:
        """The tokens of the text, up to bytes that no token stands for."""
        if self._by_bytes is None:
            self._by_bytes = {raw: i for i, raw in reversed(list(enumerate(self.tokens))) if raw}
            self._most = max(map(len, self._by_bytes), default=0)
        ids, at = [], 0
        while at < len(text):
            ends = range(min(at + self._most, len(text)), at, -1)
            end = next((e for e in ends if text[at:e] in self._by_bytes), None)
            if end is None:
                break
            ids.append(self._by_bytes[text[at:end]])
            at = end
        return ids
