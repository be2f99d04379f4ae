"""Which replica has seen the beginning of a prompt: an index of byte prefixes. Pure.

A prompt is cut into chunks of ``CHUNK_BYTES``; each prefix of whole chunks has a key, a chain of hashes that begins
with the tenant (the scheme of vLLM's prefix cache, over bytes in place of token blocks; the gateway has no
tokenizer). The chain's start keeps tenants apart, as in the engine's cache: a replica is never preferred for what
another tenant said. The hash is the interpreter's SipHash with its secret of this process: 64 bits are enough for a
guess, and it takes a fifth of BLAKE2b's time. What is kept are keys, never text; the least recently used go first.

It is a guess about caches elsewhere: a wrong one costs a missed hit and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from inferd.types import JSON, Chat, GenerateRequest, Relay, Request, TextPrompt

CHUNK_BYTES: Final = 256
MAX_BYTES: Final = 16 * 1024
"""Of a prompt: what is beyond makes no difference to where it goes."""

_MAX_HOLDERS: Final = 8  # of one prefix; a prefix that everybody has decides nothing
_FIELD_WITHIN: Final = 64 * 1024  # of a relayed body


class PrefixIndex:
    """At most ``max_entries`` prefixes, about 250 bytes each."""

    __slots__ = ("_generation", "_holders", "_max_entries", "_next", "_replica")

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._holders: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # prefix -> holders, the latest first
        # A holder is a replica in one of its lives, so forgetting one need not search the prefixes.
        self._generation: dict[int, int] = {}  # replica -> holder
        self._replica: dict[int, int] = {}  # holder -> replica
        self._next = 0

    def __len__(self) -> int:
        return len(self._holders)

    def best(self, keys: Sequence[int]) -> dict[int, int]:
        """How many of a text's first bytes each replica has seen, by index; the others have seen none. ``keys``: of the
        text, by ``prefixes``."""
        seen: dict[int, int] = {}
        num_found = 0
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            num_found += 1
            for holder in holders:  # a replica that has seen this much has seen what comes before it
                replica = self._replica.get(holder)
                if replica is not None:
                    seen[replica] = num_found * CHUNK_BYTES
        for key in reversed(keys[:num_found]):  # a prefix outlives what continues it
            self._holders.move_to_end(key)
        return seen

    def note(self, keys: Sequence[int], replica: int) -> None:
        """The replica is given a text with these prefixes."""
        holder = self._generation.get(replica)
        if holder is None:
            holder = self._generation[replica] = self._next
            self._replica[holder] = replica
            self._next += 1
        for key in reversed(keys):
            others = self._holders.get(key, ())
            if not others or others[0] != holder:
                alive = [other for other in others if other != holder and other in self._replica]
                self._holders[key] = (holder, *alive[: _MAX_HOLDERS - 1])
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Its cache is gone. At once, however many prefixes it had."""
        holder = self._generation.pop(replica, None)
        if holder is not None:
            del self._replica[holder]


def text_of(request: Request, relay: Relay | None = None) -> bytes:
    """The bytes of a prompt that make its prefix, at most ``MAX_BYTES``; empty: it has none to speak of.

    Equal beginnings of prompts are equal beginnings here: a chat's tools, then its messages in order.
    """
    if not isinstance(request, GenerateRequest):
        return relayed_text(relay.body) if relay is not None else b""
    if request.truncate_prompt_tokens is not None:
        return b""  # what is kept is the prompt's end
    prompt = request.prompt
    salt = request.cache_salt.encode("utf-8", "surrogatepass") + b"\0" if request.cache_salt else b""
    if isinstance(prompt, Chat):
        text = _chat(prompt)
    elif isinstance(prompt, TextPrompt):
        text = _cut(prompt.text)
    else:
        text = str(prompt.token_ids[: MAX_BYTES // 4]).encode()
    return (salt + text)[:MAX_BYTES]


def relayed_text(body: bytes) -> bytes:
    """Likewise of the body of a request that another server answers: from the field that holds the prompt. Fields before
    it differ more often than their order."""
    for field in (b'"messages"', b'"prompt"', b'"input"'):
        start = body.find(field, 0, _FIELD_WITHIN)
        if start >= 0:
            return body[start : start + MAX_BYTES]
    return b""


def _chat(prompt: Chat) -> bytes:
    parts: list[bytes] = []
    size = 0
    if prompt.tools:
        parts.append(msgspec.json.encode(prompt.tools))
        size = len(parts[0])
    for message in prompt.messages:
        if size >= MAX_BYTES:
            break
        parts.append(_message(message))
        size += len(parts[-1])
    return b"".join(parts)


def _message(message: JSON) -> bytes:
    """Role and text as they are, so that a long text is not encoded to its end."""
    content = message.get("content")
    if not isinstance(content, str):
        return msgspec.json.encode(message)
    others = {name: value for name, value in message.items() if name != "content"}
    return msgspec.json.encode(others) + _cut(content) + b"\0"


def _cut(text: str) -> bytes:
    return text[:MAX_BYTES].encode("utf-8", "surrogatepass")


def prefixes(tenant: str, text: bytes) -> list[int]:
    """The keys of a text's prefixes, the shortest first."""
    keys: list[int] = []
    key = hash(tenant)
    for end in range(CHUNK_BYTES, min(len(text), MAX_BYTES) + 1, CHUNK_BYTES):
        key = hash((key, text[end - CHUNK_BYTES : end]))
        keys.append(key)
    return keys
