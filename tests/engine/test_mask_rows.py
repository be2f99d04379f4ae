"""The masks of a step are those of each answer alone, by one thread and by several, and tokens that are allowed without
a mask are allowed by it."""

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
from inferd.checkpoints.answers.format import AnswerFormat, Calls, Keywords, Name, Text
from inferd.checkpoints.answers.grammar import Tool, answer_grammar
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.engine.masks import MaskMaker
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
    return {name: MaskMaker(grammars[0].vocabulary) for name in ("one thread", "several")}


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
        for name, maker in makers.items():
            maker._mask_s = 0.0 if name == "one thread" else 1.0
            masks = maker.compute(guides)
            for i, grammar in enumerate(chosen):
                wanted = alone(grammar, said[i], endless[i])
                assert allowed(masks.words[masks.of[i]]) == wanted
                size = grammar.vocabulary.mask_words * 32
                assert [token for token in range(size + 32) if masks.allows(masks.of[i], token)] == wanted
        for i, (guide, grammar) in enumerate(zip(guides, chosen, strict=True)):
            if not guide.is_over:
                token = data.draw(st.sampled_from(alone(grammar, said[i], endless[i]) or [EOS]))
                guide.push(token)
                said[i].append(token)


@settings(max_examples=60)
@given(st.data())
def test_a_token_that_is_allowed_without_a_mask_is_allowed_by_it(
    grammars: list[CompiledGrammar], data: st.DataObject
) -> None:
    grammar = data.draw(st.sampled_from(grammars))
    endless: float = data.draw(st.sampled_from([0.0, 3.0, math.inf]))
    guide = grammar.guide(endless, (EOS,))
    said: list[int] = []
    while not guide.is_over and len(said) < 12:
        wanted = alone(grammar, said, endless)
        assert wanted
        vouched = [i for i in range(grammar.vocabulary.mask_words * 32) if guide.vouches_for(i)]
        assert vouched == (wanted if guide.takes_whole_masks else []), "in a state without names, all that it allows"
        assert EOS not in wanted or not guide.ends_too_early(EOS)
        assert guide.certain() is None or wanted == [guide.certain()]
        letters = [i for i in wanted if 3 <= i < 259] or wanted
        token = data.draw(st.sampled_from(wanted) | st.sampled_from(letters))
        guide.push(token)
        said.append(token)


@pytest.mark.parametrize("text", ['{"a":"b\\n\\"c","d":"', '["a\\\\b","a\\"b",1,'])
def test_the_place_of_an_answer_is_that_of_its_text(grammars: list[CompiledGrammar], text: str) -> None:
    grammar: Any = grammars[0] if text.startswith("{") else grammars[2]
    guide, place = grammar.guide(), grammar.place
    for token in grammar.vocabulary.tokens.tokenize_str(text):
        guide.push(token)
        place = place.after(grammar.vocabulary.token_bytes(token))
        assert guide.place == place
    assert guide.failure() is None


@pytest.mark.parametrize(
    ("text", "goes_on"),
    [
        ('<|calls|>[f(size=["13', True),
        ('<|calls|>[f(size=["13"', False),  # the call goes on, but not inside of a text
        ('The size is size=[13"].', False),
        ('The size is size=["13', False),
    ],
)
def test_text_that_looks_like_arguments_may_end(tiny_model: Path, text: str, goes_on: bool) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    calls = Calls((Name(), Text("("), Keywords(), Text(")")), "<|calls|>", ", ", "<|/calls|>", is_list=True)
    sizes = {"type": "object", "properties": {"size": {"type": "array", "items": {"type": "string"}}}}
    frame = answer_grammar(
        AnswerFormat("pythonic", "table", calls=calls), special_ids={}, tools=[Tool("f", sizes, "tools[0]")]
    )
    compiler = Compiler(Vocabulary(tokenizer, tokenizer.vocab_size, frozenset((EOS,))))
    try:
        grammar = compiler.compile(None, frame=frame)
        tokens = grammar.vocabulary.tokens.tokenize_str(text)
        guide = grammar.guide()
        assert guide.goes_on(tokens)[-1] is goes_on, "behind guessed tokens"
        for token in tokens:
            guide.push(token)
        assert guide.failure() is None
        assert guide.goes_on(()) == [goes_on]
    finally:
        compiler.close()
