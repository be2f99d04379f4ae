"""From the form of an answer to the text of a grammar for llguidance. Pure: it compiles nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from inferd.answer_form import JSON, Choices, Constraint, Grammar, JsonSchema, Regex, TaggedText
from inferd.checkpoints.answers.grammar import AnswerGrammar
from inferd.errors import InvalidRequest
from inferd.structured import gbnf, lark, lark_reader, regex
from inferd.structured.faults import Fault
from inferd.structured.schema import normalise

LONGEST_WHITESPACE: Final = 8  # characters between two parts of a JSON text
LONGEST_PATTERN: Final = 80  # of an expression in a message
_WHITESPACE: Final = rf"[\x20\x0A\x0D\x09]{{1,{LONGEST_WHITESPACE}}}"
_ESCAPES: Final = 'nrbtf\\"'  # letters that may stand behind a backslash

Part = dict[str, Any]
"""A grammar in llguidance's form: ``name``, and ``lark_grammar`` or ``json_schema``."""

Tries = Callable[[Sequence[Part]], str | None]
"""The mask engine's message about grammars; None: it takes them."""


class Form(NamedTuple):
    """A constraint, or the calls that an answer may have, or both."""

    constraint: Constraint | None
    frame: AnswerGrammar | None  # the grammar of the whole answer, in which that of the constraint has a place

    @property
    def at(self) -> str:
        """The field of the request, for messages."""
        return "tools" if self.constraint is None else self.constraint.at


def grammars_of(form: Form, tries: Tries) -> list[Part]:
    """The grammars of a form. Raises InvalidRequest."""
    parts: list[Part] = []
    if form.frame is not None:
        parts.append(_lark_part("frame", form.frame.lark))
        parts += [json_part(name, schema, at) for name, schema, at in form.frame.schemas]
    if form.constraint is not None:
        parts += parts_of(form.constraint)
        _check_whitespace(form.constraint, tries)
    return parts


def text_of(parts: Sequence[Part]) -> str:
    """Grammars as llguidance reads them."""
    return json.dumps({"grammars": parts})


def parts_of(constraint: Constraint) -> list[Part]:
    """The grammars of a constraint; the first one is that of the answer. Raises InvalidRequest."""
    match constraint:
        case JsonSchema(schema=schema, at=at, whitespace=whitespace):
            if whitespace:
                with _faults_of(f"{at}: the pattern of white space", param=at):
                    regex.check(whitespace)
                whitespace = _white(whitespace)
            return [json_part("answer", schema, at, whitespace)]
        case Regex(pattern=pattern, at=at):
            with _faults_of(at):
                pattern = regex.without_notes(pattern)
            return [_lark_part("answer", f"start: {_lark_regex(_unanchored(pattern))}")]
        case Choices(texts=(), at=at):
            raise InvalidRequest(f"{at} has no text to choose from; name at least one.", param=at)
        case Choices(texts=texts):
            # One word of the lexer: as rules of the parser, many texts would be as many items of a row.
            return [_lark_part("answer", "start: TEXT\nTEXT: " + " | ".join(map(_lark_text, texts)))]
        case Grammar(text=text, syntax="lark", at=at):
            with _faults_of(at):
                lark.check(text)
            return [_lark_part("answer", f"{lark_reader.without_endless(text)}\n{lark.UNFORCED}\n")]
        case Grammar(text=text, at=at):
            with _faults_of(at):
                return [_lark_part("answer", lark_reader.without_endless(gbnf.to_lark(text)))]
        case TaggedText():
            return _tagged_parts(constraint)


def _lark_part(name: str, text: str) -> Part:
    return {"name": name, "lark_grammar": text}


def json_part(name: str, schema: JSON | bool, at: str, whitespace: str | None = None) -> Part:
    return written_part(name, normalise(schema, at), whitespace)


