"""Real request traces as arrivals with token ids. Knows the files' forms; knows no engine.

- Mooncake (JSON lines: ``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids``): every id is a block of 512
  tokens together with all that came before it. Lengths are scaled down so that such a block becomes one block of the
  engine: equal ids give equal blocks, and what the trace shares is shared block for block.
- AIBrix's ShareGPT (JSON lines: ``timestamp`` ms, ``requests`` with ``prompt`` and ``Output Length``): real texts. Four
  bytes of UTF-8 are a token, about what a tokenizer makes of English.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOONCAKE_BLOCK = 512  # tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes (seconds), its prompt's token ids, and how many tokens are its answer."""

    at: float
    prompt: list[int]
    answer: int


def read(path: Path, block_size: int) -> list[Arrival]:
    """Every request of a trace in order of arrival; the form is known by the first line.

    Raises ValueError naming the file and the fields when it is neither form.
    """
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    if not rows:
        raise ValueError(f"{path} is empty; a trace has one JSON object per line.")
    if "hash_ids" in rows[0]:
        found = _mooncake(rows, block_size)
    elif "requests" in rows[0]:
        found = _sharegpt(rows)
    else:
        raise ValueError(
            f"{path} is neither a Mooncake trace (hash_ids) nor AIBrix's ShareGPT (requests): its first line has "
            f"{sorted(rows[0])}."
        )
    return sorted(found, key=_at)


def _at(arrival: Arrival) -> float:
    return arrival.at


def _mooncake(rows: list[dict[str, object]], block_size: int) -> Iterator[Arrival]:
    for row in rows:
        ids, length, answer = row["hash_ids"], _number(row["input_length"]), _number(row["output_length"])
        assert isinstance(ids, list)
        # A last block that was not full stays not full: nobody can reuse it.
        full, rest = divmod(length, MOONCAKE_BLOCK)
        tokens = full * block_size + -(-rest * block_size // MOONCAKE_BLOCK)
        if rest and tokens == (full + 1) * block_size:
            tokens -= 1
        prompt = [number * block_size + i for number in ids for i in range(block_size)][: max(tokens, 1)]
        yield Arrival(_number(row["timestamp"]) / 1000.0, prompt, max(1, -(-answer * block_size // MOONCAKE_BLOCK)))


def _sharegpt(rows: list[dict[str, object]]) -> Iterator[Arrival]:
    for row in rows:
        requests = row["requests"]
        assert isinstance(requests, list)
        for request in requests:
            text = request["prompt"].encode()
            prompt = [int.from_bytes(text[i : i + 4], "big") for i in range(0, len(text), 4)]
            yield Arrival(_number(row["timestamp"]) / 1000.0, prompt or [0], max(1, int(request["Output Length"])))


def _number(value: object) -> int:
    assert isinstance(value, int | float), f"a number was expected, got {value!r}"
    return int(value)
