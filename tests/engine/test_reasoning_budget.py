"""Reasoning that has used up its budget is closed, and the answer goes on after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoints.answers.test_detect import CASES, THINKING, TURNS
from tests.engine.deltas import joined
from tests.engine.test_forced_calls import ask, load

from inferd.answer_form import AnswerForm, Choices


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_is_closed_when_its_budget_is_used_up(tmp_path: Path, budget: int) -> None:
    source = TURNS.replace("CALLS", CASES[0][0]).replace("THINK", THINKING)
    path = tmp_path / "chat.jinja"
    path.write_text(source.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"))
    engine = load(path)
    form = AnswerForm(constraint=Choices(texts=("yes", "no"), at="c"), reasoning_budget=budget)
    for seed in range(4):
        parts = ask(engine, form, seed=seed, tokens=80)
        text, reasoning, _ = joined(parts)
        assert text in ("yes", "no")
        assert bool(reasoning) <= bool(budget)
        assert parts[-1].finish_reason == "stop"
        assert sum(len(delta.token_ids) for delta in parts) < budget + 40
    engine.close()
