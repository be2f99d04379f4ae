"""Grammars as regular expressions: sentences match, other texts do not, and the rest is refused in bounded time."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Callable

import msgspec
import pytest
from bench.schemas import Masks
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.gateway.generation.items import InputTool, ToolFormat
from inferd.gateway.responses.grammars import GrammarError, pattern_of_lark, pattern_of_regex
from inferd.gateway.responses.tools import Tools
from inferd.structured.check import Validator
from inferd.structured.schema.patterns import is_readable

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""

SUMS = r"""
// with comments
start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP MUL SP factor)* -> mul
    | factor
factor: INT
SP: " "
ADD.2: "+"
MUL: "*"
%import common.INT
"""


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern.replace("$", r"\Z"), text) is not None


@pytest.mark.parametrize(
    ("grammar", "text", "is_sentence"),
    [
        (PATCH, "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch", True),
        (
            PATCH,
            "*** Begin Patch\n*** Update File: a.py\n*** Move to: b.py\n@@ def f():\n-x\n+y\n*** End Patch\n",
            True,
        ),
        (PATCH, "*** Begin Patch\n*** Delete File: a.py\n*** End Patch", True),
        (PATCH, "*** Begin Patch\n*** Add File: a.py\nx = 1\n*** End Patch", False),
        (PATCH, "*** Begin Patch\n*** End Patch", False),
        (PATCH, "here: *** Begin Patch\n*** Delete File: a.py\n*** End Patch", False),
        (SUMS, "4 + 4", True),
        ('start: "a" "b"\n%ignore ""\n', "ab", True),
        ('start: A* B+ ":"* "("?\nA: ""\nB: "" (A | A)', ":::(", True),
        (SUMS, "1 * 23 + 4 * 5", True),
        (SUMS, "4 +4", False),
        (SUMS, "4 + ", False),
        ('start: "A"i~2..3 ["x".."z"]\n', "aAz", True),
        ('start: "A"i~2..3 ["x".."z"]\n', "a", False),
        ('start: "a" "b"\n%ignore " "\n', " a  b ", True),
        ('start: "a" "b"\n%ignore " "\n', "a-b", False),
        ('start: A B # a\nA.-1: "\\U0001F600\\/"\nB: "b" # c', "\U0001f600/b", True),
        ('start: /[a\\/]+/ "\\u00e9\\n"\n', "a/é\n", True),
        ("start: (A\n  | B)+\nA: /a.c/\nB: /b.d/s\n", "abcb\nd", True),
        ("start: (A\n  | B)+\nA: /a.c/\nB: /b.d/s\n", "a\nc", False),
        ("start: NAME\n%import common (CNAME, INT)\n%import common.WORD -> NAME\n", "abc", True),
    ],
)
def test_sentences_match(grammar: str, text: str, is_sentence: bool) -> None:
    assert matches(pattern_of_lark(grammar), text) is is_sentence


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start? ")"', "refers to itself"),
        ("start: other", "not defined"),
        ('begin: "a"', "no rule 'start'"),
        ("start: INT", "not defined"),
        ('start: "a"\nstart: "b"', "twice"),
        ('start: ("a"', "expected"),
        ('start: "a" )', "not expected"),
        ("start: /a/i", "flags"),
        ("start: /(?i:a)/", "not supported"),
        ("start: a{b}", "no meaning"),
        ('start: "a"~5000', "number"),
        ('start: "a"~-1', "number"),
        ('start: "\\d"', r"the escape \\d in a text is unknown"),
        ('start: "\\U00110000"', r"the escape \\U00110000 in a text is unknown"),
        ("%declare A", "not supported"),
        ("%import python.INT\nstart: INT", "not known"),
        ("start: " + "(" * 200 + '"a"' + ")" * 200, "parentheses"),
        ("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(200)) + 'r200: "a"', "within each other"),
        ('start: a0\na20: "a"\n' + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(20)), "characters"),
        ("x" * 70_000, "characters"),
    ],
)
def test_what_no_mask_enforces_is_refused_at_once(grammar: str, reason: str) -> None:
    began = time.process_time()
    with pytest.raises(GrammarError, match=reason):
        pattern_of_lark(grammar)
    assert time.process_time() - began < 5


@given(st.text(max_size=300))
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    for read in (pattern_of_lark, pattern_of_regex):
        with contextlib.suppress(GrammarError):
            assert read(text).startswith("^(?:")


@given(st.text(alphabet='start:"ab|()[]*+?~.0123/\\n\n %import common.LF->AB', max_size=200))
def test_any_grammar_is_a_pattern_or_refused(text: str) -> None:
    with contextlib.suppress(GrammarError):
        assert pattern_of_lark("start: x\nx: " + text).endswith(")$")


def test_a_regular_expression_matches_as_a_whole() -> None:
    pattern = pattern_of_regex(r"(?P<year>\d{4})-a|b.")
    assert matches(pattern, "2026-a")
    assert matches(pattern, "b\r")
    assert not matches(pattern, "b\n")
    assert not matches(pattern, "x2026-a")
    assert not matches(pattern, "2026-a|b")


@pytest.mark.parametrize(
    ("syntax", "definition", "reason"),
    [
        ("regex", "a(", "at line 1, column 2, before '\\(': the group is not closed"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "(a{1,999}){1,999}", "over 500000 parts"),
        ("lark", "start: /a(/", "the group is not closed"),
        ("regex", "x\\a", r"/x\\a/ is not read at line 1, column 2, before .*control character"),
        ("regex", "a**", r"at line 1, column 3, before '\*': a repetition stands behind another one"),
        ("regex", "a{2}*", r"at line 1, column 5, before '\*': a repetition stands behind another one"),
        ("regex", "[a--b]", r"at line 1, column 3, before '--b\]': the operation '--' on classes .*'\\-\\-'"),
        ("regex", "[a-z&&[^e]]", r"at line 1, column 5, before .*: the operation '&&' on classes"),
        ("lark", "start: /[[a]b]/", r"at line 1, column 2, before .*: a class within a class"),
        ("regex", "[[:foo:]]", "column 2, before .*: the class has an unknown name; one of alnum"),
        ("lark", "start: /[[:alpha:][]/", "column 11, before .*: the class of characters is not closed"),
        (
            "regex",
            r"a\p{Foo}",
            r"/a\\p\{Foo\}/ is not read at line 1, column 2, .* names no property .*'\\p\{Letter\}'",
        ),
        ("lark", r"start: /[\P{Foo}]/", r"/\[\\P\{Foo\}\]/ is not read at line 1, column 2, .* names no property"),
        (
            "regex",
            "(?:)?a",
            r"/\(\?:\)\?a/ is not read at line 1, column 1, .* is repeated, and has nothing in it; leave it",
        ),
        ("regex", r"a\x01", r"/a\\x01/ is not read at line 1, column 2, .* a control character is not supported"),
        ("lark", r'start: "\x01" "a"', r'"\\x01" has a control character'),
        ("lark", r'start: "\ud800"', r'"\\ud800" has .* half of a surrogate pair'),
        ("regex", "(?:a|b$)c", r"/\(\?:a\|b\$\)c/ is not read at line 1, column 7, .* asks for an end within the text"),
        ("regex", r"a[^\s\S]", "no text satisfies it, because it needs a character of a class without one"),
        ("lark", 'start: "a" B\nB: /[^\\d\\D]+/', "no text satisfies it"),
        ("regex", "a" * 80 + "(" + "a" * 80, r"/a{80}\.\.\./ is not read at line 1, column 81"),
        ("regex", "a" * 65_537, "has 65537 characters, and at most 65536 are read"),
    ],
)
def test_an_expression_that_is_not_read_is_refused_where_it_is_written(
    syntax: str, definition: str, reason: str
) -> None:
    given = ToolFormat("grammar", syntax, definition)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        Tools([InputTool("custom", "f", format=given)])
    assert caught.value.param == "tools[0].format.definition"


@pytest.mark.parametrize(
    ("read", "definition", "texts"),
    [
        (pattern_of_regex, r"[^[\]]+", ("ab",)),
        (pattern_of_regex, r"[!-/:-@[-`{-~]+", ("![`~",)),
        (pattern_of_regex, "(?<n>a)|(?<n>b)", ("a", "b")),
        (pattern_of_regex, "(?<é>a)", ("a",)),
        (pattern_of_lark, 'start: "[" /[^[]+/', ("[a",)),
        (pattern_of_lark, "start: /[[a-z]+/", ("[a",)),
        (pattern_of_lark, 'start: "b" | /[^\\s\\S]/', ("b",)),
    ],
)
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")  # of Python, which reads the pattern here
def test_classes_and_names_are_those_of_ecma(
    read: Callable[[str], str], definition: str, texts: tuple[str, ...]
) -> None:
    pattern = read(definition)
    assert is_readable(pattern)
    assert all(matches(pattern, text) for text in texts)
    assert not matches(pattern, "")


@pytest.mark.parametrize(
    ("definition", "inside", "outside"),
    [
        ("[[:alpha:]]+", ("aZ",), ("1", ":", "[", "é")),
        ("[^[:^digit:]_]", ("7",), ("_", "a")),
        ("[[:^ascii:]x-]", ("é", "x", "-", "\U0001f600"), ("a", ":")),
        ("[[:punct:][:space:]]", ("]", "~", "\v"), ("a", "1")),
        ("[[:word:]][[:xdigit:]]", ("_f",), ("gg", "-f")),
    ],
)
def test_a_class_with_a_name_of_posix_is_read_as_in_rust(
    definition: str, inside: tuple[str, ...], outside: tuple[str, ...]
) -> None:
    for read in (pattern_of_regex(definition), pattern_of_lark(f"start: /{definition}/")):
        assert is_readable(read)
        assert [matches(read, text) for text in inside] == [True] * len(inside)
        assert not any(matches(read, text) for text in outside)


@pytest.mark.parametrize("end", ["start: a a a b", 'start: "c"\n%ignore a\n%ignore a\n%ignore a\n%ignore b'])
def test_a_grammar_is_read_no_further_than_its_expression_may_be_long(end: str) -> None:
    with pytest.raises(GrammarError, match="over 65536 characters"):  # before b, which is not defined
        pattern_of_lark(f'a: "{"x" * 30_000}"\n{end}')


def test_blank_lines_are_looked_at_once() -> None:
    began = time.process_time()
    assert pattern_of_lark('start: "a"' + "\n" * 20_000 + '| "b"') == "^(?:(?:(?:a)|(?:b)))$"
    assert time.process_time() - began < 5


def test_the_grammars_of_a_request_have_a_limit_together() -> None:
    def tools(*definitions: str) -> Tools:
        forms = [ToolFormat("grammar", "regex", text) for text in definitions]
        return Tools([InputTool("custom", f"f{i}", format=form) for i, form in enumerate(forms)])

    assert len(tools(*["a" * 60_000] * 60).rendered) == 60  # one grammar of many tools counts once
    with pytest.raises(InvalidRequest, match="at most 131072 are read") as caught:
        tools("a" * 60_000, "b" * 60_000, "c" * 60_000)
    assert caught.value.param == "tools[2].format.definition"


def test_masks_enforce_the_grammar_of_a_custom_tool() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    tools = Tools([msgspec.convert({"type": "custom", "name": "apply_patch", "format": form}, InputTool)])
    schema = tools.rendered[0]["function"]["parameters"]
    masks, validator = Masks(schema), Validator(schema)
    for seed in range(20):
        text = masks.walk(random.Random(seed))
        if text is not None:
            assert validator.errors(text) is None
            assert matches(pattern_of_lark(PATCH), json.loads(text)["input"])
    patch = '*** Begin Patch\n*** Update File: é "a".py\n@@\n-x\t= 1\r\n+y\n*** End Patch'
    assert masks.allow({"input": patch})
    assert not masks.allow({"input": patch.replace("-x", "x")})
    assert not masks.allow({"input": patch + "\n\n"})
