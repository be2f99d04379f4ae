"""Chooses the integers of a model's products by each method, product by product.

Knows tensors by name. Does not know the files that are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.checkpoints.decoder_config import FAMILIES, DecoderConfig
from inferd.checkpoints.weights import Weights
from inferd.engine.calibrate.gptq import gptq
from inferd.engine.calibrate.layers import observed_layers
from inferd.engine.calibrate.observe import Observed
from inferd.engine.calibrate.rounding import Form, nearest
from inferd.engine.calibrate.student import Around, Handed, floating
from inferd.engine.calibrate.tuning import Tuned, tuned
from inferd.engine.calibrate.wish import Wish
from inferd.engine.model.llama import LlamaDecoder
from inferd.native.quantized import QuantizedWeight

Progress = Callable[[str, int, int], None]
Fitted = Iterator[tuple[str, QuantizedWeight]]
"""Names without ".weight"."""

# Tokens that tuning learns from, where none are configured:
_TUNING_TOKENS = 1 << 20
_MOST_WORK = 2e14  # eight for each weight and token; one core of 2022 does some 4e10 a second
_LEAST_TOKENS = 1 << 15  # with fewer, tuning is skipped: models of 760 million weights and more stay as GPTQ made them
_MOST_EPOCHS = 12  # passes over a short text: more passes bring nothing


@dataclass(frozen=True, slots=True)
class Loss:
    """A product's loss: the squared change of its outputs relative to the squared outputs."""

    share: float
    num_weights: int


@dataclass(frozen=True, slots=True)
class Job:
    """What calibration needs to know."""

    config: DecoderConfig
    open_weights: Callable[[], Handed]
    windows: Tensor  # [N, length] of token ids
    spread: Callable[[int], Tensor]  # so many of them, or all there are
    form: Form
    wide: frozenset[str]  # products that have 8 bits instead
    wish: Wish
    record_loss: Callable[[tuple[str, ...], Loss], None]  # called with each product's loss, by the names of its parts
    record_tuned: Callable[[Tuned], None]  # called with the result of tuning, where the method tunes
    progress: Progress

    def form_of(self, name: str) -> Form:
        return Form(8, 0, scale_dtype=self.form.scale_dtype) if name in self.wide else self.form


def stored_scales(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit format of scales beside a weight of this format; float16 is the more precise one."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def rounded_products(weights: Weights, products: Sequence[str], form: Form, progress: Progress) -> Fitted:
    """To the nearest, without data."""
    for done, name in enumerate(products):
        yield name.removesuffix(".weight"), nearest(weights.stored(name).float(), form)
        progress("quantising", done + 1, len(products))


def gptq_products(job: Job, weights: Weights) -> Fitted:
    """GPTQ layer by layer; each layer's inputs come from the quantised layers before it."""
    job.progress("calibrating", 0, job.config.num_layers)
    family = FAMILIES[job.config.architecture]
    layers = observed_layers(job.open_weights, job.config, family, job.windows)
    for done, observed in enumerate(layers):
        for product in observed:
            numbers: list[Tensor] = []
            lost = of = 0.0
            for name, _ in product.parts:
                weight = weights.stored(f"{name}.weight").float()
                quantised = _fitted(weight, product, job.form_of(name), job.wish)
                yield name, quantised
                numbers.append(quantised.rows(torch.arange(quantised.values.shape[0])))
                off = numbers[-1] - weight
                lost += float(((off @ product.moments) * off).sum())
                of += float(((weight @ product.moments) * weight).sum())
            names = tuple(name for name, _ in product.parts)
            job.record_loss(names, Loss(lost / max(of, 1e-30), sum(part.numel() for part in numbers)))
            product.replace(numbers)
        job.progress("calibrating", done + 1, job.config.num_layers)


def _fitted(weight: Tensor, product: Observed, form: Form, wish: Wish) -> QuantizedWeight:
    if product.num_rows == 0:  # an expert that no calibration token was sent to
        return nearest(weight, form)
    return gptq(weight, product.moments, form, damping=wish.damping, by_size=wish.by_size)


def tuned_products(job: Job, weights: Weights) -> Fitted:
    """GPTQ first; then all integers and the floating weights are learned together.

    The whole model is in memory, about five times in float32.
    """
    quantised = dict(gptq_products(job, weights))
    tokens = job.wish.tuning_tokens
    if tokens is None:
        num_weights = sum(each.values.numel() for each in quantised.values())
        tokens = min(_TUNING_TOKENS, int(_MOST_WORK / (8 * num_weights)))
        tokens = tokens if tokens >= _LEAST_TOKENS else 0
    length = job.windows.shape[1]
    lessons = job.spread(max(1, tokens // length))
    epochs = min(round(tokens / lessons.numel()), _MOST_EPOCHS)

    def open_model(around: Around | None) -> tuple[LlamaDecoder, dict[str, Tensor]]:
        config = job.config
        mine = job.open_weights()
        mine.dtype, mine.around = torch.float32, around
        model = LlamaDecoder(config, FAMILIES[config.architecture], mine, length)
        return model, floating(model, mine)

    if epochs:
        found = tuned(
            open_model,
            quantised,
            {name: job.form_of(name) for name in quantised},
            lessons,
            epochs=epochs,
            progress=lambda done, total: job.progress("tuning", done, total),
        )
        quantised = found.products
        job.record_tuned(found)
    yield from quantised.items()
