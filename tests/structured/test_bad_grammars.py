"""What is told of patterns, grammars and schemas that no mask enforces: the place, what is wrong, and the remedy."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import THOROUGH

from inferd.answer_form import Constraint, Grammar, JsonSchema, Regex, TaggedStructure, TaggedText
from inferd.checkpoints.answers.format import AnswerFormat, Reasoning
from inferd.checkpoints.answers.grammar import AnswerGrammar, answer_grammar
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.errors import InvalidRequest
from inferd.structured import gbnf, lark, regex
from inferd.structured.check import TaggedValidator
from inferd.structured.compiled import Compiler
from inferd.structured.faults import Fault
from inferd.structured.grammar_text import Form
from inferd.structured.guide import CompiledGrammar
from inferd.structured.lark_reader import without_endless
from inferd.structured.refused import refusal_of
from inferd.structured.schema.patterns import for_masks, unreadable
from inferd.structured.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> Iterator[Compiler]:
    tokenizer = Tokenizer.load(tiny_model)
    made = Compiler(Vocabulary(tokenizer, tokenizer.vocab_size, frozenset((0,))))
    yield made
    made.close()


def refusal(compiler: Compiler, constraint: Constraint, frame: AnswerGrammar | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(constraint, frame=frame)
    error = caught.value
    assert len(error.message) < 700
    assert error.message.isprintable()
    for words in ("regex parse error", "llguidance", "panicked", "thread '", ".rs:", "non-verbose", "NoExt"):
        assert words not in error.message
    return error


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_answer_without_another_name_is_the_fault_of_its_schema(compiler: Compiler, *, is_whole: bool) -> None:
    only = {"type": "object", "patternProperties": {r"^\p{Zl}$": {"const": 1}}, "additionalProperties": False}
    guide = compiler.compile(JsonSchema(schema={**only, "minProperties": 2}, at="field")).guide()
    letters = {compiler.vocabulary.token_bytes(i): i for i in range(3, 259)}
    text = '{"\u2028":1,"\u2028":1}' if is_whole else '{"\u2028":1,'
    for byte in text.encode():
        guide.push(letters[bytes([byte])])
    guide.hear(text)
    error = guide.check()
    assert isinstance(error, InvalidRequest) == is_whole, "an answer that is cut otherwise is no fault of the schema"
    if isinstance(error, InvalidRequest):
        assert (error.param, error.code) == ("field", "unsupported_schema")
        assert "had used every name" in error.message


def says(compiler: Compiler, grammar: CompiledGrammar, text: str) -> bool:
    """Whether the whole text is an answer."""
    guide = grammar.guide()
    letters = {compiler.vocabulary.token_bytes(i): i for i in range(3, 259)}
    for byte in text.encode():
        token = letters[bytes([byte])]
        if guide.num_possible([token]) != 1:
            return False
        guide.push(token)
    return guide.matcher.is_accepting()


PATTERNS = [
    ("a(?=b)", 1, 2, "a look-ahead '(?='", "without looking around"),
    ("a(?!b)", 1, 2, "a negative look-ahead '(?!'", "without looking around"),
    ("(?<=a)b", 1, 1, "a look-behind '(?<='", "without looking around"),
    ("x(?<!a)b", 1, 2, "a negative look-behind '(?<!'", "without looking around"),
    (r"(a|b)\1", 1, 6, r"a back-reference (\1)", "write the text that is repeated"),
    (r"(?P<q>a)(?P=q)", 1, 9, "a back-reference '(?P='", "write the text that is repeated"),
    (r"(?P<q>a)\k<q>", 1, 9, r"a back-reference (\k)", "write the text that is repeated"),
    (r"\bword\b", 1, 1, r"a word boundary (\b)", "before and behind the word"),
    (r"a\B", 1, 2, r"a word boundary (\B)", "before and behind"),
    (r"a\Z", 1, 2, r"an anchor (\Z)", "the whole text is matched"),
    (r"\Ga", 1, 1, r"an anchor (\G)", "the whole text is matched"),
    (r"a\Kb", 1, 2, r"a reset of the match (\K)", "leave it out"),
    ("(?>a)b", 1, 1, "an atomic group '(?>'", "write '(?:'"),
    ("(?#note)a", 1, 1, "a comment '(?#'", "leave it out"),
    ("(a)(?(1)b|c)", 1, 4, "a conditional '(?('", "as alternatives"),
    ("(?&x)", 1, 1, "a recursion '(?&'", "send a grammar"),
    ("(?|a|b)", 1, 1, "a branch reset", "write '(?:'"),
    ("a\nb(?=c)", 2, 2, "a look-ahead", "without looking around"),
    ("(ab", 1, 1, "the group is not closed", "add ')'"),
    ("ab)", 1, 3, "')' closes no group", r"'\)'"),
    ("a[bc", 1, 2, "the class of characters is not closed", "add ']'"),
    ("[z-a]", 1, 2, "the range 'z'-'a' is empty", "the smaller character first"),
    (r"[\d-z]", 1, 4, "a class stands at an end of a range", r"'\-'"),
    (r"[a-\d]", 1, 3, "a range of characters ends with a class", r"'\-'"),
    ("*a", 1, 1, "'*' has nothing to repeat", r"'\*'"),
    ("a|+", 1, 3, "'+' has nothing to repeat", r"'\+'"),
    ("^*", 1, 2, "'*' has nothing to repeat", r"'\*'"),
    ("(*a)", 1, 2, "'*' has nothing to repeat", r"'\*'"),
    ("(?:+)", 1, 4, "'+' has nothing to repeat", r"'\+'"),
    ("(?i)?", 1, 5, "'?' has nothing to repeat", r"'\?'"),
    ("b({2})", 1, 3, "'{' has nothing to repeat", r"'\{'"),
    ("a{3,1}", 1, 2, "{3,1} is empty", "the smaller number first"),
    ("a{,3}", 1, 2, "begins no number of repetitions", "'{2,5}'"),
    ("a{99999999}", 1, 2, "too large", "at most"),
    ("(a{1000}){1000}", 1, 10, "has over 500000 parts", "smaller numbers"),
    ("(?:(?:x{1,90}y){1,90}z){90}", 1, 24, "has over 500000 parts", "smaller numbers"),
    ("a\\", 1, 2, "the backslash has nothing behind it", "for a backslash"),
    (r"\q", 1, 1, r"the escape \q is unknown", "leave the backslash out"),
    (r"\x4", 1, 1, "needs 2 hexadecimal digits", "braces"),
    (r"\x{110000}", 1, 1, "names no Unicode character", "10FFFF"),
    (r"a\p{Foo}", 1, 2, "names no property of Unicode", "Letter"),
    ("[[:foo:]]", 1, 2, "the class has an unknown name", "alnum"),
    ("(?<n>a)(?<n>b)", 1, 8, "is there twice", "leave the names"),
    ("(?z)a", 1, 1, "the group has an unknown form", "'(?:'"),
    ("a(?<1>b)", 1, 2, "the name of the group is not well formed", "write '(?:'"),
    ("(?P<n", 1, 1, "the name of the group is not well formed", "write '(?:'"),
    ("a^b", 1, 2, "asks for an end within the text", "the whole text is matched"),
    ("a$b", 1, 2, "asks for an end within the text", "the whole text is matched"),
    ("(?:a|b$|c)d", 1, 7, "asks for an end within the text", "the whole text is matched"),
    (r"(a|(x\Ab))", 1, 6, "asks for an end within the text", "the whole text is matched"),
    ("(" * 300 + ")" * 300, 1, 201, "more than 200 groups", "simpler pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "line", "column", "problem", "remedy"), PATTERNS)
def test_a_bad_pattern_is_told_with_its_place(
    compiler: Compiler, pattern: str, line: int, column: int, problem: str, remedy: str
) -> None:
    error = refusal(compiler, Regex(pattern=pattern, at="guided_regex"))
    assert (error.param, error.code) == ("guided_regex", "invalid_grammar")
    assert error.message.startswith(f"guided_regex: at line {line}, column {column}, before ")
    assert problem in error.message
    assert remedy in error.message.partition(problem)[2]


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("(?x) ^ a b # it's ([ $\n [c # d\n] | \\ \\#{2} $ # end $", ["abc", " ##"], ["ab", "abd", " #", "ab c"]),
        ("(?x: a # )\n){2} b(?-x: c)|((?x) d ) e", ["aa b c", "d e"], ["aab c", "aa bc", "de"]),
        ("[a-z--[aeiou]][+--]", ["b+"], ["a+", "b-"]),
    ],
)
def test_a_pattern_matches_what_it_matches_in_rust(
    compiler: Compiler, pattern: str, texts: list[str], others: list[str]
) -> None:
    grammar = compiler.compile(Regex(pattern=pattern, at="r"))
    assert [says(compiler, grammar, each) for each in texts] == [True] * len(texts)
    assert [says(compiler, grammar, each) for each in others] == [False] * len(others)


def test_a_pattern_without_a_text_is_refused(compiler: Compiler) -> None:
    nothing = refusal(compiler, Regex(pattern="[a&&b]", at="r"))
    assert nothing.message.startswith("r: no text satisfies it")


@pytest.mark.parametrize(
    ("pattern", "at"),
    [
        (r"[^\s\S]", 0),
        (r"(a|[^\d\D])[^\W\w]{2,}", 11),
        (r"a(?:[^\x00-\uD7FF\x{E000}-\x{10FFFF}]|[^\p{L}\P{L}])+", 4),
        (r"a|[^\s\S]", None),
        (r"(?:[^\s\S]|)[^\s\S]*[^\s\S]?[^\s\S]{0,2}", None),
        (r"[^\p{L}\P{Lu}][^\x00-\x{10FFFE}]", None),
        ("(?x)a # [^\\s\\S]", None),
    ],
)
def test_a_class_without_a_character_is_found_where_the_text_needs_it(pattern: str, at: int | None) -> None:
    assert regex.empty_class(pattern) == at


@pytest.mark.parametrize("pattern", ["(" * 3000, "^" * 3000, "(?:" * 1000 + "^", "$" * 3000])
def test_the_search_for_an_inner_anchor_reads_each_character_once(pattern: str) -> None:
    copied = 0

    class Counted(str):
        __slots__ = ()

        def __getitem__(self, key: Any) -> str:
            nonlocal copied
            part = super().__getitem__(key)
            copied += len(part)
            return part

    regex.inner_anchor(Counted(pattern))
    assert copied <= len(pattern)


@pytest.mark.parametrize("hostile", ["[", "[\\a-", "(?<", "\\[\\d-", "[^]\\"])
def test_a_pattern_is_divided_into_pieces_that_cover_it_once(hostile: str) -> None:
    pattern = hostile * 10_000
    assert "".join(found[0] for found in regex.pieces(pattern)) == pattern
    assert unreadable(pattern) is None
    assert for_masks(pattern)


@pytest.mark.parametrize("pattern", ["(a{100}){1000}", "((a|b){9}c){2000}", "[a-z]{1,99999}", "(x{1000}|y{1000}){100}"])
def test_a_pattern_with_many_repetitions_is_taken_by_the_check(pattern: str) -> None:
    regex.check(pattern)


LARK = [
    ("start: foo", 1, 8, "'foo' is not defined", "define it"),
    ('x: "a"', 1, 1, "no rule 'start'", "define it"),
    ('start: ("a"', 1, 12, "')' is expected", "add it"),
    ('start "a"', 1, 7, "':' is expected", "write 'name: what it is'"),
    ('start: "a"\nfoo bar', 2, 5, "':' is expected", "write 'name: what it is'"),
    ('start: "a', 1, 10, "no meaning in Lark", "double quotation marks"),
    ("start: 'a'", 1, 8, "no meaning in Lark", "double quotation marks"),
    ('start: "a"\nstart: "b"', 2, 8, "'start' is defined twice", "define it once"),
    ("start: /a(?=b)/", 1, 10, "a look-ahead '(?='", "without looking around"),
    (r"start: A\nA: /(b/".replace("\\n", "\n"), 2, 5, "the group is not closed", "add ')'"),
    ('start: "a"{3,1}', 1, 8, "the repetition is empty", "smaller number first"),
    ('start: "c".."a"', 1, 8, "the range of characters is empty", "smaller character first"),
    ('start: "ab".."c"', 1, 8, "no single character", '"a".."z"'),
    ('start: A\nA: A "b"', 2, 4, "the terminal 'A' refers to itself", "lower case"),
    ("%import common.FOO\nstart: FOO", 1, 1, "not known", "DIGIT"),
    ("%declare A\nstart: A", 1, 1, "%declare is not supported", "define the terminal"),
    ('start: A\nA.2: "x"', 2, 6, "priorities are not supported", "leave the number out"),
    ("start: a & b\na: /x/\nb: /y/", 1, 8, "join terminals alone", "upper case"),
    ('start: "a" @answer', 1, 12, "no grammar '@answer'", "write its rules"),
    ('start: "a"{0}', 1, 14, "the repetition is of 0 times", "leave it out"),
    ("start: @arguments", 1, 8, "no grammar '@arguments'", "write its rules"),
    ("start: <|nothing|>", 1, 8, "no special token", "write a text"),
    ("start: ?", 1, 8, "is missing", "write one"),
    ('start: %json {"type": "integer"}', 1, 8, "%json is not supported", "response_format"),
    ('start: "%json" /%json/ // %json\n | %json {}', 2, 4, "%json is not supported", "response_format"),
    ("start: a\na: %lark {\nstart: %json {}\n}", 3, 8, "%json is not supported", "structural_tag"),
    ("start: " + "(" * 3000 + '"a"' + ")" * 3000, 1, 37, "nested too deeply", "name parts"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "column", "problem", "remedy"), LARK)
def test_a_bad_grammar_in_lark_is_told_with_its_place(
    compiler: Compiler, text: str, line: int, column: int, problem: str, remedy: str
) -> None:
    check_grammar(compiler, Grammar(text=text, syntax="lark", at="g"), line, column, problem, remedy)


GBNF = [
    ('root ::= ("a"', 1, 10, "the group is not closed", "add ')'"),
    ("root ::= foo", 1, 10, "the rule 'foo' is not defined", "define it"),
    ('x ::= "a"', 1, 1, "no rule 'root'", "define it"),
    ("root ::= [a-", 1, 10, "the characters are not closed", "add ']'"),
    ('root ::= "a', 1, 10, "the text is not closed", "add '\"'"),
    ('root ::= "\\q"', 1, 11, "this escape is unknown", "one of"),
    ('root ::= "\\x4"', 1, 11, "needs 2 hexadecimal digits", "write them"),
    ('root ::= "a"{3,1}', 1, 13, "the repetition is empty", "smaller number first"),
    ('root ::= "a"{,3}', 1, 13, "no number of repetitions", "'{2,5}'"),
    ('root ::= "a"\nb := "a"', 2, 3, "'::=' is expected", "name ::= what it is"),
    ('::= "a"', 1, 1, "begins with its name", "name ::= what it is"),
    ("root ::= $", 1, 10, "no meaning here", "the name of a rule"),
    ("root ::= *", 1, 10, "nothing to repeat", "before it"),
    ("root ::= [z-a]", 1, 11, "the range 'z'-'a' is empty", "smaller one first"),
    ("root ::= []", 1, 10, "no character between", "name at least one"),
    ('root ::= "a"\nroot ::= "b"', 2, 1, "'root' is defined twice", "define it once"),
    ("root ::= <think>", 1, 10, "tokens by name or number", "double quotation marks"),
    ('root ::= "a" )', 1, 14, "')' closes no group", "leave it out"),
    ("root ::= " + '"a" | ' * 20_000 + '"b"', 1, 60_008, "over 10000 alternatives", "name parts"),
    ("root ::= " + "(" * 200, 1, 110, "more than 100 parentheses", "name parts"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "column", "problem", "remedy"), GBNF)
def test_a_bad_grammar_in_gbnf_is_told_with_its_place(
    compiler: Compiler, text: str, line: int, column: int, problem: str, remedy: str
) -> None:
    check_grammar(compiler, Grammar(text=text, syntax="gbnf", at="g"), line, column, problem, remedy)


def check_grammar(compiler: Compiler, grammar: Grammar, line: int, column: int, problem: str, remedy: str) -> None:
    error = refusal(compiler, grammar)
    assert (error.param, error.code) == ("g", "invalid_grammar")
    assert error.message.startswith(f"g: at line {line}, column {column}, ")
    assert problem in error.message
    assert remedy in error.message.partition(problem)[2]


REASONS = answer_grammar(
    AnswerFormat("r", "table", Reasoning("<think>", "</think>")), special_ids={}, has_constraint=True
)


@pytest.mark.parametrize("frame", [None, REASONS], ids=["alone", "behind reasoning"])
@pytest.mark.parametrize("syntax", ["lark", "gbnf"])
def test_a_grammar_without_a_sentence_is_refused(compiler: Compiler, syntax: Any, frame: AnswerGrammar | None) -> None:
    text = 'start: start "a"' if syntax == "lark" else 'root ::= root "a"'
    message = refusal(compiler, Grammar(text=text, syntax=syntax, at="g"), frame).message
    assert message.startswith(f"g: at line 1, column 1, before '{text}': the rule ")
    unknown = Grammar(text='start: A\nA: "a" & "b"', syntax="lark", at="g")  # the mask engine alone knows it
    assert refusal(compiler, unknown, frame).message.startswith("g: no text satisfies it")


ENDLESS = [
    ("gbnf", 'root ::= "a" root', "1, column 1", "the rule 'root' has no end", "'?' or '*' behind 'root'"),
    ("gbnf", 'root ::= "a" b? c\nb ::= "b" | root\nc ::= [cd] b c', "3, column 1", "'c' has no end", "without 'c'"),
    ("gbnf", 'root ::= x\nx ::= "x" y\ny ::= "y" x', "2, column 1", "such as 'y'", "behind 'y'"),
    ("gbnf", r'root ::= "a" [^\x00-\U0010FFFF]', "1, column 14", "no character is in this class", "with a character"),
    ("lark", 'start: "a" start | [x] start\nx: "x"', "1, column 1", "'start' has no end", "behind 'start'"),
    ("lark", 'start: "a"~2 b+ -> x\n!b: ("b" | "c") c{2}\nc: b | b c', "2, column 1", "such as 'c'", "without 'c'"),
    ("lark", 'start: "a" x::1\nx::_: "a" x::incr(_) %if lt(_, 4)', "2, column 1", "'x' has no end", "behind 'x'"),
    ("lark", "start: A // c\n  | B\nA: /a[^\\d\\D]/\nB: A", "3, column 6", "no character is in", "with a character"),
    ("lark", 'start: %lark {\n start: "a" start\n}', "2, column 2", "'start' has no end", "behind 'start'"),
]


@pytest.mark.parametrize(("syntax", "text", "place", "problem", "remedy"), ENDLESS)
def test_a_grammar_whose_sentences_never_end_is_refused(
    compiler: Compiler, syntax: Any, text: str, place: str, problem: str, remedy: str
) -> None:
    error = refusal(compiler, Grammar(text=text, syntax=syntax, at="g"))
    assert error.message.startswith(f"g: at line {place}, before ")
    assert problem in error.message
    assert remedy in error.message.partition(problem)[2]


@pytest.mark.parametrize(
    ("syntax", "text", "sentences", "others"),
    [
        ("gbnf", 'root ::= x | "b" (x | "c") x*\nx ::= "d" x', ["bc"], ["d", "bd", "bcd"]),
        ("gbnf", 'root ::= "b" | "cc" [^\\x00-\\U0010FFFF]', ["b"], ["c"]),
        ("lark", 'start: "x" | "q" /[^\\s\\S]/', ["x"], ["q"]),
        ("lark", 'start: x // a | b\n | x | "y" // c\n  | "q" x | "z"\nx: "c" x', ["y", "z"], ["c", "q"]),
        ("lark", 'start: "a" x? [x] x{0,2} x~0..3 ("b" x | "c" | x)\nx: "d" x', ["ac"], ["ad", "ab"]),
        ("lark", 'start: "a" (x |) (| x) b\nx: x "e"\nb: "f" b | "g"', ["affg"], ["ae"]),
        ("lark", 'start: "%json" /%json/ // %json {}\n', ["%json%json"], []),
        ("lark", "start: /a # [^\\s\\S]\n b/x", ["ab"], ["b"]),
        ("lark", 'start: "a" | b\nb[max_tokens=3]: B\nB: /b+/', ["a", "bb"], []),
    ],
)
def test_an_answer_begins_no_alternative_without_an_end(
    compiler: Compiler, syntax: Any, text: str, sentences: list[str], others: list[str]
) -> None:
    grammar = compiler.compile(Grammar(text=text, syntax=syntax, at="g"))
    assert [says(compiler, grammar, each) for each in sentences] == [True] * len(sentences)
    for other in others:
        guide = grammar.guide()
        letters = [next(i for i in range(3, 259) if compiler.vocabulary.token_bytes(i) == c.encode()) for c in other]
        assert guide.num_possible(letters) < len(letters)


def test_a_long_chain_of_rules_has_an_end_where_its_last_rule_has() -> None:
    number = 1500
    rules = "".join(f'r{n}: "a" r{n + 1}\n' for n in range(number))
    lark.check(f'start: r0\n{rules}r{number}: "b"')
    with pytest.raises(Fault, match="has no end"):
        lark.check(f"start: r0\n{rules}r{number}: r0")


def test_a_part_of_a_grammar_without_a_text_ends_the_request(compiler: Compiler) -> None:
    guide = compiler.compile(Grammar(text='start: "x" | "qqqq" A\nA: "a" & "b"', syntax="lark", at="g")).guide()
    letters = {compiler.vocabulary.token_bytes(i): i for i in range(3, 259)}
    for _ in range(4):
        guide.push(letters[b"q"])
    guide.matcher.compute_bitmask()
    error = guide.failure()
    assert isinstance(error, InvalidRequest)
    assert (error.param, error.code) == ("g", "invalid_grammar")
    assert "no text may follow the first 4 tokens" in error.message


@settings(max_examples=60)
@given(st.text(alphabet='start:xyAB"|()[]{}?*+~&/->.,0123%# \n', max_size=60))
def test_what_is_cut_from_a_grammar_keeps_the_places_of_the_rest(text: str) -> None:
    for grammar in (text, f"start: x\nx: {text}"):
        cut = without_endless(grammar)
        assert len(cut) == len(grammar)
        assert all(a == b or b in ' "' for a, b in zip(grammar, cut, strict=True))


SCHEMAS = [
    ({"patternProperties": {"f.*": True, "b.*": False}}, "/patternProperties", "'f.*' and 'b.*'", "no two match"),
    (
        {"properties": {"a": {"items": {"patternProperties": {"[0-9]{2,}": {"type": "null"}, "X_": {}}}}}},
        "/properties/a/items/patternProperties",
        "'[0-9]{2,}' and 'X_'",
        "no two match",
    ),
    (
        {"items": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(/|$)x"}]}},
        "/items/anyOf/1/pattern",
        "an end within the text",
        "at the ends of the pattern",
    ),
    (
        {"prefixItems": [{"type": "string", "pattern": "^([a-z][0-9])+$", "minLength": 10000}]},
        "/prefixItems/0/pattern",
        "too complex together",
        "one pattern",
    ),
    (
        {"const": {"foo": 1}, "patternProperties": {"f.*o": {"type": "integer"}}},
        "/const",
        "together with a pattern that its name matches",
        "in 'properties'",
    ),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"patternProperties": {"f.*": {"type": "null"}, "b.*": {}}}}},
        "/$defs/a/patternProperties",
        "'f.*' and 'b.*'",
        "no two match",
    ),
]  # fmt: skip


WIDE = {f"p{n}": {"type": "null"} for n in range(1_001)}
SCHEMAS += [
    ({"items": {"properties": WIDE}}, "/items/properties", "1001 named properties", "up to 1000"),
    (
        {"type": "string", "pattern": "a("},
        "/pattern",
        "line 1, column 2, before '(': the group is not closed",
        "add ')'",
    ),
    ({"type": "string", "pattern": "^a{2, 3}$"}, "/pattern", "column 3, before '{2, 3}$': '{' begins no", "'{2,5}'"),
    ({"type": "string", "pattern": "^a++b$"}, "/pattern", "column 4, before '+b$': a repetition stands", "put the"),
    ({"type": "string", "pattern": "^a{2}{3}$"}, "/pattern", "before '{3}$': a repetition stands behind", "put the"),
    (
        {"type": "string", "pattern": "^(?x)a # b\nc$"},
        "/pattern",
        "column 2, before '(?x)a # b': the flag x",
        "leave it",
    ),
    (
        {"type": "string", "pattern": "^a(?:)?$"},
        "/pattern",
        "column 3, before '(?:)?$': the group '(?:)' is",
        "leave it",
    ),
    (
        {"type": "string", "pattern": "^(?:(?i:)(?:)){2}"},
        "/pattern",
        "column 2, before '(?:(?i:)(?:)){2}': the group '(?:(?i:)(?:))' is repeated",
        "leave it out, with its repetition",
    ),
    ({"type": "string", "pattern": "^\\u000Fb$"}, "/pattern", "has a control character", "without it"),
    ({"type": "string", "pattern": "^\\u{1}$"}, "/pattern", "has a control character", "without it"),
    ({"type": "string", "pattern": "^\\v$"}, "/pattern", "has a control character", "without it"),
    ({"type": "string", "pattern": "^[\\x0f]$"}, "/pattern", "has a control character", "without it"),
    ({"type": "string", "pattern": "^(b{1,9999}){1,9999}$"}, "/pattern", "over 500000 parts", "smaller numbers"),
]


@pytest.mark.parametrize(("schema", "place", "problem", "remedy"), SCHEMAS)
def test_what_the_mask_engine_refuses_of_a_schema_is_found(
    compiler: Compiler, schema: dict[str, Any], place: str, problem: str, remedy: str
) -> None:
    error = refusal(compiler, JsonSchema(schema=schema, at="response_format.schema"))
    assert (error.param, error.code) == ("response_format.schema", "unsupported_schema")
    assert error.message.startswith(f"response_format.schema: at {place}: ")
    assert problem in error.message
    assert remedy in error.message


PAGE = Path(__file__).resolve().parents[2] / "docs" / "structured-output.md"


def documented() -> list[tuple[str, str]]:
    """The rows of the page's table of what is refused."""
    table = PAGE.read_text(encoding="utf-8").partition("## What is refused")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return [(given, told) for given, told in rows]