def written_part(name: str, normal: JSON, whitespace: str | None = None) -> Part:
    """The grammar of a schema that is normalised."""
    options: JSON = {"whitespace_flexible": False}
    if whitespace != "":
        options = {"whitespace_pattern": whitespace or _WHITESPACE}
    # Each text has one spelling: a name that is written with \u otherwise escapes what the schema says of it.
    options = {**options, "json_allowed_escapes": _ESCAPES}
    return {"name": name, "json_schema": {**normal, "x-guidance": options}}


def _lark_text(text: str) -> str:
    """A text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _lark_regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, use_ascii='')}/"


def _white(pattern: str) -> str:
    """A pattern of white space in which ``\\s`` is the white space of JSON."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\\s", r"\1[ \\t\\n\\r]", pattern)


def _unanchored(pattern: str) -> str:
    """The pattern without ``^`` and ``$`` at its ends. The whole text is matched, so they mean nothing there."""
    pattern = pattern.removeprefix("^")
    escapes = re.search(r"(\\*)\$\Z", pattern)
    return pattern[:-1] if escapes is not None and len(escapes[1]) % 2 == 0 else pattern


def _tagged_parts(constraint: TaggedText) -> list[Part]:
    """Free text with structures. A structure begins wherever a trigger occurs that its ``begin`` starts with."""
    at = constraint.at
    rules = ["start: tag* TEXT", "TEXT: /(.|\\n)*/"]
    parts: list[Part] = []
    tags: list[str] = []
    for number, trigger in enumerate(constraint.triggers):
        bodies: list[str] = []
        for index, structure in enumerate(constraint.structures):
            if structure.begin.startswith(trigger):
                rest = structure.begin[len(trigger) :]
                texts = [_lark_text(text) if text else "" for text in (rest, structure.end)]
                bodies.append(f"{texts[0]} @structure_{index} {texts[1]}")
        if not bodies:
            raise InvalidRequest(
                f"{at}.triggers[{number}] begins no structure. Let the 'begin' of one start with it.", param=at
            )
        rules.append(f"trigger_{number}[lazy]: TEXT {_lark_text(trigger)}")
        rules.append(f"tag_{number}: trigger_{number} ({' | '.join(bodies)})")
        tags.append(f"tag_{number}")
    for index, structure in enumerate(constraint.structures):
        if not any(structure.begin.startswith(trigger) for trigger in constraint.triggers):
            raise InvalidRequest(
                f"{at}.structures[{index}].begin starts with none of the triggers. Add one that it starts with.",
                param=at,
            )
        parts.append(json_part(f"structure_{index}", structure.schema, at_structure(constraint, index)))
    rules.insert(1, f"tag: {' | '.join(tags)}" if tags else "tag: TEXT")
    return [_lark_part("answer", "\n".join(rules)), *parts]


def at_structure(constraint: TaggedText, index: int) -> str:
    return f"{constraint.at}.structures[{index}].schema"


def _check_whitespace(constraint: Constraint, tries: Tries) -> None:
    """Refuse a pattern of white space that matches other texts: they would stand between the parts of a JSON text."""
    if isinstance(constraint, JsonSchema) and constraint.whitespace:
        others = f"start: OTHER\nOTHER: {_lark_regex(_white(constraint.whitespace))} & ~/[ \\t\\n\\r]*/"
        problem = tries([_lark_part("answer", others)]) or ""
        if not problem.startswith("NoExt"):
            raise InvalidRequest(
                f"{constraint.at}: the pattern of white space {constraint.whitespace[:LONGEST_PATTERN]!r} matches "
                f"texts that JSON does not allow between its parts{'' if not problem else ', or is too complex'}; "
                "use only ' ', '\\t', '\\n' and '\\r', such as '[ \\n]{0,4}'.",
                param=constraint.at,
                code="invalid_grammar",
            )


@contextmanager
def _faults_of(at: str, *, param: str = "") -> Iterator[None]:
    """Raise the fault of a text as the refusal of the field that holds it."""
    try:
        yield
    except Fault as fault:
        raise InvalidRequest(f"{at}: {fault}.", param=param or at, code="invalid_grammar") from None
