"""The requests of a load test: random token ids of given lengths, or prompts from a file."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from inferd.errors import ConfigError


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """One request's body, but for the model and the streaming flags."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None
    max_tokens: int = 64

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.messages is not None else "/v1/completions"


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None
    max_tokens: int | None = None


def random_tokens(count: int, *, input_len: int, output_len: int, vocab_size: int, seed: int = 0) -> list[Query]:
    """Prompts of random ids, no two alike, so that no prefix is found in a cache."""
    rng = random.Random(seed)
    # The lowest ids are often special tokens; leave them out where the vocabulary allows.
    low = min(256, vocab_size // 4)
    return [
        Query(prompt=[rng.randrange(low, vocab_size) for _ in range(input_len)], max_tokens=output_len)
        for _ in range(count)
    ]


def from_file(path: Path, count: int, *, output_len: int) -> list[Query]:
    """Prompts of a JSON-lines file (``{"prompt": ...}`` or ``{"messages": [...]}``, optionally
    ``max_tokens``), repeated from the start until there are ``count``. Raises ConfigError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"The prompts file {path} cannot be read ({error.strerror}); check the path.", param="prompts"
        ) from None
    queries: list[Query] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f'{path}, line {number}: {error}; a line is {{"prompt": "..."}}.', param="prompts"
            ) from None
        if (found.prompt is None) == (found.messages is None):
            raise ConfigError(f"{path}, line {number}: give either prompt or messages.", param="prompts")
        queries.append(Query(prompt=found.prompt, messages=found.messages, max_tokens=found.max_tokens or output_len))
    if not queries:
        raise ConfigError(f"The prompts file {path} has no prompts.", param="prompts")
    return [queries[i % len(queries)] for i in range(count)]
