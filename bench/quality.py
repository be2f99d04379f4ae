"""What quantisation costs in quality: perplexity of a model by method, on texts, as a table in Markdown.

    python -m bench.quality --model DIR --data TEXT [--data TEXT ...] [--own 40000] [--methods none,int8,int4]

Methods: ``none`` the checkpoint as it is; ``int8``, ``int4`` made at load; ``file-int8``, ``file-int4``, ``gptq-8``, ``gptq-4``,
``gptq-4/64`` (groups of 64), ``gptq-mixed`` (8 bits where needed for +2 %), ``tuned`` (and ``tuned-mixed``) written by ``inferd quantize`` with the first four
fifths of the text and measured on the rest; ``kv-int8`` keeps the cache alone in 8 bits. ``--own N`` adds a text of N tokens that the model
writes itself (temperature 1, seeded): the one kind that a small model knows, and where the logarithm of the change is the
divergence (Kullback and Leibler) between the two models' answers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from inferd.checkpoints.safetensors import weight_files
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.engine.calibrate.checkpoint import quantise
from inferd.engine.calibrate.measure import read_text
from inferd.engine.calibrate.wish import Wish
from inferd.engine.model.load import load_model
from inferd.engine.perplexity import Perplexity, measuring, perplexity
from inferd.errors import QualityError

WISHES = {
    "file-int8": Wish(method="int8"),
    "file-int4": Wish(method="int4"),
    "gptq-8": Wish(method="gptq", bits=8),
    "gptq-4": Wish(method="gptq"),
    "gptq-4/64": Wish(method="gptq", group_size=64),
    "gptq-mixed": Wish(method="gptq", mixed=True, max_change=0.02),
    "tuned": Wish(method="tuned"),
    "tuned-mixed": Wish(method="tuned", mixed=True, max_change=0.02),
}
METHODS = ("none", "int8", "int4", "kv-int8", *WISHES)
HELD_OUT = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    method: str
    size: int  # bytes: of a written file, of the weights in memory otherwise
    found: Perplexity
    change: float


def own_text(model: Path, num_tokens: int) -> str:
    """What the model writes: pieces of at most 400 tokens, at temperature 1, with fixed seeds."""
    from inferd.llm import LLM
    from inferd.types import SamplingParams

    tokenizer = Tokenizer.load(model)
    begin = tokenizer.encode("") or tokenizer.encode("Once upon a time")
    pieces: list[str] = []
    with LLM(str(model), dtype="float32") as llm:
        length = min(400, llm.info.max_model_len - len(begin) - 1)
        count = -(-num_tokens // length)
        wishes = [
            SamplingParams(max_tokens=length, temperature=1.0, top_p=1.0, top_k=0, seed=seed) for seed in range(count)
        ]
        pieces = [answer.text for answer in llm.generate([list(begin)] * count, wishes, progress=False)]
    return "\n\n".join(pieces)


def rows(
    model: Path, text: Path, methods: list[str], *, context: int, most: int, tuning_tokens: int | None = None
) -> Iterator[Row]:
    tokenizer = Tokenizer.load(model)
    leading = tokenizer.encode("")
    ids = tokenizer.encode(read_text(text), add_special_tokens=False)
    held_out = ids[len(ids) - max(int(len(ids) * HELD_OUT), 2 * context) :][:most]

    def measured(folder: Path, quantization: str, *, cache_in_bytes: bool = False) -> tuple[int, Perplexity]:
        decoder = load_model(folder, dtype="auto", device=torch.device("cpu"), quantization=quantization)  # type: ignore[arg-type]
        runner = measuring(decoder, num_tokens=max(2048, 2 * context), in_bytes=cache_in_bytes)
        return decoder.weights_bytes, perplexity(runner, held_out, context=context, leading=leading)

    size, before = measured(model, "none")
    for method in methods:
        if method == "none":
            yield Row(method, size, before, 0.0)
        elif method in WISHES:
            with tempfile.TemporaryDirectory() as folder:
                wish = replace(
                    WISHES[method], context=context, most_measured=most, held_out=HELD_OUT, tuning_tokens=tuning_tokens
                )
                try:
                    result = quantise(
                        model, Path(folder) / "out", wish, data=text, source=model.name, progress=lambda *_: None
                    )
                except QualityError as error:
                    print(f"{method}: {error.message}", file=sys.stderr)
                    continue
                written = sum(path.stat().st_size for path in weight_files(result.folder))
            assert result.after is not None
            yield Row(
                f"{method}, {result.bits_per_weight:.2f} bits", written, result.after, result.after.change(before)
            )
        else:
            in_bytes = method == "kv-int8"
            held, found = measured(model, "none" if in_bytes else method, cache_in_bytes=in_bytes)
            yield Row(method if in_bytes else f"{method} at load", held, found, found.change(before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--data", type=Path, action="append", default=[])
    parser.add_argument("--own", type=int, default=0, help="tokens that the model writes itself")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--most", type=int, default=30_000, help="tokens measured")
    parser.add_argument("--tuning-tokens", type=int, default=None, help="as of 'inferd quantize'")
    asked = parser.parse_args()
    methods = asked.methods.split(",")
    unknown = sorted(set(methods) - set(METHODS))
    if unknown or not (asked.data or asked.own):
        parser.error(f"{unknown[0]} is no method" if unknown else "give a text: --data or --own")
    print("| model | text | method | MB | perplexity | change |\n| --- | --- | --- | --- | --- | --- |")
    for model in asked.model:
        texts = list(asked.data)
        with tempfile.TemporaryDirectory() as folder:
            if asked.own:
                texts.append(Path(folder) / "its own writing")
                texts[-1].write_text(own_text(model, asked.own))
            for text in texts:
                found = rows(
                    model, text, methods, context=asked.context, most=asked.most, tuning_tokens=asked.tuning_tokens
                )
                for row in found:
                    print(
                        f"| {model.name} | {text.name} | {row.method} | {row.size / 1e6:.2f} | {row.found.value:.5g} | {row.change:+.2%} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
