"""Integers and scales that are learned: the quantised model is taught to answer as the original one does.

Knows a Llama-like decoder as it is computed in plain torch, and windows of text. Does not know files.

GPTQ makes each product's own outputs change little, which is not what counts: some changes matter to no answer, others to each.
Here the loss is what counts, the Kullback-Leibler divergence from the original model's next-token distribution at every token of
the windows. Every weight has a latent number whose nearest integer it is; gradients pass through the rounding as if it were not
there (Bengio et al. 2013), so that latents drift until integers change, and the groups' scales are learned with them (Esser et
al. 2020; Liu et al. 2023 for language models with their own answers as the goal). Only integers and scales change: what is
written has the same form and size, and the text's own words are never the goal, so the model learns no text.

A part of the windows is kept from learning: of the states before and after each epoch the one with the least divergence on these
is taken, so that too little text, or too large steps, never make it worse than it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.engine import native, ops
from inferd.engine.attention import FlatBatch
from inferd.engine.calibrate.rounding import Form, made, storable
from inferd.engine.model.llama import LlamaDecoder
from inferd.engine.quantized import QuantizedWeight

Progress = Callable[[int, int], None]
Open = Callable[[Callable[[list[tuple[str, int]], list[Tensor] | None, ops.Linear], ops.Linear] | None], LlamaDecoder]
"""The model in float32, anew; with what stands for its products."""

_TOKENS = 1024  # of a step
_LOGITS = 1 << 23  # most held at once
_KEPT = 8  # one of so many windows is kept from learning
_LATENT_STEP, _SCALE_STEP = 0.015, 0.001  # of a group's scale, at a step of Adam
_BETAS = (0.9, 0.99)
_WARM_UP = 10  # steps


@dataclass(slots=True)
class Divergence:
    """From the original's answers, in nats for each token of the windows that were kept from learning."""

    before: float
    after: float


class _Learned:
    """One matrix of integers whose latent numbers and scales are learned."""

    def __init__(self, weight: QuantizedWeight, form: Form) -> None:
        out = weight.values.shape[0]
        self.form, self.groups = form, (out, weight.scale.shape[1], -1)
        zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero.float()
        self.zero = zero.unsqueeze(2).clone()
        self.scale = weight.scale.unsqueeze(2).clone().requires_grad_()
        # The middle of its integer's range, whichever side GPTQ rounded from.
        self.latent = weight.rows(torch.arange(out)).view(self.groups).clone().requires_grad_()

    def __call__(self) -> Tensor:
        scale = _through(self.scale, storable(self.scale.detach(), self.form))
        steps = self.latent / scale
        whole = (_through(steps, steps.detach().round()) + self.zero).clamp(self.form.low, self.form.high)
        return ((whole - self.zero) * scale).flatten(1)

    def result(self) -> QuantizedWeight:
        scale = storable(self.scale.detach(), self.form)
        whole = ((self.latent.detach() / scale).round() + self.zero).clamp(self.form.low, self.form.high)
        return made(whole.flatten(1).to(torch.int8), scale.squeeze(2), self.zero.squeeze(2), self.form)


class _Product(ops.Linear):
    """Stands for a product of several matrices while they are learned."""

    __slots__ = ("_added", "_parts")

    _parts: Sequence[Callable[[], Tensor]]
    _added: Tensor | None

    @classmethod
    def of(cls, parts: Sequence[Callable[[], Tensor]], bias: Tensor | None, inner: ops.Linear) -> _Product:
        made = cls.__new__(cls)
        made.in_features, made.out_features, made.dtype = inner.in_features, inner.out_features, inner.dtype
        made._parts, made._added = parts, bias
        return made

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, activation: str = "") -> Tensor:
        assert not activation
        return F.linear(x, torch.cat([part() for part in self._parts]), self._added)


