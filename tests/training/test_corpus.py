"""The generator repeats itself, keeps its two sides apart, and writes what the chat template renders."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from training.corpus import conversations, exchanges
from training.dialogue import Dialogue, render

from inferd import models

TEMPLATE = Path(__file__).parents[2] / "training" / "chat_template.jinja"


def as_text(dialogue: Dialogue) -> str:
    return "".join(text for text, _ in render(dialogue))


def test_one_seed_gives_one_corpus() -> None:
    first, again, other = (list(map(as_text, islice(conversations(seed), 300))) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_no_held_out_key_is_in_training() -> None:
    training = {d.key for d in islice(exchanges(5, "train"), 6000)} - {None}
    held_out = {d.key for d in islice(exchanges(5, "held-out"), 1500)} - {None}
    assert len(held_out) > 500
    assert not training & held_out


def test_a_held_out_sum_is_in_no_training_conversation() -> None:
    held_out = {d.expect["result"]: d for d in islice(exchanges(1, "held-out"), 1500) if d.kind == "arithmetic"}
    answers = {d.messages[-1].content for d in held_out.values() if "+" in d.messages[-1].content}
    assert len(answers) > 10
    for dialogue in islice(conversations(1), 4000):
        assert not answers & {message.content for message in dialogue.messages}


@pytest.mark.parametrize("generation_prompt", [False, True])
def test_the_corpus_is_written_as_the_chat_template_renders(generation_prompt: bool) -> None:
    import json

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE.read_text())
    num_tools = 0
    for dialogue in islice(conversations(9), 400):
        if dialogue.raw:
            continue
        rendered = template.render(
            messages=[message.as_openai() for message in dialogue.messages],
            tools=list(dialogue.tools) or None,
            add_generation_prompt=generation_prompt,
        )
        num_tools += bool(dialogue.tools)
        assert rendered == "".join(text for text, _ in render(dialogue, generation_prompt=generation_prompt))
    assert num_tools > 10


def test_pieces_encode_as_the_whole_text_does() -> None:
    tokenizer = Tokenizer.from_file(str(models.path("demo") / "tokenizer.json"))
    for dialogue in islice(conversations(2), 300):
        pieces = [token for text, _ in render(dialogue) for token in tokenizer.encode(text).ids]
        assert pieces == tokenizer.encode(as_text(dialogue)).ids
