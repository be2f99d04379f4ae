"""Grammars in Lark as clients send them: what is wrong with one, in words of the grammar.

The mask engine reads the grammar itself; its messages have a line and a column, and are told here in other words.
"""

from __future__ import annotations

import re
from typing import Final

from inferd.structured import endless, lark_reader, regex
from inferd.structured.faults import Fault, offset_of

UNFORCED: Final = '%llguidance {"no_forcing": true}'
"""A line for the end of a grammar with several terminals, in which the mask engine does not look for all the text that
must follow. It reads a terminal as far as it goes, so that behind the ``A`` of ``A "a"`` with ``A: "a"+`` the search would
never end."""

_PLACE: Final = re.compile(r"(?:at )?(\d{1,9})\((\d{1,9})\): (.*)", re.DOTALL)
_REGEX: Final = re.compile(r"/((?:\\.|[^/\\\n])+)/")
_UNKNOWN_GRAMMAR: Final = re.compile(r"unknown grammar (@[\w-]+)")
_NAMED: Final = re.compile(r'"([^"]{1,64})"')
_EXPECTED: Final = re.compile(r"Expected token '(.{1,20}?)'")
_COMMON: Final = (
    "DIGIT, HEXDIGIT, INT, SIGNED_INT, DECIMAL, FLOAT, SIGNED_FLOAT, NUMBER, SIGNED_NUMBER, ESCAPED_STRING, "
    "LCASE_LETTER, UCASE_LETTER, LETTER, WORD, CNAME, WS_INLINE, WS, CR, LF, NEWLINE, SH_COMMENT, CPP_COMMENT, "
    "C_COMMENT and SQL_COMMENT"
)
_WORDS: Final = (
    ("unknown name", "{0!r} is not defined", "define it, or import it from 'common'; write a text in \"...\""),
    ("duplicate rule", "{0!r} is defined twice", "define it once, with '|' between its ways"),
    (
        "circular reference in token",
        "the terminal {0!r} refers to itself",
        "write its name in lower case: a rule may refer to itself",
    ),
    ("unknown special token", "the tokenizer has no special token {0!r}", 'write a text in "..."'),
    ("Unknown common regex", "this is not known", f"'%import common.NAME' with one of {_COMMON}"),
    ("cannot be 0", "the repetition is of 0 times", "leave it out, with what it repeats"),
    ("range end must be", "the repetition is empty", "write the smaller number first"),
    ("range start must be >=", "the repetition begins below 0", "write 0 or more"),
    ("invalid range order", "the range of characters is empty", "write the smaller character first"),
    ("must be a single character", "the end of a range is no single character", 'write one such as "a".."z"'),
    ("lexer error", "this has no meaning in Lark here", "write texts in double quotation marks, patterns in slashes"),
    ("too deeply nested", "the parentheses are nested too deeply", "name parts of it as rules"),
    ("declare statement", "%declare is not supported", "define the terminal"),
    ("priority not supported", "priorities are not supported", "leave the number out"),
    ("only supported for tokens", "'&' and '~' join terminals alone", "write the name of the rule in upper case"),
    ("expecting rule, token or statement", "a rule begins with its name", "write 'name: what it is' on its own line"),
    ("Expected value", "a text, a pattern, a name or a group is missing", "write one, or leave the rest out"),
    ("Unexpected expression", "this is not expected here", "write 'name: what it is' on a line of its own"),
)


def check(text: str) -> None:
    """Raise ``Fault`` where the grammar has a schema, another grammar or no sentence.

    What a schema says is normalised and checked again in the whole answer, and in a sentence of a grammar nothing tells
    which part a schema is for.
    """
    at = lark_reader.schema(text)
    if at is not None:
        remedy = (
            "send the schema in response_format of type json_schema, or in the structures of a structural_tag if other "
            "text stands around it"
        )
        raise Fault(text, at, f"{lark_reader.SCHEMA} is not supported in a grammar", remedy)
    reading = lark_reader.read(text)
    if reading is not None:
        for name, at in reading.grammars:
            raise _unknown_grammar(text, at, name)
        endless.check(text, reading.sentences, reading.start, reading.rules, reading.empty)


def _unknown_grammar(text: str, at: int, name: str) -> Fault:
    return Fault(text, at, f"there is no grammar {name!r}", "write its rules into this grammar")


def fault_of(text: str, problem: str, read: str) -> Fault | None:
    """The mask engine's message about a grammar in words of the grammar; None: it names no place in it. ``read``: what
    the engine got, in which everything has the same place."""
    if problem.startswith("no start rule"):
        return Fault(text, 0, "there is no rule 'start'", "define it: its sentences are the answers")
    unknown = _UNKNOWN_GRAMMAR.match(problem)
    if unknown is not None:
        at = max(text.find(unknown[1]), 0)
        return _unknown_grammar(text, at, unknown[1])
    found = _PLACE.match(problem)
    if found is None:
        return None
    at = offset_of(read, int(found[1]), int(found[2]))
    said = found[3]
    if said.startswith("invalid regex"):
        return _of_regex(text, at, said)
    expected = _EXPECTED.match(said)
    if expected is not None:
        remedy = "write 'name: what it is' on a line of its own" if expected[1] in ":_" else "add it"
        return Fault(text, at, f"'{expected[1]}' is expected here", remedy)
    for start, told, remedy in _WORDS:
        if start in said.partition("\n")[0]:
            named = _NAMED.search(said)
            return Fault(text, at, told.format(named[1] if named is not None else ""), remedy)
    return Fault(text, at, "this is not supported", "write it in another way, or leave it out")


def _of_regex(text: str, at: int, said: str) -> Fault:
    written = _REGEX.match(text, text.find("/", at))
    if written is not None:
        try:
            regex.check(written[1])
        except Fault as fault:
            return Fault(text, written.start(1) + fault.offset, fault.problem, fault.remedy)
    return Fault(text, at, *regex.words_of(said))