class _WindowAttention:
    """Attention within windows of one length that lie side by side, with gradients."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        heads, dim = q.shape[1:]
        qs, ks, vs = (x.reshape(self._count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        ks, vs = (x.repeat_interleave(heads // x.shape[1], 1) for x in (ks, vs))
        length = qs.shape[2]
        at = torch.arange(length)
        seen = at <= at.unsqueeze(1)
        if window is not None:
            seen &= at > at.unsqueeze(1) - window
        if softcap is None:
            out = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=seen, scale=scale)
        else:
            scores = softcap * torch.tanh(qs @ ks.transpose(2, 3) * (scale / softcap))
            out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ vs
        return out.transpose(1, 2).reshape(-1, heads, dim)


def tuned(
    open_model: Open,
    quantised: Mapping[str, QuantizedWeight],
    forms: Mapping[str, Form],
    windows: Tensor,
    *,
    epochs: int,
    progress: Progress,
) -> tuple[dict[str, QuantizedWeight], Divergence]:
    """``quantised`` products by name, better. ``windows`` [N, length] of token ids; ``forms`` of the products."""
    with native.using_level("none"), torch.inference_mode(False):
        original = open_model(None)
        goals = torch.cat([_hidden(original, ids) for ids in torch.split(windows, _at_once(windows))])
        head = original.logits
        learned = {name: _Learned(weight, forms[name]) for name, weight in quantised.items()}

        def around(parts: list[tuple[str, int]], biases: list[Tensor] | None, inner: ops.Linear) -> ops.Linear:
            if parts[0][0] not in learned:
                return inner
            bias = None if biases is None else torch.cat(biases)
            return _Product.of([learned[name] for name, _ in parts], bias, inner)

        model = open_model(around)
        kept = torch.arange(len(windows)) % _KEPT == _KEPT // 2
        return _taught(model, head, learned, (windows, goals), kept, epochs, progress)


def _taught(
    model: LlamaDecoder,
    head: Callable[[Tensor], Tensor],
    learned: dict[str, _Learned],
    texts: tuple[Tensor, Tensor],
    kept: Tensor,
    epochs: int,
    progress: Progress,
) -> tuple[dict[str, QuantizedWeight], Divergence]:
    windows, goals = texts
    lessons = (~kept).nonzero().flatten() if bool(kept.any()) else torch.arange(len(windows))
    exam = kept.nonzero().flatten() if bool(kept.any()) else lessons
    size = _at_once(windows)
    steps = -(-len(lessons) // size) * epochs
    parameters = [
        {"params": [x], "lr": step * float(each.scale.detach().abs().mean())}
        for each in learned.values()
        for x, step in ((each.latent, _LATENT_STEP), (each.scale, _SCALE_STEP))
    ]
    optimiser = torch.optim.Adam(parameters, betas=_BETAS)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / _WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / max(steps, 1)))
    )

    def examined() -> float:
        with torch.no_grad():
            lost = [
                _divergence(head, _hidden(model, windows[at]), goals[at]) * len(at) for at in torch.split(exam, size)
            ]
        return float(sum(lost)) / len(exam)

    least = before = examined()
    best = {name: each.result() for name, each in learned.items()}
    draw = torch.Generator().manual_seed(0)
    done = 0
    for _ in range(epochs):
        for at in torch.split(lessons[torch.randperm(len(lessons), generator=draw)], size):
            optimiser.zero_grad()
            _learn(head, _hidden(model, windows[at]), goals[at])
            optimiser.step()
            rate.step()
            done += 1
            progress(done, steps)
        now = examined()
        if now < least:
            least, best = now, {name: each.result() for name, each in learned.items()}
    return best, Divergence(before, least)


def _learn(head: Callable[[Tensor], Tensor], hidden: Tensor, goals: Tensor) -> None:
    """Gradients of the divergence. The logits of few rows at a time: of large vocabularies they would be most of the memory."""
    cut = hidden.detach().requires_grad_()
    rows = cut.flatten(0, 1)
    most = max(1, _LOGITS // _vocabulary(head, goals))
    for mine, goal in zip(torch.split(rows, most), torch.split(goals.flatten(0, 1), most), strict=True):
        torch.autograd.backward(_divergence(head, mine, goal) * (len(mine) / len(rows)))
    torch.autograd.backward(hidden, cut.grad)


def _vocabulary(head: Callable[[Tensor], Tensor], goals: Tensor) -> int:
    return int(head(goals.flatten(0, 1)[:1]).shape[-1])


def _divergence(head: Callable[[Tensor], Tensor], hidden: Tensor, goals: Tensor) -> Tensor:
    """The mean over the rows."""
    with torch.no_grad():
        wanted = F.log_softmax(head(goals.flatten(0, -2)), -1)
    found = F.log_softmax(head(hidden.flatten(0, -2)), -1)
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True)


def _hidden(model: LlamaDecoder, ids: Tensor) -> Tensor:
    """[N, length] -> [N, length, H], what the head sees."""
    count, length = ids.shape
    nothing = torch.empty(0, dtype=torch.int32)
    batch = FlatBatch(
        token_ids=ids.flatten(),
        positions=torch.arange(length).repeat(count),
        query_start=nothing,
        seq_len=nothing,
        block_table=nothing,
        slots=nothing,
        num_sequences=count,
    )
    return model.forward(batch, _WindowAttention(count)).view(count, length, -1)


def _at_once(windows: Tensor) -> int:
    return max(1, _TOKENS // windows.shape[1])


def _through(x: Tensor, y: Tensor) -> Tensor:
    """``y``, with gradients as if it were ``x``."""
    return x + (y - x).detach()
