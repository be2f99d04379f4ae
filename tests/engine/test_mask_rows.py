"""The masks of a step are those of each answer alone: with and without guesses, by one thread and by several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.answer_form import Choices, Constraint, JsonSchema
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.engine.masks import MaskMaker, Wanted
from inferd.structured.compiled import Compiler
from inferd.structured.guide import CompiledGrammar
from inferd.structured.vocabulary import Vocabulary

EOS = 0
FORMS: list[Constraint] = [
    JsonSchema(schema={"type": "object", "additionalProperties": {"type": "string"}}, at="s"),
    JsonSchema(schema={"type": "string", "maxLength": 5}, at="s"),
    JsonSchema(schema={"type": "array", "items": {"enum": ["a\\b", 'a"b', 1]}}, at="s"),
    Choices(texts=("yes", "yesterday", "no"), at="c"),
]


@pytest.fixture(scope="module")
def grammars(tiny_model: Path) -> Iterator[list[CompiledGrammar]]:
    tokenizer = Tokenizer.load(tiny_model)
    compiler = Compiler(Vocabulary(tokenizer, tokenizer.vocab_size, frozenset((EOS,))))
    yield [compiler.compile(form) for form in FORMS]
    compiler.close()


@pytest.fixture(scope="module")
def makers(grammars: list[CompiledGrammar]) -> dict[str, MaskMaker]:
    """The memory of each is used again by each step of the test."""
    return {name: MaskMaker(grammars[0].vocabulary.mask_words) for name in ("one thread", "several")}


def allowed(words: np.ndarray) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return found


def alone(grammar: CompiledGrammar, tokens: list[int], num_endless: float) -> list[int] | None:
    """What may follow the tokens of an answer; None: they are no beginning of one."""
    matcher, place = grammar.guide().matcher, grammar.place
    if tokens and not matcher.consume_tokens(tokens):
        return None
    words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32).copy()
    for token in tokens:
        if place is not None and token != EOS:
            place = place.after(grammar.vocabulary.token_bytes(token))
            if place is None:  # a name is repeated
                return None
    if place is not None:
        grammar.quotes.ban(words, place)
    found = allowed(words)
    return [i for i in found if i != EOS] or found if len(tokens) < num_endless else found


@settings(max_examples=60)
@given(st.data())
def test_a_mask_depends_on_the_tokens_before_it_alone(
    grammars: list[CompiledGrammar], makers: dict[str, MaskMaker], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(grammars), min_size=1, max_size=5))
    endless: list[float] = [data.draw(st.sampled_from([0.0, 3.0, math.inf])) for _ in chosen]
    guides = [grammar.guide(least, (EOS,)) for grammar, least in zip(chosen, endless, strict=True)]
    said: list[list[int]] = [[] for _ in chosen]
    for _ in range(data.draw(st.integers(1, 8))):
        drafts = [_draft(data, grammar, tokens) for grammar, tokens in zip(chosen, said, strict=True)]
        for name, maker in makers.items():
            maker._mask_s = 0.0 if name == "one thread" else 1.0
            masks = maker.compute(Wanted(guides, drafts, sum(1 + len(draft) for draft in drafts)))
            for i, (grammar, draft) in enumerate(zip(chosen, drafts, strict=True)):
                assert masks.counts[i] in (1, 1 + len(draft)), "all guesses have masks, or none has"
                for count in range(masks.counts[i]):
                    wanted = alone(grammar, [*said[i], *draft[:count]], endless[i])
                    assert wanted is None or allowed(masks.words[masks.first[i] + count]) == wanted
        for i, (guide, grammar) in enumerate(zip(guides, chosen, strict=True)):
            if not guide.is_over:
                token = data.draw(st.sampled_from(alone(grammar, said[i], endless[i]) or [EOS]))
                guide.push(token)
                said[i].append(token)


def _draft(data: st.DataObject, grammar: CompiledGrammar, said: list[int]) -> tuple[int, ...]:
    """Tokens that may follow, and sometimes one that may not."""
    draft: list[int] = []
    for _ in range(data.draw(st.sampled_from([0, 0, 1, 3]))):
        possible = [i for i in alone(grammar, [*said, *draft], 0) or [] if i != EOS]
        if not possible:
            break
        draft.append(data.draw(st.sampled_from(possible)))
    ends_wrong = data.draw(st.booleans())
    if draft and ends_wrong:
        draft.append(data.draw(st.integers(1, 200)))
    return tuple(draft)


@pytest.mark.parametrize("text", ['{"a":"b\\n\\"c","d":"', '["a\\\\b","a\\"b",1,'])
def test_the_place_of_an_answer_is_that_of_its_text(grammars: list[CompiledGrammar], text: str) -> None:
    grammar: Any = grammars[0] if text.startswith("{") else grammars[2]
    guide, place = grammar.guide(), grammar.place
    for token in grammar.vocabulary.tokens.tokenize_str(text):
        guide.push(token)
        place = place.after(grammar.vocabulary.token_bytes(token))
        assert guide.place == place
    assert guide.failure() is None
