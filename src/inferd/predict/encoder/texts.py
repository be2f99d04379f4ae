"""Texts to token ids as an encoder reads them: pairs, limits, truncation, offsets. Knows no tensor."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import tokenizers

from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from inferd.predict.long_text import deciding_part

Side = Literal["left", "right"]


class Encoded(NamedTuple):
    """One text, or a pair, as the model reads it."""

    ids: list[int]
    types: list[int] | None  # None: all 0
    offsets: list[tuple[int, int]] | None  # of every token's characters, if they are wanted
    special: list[int] | None  # 1 for special tokens, if offsets are wanted


class Cut(NamedTuple):
    """How a text that is too long is cut. It is refused where ``to`` is None."""

    to: int | None = None  # tokens, special ones included
    side: Side = "right"  # that is cut off


KEEP: Final = Cut()


class Among(NamedTuple):
    """A request's texts that are tokenized together: the first one's place, and how many the request has."""

    first: int
    total: int


class Texts:
    """One model's way of reading texts of at most ``max_tokens`` tokens, special ones included."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_tokens: int, lower_case: bool, has_types: bool, vocab_size: int
    ) -> None:
        self._backend = tokenizer.backend
        self.max_tokens = max_tokens
        self._lower = lower_case
        self._has_types = has_types
        self._vocab_size = vocab_size
        if tokenizer.vocab_size > vocab_size and max(self._backend.get_vocab().values(), default=0) >= vocab_size:
            raise ModelLoadError(
                f"The tokenizer has {tokenizer.vocab_size} tokens, but the model knows {vocab_size}. Use the tokenizer "
                "that came with the checkpoint."
            )

    def encode(
        self, texts: list[str], cut: Cut = KEEP, *, offsets: bool = False, among: Among | None = None
    ) -> list[Encoded]:
        """Raises ContextLengthExceeded that names the text and the limit. ``among``: of which texts these are a
        part."""
        if self._lower:
            texts = [text.lower() for text in texts]
        limit, among = self._limit(cut), among or Among(0, len(texts))
        if not (offsets and cut.side == "left"):  # where places are counted from the beginning
            texts = [self._part(text, limit, cut, at, among) for at, text in enumerate(texts)]
        encodings = self._batch(texts, offsets, among)
        for at, encoding in enumerate(encodings):
            if len(encoding.ids) > limit:
                if cut.to is None:
                    raise self._too_long(f"{len(encoding.ids)} tokens", at, among)
                encodings[at] = self._cut_single(texts[at], limit, cut.side)
        return [self._encoded(encoding, offsets, is_pair=False) for encoding in encodings]

    def encode_pairs(
        self, pairs: list[tuple[str, str]], cut: Cut = KEEP, *, among: Among | None = None
    ) -> list[Encoded]:
        """Of a pair that is too long, the longer text is cut first (``longest_first``). Raises as ``encode``."""
        if self._lower:
            pairs = [(first.lower(), second.lower()) for first, second in pairs]
        limit, among = self._limit(cut), among or Among(0, len(pairs))
        pairs = [
            (self._part(first, limit, cut, at, among), self._part(second, limit, cut, at, among))
            for at, (first, second) in enumerate(pairs)
        ]
        encodings = self._batch(list(pairs), False, among)
        for at, encoding in enumerate(encodings):
            if len(encoding.ids) > limit:
                if cut.to is None:
                    raise self._too_long(f"{len(encoding.ids)} tokens", at, among)
                encodings[at] = self._cut_pair(pairs[at], limit, cut.side)
        return [self._encoded(encoding, False, is_pair=True) for encoding in encodings]

    def check_ids(self, ids: list[int], at: int, among: Among, cut: Cut = KEEP) -> Encoded:
        """Token ids that a client made himself. Raises InvalidRequest."""
        if not ids:
            raise InvalidRequest(
                f"input[{among.first + at}] is an empty list of token ids; send at least one.", param="input"
            )
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"input[{among.first + at}] holds the token id {token}; this model has the ids 0 to "
                    f"{self._vocab_size - 1}.",
                    param="input",
                )
        limit = self._limit(cut)
        if len(ids) > limit:
            if cut.to is None:
                raise self._too_long(f"{len(ids)} tokens", at, among)
            ids = ids[:limit] if cut.side == "right" else ids[len(ids) - limit :]
        return Encoded(ids, None, None, None)

    def _part(self, text: str, limit: int, cut: Cut, at: int, among: Among) -> str:
        """The part of ``text`` that the model reads. Raises ContextLengthExceeded."""
        part = deciding_part(
            text, limit, lambda part: len(self._tokens([part], False)[0].ids), from_end=cut.side == "left"
        )
        if not part.is_whole and cut.to is None:
            number = f"more than {limit} tokens" if part.has_plenty else f"{len(text)} characters"
            raise self._too_long(number, at, among)
        return part.text

    def _limit(self, cut: Cut) -> int:
        return self.max_tokens if cut.to is None else min(cut.to, self.max_tokens)

    def _batch(
        self, texts: list[str] | list[tuple[str, str]], offsets: bool, among: Among
    ) -> list[tokenizers.Encoding]:
        found = self._tokens(texts, offsets)
        for at, encoding in enumerate(found):
            if not encoding.ids:
                raise InvalidRequest(
                    f"Text {among.first + at} of {among.total} has no tokens; send a text that is not empty.",
                    param="input",
                )
        return found

    def _tokens(self, texts: list[str] | list[tuple[str, str]], offsets: bool) -> list[tokenizers.Encoding]:
        encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
        try:
            found: list[tokenizers.Encoding] = encode(texts)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(
                "A text contains a lone UTF-16 surrogate, which is no character. Remove it.", param="input"
            ) from error
        return found

    def _cut_single(self, text: str, limit: int, side: Side) -> tokenizers.Encoding:
        bare = self._backend.encode(text, add_special_tokens=False)
        bare.truncate(self._max_text_tokens(limit, is_pair=False), direction=side)
        return self._backend.post_process(bare)

    def _cut_pair(self, pair: tuple[str, str], limit: int, side: Side) -> tokenizers.Encoding:
        first, second = (self._backend.encode(text, add_special_tokens=False) for text in pair)
        max_tokens = self._max_text_tokens(limit, is_pair=True)
        of_first, of_second = _longest_first(len(first.ids), len(second.ids), max_tokens)
        first.truncate(of_first, direction=side)
        second.truncate(of_second, direction=side)
        return self._backend.post_process(first, second)

    def _max_text_tokens(self, limit: int, *, is_pair: bool) -> int:
        special = self._backend.num_special_tokens_to_add(is_pair)
        if limit <= special:
            raise InvalidRequest(
                f"A text cannot be cut to {limit} tokens: {special} of them are special; allow at least {special + 1}.",
                param="truncate_prompt_tokens",
            )
        return limit - special

    def _encoded(self, encoding: tokenizers.Encoding, offsets: bool, *, is_pair: bool) -> Encoded:
        types = encoding.type_ids if is_pair and self._has_types else None
        if offsets:
            return Encoded(encoding.ids, types, encoding.offsets, encoding.special_tokens_mask)
        return Encoded(encoding.ids, types, None, None)

    def _too_long(self, length: str, at: int, among: Among) -> ContextLengthExceeded:
        which = "The text" if among.total == 1 else f"Text {among.first + at} of {among.total}"
        return ContextLengthExceeded(
            f"{which} has {length}; this model reads at most {self.max_tokens} tokens. Shorten it, or ask for "
            "truncation (truncate_prompt_tokens: -1, truncate: true).",
            param="input",
        )


def _longest_first(first: int, second: int, max_tokens: int) -> tuple[int, int]:
    """How many tokens of each text remain: the longer text loses one until both fit."""
    over = max(0, first + second - max_tokens)
    swap = first < second
    long, short = max(first, second), min(first, second)
    level = min(over, long - short)
    long -= level
    over -= level
    long -= (over + 1) // 2
    short -= over // 2
    return (short, long) if swap else (long, short)
