"""The tokens of a model, in the form in which masks are computed over them.

Reading a large vocabulary takes a while, so it is read when the first constraint needs it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from functools import cached_property
from string import ascii_letters
from typing import TYPE_CHECKING, Protocol

from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.structured.end_tokens import EndTokens
from inferd.structured.names import QuoteTokens
from inferd.structured.spelling import LongestTokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_ASCII = "\n" + "".join(map(chr, range(0x20, 0x7F)))
_SPECIAL = b"\xff"  # llguidance's mark of a token that no text contains
_CONTROLS = frozenset(bytes((code,)) for code in range(0x20)) - {b"\t", b"\n", b"\r"}
_LETTERS = frozenset(letter.encode() for letter in ascii_letters)
_CONTEXT = "\x02"  # a text before which a tokenizer adds no space
_MOST_SPELLED = 1024  # texts whose tokens are kept
_WINDOW = 512  # characters of a longer text that are spelled
_LEAST_TOKENS = 8  # of a longer text: llguidance takes up to four from the end


class Tokens(Protocol):
    """The tokens of a model, as compiling a grammar needs them."""

    @property
    def tokens(self) -> LLTokenizer: ...

    @property
    def missing(self) -> str: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...


class Vocabulary:
    """The first ``size`` tokens of a tokenizer. ``eos_ids``: tokens that end an answer."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: frozenset[int]) -> None:
        self.size = size
        # llguidance needs a token that ends an answer. Where a model has none, it is one behind the vocabulary.
        self.eos_ids = frozenset(i for i in eos_ids if i < size) or frozenset((size,))
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._read: LLTokenizer | None = None
        self._texts: list[bytes] = []
        self._quotes: QuoteTokens | None = None
        self._ends: EndTokens | None = None

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask: one bit for each token."""
        return -(-(max(self.size, max(self.eos_ids) + 1)) // 32)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def text(self, tokens: Iterable[int]) -> str | None:
        """The text of tokens, without those that are no part of it; None: their bytes are no text."""
        try:
            return b"".join(self.token_bytes(i) for i in tokens if self.is_text(i)).decode()
        except UnicodeDecodeError:
            return None

    @cached_property
    def missing(self) -> str:
        """The characters of ASCII that no token writes without other text. Where a constraint needs one of them, no
        text that the tokenizer can write satisfies it."""
        special = self._tokenizer.special_ids | self.eos_ids
        written = {self._tokenizer.token_bytes(i) for i in range(self.size) if i not in special}
        return "".join(character for character in _ASCII if character.encode() not in written)

    @cached_property
    def outside_json(self) -> tuple[int, ...]:
        """Tokens that follow one another in free text and in no JSON text: a control character. Where no token stands
        for one, a quotation mark and a letter, twice: whether the first mark begins a text of JSON or ends one, a
        letter stands outside of it, where JSON has none. Without those, a token that ends an answer, which only the
        last free text may have behind it."""
        texts = self._own_texts()
        control = next((i for i, text in enumerate(texts) if text in _CONTROLS), None)
        if control is not None:
            return (control,)
        letter = next((i for i, text in enumerate(texts) if text in _LETTERS), None)
        if letter is not None and b'"' in texts:
            return (texts.index(b'"'), letter) * 2
        return (min(self.eos_ids),)

    def is_text(self, token_id: int) -> bool:
        """Whether the token stands for a part of a text."""
        return token_id not in self._tokenizer.special_ids and token_id not in self.eos_ids

    def _own_texts(self) -> list[bytes]:
        """The bytes of all tokens; none for those that are no part of a text."""
        return [self._tokenizer.token_bytes(i) if self.is_text(i) else b"" for i in range(self.size)]

    @property
    def quotes(self) -> QuoteTokens:
        """Safe to call from several threads."""
        with self._lock:
            if self._quotes is None:
                self._quotes = QuoteTokens(self._own_texts())
            return self._quotes

    @property
    def ends(self) -> EndTokens:
        """Safe to call from several threads."""
        with self._lock:
            if self._ends is None:
                special_ids = (i for i in self._tokenizer.special_ids if i < self.size and i not in self.eos_ids)
                self._ends = EndTokens(self._own_texts(), special_ids)
            return self._ends

    @property
    def tokens(self) -> LLTokenizer:
        """Safe to call from several threads."""
        with self._lock:
            if self._read is None:
                from llguidance import LLTokenizer

                spelling = _Spelling(self._tokenizer, self.size, self.eos_ids)
                self._texts = spelling.tokens
                self._read = LLTokenizer(spelling, eos_token=sorted(self.eos_ids))  # type: ignore[arg-type]
            return self._read

    @property
    def texts(self) -> list[bytes]:
        """What each token stands for, as llguidance expects it: special tokens have a mark."""
        _ = self.tokens
        return self._texts


class _Spelling(LongestTokens):
    """The bytes of all tokens, and the usual tokens of a text."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: frozenset[int]) -> None:
        special = tokenizer.special_ids | eos_ids
        tokens = [_SPECIAL * (i in special) + tokenizer.token_bytes(i) for i in range(size)]
        if min(eos_ids) == size:
            tokens.append(_SPECIAL + b"<end of the answer>")
        super().__init__(tokens, eos_ids)
        self._backend = tokenizer.backend
        names = sorted((tokenizer.token_bytes(i).decode() for i in tokenizer.special_ids), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, filter(None, names)))) if any(names) else None
        self._spelled: dict[str, list[int]] = {}  # the same few texts are certain in all answers of a form

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that stands inside another one. Text that reads like a special token stays text.

        Of a long text these are the first tokens. It is asked for again behind each of them.
        """
        if isinstance(text, bytes):
            text = text.decode()
        if len(text) > _WINDOW:
            return self._beginning(text)
        known = self._spelled.get(text)
        if known is None:
            if len(self._spelled) >= _MOST_SPELLED:
                self._spelled.clear()
            known = self._spelled[text] = self._spell_text(text)
        return list(known)

    def _beginning(self, text: str) -> list[int]:
        """The first tokens of a long text."""
        window = _WINDOW
        while window < len(text):
            ids, size = self._spell_text(text[:window]), 0
            sure = len(text[: window // 4 * 3].encode())  # the tokens at the end depend on what follows
            for count, i in enumerate(ids):
                size += len(self._spell([i]))
                if size > sure:
                    if count >= _LEAST_TOKENS:
                        return ids[:count]
                    break
            window *= 4
        return self._spell_text(text)

    def _spell_text(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._apart(text):
            ids += self._encode(part)
        return ids

    def _apart(self, text: str) -> list[str]:
        """The text in parts, none of which contains the name of a special token."""
        parts, at = [], 0
        if self._names is not None:
            for name in self._names.finditer(text):
                parts.append(text[at : name.start() + 1])
                at = name.start() + 1
        parts.append(text[at:])
        return [part for part in parts if part]

    def _encode(self, text: str) -> list[int]:
        wanted = text.encode()
        ids = self._encode_in(text)
        if self._spell(ids) == wanted:
            return ids
        # Some tokenizers put a space before a text; a character before it keeps it away.
        ids, prefix = self._encode_in(_CONTEXT + text), _CONTEXT.encode()
        for count in range(len(ids) + 1):
            if self._spell(ids[:count]).lstrip(b" ") == prefix and self._spell(ids[count:]) == wanted:
                return ids[count:]
        return self.longest(wanted)

    def _encode_in(self, text: str) -> list[int]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _spell(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[i] if i < len(self.tokens) else _SPECIAL for i in ids)
