"""Compiling constraints: limits on time, memory and size, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd.answer_form import Choices, Constraint, JsonSchema, Regex
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.errors import InvalidRequest
from inferd.structured import compiled, matching
from inferd.structured.compiled import Compiler
from inferd.structured.vocabulary import Vocabulary


@pytest.fixture
def compiler(tiny_model: Path) -> Iterator[Compiler]:
    tokenizer = Tokenizer.load(tiny_model)
    made = Compiler(Vocabulary(tokenizer, tokenizer.vocab_size, frozenset((0,))))
    yield made
    made.close()


def test_what_was_compiled_for_a_tenant_is_kept_for_this_tenant(compiler: Compiler) -> None:
    constraint = Regex(pattern="ab", at="r")
    first = compiler.compile(constraint, "a")
    assert compiler.compile(Regex(pattern="ab", at="r"), "a") is first
    assert compiler.compile(constraint, "b") is not first


def test_a_refusal_is_kept(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest) as first:
        compiler.compile(Regex(pattern="a(?=b)", at="r"))
    monkeypatch.setattr(compiler.trials, "run", lambda *given: pytest.fail("tried again"))
    with pytest.raises(InvalidRequest) as second:
        compiler.compile(Regex(pattern="a(?=b)", at="r"))
    assert second.value is not first.value
    assert (second.value.message, second.value.param) == (first.value.message, first.value.param)


def test_the_least_recently_used_is_dropped(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_MOST_KEPT", 2)
    grammars = [compiler.compile(Regex(pattern=p, at="r")) for p in "abac"]
    assert grammars[0] is grammars[2]
    assert compiler.compile(Regex(pattern="a", at="r")) is grammars[0]
    assert compiler.compile(Regex(pattern="b", at="r")) is not grammars[1]


@pytest.mark.parametrize(
    "constraint",
    [
        JsonSchema(schema={"properties": {f"p{i}": {} for i in range(3_000)}, "type": "object"}, at="s"),
        JsonSchema(schema={"$ref": "#"}, at="s"),
        Regex(pattern="(" * 500 + ")" * 500, at="s"),
    ],
)
def test_a_bomb_is_refused_by_its_field(compiler: Compiler, constraint: Constraint) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(constraint)
    assert caught.value.param == "s"
    assert len(caught.value.message) < 700


def test_choices_without_a_text_are_refused(compiler: Compiler) -> None:
    with pytest.raises(InvalidRequest, match="c has no text to choose from"):
        compiler.compile(Choices(texts=(), at="c"))


def test_many_choices_are_no_bomb(compiler: Compiler) -> None:
    texts = tuple(f"w{i * 7919 % 100_003}" for i in range(10_000))
    guide = compiler.compile(Choices(texts=texts, at="c")).guide()
    letters = {compiler.vocabulary.tokens.decode_str([i]): i for i in range(3, 259)}
    done = [guide.push(letters[letter]) for letter in texts[1]]
    assert guide.failure() is None
    assert guide.matcher.is_accepting()
    assert not any(done[:-1])


def test_an_answer_that_exhausts_its_limits_is_told_apart_from_a_defect(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llguidance import LLParserLimits

    def tight(**limits: Any) -> LLParserLimits:
        return LLParserLimits(**{**limits, "max_items_in_row": 12})

    monkeypatch.setattr(matching, "_PROBED", -1)
    monkeypatch.setattr("llguidance.LLParserLimits", tight)
    names: dict[str, Any] = {f"p{i}": {} for i in range(40)}
    guide = compiler.compile(JsonSchema(schema={"type": "object", "properties": names}, at="s")).guide()
    guide.push(compiler.vocabulary.tokens.tokenize_str("{")[0])
    failure = guide.failure()
    assert isinstance(failure, InvalidRequest)
    assert (failure.param, failure.code) == ("s", "constraint_too_complex")


def test_a_form_whose_limits_an_answer_has_reached_is_compiled_again(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states that answers need are kept by their form, and stay within its limit. An answer that reaches it must
    not end those that are asked for later."""
    monkeypatch.setattr(matching, "_MOST_STATES", 300)
    form = Regex(pattern="[ab]*a[ab]{12}", at="r")
    texts = [f"{i * 7919 % 4096:012b}".translate({48: "a", 49: "b"}) for i in range(60)]
    long, short = "".join(texts), "ab"
    letters = {compiler.vocabulary.tokens.decode_str([i]): i for i in range(3, 259)}
    guide = compiler.compile(form).guide()
    for letter in long:
        guide.push(letters[letter])
        if (failure := guide.failure()) is not None:
            break
    assert isinstance(failure, InvalidRequest)
    assert failure.code == "constraint_too_complex"
    again = compiler.compile(form).guide()
    for letter in short:
        again.push(letters[letter])
    assert again.failure() is None
