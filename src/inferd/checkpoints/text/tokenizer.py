"""Text to token ids and back, by the checkpoint's own tokenizer.

Wraps the ``tokenizers`` library, and reads the files beside ``tokenizer.json`` that name special tokens. Knows no
templates and no requests. Safe to call from several threads.

``tokenizer.json`` alone decides how text is split and which tokens are added at its ends. The settings
``add_bos_token`` and ``add_eos_token`` beside it are ignored, as in transformers 5 where that file exists. Where
transformers rebuilds a tokenizer by its class (LlamaTokenizer with ``legacy: false``), texts that begin with a space
may differ; ``tokenizer.json`` agrees with the original sentencepiece model there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers import AddedToken

from inferd.checkpoints.text.detokenizer import Detokenizer, Pieces
from inferd.errors import InvalidRequest, ModelLoadError

_CACHE_CHARS = 4_000_000  # total length of the texts whose ids are kept, each with
_ENTRY_CHARS = 100  # for itself, so that short texts are not kept without number
_MOST_SHRINKING = 4  # characters that a normalizer makes one of: NFC joins at most three
_PROBE = "Hello, \u4e16\u754c \U0001f600\u0f00"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_Settings = dict[str, Any]


class Owner(NamedTuple):
    """The tenant of a text. Cached tokens of one owner are found by no other, as in the prefix cache."""

    tenant: str = ""
    salt: str = ""  # a client's own


NO_OWNER = Owner()


class Branches(NamedTuple):
    """Texts that begin alike: what they share, and the rest of each, as text and as token ids."""

    shared_ids: list[int]
    tails: list[str]
    tail_ids: list[list[int]]


class _Share:
    """A tenant's part of the cache, the least recently used first."""

    __slots__ = ("entries", "num_chars")

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[str, str, bool], list[int]] = OrderedDict()
        self.num_chars = 0


