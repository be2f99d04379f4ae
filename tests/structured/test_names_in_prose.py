"""Names are never repeated in a call's arguments, and prose is free, also where it reads like a call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.checkpoints.answers.format import (
    WHITE_SPACE,
    AnswerFormat,
    Arguments,
    Calls,
    Keywords,
    Name,
    Reasoning,
    Text,
)
from inferd.checkpoints.answers.grammar import Tool, answer_grammar
from inferd.checkpoints.answers.parser import AnswerParser
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.structured.compiled import Compiler
from inferd.structured.guide import CompiledGrammar, Guide
from inferd.structured.vocabulary import Vocabulary

EOS = 0
ANY_OBJECT = {"type": "object", "properties": {"size": {"type": "object"}}}
TAGGED = Calls((Text("<call>"), Name(), Text(":"), Arguments(), Text("</call>")))
PYTHONIC = Calls((Name(), Text("("), Keywords(), Text(")")), "<|calls|>", ", ", "<|/calls|>", is_list=True)
NOTATIONS = {  # each with a call up to its JSON text, and what reads so in prose
    "reasoning": (AnswerFormat("r", "table", Reasoning("<think>", "</think>"), TAGGED), "<call>f:", "<call>f:"),
    "keywords": (AnswerFormat("k", "table", calls=PYTHONIC), "<|calls|>[f(size=", "size="),
}
members = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["1", '"b"', '{"a":1}'])), max_size=4)
pieces = st.tuples(st.text(alphabet='{}[]",:a =', max_size=4), members, st.booleans())


@pytest.fixture(scope="module")
def grammars(tiny_model: Path) -> Iterator[dict[str, CompiledGrammar]]:
    tokenizer = Tokenizer.load(tiny_model)
    compiler = Compiler(Vocabulary(tokenizer, tokenizer.vocab_size, frozenset((EOS,))))
    tool = Tool("f", ANY_OBJECT, "tools[0]")
    yield {
        name: compiler.compile(None, frame=answer_grammar(notation, special_ids={}, tools=[tool]))
        for name, (notation, _, _) in NOTATIONS.items()
    }
    compiler.close()


@settings(max_examples=40)
@given(
    st.text(
        st.sampled_from([*WHITE_SPACE, *"\u180e\u200b\ufeffa<"]),
        max_size=3,
    )
)
def test_the_grammar_and_the_parser_agree_on_what_begins_reasoning(
    grammars: dict[str, CompiledGrammar], before: str
) -> None:
    notation, call, _ = NOTATIONS["reasoning"]
    parser = AnswerParser(notation, tools={"f": ANY_OBJECT})
    parser.feed(f"{before}<think>")
    guide = grammars["reasoning"].guide()
    for token in guide._grammar.vocabulary.tokens.tokenize_str(f"{before}<think>{call}"):
        guide.push(token)
    assert guide.failure() is None
    (letter,) = guide._grammar.vocabulary.tokens.tokenize_str("x")
    is_free = bool(mask(guide)[letter // 32] >> letter % 32 & 1)  # no call begins in reasoning
    assert is_free == parser.is_reasoning


def test_prose_is_free_where_no_token_stands_for_a_control_character() -> None:
    """In reasoning before a call that must be made no answer may end, so that a token for its end says nothing."""
    pieces = ["<end>", *map(chr, range(0x20, 0x7F))]
    model = tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="?")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<end>"])
    vocabulary = Vocabulary(Tokenizer(backend, {}), len(pieces), frozenset((0,)))
    compiler = Compiler(vocabulary)
    notation, call, _ = NOTATIONS["reasoning"]
    frame = answer_grammar(notation, special_ids={}, tools=[Tool("f", ANY_OBJECT, "t")], is_required=True)
    guide = compiler.compile(None, frame=frame).guide()
    begun = f'{call}{{"a":1,"a'
    for token in vocabulary.tokens.tokenize_str(f"<think>{begun}"):
        guide.push(token)
    assert guide.failure() is None
    assert narrowed(guide) == mask(guide).tobytes()
    for token in vocabulary.tokens.tokenize_str(f"</think>{begun}"):
        guide.push(token)
    assert guide.failure() is None
    assert narrowed(guide) != mask(guide).tobytes()
    compiler.close()


def narrowed(guide: Guide) -> bytes:
    """The mask of the next token."""
    words = mask(guide)
    guide.narrow(words)
    return words.tobytes()


def mask(guide: Guide) -> np.ndarray:
    """The mask of the next token by the grammar alone."""
    return np.frombuffer(guide.matcher.compute_bitmask(), dtype=np.int32).copy()


@settings(max_examples=20)
@given(st.sampled_from(list(NOTATIONS)), st.lists(pieces, min_size=1, max_size=3))
def test_prose_that_reads_like_a_call_is_free_and_a_call_is_not(
    grammars: dict[str, CompiledGrammar], name: str, parts: list[tuple[str, list[tuple[str, str]], bool]]
) -> None:
    _, call, looks = NOTATIONS[name]
    prose = "".join(
        text + looks + "{" + ",".join(f'"{key}":{value}' for key, value in some) + "}" * is_closed
        for text, some, is_closed in parts
    )
    if name == "reasoning":
        prose = f"<think>{prose}"
    guide = grammars[name].guide()
    tokens = guide._grammar.vocabulary.tokens.tokenize_str(prose)
    num_begun = len("<think>") if name == "reasoning" else 0
    assert not any(guide.goes_on(tokens)[num_begun:]), "behind guessed tokens"
    for number, token in enumerate(tokens):
        if number >= num_begun:
            assert narrowed(guide) == mask(guide).tobytes(), f"a token is forbidden behind {prose[:number]!r}"
        assert guide.push(token) is False
    assert guide.failure() is None

    end = "</think>" if name == "reasoning" else ""
    for token in guide._grammar.vocabulary.tokens.tokenize_str(end + call + '{"a":1,"a'):
        guide.push(token)
    assert guide.failure() is None
    (mark,) = guide._grammar.vocabulary.tokens.tokenize_str('"')
    assert mask(guide)[mark // 32] >> mark % 32 & 1
    words = np.frombuffer(narrowed(guide), dtype=np.int32)
    assert not words[mark // 32] >> mark % 32 & 1, "the name would be repeated"
