"""From token ids to text, one token at a time, never splitting a character.

Knows how a tokenizer's decoder turns tokens into bytes or text; knows no files, no requests, no stop
strings. Everything that shows text to a client goes through here, so a streamed answer and the same
answer decoded at once are equal.

Three kinds of decoder exist in the checkpoints we serve (names as in the ``tokenizers`` library):

- ``bytes``: ByteLevel. Every token is bytes and the text is their UTF-8.
- ``fallback``: Replace, ByteFallback, Fuse and perhaps Strip, as converted from sentencepiece. Tokens
  are text, or one byte written ``<0xNN>``.
- ``pieces``: the others. A token's text depends only on whether it comes first (WordPiece, Metaspace,
  or tokens joined by spaces).

Ill-formed UTF-8: ``bytes`` shows U+FFFD for each maximal ill-formed part; ``fallback`` shows one for
each ill-formed byte and keeps the characters around it. The ``tokenizers`` library differs there, and
only there: it gives up the well-formed characters of the same run of byte tokens too, which a stream
has already shown.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import tokenizers

Kind = Literal["bytes", "fallback", "pieces"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("inferd-each-byte", _replace_each_byte)
_Utf8 = codecs.getincrementaldecoder("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Pieces:
    """The text or bytes of each token id under one tokenizer's decoder, computed when an id is first seen."""

    def __init__(
        self, backend: tokenizers.Tokenizer, vocab_size: int, added: Mapping[int, tokenizers.AddedToken] | None = None
    ) -> None:
        """``added``: the backend's added tokens, if the caller has them: reading many takes a while."""
        self._backend = backend
        self._added = backend.get_added_tokens_decoder() if added is None else added
        self.added_ids = frozenset(self._added)
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.kind: Kind
        self.kind, self.strips_start, self._replaced = _read_decoder(backend)
        # An ordinary token to put before another, to see how that one continues a text.
        self._context: int | None = None
        if self.kind == "pieces":
            self._context = next((i for i in range(vocab_size) if i not in self._added and self._alone(i)), None)
        self._vocab_size = vocab_size
        self._later: dict[int, bytes | str] = {}

    def later(self, token_id: int) -> bytes | str:
        """The token inside a text: bytes that may be part of a character, or text."""
        piece = self._later.get(token_id)
        if piece is None:
            if not 0 <= token_id < self._vocab_size:
                return ""  # the model may have more rows than the tokenizer has tokens
            piece = self._later[token_id] = self._find(token_id)
        return piece

    def first(self, token_id: int) -> bytes | str:
        """The token as the first of a text."""
        if self.kind == "pieces":
            return self._alone(token_id)
        piece = self.later(token_id)
        if not self.strips_start:
            return piece
        return piece.removeprefix(b" ") if isinstance(piece, bytes) else piece.removeprefix(" ")

    def raw(self, token_id: int) -> bytes:
        """The exact bytes the token adds inside a text."""
        piece = self.later(token_id)
        return piece if isinstance(piece, bytes) else piece.encode()

    def content(self, token_id: int) -> str | None:
        """The text of an added token; None for a token of the model."""
        token = self._added.get(token_id)
        return None if token is None else token.content

    def _find(self, token_id: int) -> bytes | str:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""  # a hole in the numbering
        if self.kind == "bytes":
            if all(c in _ALPHABET for c in token):
                return bytes(_ALPHABET[c] for c in token)
            return token.encode()
        if self.kind == "fallback":
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte:
                return bytes([int(byte[1], 16)])
            for pattern, content in self._replaced:
                token = token.replace(pattern, content)
            return token
        if self._context is None:
            return self._alone(token_id)
        before = self._alone(self._context)
        return self._decode([self._context, token_id]).removeprefix(before)

    def _alone(self, token_id: int) -> str:
        return self._decode([token_id])

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def _read_decoder(backend: tokenizers.Tokenizer) -> tuple[Kind, bool, list[tuple[str, str]]]:
    """(kind, whether one leading space of the text is dropped, replacements in tokens)."""
    if backend.decoder is None:
        return "pieces", False, []
    spec = json.loads(backend.decoder.__getstate__())
    chain = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    types = [part["type"] for part in chain]
    if types == ["ByteLevel"]:
        return "bytes", False, []
    core = types[:-1] if types and types[-1] == "Strip" else types
    while core and core[0] == "Replace":
        core = core[1:]
    replaced = [(p["pattern"].get("String"), p["content"]) for p in chain if p["type"] == "Replace"]
    strip = chain[-1] if types and types[-1] == "Strip" else None
    strips_as_known = strip is None or (strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0)
    if core == ["ByteFallback", "Fuse"] and strips_as_known and all(pattern for pattern, _ in replaced):
        return "fallback", strip is not None and strip["start"] == 1, replaced
    return "pieces", False, []


class Detokenizer:
    """The text of one growing sequence, returned as soon as it is certain.

    All pushes joined, then ``flush``, are the decoded sequence without the prompt's part. A character that the prompt
    left unfinished counts with the output.
    """

    __slots__ = ("_decoder", "_is_start", "_join_specials", "_last_added", "_pieces", "_skipped")

    def __init__(
        self,
        pieces: Pieces,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._skipped = pieces.special_ids - shown_ids if skip_special_tokens else frozenset()
        # As in vLLM: only added tokens that are shown and follow one another lose their spaces.
        self._join_specials = not (skip_special_tokens or spaces_between_special_tokens) and pieces.kind == "pieces"
        self._last_added = False
        self._decoder = _Utf8("replace" if pieces.kind == "bytes" else "inferd-each-byte")
        self._is_start = pieces.kind != "bytes"
        self._enter(prompt_ids)

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that became certain with it."""
        if token_id in self._skipped:
            return ""
        if self._is_start or self._join_specials:
            return self._push_special_case(token_id)
        piece = self._pieces.later(token_id)
        if isinstance(piece, bytes):
            return self._decoder.decode(piece)
        if self._decoder.getstate()[0]:
            return self.flush() + piece
        return piece

    def flush(self) -> str:
        """The text of an unfinished character when no token follows."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def _push_special_case(self, token_id: int) -> str:
        """The first token of the text, and added tokens whose spaces are not wanted."""
        pieces = self._pieces
        content = pieces.content(token_id) if self._join_specials else None
        if content is not None and self._last_added:
            return content
        self._last_added = content is not None
        piece = pieces.first(token_id) if self._is_start else pieces.later(token_id)
        if pieces.kind == "pieces" or pieces.later(token_id):
            self._is_start = False
        if isinstance(piece, bytes):
            return self._decoder.decode(piece)
        return self.flush() + piece

    def _enter(self, prompt_ids: Sequence[int]) -> None:
        """Reach the state after the prompt without decoding all of it."""
        pieces = self._pieces
        if pieces.kind == "pieces":
            shown = next((i for i in reversed(prompt_ids) if i not in self._skipped), None)
            if shown is not None:
                self._is_start = False
                self._last_added = self._join_specials and shown in pieces.added_ids
            return
        if self._is_start:
            self._is_start = not any(i not in self._skipped and pieces.later(i) for i in prompt_ids)
        # Only the last three bytes can belong to an unfinished character.
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id in self._skipped:
                continue
            piece = pieces.later(token_id)
            if isinstance(piece, str):
                if piece:
                    break
                continue
            tail = piece + tail
            if len(tail) >= 3:
                break
        self._decoder.decode(tail)
