"""Perplexity: how well a model predicts a text. Quantisation, kernels and cache formats are judged by it.

Computes with the runner that serves requests, so that what is measured is what is served. Knows token ids. Does not
know tokenizers, files or requests.

Definition. The text's ids t_0 .. t_{n-1} are cut into windows. Window k holds the ids from k * stride to k * stride +
context, or to the text's end. It begins with the ``leading`` ids, which the tokenizer puts before a text. The first
window that reaches the text's end is the last. Every id is scored once, in the first window that has it, given
everything before it in that window. t_0 is scored only where there are leading ids. With the losses l_i = -ln p(t_i |
the ids before it in its window), perplexity is exp(mean of l_i).

With ``stride == context`` (the default) windows do not overlap: this costs least, and predicts the first ids of each
window worse. A smaller stride gives every id at least ``context - stride`` ids of context (the sliding window of
transformers' documentation).

Losses are summed in float64. With the compiled kernels a row's logits do not depend on the batch, so the result is the
same to the bit for any number of windows at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.engine.model.load import Decoder
from inferd.engine.runner import Runner
from inferd.engine.scheduling.scheduler import Slice, Step
from inferd.engine.scheduling.sequence import Sequence as Tokens
from inferd.errors import InvalidRequest
from inferd.native.kv_cache import KVCache
from inferd.types import SamplingParams

Progress = Callable[[str, int, int], None]

_BLOCK = 16  # tokens per block of an arena of our own
_LOGITS = 1 << 24  # most logits held at once: 64 MB


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The result over one text."""

    value: float  # exp(mean loss)
    error: float  # standard error of the mean loss, which is about the relative one of ``value``
    num_scored: int  # tokens
    num_windows: int
    context: int = 0  # tokens of a window at most

    def change(self, other: Perplexity) -> float:
        """Relative increase over ``other``: 0.01 is one per cent worse."""
        return self.value / other.value - 1


@dataclass(frozen=True, slots=True)
class Window:
    """The ids of one window, of which the last ``num_scored`` are scored."""

    ids: tuple[int, ...]
    num_scored: int


def windows(
    ids: Sequence[int], *, context: int, stride: int | None = None, leading: Sequence[int] = ()
) -> list[Window]:
    """Cut a text as the module defines. ``context`` counts the leading ids. Raises InvalidRequest."""
    fresh = context - len(leading)  # ids of the text in a window
    step = fresh if stride is None else stride
    if not 1 <= step <= fresh or context < 2:
        raise InvalidRequest(
            f"Windows of {context} tokens ({len(leading)} of them before the text) every {step} tokens leave out "
            "parts of the text. "
            f"Give a context of at least {max(len(leading) + 1, 2)} and a stride from 1 to {max(fresh, 1)}.",
            param="stride",
        )
    if len(ids) + len(leading) < 2:
        raise InvalidRequest(
            f"The text has {len(ids)} tokens, too few to predict one from another. Give a longer text."
        )
    cut: list[Window] = []
    begin = seen = 0
    while seen < len(ids):
        end = min(begin + fresh, len(ids))
        held = (*leading, *ids[begin:end])
        scored = min(end - seen, len(held) - 1)  # nothing stands before the first of all
        if scored:
            cut.append(Window(held, scored))
        begin, seen = begin + step, end
    return cut


def measuring(decoder: Decoder, *, num_tokens: int = 4096, in_bytes: bool = False) -> Runner:
    """A runner for measurements, with a KV cache for ``num_tokens`` tokens.

    The cache has the decoder's number format, or 8-bit integers (``in_bytes``).
    """
    dims = decoder.config
    cache = KVCache(
        num_layers=dims.num_layers,
        num_blocks=-(-num_tokens // _BLOCK),
        block_size=_BLOCK,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        dtype=decoder.dtype,
        device=torch.device("cpu"),
        in_bytes=in_bytes,
    )
    return Runner(decoder, cache, "auto", torch.device("cpu"))


def perplexity(
    runner: Runner,
    ids: Sequence[int],
    *,
    context: int,
    stride: int | None = None,
    leading: Sequence[int] = (),
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of the runner's model over a text's ids, as the module defines it.

    ``context``: tokens of a window, at most the model's positions and what the runner's cache holds. ``progress`` is
    called with ("perplexity", tokens done, tokens in all). Raises InvalidRequest.
    """
    most = runner.decoder.config.max_position_embeddings
    if context > most:
        raise InvalidRequest(
            f"context is {context}, but the model has {most} positions. Give {most} or less.", param="context"
        )
    parts = windows(ids, context=context, stride=stride, leading=leading)
    return replace(summary(losses(runner, parts, progress), len(parts)), context=context)


def losses(runner: Runner, parts: Sequence[Window], progress: Progress | None = None) -> Tensor:
    """The losses of every scored id of ``parts`` in nats, float32 [sum of num_scored], in order."""
    room = runner.cache.num_blocks
    longest = max(len(part.ids) for part in parts)
    if _blocks(runner, longest) > room:
        raise InvalidRequest(
            f"A window has {longest} tokens, but the arena has {room} blocks of {runner.cache.block_size}. "
            "Give a smaller context.",
            param="context",
        )
    found: list[Tensor] = []
    total, done = sum(len(part.ids) for part in parts), 0
    batch: list[Window] = []
    taken = 0
    with torch.inference_mode():
        for at, part in enumerate(parts):
            batch.append(part)
            taken += _blocks(runner, len(part.ids))
            if at + 1 == len(parts) or taken + _blocks(runner, len(parts[at + 1].ids)) > room:
                found.append(_batch_losses(runner, batch))
                done += sum(len(window.ids) for window in batch)
                if progress is not None:
                    progress("perplexity", done, total)
                batch, taken = [], 0
    return torch.cat(found)


def summary(loss: Tensor, num_windows: int) -> Perplexity:
    """Perplexity from the losses [N] of one text."""
    exact = loss.double()
    mean = float(exact.mean())
    error = float(exact.std() / math.sqrt(len(exact))) if len(exact) > 1 else math.inf
    # A model that is certain of something else: infinite, not an OverflowError.
    return Perplexity(math.exp(mean) if mean < 700 else math.inf, error, len(exact), num_windows)


def _blocks(runner: Runner, num_tokens: int) -> int:
    return -(-num_tokens // runner.cache.block_size)


def _batch_losses(runner: Runner, parts: list[Window]) -> Tensor:
    """Windows side by side in one step, each as a new sequence."""
    step, first = Step(), 0
    for part in parts:
        sequence = Tokens(
            request_id="perplexity",
            index=0,
            prompt_ids=list(part.ids),
            sampling=SamplingParams(),
            seed=0,
            use_cache=False,
        )
        count = _blocks(runner, len(part.ids))
        sequence.blocks = list(range(first, first + count))
        first += count
        step.slices.append(Slice(sequence, 0, len(part.ids)))
    hidden = runner.run(step)
    # The logits of an id are in the row before it.
    rows: list[int] = []
    wanted: list[int] = []
    begin = 0
    for part in parts:
        end = begin + len(part.ids)
        rows += range(end - part.num_scored - 1, end - 1)
        wanted += part.ids[len(part.ids) - part.num_scored :]
        begin = end
    target = torch.tensor(wanted, device=hidden.device)
    some = max(1, _LOGITS // runner.decoder.config.vocab_size)
    return torch.cat(
        [
            F.cross_entropy(runner.logits(hidden, rows[i : i + some]), target[i : i + some], reduction="none").cpu()
            for i in range(0, len(rows), some)
        ]
    )