@pytest.mark.parametrize(("given", "told"), documented())
def test_what_the_page_says_is_refused(compiler: Compiler, given: str, told: str) -> None:
    kind, text = re.findall(r"`([^`]*)`", given)[0], re.findall(r"`([^`]*)`", given)[-1]
    constraint: Constraint = JsonSchema(schema={}, at="field")
    match kind:
        case "regex":
            constraint = Regex(pattern=text, at="field")
        case "lark" | "gbnf":
            constraint = Grammar(text=text, syntax="lark" if kind == "lark" else "gbnf", at="field")
        case schema:
            constraint = JsonSchema(schema=json.loads(schema), at="field")
    error = refusal(compiler, constraint)
    place, _, words = told.rpartition(": ")
    assert f"{place}" in error.message
    assert words in error.message.replace("\\\\", "\\")
    assert error.code == ("unsupported_schema" if isinstance(constraint, JsonSchema) else "invalid_grammar")


def test_the_page_has_the_table() -> None:
    assert len(documented()) > 20


def test_a_panic_of_the_mask_engine_is_told_in_words_of_the_schema() -> None:
    schema = {"properties": {"a": {"items": {"maxItems": 9}}, "b": {"type": "null"}}}

    def breaks(parts: Sequence[dict[str, Any]]) -> str | None:
        panic = "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10\n<backtrace>\n   0: <unknown>"
        return panic if '"maxItems": 9' in json.dumps(parts) else None

    form = Form(JsonSchema(schema=schema, at="s"), None)
    message = refusal_of(form, breaks([{"maxItems": 9}]) or "", breaks).message
    larger = "it is larger than a form may be; a simpler schema in this place"
    assert message == f"s: at /properties/a/items/maxItems: {larger}"


