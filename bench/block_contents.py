"""What hand-overs add between two steps: ``python -m bench.block_contents [--rounds 7]``.

Blocks with the keys and values of Qwen3-0.6B's shape (28 layers, 8 heads of 128 columns, bfloat16), of one process and
of groups of ranks with one thread each. Read: as much as a sender reads between two steps at most, and the same until
the parts of all ranks have come. Write: as much as a receiver writes between two steps at most, until all ranks have
it. Prints Markdown: the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from bench.plan import write_checkpoint
from bench.report import markdown
from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig, SpeculationConfig
from inferd.engine.hand_over.contents import Contents
from inferd.engine.hand_over.frames import FRAME_BYTES
from inferd.engine.hand_over.link import MOST_GIVEN_BYTES
from inferd.engine.hand_over.receiver import WINDOW
from inferd.engine.load import create_backend

LAYOUTS: Final = ((1, 1), (2, 1), (1, 2), (2, 2))
SIZES: Final = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 2048,
}
"""The products are narrow: they take no part in this."""


def reading(contents: Contents, num_blocks: int, found: list[bytes], *, to_the_end: bool) -> Callable[[], None]:
    """Reads blocks as a sender does; to the end: until all ranks have given their parts."""
    each = max(FRAME_BYTES // contents.block_bytes, 1)
    is_done = threading.Event()

    def read() -> None:
        found.clear()
        is_done.clear()
        for at in range(0, num_blocks, each):
            contents.read(list(range(at, min(at + each, num_blocks))), found.extend)
        contents.after_reads(is_done.set)
        if to_the_end:
            is_done.wait()

    return read


def writing(contents: Contents, found: list[bytes]) -> Callable[[], None]:
    """Writes as many blocks as a receiver does between two steps, until all ranks have written them."""
    each = max(FRAME_BYTES // contents.block_bytes, 1)
    num_blocks = min(WINDOW * each, len(found))
    is_done = threading.Event()

    def write() -> None:
        is_done.clear()
        for at in range(0, num_blocks, each):
            blocks = list(range(at, min(at + each, num_blocks)))
            contents.write(blocks, found[at : at + len(blocks)])
        contents.read([0], lambda read: None)  # is answered when the ranks have written
        contents.after_reads(is_done.set)
        is_done.wait()

    return write


def median_ms(call: Callable[[], None], rounds: int, settle: Callable[[], None] = lambda: None) -> float:
    taken = []
    for _ in range(rounds + 1):  # the first one touches memory for the first time
        began = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - began))
        settle()
    return statistics.median(taken[1:])


def row(folder: Path, tensor: int, pipeline: int, rounds: int) -> list[str]:
    config = ModelConfig(
        source=str(folder),
        dtype="bfloat16",
        threads=1,
        max_model_len=256,
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline),
        kv_cache=KVCacheConfig(memory_bytes=256 * 1024 * 1024),
        speculation=SpeculationConfig(method="none"),
    )
    engine = create_backend("m", config, lambda *_: None)
    try:
        contents = engine._runner.contents()
        found: list[bytes] = []
        most = MOST_GIVEN_BYTES // contents.block_bytes
        whole = reading(contents, most, found, to_the_end=True)
        begun = median_ms(reading(contents, most, found, to_the_end=False), rounds, settle=whole)
        whole_ms = median_ms(whole, rounds)
        write_ms = median_ms(writing(contents, found), rounds)
    finally:
        engine.close()
    return [f"{tensor} x {pipeline}", *(f"{value:.0f}" for value in (begun, whole_ms, write_ms))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    words = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        write_checkpoint(Path(place), SIZES)
        rows = [row(Path(place), tensor, pipeline, words.rounds) for tensor, pipeline in LAYOUTS]
    read, written = (f"{size / 2**20:.0f} MiB" for size in (MOST_GIVEN_BYTES, WINDOW * FRAME_BYTES))
    heads = ["tensor x pipeline", f"read {read}, ms", "until all parts came, ms", f"write {written}, ms"]
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()
