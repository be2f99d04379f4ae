"""Grammars in GBNF under the masks against a reader that follows every way to read a text."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import product

import pytest
from bench.schemas import Masks
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tests.tiers import examples

from inferd.structured import gbnf, lexemes
from inferd.structured.faults import Fault
from inferd.structured.lexemes import (
    Division,
    Expression,
    InOrder,
    OneOf,
    Reference,
    Repeated,
    Text,
    Ways,
    division,
)

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
"""llama.cpp's grammar of JSON."""

TEXTS = ["".join(text) for size in range(5) for text in product("ab(", repeat=size)]


class Reader:
    """Where a rule may end, for each place at which it begins."""

    def __init__(self, rules: Mapping[str, Expression], text: str) -> None:
        self._text = text
        self._ends: dict[tuple[str, int], set[int]] = {
            (name, at): set() for name in rules for at in range(len(text) + 1)
        }
        is_changed = True
        while is_changed:
            is_changed = False
            for (name, at), known in self._ends.items():
                found = self._behind(rules[name], at)
                is_changed |= not found <= known
                known |= found

    def reads(self) -> bool:
        return len(self._text) in self._ends["root", 0]

    def _behind(self, expression: Expression, at: int) -> set[int]:
        match expression:
            case Text(text):
                return {at + len(text)} if self._text.startswith(text, at) else set()
            case OneOf(_, ranges):
                is_in = any(first <= ord(each) <= last for each in self._text[at : at + 1] for first, last in ranges)
                return {at + 1} if is_in else set()
            case Reference(name):
                return self._ends[name, at]
            case InOrder(parts):
                places = {at}
                for part in parts:
                    places = {end for place in places for end in self._behind(part, place)}
                return places
            case Ways(ways):
                return {end for way in ways for end in self._behind(way, at)}
            case Repeated(part, _, least, most):
                places, found = {at}, {at} if least == 0 else set()
                for number in range(1, (least + len(self._text) + 1 if most is None else most) + 1):
                    places = {end for place in places for end in self._behind(part, place)}
                    found |= places if number >= least else set()
                return found


items = st.recursive(
    st.sampled_from(['"a"', '"ab"', '"ba"', '"aab"', '"(a"', "[ab]", "[^a]", "x", "y", "root", '""', "z"]),
    lambda inner: st.builds(
        "{}{}".format,
        st.lists(inner, min_size=1, max_size=2).map(lambda some: f"({' '.join(some)})")
        | st.lists(inner, min_size=2, max_size=2).map(lambda some: f"({' | '.join(some)})"),
        st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{0,1}", "{2,}"]),
    ),
    max_leaves=4,
)
bodies = st.lists(items, min_size=1, max_size=3).map(" ".join)


@settings(deadline=None, max_examples=examples(32), suppress_health_check=list(HealthCheck))
@given(bodies, bodies, bodies, st.sampled_from(['"b"', '"a"* "b"', '[ab] "a"?']))
def test_a_recursive_grammar_has_every_sentence_under_the_masks(root: str, x: str, y: str, z: str) -> None:
    text = f'root ::= "(" root | {root}\nx ::= {x}\ny ::= "a" | {y}\nz ::= {z}'
    try:
        lark, rules = gbnf.to_lark(text), gbnf._Parser(text).rules()
    except Fault:
        assume(False)
    grammar = {"grammars": [{"name": "answer", "lark_grammar": lark}]}
    base = LLMatcher(Masks._tokens, json.dumps(grammar), log_level=0)
    assert not base.is_error(), base.get_error()
    bodies = {name: rule.body for name, rule in rules.items()}
    for each in TEXTS:
        matcher, read = base.deep_copy(), [*each.encode()]
        is_sentence = matcher.try_consume_tokens(read) == len(read) and matcher.is_accepting()
        assert is_sentence == Reader(bodies, each).reads(), (lark, each)
        event("sentence" if is_sentence else "another text")


def divided(text: str) -> Division:
    """What the grammar has as smaller words."""
    rules = {name: rule.body for name, rule in gbnf._Parser(text).rules().items()}
    return division(rules, gbnf._terminals(rules))


@pytest.mark.parametrize(
    ("text", "rules", "texts"),
    [
        (JSON, set(), set()),
        ('root ::= "(" root ")" | x | "abc"\nx ::= [a-z]+', set(), set()),
        ('root ::= "(" root ")" | [a-z]* "end"', set(), {"end"}),
        ('root ::= "(" root ")" | x "a"\nx ::= [a-z]+', {"x"}, set()),
        ('root ::= "(" root ")" | x y\nx ::= [a-z] y?\ny ::= "-" [0-9]{1,3}', {"x"}, set()),
        ('root ::= "(" root ")" | "a" [^b] | "ac" | "ab"', set(), {"ac"}),
        ('root ::= "ab" root* | "a" root', set(), set()),
        ('root ::= "ab" root* | "a" root | "b"', set(), {"ab"}),
    ],
)
def test_only_words_that_may_take_what_belongs_to_the_next_one_are_divided(
    text: str, rules: set[str], texts: set[str]
) -> None:
    assert divided(text) == Division(frozenset(rules), frozenset(texts))


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "(" root ")" | "' + "a" * lexemes.MOST_PLACES + '" x\nx ::= "b"',
        'root ::= "(" root ")" | x0\n' + "".join(f'x{n} ::= "b" x{n + 1}\n' for n in range(300)) + 'x300 ::= "c"',
    ],
    ids=["long", "deep"],
)
def test_a_grammar_that_is_too_large_to_be_looked_at_has_words_of_one_character(text: str) -> None:
    found = divided(text)
    assert "x" in found.rules or "x300" in found.rules
    assert found.texts >= {"(", ")", "b"}


def test_groups_within_each_other_and_rules_in_a_row_are_read_within_bounds() -> None:
    groups = 'root ::= "<" root ">" | ' + '("a" | "b" ' * gbnf.DEEPEST + ")*" * gbnf.DEEPEST
    assert divided(groups).texts == {"<", ">", "a", "b"}, "the groups are too deep to be looked at"
    row = "".join(f'x{n} ::= "b" x{n + 1} | "(" root\n' for n in range(2_000))
    assert divided(f'root ::= x0\n{row}x2000 ::= "c"') == Division()
    words = " | ".join(f'"w{number}"' for number in range(1000, 4000))
    began = time.process_time()
    assert divided(f'root ::= "(" root ")" | {words}') == Division()
    assert time.process_time() - began < 2
