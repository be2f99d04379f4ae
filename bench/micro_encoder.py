"""A text encoder of all-MiniLM-L6-v2's shape in process: texts per second of ours against transformers, in turn.

    OMP_NUM_THREADS=2 python bench/micro_encoder.py [--tokens 24] [--batch 32] [--model DIR]

Weights are random unless a folder is named; the arithmetic is the same. Every contestant has the best of its rounds,
as what disturbs a machine only ever takes time. ``cosine`` is the smallest between a text's vector and the one
that transformers gives in float32: with random weights it says little, with a real folder it is the quality.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inferd.native import compiled
from inferd.predict.encoder.checkpoint import EncoderOptions
from inferd.predict.encoder.load import TextModel, load_text_model
from inferd.predict.encoder.ragged import ragged

Vectors = npt.NDArray[np.float32]
CHUNKS = (96, 192, 256, 384, 768)


def write_random(folder: Path) -> None:
    import transformers

    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
    config = transformers.BertConfig(vocab_size=2000, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordPiece({f"t{i}": i for i in range(2000)}, unk_token="t0"))
    tokenizer.save(str(folder / "tokenizer.json"))


def plain(folder: Path) -> Callable[[list[list[int]]], Vectors]:
    """transformers, padded to the longest, mean pooling."""
    import transformers

    make: Any = transformers.AutoModel
    model = make.from_pretrained(folder, dtype=torch.float32).eval()

    def run(texts: list[list[int]]) -> Vectors:
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state * mask.unsqueeze(-1)
        mean = hidden.sum(1) / mask.sum(1, keepdim=True)
        found: Vectors = torch.nn.functional.normalize(mean).numpy()
        return found

    return run


def ours(model: TextModel, chunk: int) -> Callable[[list[list[int]]], Vectors]:
    def run(texts: list[list[int]]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = np.empty((len(texts), model.size), np.float32)
        at = 0
        while at < len(order):
            end, tokens = at, 0
            while end < len(order) and (end == at or tokens + len(texts[order[end]]) <= chunk):
                tokens += len(texts[order[end]])
                end += 1
            part = order[at:end]
            values = model.compute(ragged([texts[i] for i in part], [None] * len(part), model.device)).numpy()
            out[part] = values / np.linalg.norm(values, axis=1, keepdims=True)
            at = end
        return out

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24, help="per text")
    parser.add_argument("--spread", type=int, default=0, help="texts have so many tokens more or less")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model", type=Path)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as made:
        folder = asked.model or Path(made)
        if asked.model is None:
            write_random(folder)
        contestants = {"transformers float32": plain(folder)}
        for dtype in ("float32", "bfloat16", *(("int8",) if compiled.has_int8() else ())):
            settings: dict[str, Any] = (
                {"options": EncoderOptions(quantize="int8")} if dtype == "int8" else {"dtype": dtype}
            )
            model = load_text_model(folder, device=torch.device("cpu"), **settings)
            for chunk in CHUNKS:
                contestants[f"inferd {dtype}, {chunk} tokens at a time"] = ours(model, chunk)
        draw = random.Random(0)
        lengths = [asked.tokens + draw.randint(-asked.spread, asked.spread) for _ in range(asked.batch)]
        texts = [[draw.randrange(1000, 2000) for _ in range(length)] for length in lengths]
        best = dict.fromkeys(contestants, float("inf"))
        vectors = {}
        for _ in range(asked.rounds):
            for name, run in contestants.items():
                began = time.perf_counter()
                vectors[name] = run(texts)
                best[name] = min(best[name], time.perf_counter() - began)
    level, threads = compiled.level(), torch.get_num_threads()
    print(
        f"{asked.batch} texts of {asked.tokens} tokens, {threads} threads, {level}; default chunk in the server: 256\n"
    )
    expected = vectors["transformers float32"]
    for name, seconds in best.items():
        cosine = (vectors[name] * expected).sum(axis=1).min()
        print(f"{name:40}{asked.batch / seconds:8.0f} texts/s   cosine {cosine:.6f}")


if __name__ == "__main__":
    main()
