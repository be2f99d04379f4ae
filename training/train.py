"""Trains a bundled model on the endless corpus and writes it as a Hugging Face folder.

``python -m training.train --shape demo --out out/demo --minutes 45`` or, for a run whose length does
not depend on the machine, ``--tokens 12000000``. The folder is rewritten every few minutes and the
run can be stopped and resumed (``--resume``) at any time.

Matrices are trained with Muon, the embedding and the norms with AdamW; the learning rate warms up,
stays, and decays over the last part of the run. Only what the assistant says is learnt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from . import checkpoint
from .corpus import conversations
from .dialogue import render
from .model import SHAPES, Llama

WARM_UP = 0.02
DECAY = 0.35
SHARD = 4096
LONGEST = 1536
IGNORED = -100


def batches(tokenizer: Tokenizer, seed: int, batch_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (input ids, targets), each [rows, length]; rows of a batch have about the same length.

    A target is the next token where the assistant speaks and ``IGNORED`` elsewhere.
    """
    source = conversations(seed)
    rng = Random(seed)
    while True:
        rows: list[tuple[list[int], list[bool]]] = []
        for dialogue in islice(source, SHARD):
            pieces = render(dialogue)
            ids: list[int] = []
            learnt: list[bool] = []
            for encoding, (_, target) in zip(tokenizer.encode_batch([text for text, _ in pieces]), pieces, strict=True):
                ids += encoding.ids
                learnt += [target] * len(encoding.ids)
            rows.append((ids[:LONGEST], learnt[:LONGEST]))
        rows.sort(key=lambda row: len(row[0]) + rng.random())
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in rows:
            if len(row[0]) * (len(groups[-1]) + 1) > batch_tokens and groups[-1]:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            inputs = torch.zeros(len(group), width, dtype=torch.long)
            targets = torch.full((len(group), width), IGNORED)
            for i, (ids, learnt) in enumerate(group):
                inputs[i, : len(ids)] = torch.tensor(ids)
                chosen = [token if target else IGNORED for token, target in zip(ids, learnt, strict=True)][1:]
                targets[i, : len(chosen)] = torch.tensor(chosen)
            yield inputs, targets


def learning_rate(progress: float) -> float:
    """Return the share of the full learning rate at a point of the run in [0, 1]."""
    if progress < WARM_UP:
        return progress / WARM_UP
    if progress > 1 - DECAY:
        return max(0.02, (1 - progress) / DECAY)
    return 1.0


def loss_of(model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the learnt tokens of a batch."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(inputs)
        learnt = targets != IGNORED
        logits = model.logits(hidden[learnt])
    return F.cross_entropy(logits.float(), targets[learnt])


def main() -> None:
    """Train a model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("src/inferd/models/demo"), help="folder with tokenizer.json"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float)
    length.add_argument("--tokens", type=int)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=float, default=180.0, help="seconds between two versions of the folder")
    parser.add_argument("--resume", type=Path, help="folder to take the first weights from")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    model = checkpoint.load(options.resume) if options.resume else Llama(SHAPES[options.shape])
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(
        matrices, lr=options.muon_lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=options.adam_lr, weight_decay=0.0, betas=(0.9, 0.98))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    start = saved = time.monotonic()
    seen = 0
    average = 0.0
    for step, (inputs, targets) in enumerate(batches(tokenizer, options.seed, options.batch_tokens)):
        now = time.monotonic()
        progress = (now - start) / (60 * options.minutes) if options.minutes else seen / options.tokens
        if progress >= 1:
            break
        scale = learning_rate(progress)
        muon.param_groups[0]["lr"] = options.muon_lr * scale
        adam.param_groups[0]["lr"] = options.adam_lr * scale
        loss = loss_of(model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()  # type: ignore[no-untyped-call]
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        seen += inputs.numel()
        average = loss.item() if step == 0 else 0.97 * average + 0.03 * loss.item()
        if step % 20 == 0:
            speed = seen / (time.monotonic() - start)
            print(
                f"step {step} {progress:.1%} loss {average:.4f} tokens {seen:,} {speed:.0f}/s lr {scale:.2f}",
                flush=True,
            )
        if now - saved > options.save_every:
            checkpoint.save(model, options.tokenizer, options.out)
            saved = now
    checkpoint.save(model, options.tokenizer, options.out)


if __name__ == "__main__":
    main()
