"""Learned integers: what the student computes, and that it never ends worse than it began."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiers import THOROUGH

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import FAMILIES, Source
from inferd.engine.calibrate.rounding import Form, nearest
from inferd.engine.calibrate.student import Around, Handed, floating, on_grid, through
from inferd.engine.calibrate.tuning import Tuned, tuned
from inferd.engine.model.llama import LlamaDecoder
from inferd.native import ops
from inferd.native.quantized import QuantizedWeight

FORM = Form(4, 16, False, torch.float16)


class Student:
    """A model, and its products rounded to the nearest."""

    def __init__(self, folder: Path, form: Form = FORM) -> None:
        self._folder = folder
        self._config = read_config(Source(folder / "config.json"))
        weights = self._weights()
        names = [name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")]
        self.quantised = {name: nearest(weights.stored(f"{name}.weight").float(), form) for name in names}
        self.forms = dict.fromkeys(names, form)
        self.windows = torch.randint(3, 250, (16, 40), generator=torch.Generator().manual_seed(0))

    def _weights(self) -> Handed:
        return Handed(self._folder, dtype=torch.float32, device=torch.device("cpu"))

    def open(self, around: Around | None) -> tuple[LlamaDecoder, dict[str, torch.Tensor]]:
        weights = self._weights()
        weights.around = around
        model = LlamaDecoder(self._config, FAMILIES[self._config.architecture], weights, 40)
        return model, floating(model, weights)

    def stored(self, name: str) -> torch.Tensor:
        return self._weights().stored(name)

    def learn(self, epochs: int) -> Tuned:
        return tuned(self.open, self.quantised, self.forms, self.windows, epochs=epochs, progress=lambda *_: None)


@THOROUGH
def test_answers_come_closer_to_the_original_s_and_grids_stay_grids(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.engine.calibrate.tuning._LATENT_WALK", 0.3)
    student = Student(tiny_model)
    student.windows = student.windows[
        :3
    ]  # so few that none is kept: a model of random weights has nothing else to learn
    learnt = student.learn(30)
    found, divergence = learnt.products, learnt.divergence
    assert divergence.after < 0.7 * divergence.before
    assert found.keys() == student.quantised.keys()
    changed = 0
    for name, weight in found.items():
        before = student.quantised[name]
        assert int(weight.values.min()) >= -8
        assert int(weight.values.max()) <= 7
        assert torch.equal(weight.scale.half().float(), weight.scale)
        assert weight.zero is not None
        assert before.zero is not None
        assert torch.equal(weight.zero, before.zero)
        changed += int((weight.values != before.values).sum())
    assert changed > 0


def test_what_stays_floating_makes_up_for_what_integers_lose(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone: with integers and scales held still. Norms and the table of tokens are learned under the checkpoint's names."""
    for step in ("_LATENT_WALK", "_SCALE_STEP"):
        monkeypatch.setattr(f"inferd.engine.calibrate.tuning.{step}", 0.0)
    monkeypatch.setattr("inferd.engine.calibrate.tuning._FLOAT_STEP", 0.01)
    student = Student(tiny_model)
    student.windows = student.windows[:3]
    learnt = student.learn(30)
    assert learnt.divergence.after < 0.9 * learnt.divergence.before
    for name, weight in learnt.products.items():
        assert torch.equal(weight.values, student.quantised[name].values)
    assert {name for name, tensor in learnt.floats.items() if not torch.equal(tensor, student.stored(name))} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(
            f"model.layers.{i}.{norm}.weight"
            for i in (0, 1)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ),
    }