def test_a_schema_of_a_structure_is_named(compiler: Compiler) -> None:
    bad = {"items": {"patternProperties": {"f.*": {"type": "null"}, "b.*": {}}}}
    structures = (TaggedStructure(begin="<a>", schema={}, end="</a>"), TaggedStructure(begin="<b>", schema=bad, end=""))
    error = refusal(compiler, TaggedText(structures=structures, triggers=("<",), at="structural_tag"))
    assert error.param == "structural_tag.structures[1].schema"
    assert ".schema: at /items/patternProperties: " in error.message


def test_what_masks_allow_of_tagged_texts_is_what_the_check_reads(compiler: Compiler) -> None:
    """Random answers, also with begins and ends that overlap each other, triggers and numbers."""
    small = {"type": "integer", "minimum": 1, "maximum": 999}
    cases: list[tuple[list[tuple[str, Any, str]], tuple[str, ...]]] = [
        ([("<f>", small, "</f>")], ("<f",)),
        ([("aab", small, "5")], ("aa",)),
        ([("xx", {"type": "null"}, "x"), ("xy", {"enum": ["y", "xx"]}, "y")], ("x",)),
        ([("ab", {"type": "null"}, "a"), ("bc", {"type": "null"}, "a")], ("ab", "bc")),
        ([("<a>", {"type": "boolean"}, ""), ("[[", {"type": "array", "maxItems": 1}, "]]")], ("<a", "[[")),
    ]
    random_, num_structures = random.Random(0), 0
    for tags, triggers in cases:
        structures = tuple(TaggedStructure(begin=begin, schema=schema, end=end) for begin, schema, end in tags)
        constraint = TaggedText(structures=structures, triggers=triggers, at="t")
        grammar, check = compiler.compile(constraint), TaggedValidator(constraint)
        wanted = set("".join(begin + end for begin, _, end in tags) + '"{}[]:, xyntruefalse15')
        letters = {compiler.vocabulary.token_bytes(token): token for token in range(3, 259)}
        liked = [letters[letter.encode()] for letter in sorted(wanted)]
        for _ in range(40):
            guide, text = grammar.guide(), ""
            while len(text) < 200:
                if guide.matcher.is_accepting() and (random_.random() < 0.05 or len(text) > 60):
                    assert check.errors(text) is None, text
                    num_structures += any(trigger in text for trigger in triggers)
                    break
                token = next(t for t in random_.sample(liked, len(liked)) if guide.num_possible([t]) == 1)
                guide.push(token)
                text += compiler.vocabulary.token_bytes(token).decode()
    assert num_structures > 20


