"""What a token costs behind 4,032 tokens beyond one behind 128, and what reading memory costs meanwhile, in one process.

    python -m bench.llm_peers.context MODEL --format bf16 --threads 2

A difference of two long times says little where neighbours take a third of the machine for minutes. So in each of many turns some
tokens are decoded behind the short prompt, memory is read, and some are decoded behind the long prompt, which is computed
once (later turns find it in the prefix cache). Each turn has its medians and its own limit, and is judged by them alone:
the long step should take the short one's time and that of reading its keys and values. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from bench.llm_peers.inprocess import LONG
from bench.llm_peers.limits import Reading
from bench.llm_peers.loads import PROMPT
from bench.llm_peers.runner import VOCABULARY, inferd
from bench.llm_peers.table import Shape

STEPS = 16  # timed in a turn behind each
READ_GB = 0.5


@dataclass(frozen=True, slots=True)
class Turn:
    """Median seconds of a step behind each prompt, and bytes read per second between them."""

    short_s: float
    long_s: float
    read_gb_per_s: float

    def bandwidth_share(self, shape: Shape, form: str) -> float:
        """Bytes that a short step reads, of what could be read in its time."""
        cache = (PROMPT + STEPS / 2) * shape.kv_bytes_per_token
        return (shape.own_weight_bytes(form) + cache) / self.short_s / 1e9 / self.read_gb_per_s

    def context_share(self, shape: Shape) -> float:
        """What the long step should take, of what it takes."""
        keys_and_values = (LONG - PROMPT) * shape.kv_bytes_per_token / (self.read_gb_per_s * 1e9)
        return (self.short_s + keys_and_values) / self.long_s


def figures_of(turns: Sequence[Turn], shape: Shape, form: str) -> dict[str, float]:
    """Medians over the turns."""
    return {
        "decode, tokens/s": 1 / median(turn.short_s for turn in turns),
        "decode at 4096, tokens/s": 1 / median(turn.long_s for turn in turns),
        "read between decodes, GB/s": median(turn.read_gb_per_s for turn in turns),
        "decode, % of the read bandwidth": 100 * median(turn.bandwidth_share(shape, form) for turn in turns),
        "decode at 4096, % of what KV bytes leave": 100 * median(turn.context_share(shape) for turn in turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    shape = Shape.of(json.loads((Path(options.model) / "config.json").read_text()))
    torch.set_num_threads(options.threads)
    wave = inferd(options.model, options.format, options.threads, 1)
    reading = Reading(READ_GB)
    draw = random.Random(7)
    short, long = ([draw.randrange(VOCABULARY) for _ in range(count)] for count in (PROMPT, LONG))

    def step_s(prompt: list[int]) -> float:
        _, moments = wave([prompt], STEPS + 1)
        return median(after - before for before, after in pairwise(moments))

    wave([short], 2)
    began = time.perf_counter()
    _, (first, *_) = wave([long], 2)  # every turn finds it in the cache
    turns = [Turn(step_s(short), step_s(long), reading.gb_per_s(2)) for _ in range(options.turns)]
    prefill = {f"prefill {LONG}, tokens/s": LONG / (first - began)}
    print(json.dumps(prefill | figures_of(turns, shape, options.format)))


if __name__ == "__main__":
    main()
