"""An index of prompts' byte prefixes: which replicas have received the beginning of a prompt. Pure.

A prompt is cut into chunks that end at ``ENDS``. Each prefix of whole chunks has a key, a hash that begins with the
tenant. This is the scheme of vLLM's prefix cache over bytes in place of token blocks, as the gateway has no tokenizer.
The tenant at the start of the hash keeps tenants apart, as in the engine's cache: a replica is never preferred for
another tenant's prompt. The hash is BLAKE2b without a secret, so that several gateways have equal keys. Its 64 bits
are enough for a guess. Only keys are stored, never text. The least recently used keys are evicted first.

The index is a guess about the caches of replicas. A wrong guess costs a missed cache hit and nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgspec

from inferd.types import JSON, Chat, GenerateRequest, Relay, Request, TextPrompt

CHUNK_BYTES: Final = 256
"""Shorter prompts are not indexed."""

MAX_BYTES: Final = 16 * 1024
"""The bytes of a prompt that are indexed; the rest does not influence the choice of a replica."""

ENDS: Final = (*range(CHUNK_BYTES, 4096 + 1, CHUNK_BYTES), *range(5 * 1024, MAX_BYTES + 1, 1024))
"""Where chunks end, in bytes of the prompt. Of long prompts fewer prefixes are told apart, as each costs a hash."""

KEY_BYTES: Final = 8
_MAX_HOLDERS: Final = 16  # replicas remembered for one prefix
_FIELD_WITHIN: Final = 64 * 1024  # bytes of a relayed body that are searched for the prompt's field


class PrefixIndex:
    """An index of at most ``max_entries`` prefixes, about 250 bytes each."""

    __slots__ = ("_generation", "_holders", "_max_entries", "_next", "_replica")

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._holders: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # prefix -> holders, the latest first
        # A replica gets another holder number after ``forget``, so that forgetting need not search the prefixes.
        self._generation: dict[int, int] = {}  # replica -> holder
        self._replica: dict[int, int] = {}  # holder -> replica
        self._next = 0

    def __len__(self) -> int:
        return len(self._holders)

    def best(self, keys: Sequence[int]) -> dict[int, int]:
        """The number of a text's first bytes that each replica has received, by the replica's index.

        Replicas that are not in the result have received none. ``keys`` are those of the text, by ``prefixes``.
        """
        seen: dict[int, int] = {}
        num_found = 0
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            num_bytes = ENDS[num_found]
            num_found += 1
            for holder in holders:  # a replica that has seen this much has seen what comes before it
                replica = self._replica.get(holder)
                if replica is not None:
                    seen[replica] = num_bytes
        for key in reversed(keys[:num_found]):  # a prefix outlives what continues it
            self._holders.move_to_end(key)
        return seen

    def note(self, keys: Sequence[int], replica: int) -> None:
        """Note that the replica receives a text with these prefixes."""
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

    def learn(self, keys: Sequence[int], replica: int) -> list[int]:
        """Note that the replica received a text with these prefixes elsewhere; those that were not known of it."""
        holder = self._generation.get(replica)
        new = [key for key in keys if holder is None or holder not in self._holders.get(key, ())]
        self.note(keys, replica)
        return new

    def forget(self, replica: int) -> None:
        """Note that the replica's cache is empty. Takes constant time."""
        holder = self._generation.pop(replica, None)
        if holder is not None:
            del self._replica[holder]


def text_of(request: Request, relay: Relay | None = None) -> bytes:
    """The first bytes of a request's prompt, at most ``MAX_BYTES``; empty: the request has no prompt to index.

    Prompts with equal beginnings have results with equal beginnings: a chat's tools, then its messages in order.
    """
    if not isinstance(request, GenerateRequest):
        return relayed_text(relay.body) if relay is not None else b""
    if request.truncate_prompt_tokens is not None:
        return b""  # truncation keeps the end of the prompt, which need not begin like others
    prompt = request.prompt
    salt = request.cache_salt.encode("utf-8", "surrogatepass") + b"\0" if request.cache_salt else b""
    if isinstance(prompt, Chat):
        text = _chat(prompt)
    elif isinstance(prompt, TextPrompt):
        text = _cut(prompt.text)
    else:
        text = str(prompt.token_ids[: MAX_BYTES // 4]).encode()
    return (salt + text)[:MAX_BYTES]


def size_of(request: GenerateRequest) -> int:
    """The bytes of a whole prompt, about; of token ids four times their number."""
    prompt = request.prompt
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, Chat):
        return sum((len(str(message.get("content") or "")) for message in prompt.messages), 0) + 256 * len(
            prompt.tools or ()
        )
    return 4 * len(prompt.token_ids)


def relayed_text(body: bytes) -> bytes:
    """The bytes of a relayed request's body from the field with the prompt on, at most ``MAX_BYTES``.

    Fields before the prompt differ between requests with equal prompts, so they are left out.
    """
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
    """The bytes of one message: its role and other fields as JSON, then its text, cut before it is encoded."""
    content = message.get("content")
    if not isinstance(content, str):
        return msgspec.json.encode(message)
    others = {name: value for name, value in message.items() if name != "content"}
    return msgspec.json.encode(others) + _cut(content) + b"\0"


def _cut(text: str) -> bytes:
    return text[:MAX_BYTES].encode("utf-8", "surrogatepass")


def prefixes(tenant: str, text: bytes) -> list[int]:
    """The keys of a text's prefixes of whole chunks, the shortest first; equal in every process."""
    keys: list[int] = []
    digest = _beginning(tenant).copy()
    begin, num_chunks = 0, bisect_right(ENDS, len(text))
    for end in ENDS[:num_chunks]:
        digest.update(text[begin:end])
        keys.append(int.from_bytes(digest.copy().digest()))
        begin = end
    return keys


def new_bytes(num_bytes: int, seen_bytes: int) -> int:
    """The bytes of a prompt that a replica has not received before, about. ``seen_bytes``: of those that are indexed. A
    prompt whose indexed bytes it has all received is taken to go on with what it received."""
    return 0 if seen_bytes >= MAX_BYTES else max(0, num_bytes - seen_bytes)


def last_seen(keys: Sequence[int], seen_bytes: int) -> int:
    """The key of the longest prefix within the first ``seen_bytes`` of a text, which are one chunk or more."""
    return keys[bisect_right(ENDS, seen_bytes) - 1]


def indexed_bytes(keys: Sequence[int]) -> int:
    """The bytes of a text that its keys cover."""
    return ENDS[len(keys) - 1] if keys else 0


def continuation_of(keys: Sequence[int], seen_bytes: int) -> int:
    """The key of the shortest prefix that goes beyond ``seen_bytes`` of a text; of a text without one its last key.

    Texts with an equal beginning that many replicas have seen, such as a system prompt, are told apart by it.
    """
    return keys[min(bisect_right(ENDS, seen_bytes), len(keys) - 1)]


@lru_cache(maxsize=1024)
def _beginning(tenant: str) -> blake2b:
    name = tenant.encode("utf-8", "surrogatepass")
    return blake2b(len(name).to_bytes(8) + name, digest_size=KEY_BYTES)