@pytest.mark.parametrize("pattern", ["x*", "[ ]{0,3}x?", r"\u00a0", ".", "(?=a)"])
def test_white_space_that_json_does_not_have_is_refused(compiler: Compiler, pattern: str) -> None:
    error = refusal(compiler, JsonSchema(schema={"const": [1]}, at="guided_json", whitespace=pattern))
    assert (error.param, error.code) == ("guided_json", "invalid_grammar")
    assert "white space" in error.message


@pytest.mark.parametrize("pattern", [r"\s{0,2}", r"[\s]{0,2}", "[ ]?", r"[\x20\x0A]{0,3}"])
def test_white_space_of_json_is_taken(compiler: Compiler, pattern: str) -> None:
    grammar = compiler.compile(JsonSchema(schema={"const": [1]}, at="guided_json", whitespace=pattern))
    assert says(compiler, grammar, "[ 1]")
    assert not says(compiler, grammar, "[\u00a01]")


@pytest.mark.parametrize(
    ("text", "sentences", "others"),
    [
        (r'root ::= "\u00e9\x41\U0001F600"', ["éA😀"], ["é"]),
        (r'root ::= "\[\]\"\\"', ['[]"\\'], [""]),
        (r"root ::= [\x41-\x43\]^&-]", list("ABC]^&-"), ["D", "["]),
        (r"root ::= [a&&b] [^a-z] .", ["&A\n"], ["cA\n", "aaa"]),
        ('start ::= "b"\nroot ::= start start?', ["b", "bb"], ["bbb"]),
        ('root ::= a-b a_b\na-b ::= "x" # a comment\na_b ::= "y" |\n  "z"', ["xy", "xz"], ["x"]),
        ('root ::= ("a" |\n "b"){2} "c"{1,} | ""', ["", "abc", "bbcc"], ["ab", "aabc"]),
        ("\r\nroot ::=\r\n [0-9]+ [/.*]", ["12/", "1."], ["12"]),
        ("root ::= a\na ::= b a | b\nb ::= [xy]", ["xyx"], [""]),
        ('root ::= "a"** "b"+', ["b", "aab"], ["a"]),
        ('root ::= [a-z]* "end"', ["end", "enterend"], ["enter"]),
        ('root ::= x "a"\nx ::= ("a" | "ab") ("c" | "bcd") | "a"*', ["a", "aaa", "aca", "abcda"], ["", "abcd"]),
        ('root ::= "a\nb" [^a\r\n]', ["a\nbc"], ["a\nb\n", "a"]),
        ('root ::= "a"{2}+*' + "*?+" * 20 + ' x{2} x??\nx ::= "x"', ["xx", "aaaaxxx"], ["axx", "aax"]),
        ('root ::= "a"{0} "b" "c"{0,0} ("d" "e"){0,1}', ["b", "bde"], ["a", "ab", "bc"]),
        ('root ::= "(" root ")" | [a-z]* "end"', ["end", "((enterend))"], ["enter", "(end", "(enter)"]),
        ('root ::= "(" root ")" | x x\nx ::= [a-z]{2,3}', ["abcd", "(abcde)", "abcdef"], ["abc", "abcdefg"]),
        ('root ::= "<" root ">" | x "b" | y x?\nx ::= "a" | "ab" "c"?\ny ::= x "!"', ["ab", "abb", "a!abc"], ["abc"]),
        ("root ::= " + "(" * 100 + "[a-b]" + ")?" * 20 + ")" * 80 + ' "c"', ["c", "ac", "bc"], ["a"]),
    ],
)
def test_a_grammar_in_gbnf_has_the_sentences_that_llama_cpp_reads(
    compiler: Compiler, text: str, sentences: list[str], others: list[str]
) -> None:
    grammar = compiler.compile(Grammar(text=text, syntax="gbnf", at="g"))
    assert [says(compiler, grammar, each) for each in sentences] == [True] * len(sentences)
    assert [says(compiler, grammar, each) for each in others] == [False] * len(others)


