"""What the student computes, against its plain definition: attention within windows, and the loss and its gradients."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.families import write_checkpoint
from torch import Tensor

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import FAMILIES, Source
from inferd.engine.calibrate import student
from inferd.engine.calibrate.student import Handed, WindowAttention, divergence, floating, learn
from inferd.engine.model.llama import LlamaDecoder
from inferd.native.attention import Scoring


def attended(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """One window: each row by itself."""
    out = torch.empty_like(q)
    for at in range(len(q)):
        first = 0 if scoring.window is None else max(0, at + 1 - scoring.window)
        for head in range(q.shape[1]):
            of = head // (q.shape[1] // k.shape[1])
            scores = k[first : at + 1, of] @ q[at, head] * scoring.scale
            if scoring.softcap is not None:
                scores = scoring.softcap * (scores / scoring.softcap).tanh()
            out[at, head] = scores.softmax(0) @ v[first : at + 1, of]
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_attention_sees_what_lies_before_a_row_within_its_window(window: int | None, softcap: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3 * 9, heads, 8, generator=draw) for heads in (6, 2, 2))
    scoring = Scoring(0.7, window, softcap)
    found = WindowAttention(3)(0, q, k, v, scoring)
    parts = [attended(q[at : at + 9], k[at : at + 9], v[at : at + 9], scoring) for at in (0, 9, 18)]
    torch.testing.assert_close(found, torch.cat(parts), rtol=1e-4, atol=1e-5)


@pytest.fixture(params=[1 << 23, 7 * 4, 1], ids=["all rows at once", "four rows", "one row"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many logits are held: pieces of the rows, and fewer than one row has."""
    monkeypatch.setattr(student, "_MOST_LOGITS", request.param)
    return int(request.param)


def heads() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two output layers of 7 tokens, and the states of 2 x 5 rows for each."""
    draw = torch.Generator().manual_seed(1)
    teacher, mine = (torch.randn(7, 4, generator=draw) for _ in range(2))
    goals, hidden = (torch.randn(2, 5, 4, generator=draw) for _ in range(2))
    return teacher, mine, goals, hidden


def lost(teacher: Tensor, mine: Tensor, goals: Tensor, hidden: Tensor) -> Tensor:
    wanted, found = (goals @ teacher.T).log_softmax(-1), (hidden @ mine.T).log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


def test_the_divergence_is_the_mean_of_all_rows(at_once: int) -> None:
    teacher, mine, goals, hidden = heads()
    rows: list[int] = []

    def logits(x: Tensor) -> Tensor:
        rows.append(len(x))
        return F.linear(x, mine)

    found = divergence(lambda x: F.linear(x, teacher), logits, goals, hidden)
    assert math.isclose(found, float(lost(teacher, mine, goals, hidden)), rel_tol=1e-5)
    assert rows == ([10] if at_once > 70 else [4, 4, 2] if at_once == 28 else [1] * 10)


def test_what_is_learned_follows_the_gradient_of_the_divergence(at_once: int) -> None:
    teacher, mine, goals, hidden = heads()
    ours, plain = (mine.clone().requires_grad_() for _ in range(2))
    seen, exact = (hidden.clone().requires_grad_() for _ in range(2))
    learn(lambda x: F.linear(x, teacher), lambda x: F.linear(x, ours), goals, seen)
    torch.autograd.backward(lost(teacher, plain, goals, exact))
    for found, expected in ((ours.grad, plain.grad), (seen.grad, exact.grad)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


NORMS = {
    f"model.layers.{layer}.{norm}.weight"
    for layer in range(3)
    for norm in ("input_layernorm", "post_attention_layernorm")
} | {"model.norm.weight"}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama3-tied", NORMS | {"model.embed_tokens.weight"}),
        ("llama2-mha", NORMS | {"model.embed_tokens.weight", "lm_head.weight"}),
        ("gemma2", {"model.embed_tokens.weight"}),  # its norms are kept as w + 1
    ],
)
def test_the_floating_weights_are_those_that_the_model_computes_with(
    tmp_path: Path, family: str, names: set[str]
) -> None:
    write_checkpoint(family, tmp_path)
    config = read_config(Source(tmp_path / "config.json"))
    weights = Handed(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    model = LlamaDecoder(config, FAMILIES[config.architecture], weights, 16)
    found = floating(model, weights)
    assert found.keys() == names
    for name, tensor in found.items():
        assert torch.equal(tensor, weights.stored(name)), name
