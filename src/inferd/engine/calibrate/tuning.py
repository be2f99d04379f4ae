"""Learns integers and scales: the quantised model is trained to give the original model's next-token distributions.

Knows windows, training steps and validation. Does not know how the student computes (``student``), nor files.

GPTQ keeps the change of each product's outputs small. But some of these changes affect no answer and others affect
every answer. Here the loss is the Kullback-Leibler divergence from the original model's next-token distribution at
every token of the windows. Every weight has a latent number that is rounded to its integer, and gradients pass through
the rounding unchanged (Bengio et al. 2013), so latent numbers move until integers change. The scales of groups are
learned with them (Esser et al. 2020; Liu et al. 2023 for language models that learn from their own answers), and so are
the weights that stay floating: norms, embedding and output layer. The result has the same form and size. The text's own
words are never the target, so the model does not learn the text.

A part of the windows is held out. Of the states before and after each epoch, the one with the least divergence on these
windows is kept. So too little text, or too large steps, never make the model worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.calibrate.rounding import Form
from inferd.engine.calibrate.student import Around, Learned, Logits, divergence, hidden_states, learn, standing
from inferd.engine.model.llama import LlamaDecoder
from inferd.native import compiled
from inferd.native.quantized import QuantizedWeight

Progress = Callable[[int, int], None]
Open = Callable[[Around | None], tuple[LlamaDecoder, dict[str, Tensor]]]
"""The model in float32, anew, with what stands for its products; and its floating weights by name, the tensors that it
computes with."""

_TOKENS = 512  # of a step
_KEPT = 8  # one of so many windows is kept from learning
_LATENT_WALK = 0.2
"""How far chance alone takes a latent number in all steps of Adam together, in scales. Its gradients are mostly chance,
so it walks by the square root of the steps, while what is no chance adds up: long lessons take smaller steps and learn
more. Beyond half a scale integers change by chance, and all that was learned is lost in that."""
_SCALE_STEP = 0.001  # of a group's scale, at a step of Adam
_FLOAT_STEP = 0.004  # of a floating tensor's root mean square
_BETAS = (0.9, 0.99)
_WARM_UP = 10  # steps


@dataclass(slots=True)
class Divergence:
    """Divergence from the original's answers, in nats per token of the held-out windows."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """The learned integers, scales and floating weights by name; ``floats`` in float32."""

    products: dict[str, QuantizedWeight]
    floats: dict[str, Tensor]
    divergence: Divergence


def tuned(
    open_model: Open,
    quantised: Mapping[str, QuantizedWeight],
    forms: Mapping[str, Form],
    windows: Tensor,
    *,
    epochs: int,
    progress: Progress,
) -> Tuned:
    """Improves the ``quantised`` products, by name.

    ``windows`` [N, length] of token ids; ``forms`` of the products.
    """
    with compiled.using_level("none"), torch.inference_mode(False):
        original, _ = open_model(None)
        with torch.no_grad():
            goals = torch.cat([hidden_states(original, ids) for ids in torch.split(windows, _at_once(windows))])
        learned = {name: Learned(weight, forms[name]) for name, weight in quantised.items()}
        model, floats = open_model(standing(learned))
        return _Lessons(original.logits, model, learned, floats, windows, goals).taught(epochs, progress)


class _Lessons:
    def __init__(
        self,
        teacher: Logits,
        model: LlamaDecoder,
        learned: dict[str, Learned],
        floats: dict[str, Tensor],
        windows: Tensor,
        goals: Tensor,
    ) -> None:
        self._teacher, self._model, self._learned, self._floats = teacher, model, learned, floats
        self._windows, self._goals = windows, goals
        kept = torch.arange(len(windows)) % _KEPT == _KEPT // 2
        self._lessons = (~kept).nonzero().flatten() if bool(kept.any()) else torch.arange(len(windows))
        self._exam = kept.nonzero().flatten() if bool(kept.any()) else self._lessons
        for tensor in floats.values():
            tensor.requires_grad_()

    def taught(self, epochs: int, progress: Progress) -> Tuned:
        size = _at_once(self._windows)
        steps = -(-len(self._lessons) // size) * epochs
        optimiser = torch.optim.Adam(self._parameters(steps), betas=_BETAS, fused=True)
        rate = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: min((step + 1) / _WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / max(steps, 1)))
        )
        before = self._examined()
        best = self._state(Divergence(before, before))
        draw = torch.Generator().manual_seed(0)
        done = 0
        for _ in range(epochs):
            for at in torch.split(self._lessons[torch.randperm(len(self._lessons), generator=draw)], size):
                optimiser.zero_grad()
                with _narrow():
                    hidden = hidden_states(self._model, self._windows[at])
                    learn(self._teacher, self._model.logits, self._goals[at], hidden)
                optimiser.step()
                rate.step()
                done += 1
                progress(done, steps)
            now = self._examined()
            if now < best.divergence.after:
                best = self._state(Divergence(before, now))
        return best

    def _parameters(self, steps: int) -> list[dict[str, object]]:
        parameters: list[dict[str, object]] = []
        latent_step = _LATENT_WALK / math.sqrt(max(steps, 1))
        for each in self._learned.values():
            size = float(each.scale.detach().abs().mean())
            parameters += [
                {"params": [each.latent], "lr": latent_step * size},
                {"params": [each.scale], "lr": _SCALE_STEP * size},
            ]
        for tensor in self._floats.values():
            parameters.append({"params": [tensor], "lr": _FLOAT_STEP * float(tensor.detach().square().mean().sqrt())})
        return parameters

    def _examined(self) -> float:
        with torch.no_grad():
            lost = [
                divergence(
                    self._teacher, self._model.logits, self._goals[at], hidden_states(self._model, self._windows[at])
                )
                * len(at)
                for at in torch.split(self._exam, _at_once(self._windows))
            ]
        return sum(lost) / len(self._exam)

    def _state(self, divergence: Divergence) -> Tuned:
        products = {name: each.result() for name, each in self._learned.items()}
        return Tuned(products, {name: x.detach().clone() for name, x in self._floats.items()}, divergence)


def _narrow() -> AbstractContextManager[object]:
    """Compute products in bfloat16 where the processor supports it: 2.2 times as fast.

    The rounding error is far below that of 4 bits.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled=compiled.BUILT and "avx512bf16" in compiled.levels())


def _at_once(windows: Tensor) -> int:
    return max(1, _TOKENS // windows.shape[1])