class Tokenizer:
    """One checkpoint's tokenizer; see ``load``. Ids 0 to ``vocab_size - 1`` are valid."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: _Settings) -> None:
        self._backend = backend
        forget_words(backend)
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = _named_tokens(settings)
        added = _add_missing(backend, settings, self.special_tokens)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pad_token_id = self._id_of("pad_token")
        self._pieces = Pieces(backend, self.vocab_size, added)
        self.special_ids: frozenset[int] = self._pieces.special_ids
        self._special_texts = [text for id in sorted(self.special_ids) if (text := backend.id_to_token(id))]
        # Elsewhere a token may stand for any length of text that is not in the vocabulary.
        self._longest = max(map(len, vocab), default=0) if self._pieces.kind == "bytes" else None
        self._lock = threading.Lock()
        self._shares: dict[str, _Share] = {}
        self._cached_chars = 0
        self.cache_hits = 0
        self.cache_queries = 0

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read ``tokenizer.json`` and its companions. Raises ModelLoadError naming the file."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(_missing(folder))
        settings = _read_settings(folder / "special_tokens_map.json") | _read_settings(folder / "tokenizer_config.json")
        try:
            tokenizer = cls(tokenizers.Tokenizer.from_file(str(path)), settings)
            # Some defects only show in use: a text with words no vocabulary has, and back.
            tokenizer.decode(tokenizer._backend.encode(_PROBE).ids, skip_special_tokens=False)
        except BaseException as error:  # the library raises a bare Exception, or a panic of its Rust side
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelLoadError(
                f"{path} cannot be read as a tokenizer: {error}. Download it again, "
                "or save it anew with the library that made it."
            ) from error
        if tokenizer.vocab_size == 0:
            raise ModelLoadError(f"{path} has no tokens. Use the tokenizer that came with the checkpoint.")
        return tokenizer

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's own tokenizer, without truncation or padding: for pairs of texts and for offsets."""
        return self._backend

    def encode(self, text: str, add_special_tokens: bool = True, owner: Owner = NO_OWNER) -> list[int]:
        """Token ids of ``text``; the caller owns the list. Raises InvalidRequest."""
        key = (owner.salt, text, add_special_tokens)
        with self._lock:
            self.cache_queries += 1
            share = self._shares.get(owner.tenant)
            known = share.entries.get(key) if share is not None else None
            if share is not None and known is not None:
                self.cache_hits += 1
                share.entries.move_to_end(key)
                return known.copy()
        (ids,) = self._encode_all([text], add_special_tokens)
        if len(text) <= _CACHE_CHARS // 8:
            self._keep(owner.tenant, key, ids.copy())
        return ids

    def encode_branches(self, texts: Sequence[str], owner: Owner = NO_OWNER) -> Branches:
        """Token ids of texts that begin alike, without special tokens at their ends. Raises InvalidRequest.

        Text before a special token does not change the tokens after it. So the texts are split before the last special
        token that they share, and what they share is tokenized once. The split is checked with the first text.
        """
        whole = self.encode(texts[0], False, owner)
        shared = _shared_beginning(texts)
        at = max((shared.rfind(token) for token in self._special_texts), default=-1)
        if at > 0:
            tails = [text[at:] for text in texts]
            ids = self._encode_all(tails, False)
            if whole[len(whole) - len(ids[0]) :] == ids[0]:
                return Branches(whole[: len(whole) - len(ids[0])], tails, ids)
        return Branches([], list(texts), [whole, *self._encode_all(texts[1:], False)])

    def _encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of texts, which are not kept. Raises InvalidRequest."""
        try:
            # Not ``encode``, which holds the interpreter lock: a text of megabytes would stop every thread
            # of the worker, its heartbeat included, and get it killed as hung.
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # a surrogate without its other half
            raise InvalidRequest(
                "The prompt contains a lone UTF-16 surrogate, which is no character. Remove it.", param="prompt"
            ) from error
        return [encoding.ids for encoding in encodings]

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of ``text``, known without tokenizing; 0: not known."""
        return len(text) // (_MOST_SHRINKING * self._longest) if self._longest else 0

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of ``ids``, equal to pushing them through ``stream``. Unknown ids have no text."""
        if self._pieces.kind == "bytes":
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        stream = Detokenizer(
            self._pieces,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def token_string(self, id: int) -> str:
        """One token in readable form, with U+FFFD for the bytes of an unfinished character.

        The leading space of a token that begins a word is kept, so that joined tokens read as the text.
        """
        return self._pieces.raw(id).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes the token adds inside a text."""
        return self._pieces.raw(id)

    def stream(
        self,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
        prompt_ids: list[int],
        shown_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Text of what will follow ``prompt_ids``, token by token. ``shown_ids``: special tokens that are never
        skipped."""
        return Detokenizer(
            self._pieces,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            prompt_ids=prompt_ids,
            shown_ids=shown_ids,
        )

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _keep(self, tenant: str, key: tuple[str, str, bool], ids: list[int]) -> None:
        """When the cache is full, the tenant with the largest share loses its oldest text, so no tenant evicts
        another's."""
        with self._lock:
            share = self._shares.get(tenant)
            if share is None:
                share = self._shares[tenant] = _Share()
            if key in share.entries:  # another thread was faster
                return
            share.entries[key] = ids
            self._charge(share, _size(key))
            while self._cached_chars > _CACHE_CHARS:
                name = max(self._shares, key=lambda tenant: self._shares[tenant].num_chars)
                largest = self._shares[name]
                oldest, _ = largest.entries.popitem(last=False)
                self._charge(largest, -_size(oldest))
                if not largest.entries:
                    del self._shares[name]

    def _charge(self, share: _Share, num_chars: int) -> None:
        share.num_chars += num_chars
        self._cached_chars += num_chars


def _shared_beginning(texts: Sequence[str]) -> str:
    """The longest text with which all texts begin."""
    least, greatest = min(texts), max(texts)  # all others are in between
    shared, too_long = 0, min(len(least), len(greatest)) + 1
    while too_long - shared > 1:
        middle = (shared + too_long) // 2
        if greatest.startswith(least[:middle]):
            shared = middle
        else:
            too_long = middle
    return least[:shared]


def _size(key: tuple[str, str, bool]) -> int:
    return len(key[0]) + len(key[1]) + _ENTRY_CHARS


def forget_words(backend: tokenizers.Tokenizer) -> None:
    """Turn the library's word cache off.

    That cache knows no tenants, so the time to tokenize a text would reveal whether its words were seen before. A model
    without such a cache (WordPiece) needs nothing.
    """
    resize = getattr(backend.model, "_resize_cache", None)
    if resize is not None:
        resize(0)


def _missing(folder: Path) -> str:
    others = [
        n
        for n in ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")
        if (folder / n).is_file()
    ]
    if not others:
        return (
            f"{folder / 'tokenizer.json'} does not exist. Copy the tokenizer files that came with the checkpoint into "
            "this folder."
        )
    return (
        f"{folder / 'tokenizer.json'} does not exist; there is only {others[0]}, which inferd does not read. "
        "Convert it once: "
        'python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


def _read_settings(path: Path) -> _Settings:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Settings)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(
            f"{path} is not a JSON object: {error}. Download it again, or delete it to do without."
        ) from error


def _content(token: object) -> str | None:
    """A token written as a string or as a serialised AddedToken."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _named_tokens(settings: _Settings) -> dict[str, str]:
    named = {name: _content(settings.get(name)) for name in _NAMED}
    return {name: token for name, token in named.items() if token is not None}


def _as_added(token: object) -> AddedToken | None:
    content = _content(token)
    if content is None:
        return None
    flags = token if isinstance(token, dict) else {}
    chosen = {name: bool(flags[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in flags}
    return AddedToken(content, special=bool(flags.get("special", True)), **{"normalized": False, **chosen})


def _add_missing(backend: tokenizers.Tokenizer, settings: _Settings, named: dict[str, str]) -> dict[int, AddedToken]:
    """Add tokens that only the companions of ``tokenizer.json`` name, as transformers does. All added tokens by id."""
    known: dict[int, AddedToken] = backend.get_added_tokens_decoder()  # slow where there are many, so asked once
    new: set[str] = set()
    decoder = settings.get("added_tokens_decoder")
    listed = (
        [decoder[i] for i in sorted(decoder, key=int)]
        if isinstance(decoder, dict) and all(i.isdecimal() for i in decoder)
        else []
    )
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens")
    extra = list(extra.values()) if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    for token in [*listed, *named.values(), *extra]:
        added = _as_added(token)
        if added is None:
            continue
        at = backend.token_to_id(added.content)
        token_there = None if at is None else known.get(at)
        if added.content in new or (token_there is not None and token_there.content == added.content):
            continue
        if added.special or added.content in named.values():
            backend.add_special_tokens([added])
        else:
            backend.add_tokens([added])
        new.add(added.content)
    return backend.get_added_tokens_decoder() if new else known