def test_a_terminal_that_takes_all_that_follows_stops_no_search(compiler: Compiler) -> None:
    text = 'start: (A "a" | "b") end  // which "a" has no text behind A\nA: "a"+\nend: %lark {start: B "b"\nB: "b"+\n'
    grammar = compiler.compile(Grammar(text=text + '%llguidance {"no_forcing": false}}', syntax="lark", at="g"))
    assert not says(compiler, grammar, "aaaaaa")
    recursive = 'root ::= "(" root ")" | x "a"\nx ::= "a"+'
    grammar = compiler.compile(Grammar(text=recursive, syntax="gbnf", at="g"))
    assert not says(compiler, grammar, "((aaaaaa")
    assert says(compiler, grammar, "((aa))")


pieces = st.sampled_from([*"ab-[]()?*+{}12,^$|:<>=!Pdpxu&~.éwi#\\", r"\d", r"\b", "[:alpha:]", "(?:", r"\n", r"\\"])


def message_of(compiler: Compiler, constraint: Constraint) -> str:
    """Empty: it compiles."""
    try:
        compiler.compile(constraint)
    except InvalidRequest as error:
        return error.message
    return ""


@THOROUGH
@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, min_size=1, max_size=7).map("".join))
def test_the_mask_engine_takes_the_form_of_each_pattern_that_the_check_takes(compiler: Compiler, pattern: str) -> None:
    message = message_of(compiler, Regex(pattern=pattern, at="r"))
    assert not message or message.startswith(("r: at line 1, column ", "r: no text satisfies it"))
    assert "no mask enforces" not in message


def fault_of(read: Callable[[str], object], text: str) -> Fault | None:
    try:
        read(text)
    except Fault as fault:
        return fault
    return None


@given(st.text(alphabet='ab"[]()|*+?{}1,:=#\n\\x-^. <', max_size=40))
def test_no_text_makes_the_reader_of_gbnf_fail(text: str) -> None:
    for grammar in (text, f"root ::= {text}"):
        fault = fault_of(gbnf.to_lark, grammar)
        assert fault is None or 0 <= fault.offset <= len(grammar)


@given(st.text(max_size=30))
def test_no_text_makes_the_check_of_patterns_fail(text: str) -> None:
    fault = fault_of(regex.check, text)
    assert fault is None or 0 <= fault.offset <= len(text)
