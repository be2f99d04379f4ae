"""The student of ``tuning``: a Llama-like decoder in plain torch with gradients for integers, scales and floating
weights.

Knows the forward and backward computation of rounding, products, attention within windows, and the divergence from a
teacher's answers. Does not know which windows are used, how often, or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.checkpoints.weights import Weights
from inferd.engine.calibrate.rounding import Form, made, storable
from inferd.engine.model.llama import LlamaDecoder
from inferd.native import ops
from inferd.native.attention import FlatBatch, Scoring
from inferd.native.quantized import QuantizedWeight

Around = Callable[[list[tuple[str, int]], list[Tensor] | None, ops.Linear], ops.Linear]
Logits = Callable[[Tensor], Tensor]

_MOST_LOGITS = 1 << 23  # held at once


class _Rounding(torch.autograd.Function):
    """Rounds numbers to a grid, with gradients.

    Gradients pass to the latent numbers as if there were no rounding, within the grid's range, and to the scales by
    what they multiply (Esser et al. 2020). One pass over the weights replaces thirty of torch's own graph.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, latent: Tensor, scale: Tensor, low: Tensor, high: Tensor
    ) -> Tensor:
        steps = latent / scale
        rounded = steps.round()
        whole = rounded.clamp(low, high)
        inside = whole == rounded
        ctx.save_for_backward(inside, torch.where(inside, steps.neg_().add_(whole), whole))
        return whole.mul_(scale)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inside, by_scale = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * inside, (grad * by_scale).sum(-1, keepdim=True), None, None


def on_grid(latent: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[..., n] numbers of the grid of ``scale`` [..., 1] from ``low`` to ``high`` times it, with gradients to both."""
    numbers: Tensor = _Rounding.apply(latent, scale, low, high)  # type: ignore[no-untyped-call]
    return numbers


class Learned:
    """One matrix of integers whose latent numbers [out, groups, n] and scales are learned."""

    def __init__(self, weight: QuantizedWeight, form: Form) -> None:
        out = weight.values.shape[0]
        self.form, self._groups = form, (out, weight.scale.shape[1], -1)
        zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero.float()
        self._zero = zero.unsqueeze(2).clone()
        self.scale = weight.scale.unsqueeze(2).clone().requires_grad_()
        # The middle of its integer's range, whichever side GPTQ rounded from.
        self.latent = weight.rows(torch.arange(out)).view(self._groups).clone().requires_grad_()

    def __call__(self) -> Tensor:
        scale = through(self.scale, storable(self.scale.detach(), self.form))
        return on_grid(self.latent, scale, self.form.low - self._zero, self.form.high - self._zero).flatten(1)

    def result(self) -> QuantizedWeight:
        scale = storable(self.scale.detach(), self.form)
        whole = ((self.latent.detach() / scale).round() + self._zero).clamp(self.form.low, self.form.high)
        return made(whole.flatten(1).to(torch.int8), scale.squeeze(2), self._zero.squeeze(2), self.form)


class _Product(ops.Linear):
    """Replaces a product of several matrices while they are learned."""

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


def standing(learned: Mapping[str, Learned]) -> Around:
    """A hook that puts learned matrices in the place of products while a model is built."""

    def around(parts: list[tuple[str, int]], biases: list[Tensor] | None, inner: ops.Linear) -> ops.Linear:
        if parts[0][0] not in learned:
            return inner
        bias = None if biases is None else torch.cat(biases)
        return _Product.of([learned[name] for name, _ in parts], bias, inner)

    return around


class Handed(Weights):
    """Weights that record the norms they returned, which the model uses without a copy."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(folder, dtype=dtype, device=device)
        self.norms: dict[str, Tensor] = {}

    def read(self, name: str, *shape: int) -> Tensor:
        tensor = super().read(name, *shape)
        if name.endswith("norm.weight"):
            self.norms[name] = tensor
        return tensor


def floating(model: LlamaDecoder, weights: Handed) -> dict[str, Tensor]:
    """The weights of ``model`` that stay floating, by their names in the checkpoint: norms, embedding, output layer.

    ``weights``: those that the model was built from.
    """
    # Where w + 1 is kept the weight itself is not what the model computes with.
    found = {} if model.family.norm_offset else dict(weights.norms)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    embedding = names[0] if names[0] in weights else names[1]
    found[embedding] = model.embedding.weight
    if model.head is not model.embedding:
        found[names[1]] = model.head.weight
    return found


class WindowAttention:
    """Attention within windows of one length that lie side by side, with gradients."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        heads, dim = q.shape[1:]
        qs, ks, vs = (x.float().reshape(self._count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        ks, vs = (x.repeat_interleave(heads // x.shape[1], 1) for x in (ks, vs))
        length = qs.shape[2]
        at = torch.arange(length)
        seen = at <= at.unsqueeze(1)
        if scoring.window is not None:
            seen &= at > at.unsqueeze(1) - scoring.window
        with torch.autocast("cpu", enabled=False):
            softcap = scoring.softcap
            if softcap is None:
                out = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=seen, scale=scoring.scale)
            else:
                scores = softcap * torch.tanh(qs @ ks.transpose(2, 3) * (scoring.scale / softcap))
                out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ vs
        return out.transpose(1, 2).reshape(-1, heads, dim)


def hidden_states(model: LlamaDecoder, ids: Tensor) -> Tensor:
    """[N, length] -> [N, length, H], the input of the output layer."""
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
    return model.forward(batch, WindowAttention(count)).view(count, length, -1)


def divergence(teacher: Logits, student: Logits, goals: Tensor, hidden: Tensor) -> float:
    """Kullback-Leibler divergence from the teacher's distributions: nats per row, the mean of [..., H] rows."""
    total = 0.0
    with torch.no_grad():
        for mine, goal in _pieces(teacher, hidden, goals):
            wanted, found = F.log_softmax(teacher(goal), -1), F.log_softmax(student(mine), -1)
            total += float(F.kl_div(found, wanted, reduction="sum", log_target=True))
    return total / hidden.flatten(0, -2).shape[0]


def learn(teacher: Logits, student: Logits, goals: Tensor, hidden: Tensor) -> None:
    """Gradients of ``divergence``, from the logits of a few rows at a time: all logits of a large vocabulary need most
    memory.

    The gradient by the logits is the difference of the two distributions, so the divergence itself is not computed.
    """
    cut = hidden.detach().requires_grad_()
    count = cut.flatten(0, -2).shape[0]
    for mine, goal in _pieces(teacher, cut, goals):
        with torch.no_grad():
            wanted = teacher(goal).float().softmax(-1)
        logits = student(mine)
        with torch.no_grad():
            off = logits.float().softmax(-1).sub_(wanted).div_(count)
        torch.autograd.backward(logits, off.to(logits.dtype))
    torch.autograd.backward(hidden, cut.grad)


def _pieces(head: Logits, hidden: Tensor, goals: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
    rows, wanted = hidden.flatten(0, -2), goals.flatten(0, -2)
    with torch.no_grad():
        most = max(1, _MOST_LOGITS // head(wanted[:1]).shape[-1])
    return list(zip(torch.split(rows, most), torch.split(wanted, most), strict=True))


def through(x: Tensor, y: Tensor) -> Tensor:
    """``y``, with gradients as if it were ``x``."""
    return x + (y - x).detach()