def test_rounding_has_the_gradients_of_its_plain_form() -> None:
    draw = torch.Generator().manual_seed(0)
    latent = torch.randn(6, 3, 16, generator=draw)
    scale = 0.1 + torch.rand(6, 3, 1, generator=draw) / 4  # of which some cut groups off
    low = torch.randint(-9, -5, (6, 3, 1), generator=draw).float()
    goal = torch.randn(6, 3, 16, generator=draw)

    def plain(latent: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        steps = latent / scale
        return torch.clamp(steps + (steps.round() - steps).detach(), low, low + 15) * scale

    found = []
    for compute in (plain, lambda x, s: on_grid(x, s, low, low + 15)):
        x, s = latent.clone().requires_grad_(), scale.clone().requires_grad_()
        numbers = compute(x, s)
        torch.autograd.backward((numbers * goal).sum())
        found.append((numbers, x.grad, s.grad))
    assert ((latent / scale).round() < low).any()
    for ours, oracle in zip(*found, strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-5, atol=1e-5)


def test_without_lessons_nothing_changes(tiny_model: Path) -> None:
    student = Student(tiny_model)
    learnt = student.learn(0)
    found, divergence = learnt.products, learnt.divergence
    assert divergence.after == divergence.before > 0
    for name, weight in found.items():
        assert torch.equal(weight.values, student.quantised[name].values)
        assert torch.equal(weight.scale, student.quantised[name].scale)


def test_steps_that_only_harm_are_thrown_away(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.engine.calibrate.tuning._LATENT_WALK", 20.0)
    monkeypatch.setattr("inferd.engine.calibrate.tuning._SCALE_STEP", 20.0)
    student = Student(tiny_model)
    monkeypatch.setattr("inferd.engine.calibrate.tuning._FLOAT_STEP", 20.0)
    learnt = student.learn(1)
    assert learnt.divergence.after == learnt.divergence.before
    assert all(torch.equal(learnt.products[name].values, weight.values) for name, weight in student.quantised.items())
    assert all(torch.equal(student.stored(name), tensor) for name, tensor in learnt.floats.items())


def test_the_student_that_is_examined_is_the_model_that_is_written(tiny_model: Path) -> None:
    """The divergence is that of a plain decoder with the integers' numbers, attention and all."""
    student = Student(tiny_model)
    divergence = student.learn(0).divergence

    def numbers(parts: list[tuple[str, int]], biases: list[torch.Tensor] | None, inner: ops.Linear) -> ops.Linear:
        if parts[0][0] not in student.quantised:
            return inner
        return ops.Linear.stack([dense(student.quantised[name]) for name, _ in parts], biases)

    kept = student.windows[4::8]
    answers = [_answers(student.open(around)[0], kept) for around in (None, numbers)]
    exact = (answers[0].exp() * (answers[0] - answers[1])).sum(-1).mean()
    assert divergence.before == pytest.approx(float(exact), rel=1e-3)


def dense(weight: QuantizedWeight) -> torch.Tensor:
    return weight.rows(torch.arange(weight.values.shape[0]))


def _answers(model: LlamaDecoder, windows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities by the paged attention that serves, one window at a time."""
    from inferd.native.attention import FlatBatch
    from inferd.native.kv_cache import KVCache
    from inferd.native.paged_attention import create_attention

    length, config = windows.shape[1], model.config
    found = []
    for ids in windows:
        cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=3,
            block_size=16,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        batch = FlatBatch(
            token_ids=ids,
            positions=torch.arange(length),
            query_start=torch.tensor([0, length], dtype=torch.int32),
            seq_len=torch.tensor([length], dtype=torch.int32),
            block_table=torch.arange(3, dtype=torch.int32).view(1, 3),
            slots=torch.arange(length),
            num_sequences=1,
        )
        with torch.inference_mode():
            found.append(model.logits(model.forward(batch, create_attention("auto", cache, batch))).log_softmax(-1))
    return torch.stack(found)


def test_a_value_stands_for_another_with_the_gradients_of_the_first() -> None:
    x = torch.tensor([0.2, 1.7, -3.4], requires_grad=True)
    found = through(x, x.round() * 2)
    assert torch.equal(found, torch.tensor([0.0, 4.0, -6.0]))
    (found * torch.tensor([1.0, 2.0, 3.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([1.0, 2.0, 3.0]))
