"""Trains a bundled model on the endless corpus and writes it as a Hugging Face folder.

``python -m training.train --shape demo --out out/demo --minutes 45`` or, for a run whose length does
not depend on the machine, ``--tokens 12000000``. The folder is rewritten every few minutes and the
run can be stopped and resumed (``--resume``) at any time.

Matrices are trained with Muon, the embedding and the norms with AdamW; the learning rate warms up,
stays, and decays over the last part of the run. Only what the assistant says is learnt.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor, distributed, multiprocessing
from torch.nn import functional as F

from . import checkpoint
from .corpus import conversation
from .dialogue import render
from .model import SHAPES, Llama

WARM_UP = 0.02
DECAY = 0.35
SHARD = 2048
LONGEST = 1536
IGNORED = -100


def batches(
    tokenizer: Tokenizer, seed: int, batch_tokens: int, with_conversations: Callable[[], bool] = lambda: True
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (input ids, targets), each [rows, length]; rows of a batch have about the same length.

    A target is the next token where the assistant speaks and ``IGNORED`` elsewhere. Single exchanges
    come alone at first; those of several join when ``with_conversations`` says so.
    """
    rng = Random(seed)
    while True:
        rows: list[tuple[list[int], list[bool]]] = []
        longer = 1.0 if with_conversations() else 0.1
        for _ in range(SHARD):
            pieces = render(conversation(rng, longer))
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


def learning_rate(progress: float, decay: float = DECAY) -> float:
    """Return the share of the full learning rate at a point of the run in [0, 1]."""
    if progress < WARM_UP:
        return progress / WARM_UP
    if progress > 1 - decay:
        return max(0.02, (1 - progress) / decay)
    return 1.0


def loss_of(model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the learnt tokens of a batch."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(inputs)
        learnt = targets != IGNORED
        logits = model.logits(hidden[learnt])
    return F.cross_entropy(logits.float(), targets[learnt])


def parsed() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a bundled model.")
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("src/inferd/models/demo"), help="folder with tokenizer.json"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float)
    length.add_argument("--tokens", type=int)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of a batch in each process")
    parser.add_argument("--muon-lr", type=float, default=0.005)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--processes", type=int, default=2, help="processes of one thread that share every step")
    parser.add_argument("--save-every", type=float, default=180.0, help="seconds between two versions of the folder")
    parser.add_argument("--resume", type=Path, help="folder to take the first weights from")
    parser.add_argument(
        "--conversations-from", type=float, default=0.5, help="part of the run after which exchanges join"
    )
    parser.add_argument("--decay", type=float, default=DECAY, help="last part of the run over which the rate decays")
    return parser.parse_args()


def train(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """Train in one of the processes: each has its own batches, all take the same steps."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.processes)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    model = checkpoint.load(options.resume) if options.resume else Llama(SHAPES[options.shape])
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(
        matrices, lr=options.muon_lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=options.adam_lr, weight_decay=0.0, betas=(0.9, 0.98))
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    start = time.monotonic()
    saved = 0.0
    seen, average, progress = 0, 0.0, 0.0
    stream = batches(
        tokenizer,
        options.seed * options.processes + rank,
        options.batch_tokens,
        lambda: progress > options.conversations_from,
    )
    for step, (inputs, targets) in enumerate(stream):
        loss = loss_of(model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        elapsed = time.monotonic() - start
        # One exchange per step: the gradients, and what every process must agree on.
        report = torch.tensor([loss.item(), float(inputs.numel()), elapsed])
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None] + [report])
        distributed.all_reduce(flat)
        flat[:-2] /= options.processes
        offset = 0
        for parameter in model.parameters():
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        seen += int(flat[-2])
        elapsed = float(flat[-1]) / options.processes
        progress = elapsed / (60 * options.minutes) if options.minutes else seen / options.tokens
        if progress >= 1:
            break
        scale = learning_rate(progress, options.decay)
        muon.param_groups[0]["lr"] = options.muon_lr * scale
        adam.param_groups[0]["lr"] = options.adam_lr * scale
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()  # type: ignore[no-untyped-call]
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        average = float(flat[-3]) if step == 0 else 0.97 * average + 0.03 * float(flat[-3])
        if rank == 0 and step % 20 == 0:
            speed = seen / elapsed
            print(
                f"step {step} {progress:.1%} loss {average:.4f} tokens {seen:,} {speed:.0f}/s lr {scale:.2f}",
                flush=True,
            )
        if rank == 0 and elapsed - saved > options.save_every:
            checkpoint.save(model, options.tokenizer, options.out)
            saved = elapsed
    if rank == 0:
        checkpoint.save(model, options.tokenizer, options.out)
    distributed.destroy_process_group()


def main() -> None:
    """Start the processes and wait for them."""
    options = parsed()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        multiprocessing.spawn(train, args=(options, rendezvous), nprocs=options.processes)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
