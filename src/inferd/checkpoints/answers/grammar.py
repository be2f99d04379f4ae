"""The grammar of an answer: reasoning, then calls in the checkpoint's notation, text, or what a constraint demands.

The grammar is a text of Lark for llguidance. It names other grammars by ``@``: the arguments of each tool, and the
request's own constraint, which begins exactly where the reasoning ends. In text, a call is free to begin; from its
first tag on, its name and its arguments are constrained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from inferd.checkpoints.answers.format import (
    WHITE_SPACE,
    AnswerFormat,
    Arguments,
    Calls,
    Envelope,
    Id,
    Keywords,
    Name,
    Parameters,
    Part,
    Reasoning,
    Text,
)
from inferd.checkpoints.answers.values import is_text, parameter_schema

JSON = dict[str, Any]

CONSTRAINT: Final = "answer"
"""The name by which the grammar refers to the request's own constraint."""

_SPACES: Final = "".join([f"\\x{{{ord(character):x}}}" for character in WHITE_SPACE])  # as an expression has them
_FINAL: Final = "<|channel|>final<|message|>"
_TAG: Final = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\]")
_ROOT_KEYS: Final = ("$defs", "definitions", "$schema", "$id")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called. ``at``: the field of the request that holds the schema of its arguments.

    ``is_bound``: the request insists on the schema. ``schema`` None: any arguments. ``wished``: a schema that the
    grammar does not enforce.
    """

    name: str
    schema: JSON | bool | None
    at: str
    is_bound: bool = False
    wished: JSON | bool | None = None

    def relaxed(self) -> Tool:
        """The tool with any arguments."""
        return Tool(self.name, None, self.at, wished=self.schema)

    @property
    def object_schema(self) -> JSON | bool:
        """The schema of arguments that are written as a JSON object."""
        return {"type": "object"} if self.schema is None else self.schema


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar, and the JSON Schemas that it refers to: name, schema and the field of the request it is from.

    ``tools``: the tools whose arguments it enforces, each with their schema. ``relaxed``: the others, with the schemas
    that it does not enforce. ``before_arguments`` and ``before_answer``: the texts directly before JSON arguments, and
    before what the request's constraint demands.
    ``ends``: the texts that end free text.
    """

    lark: str
    schemas: tuple[tuple[str, JSON | bool, str], ...] = ()
    tools: tuple[tuple[str, JSON | bool], ...] = ()
    before_arguments: tuple[str, ...] = ()
    before_answer: tuple[str, ...] = ()
    may_begin_with_answer: bool = False
    ends: tuple[str, ...] = ()
    relaxed: tuple[tuple[str, JSON | bool], ...] = ()


class NotExpressible(Exception):
    """A tool's arguments cannot be constrained in this notation. ``at``: the field that holds their schema."""

    def __init__(self, at: str, reason: str) -> None:
        super().__init__(f"{at}: {reason}")
        self.at = at
        self.reason = reason


def answer_grammar(
    notation: AnswerFormat,
    *,
    special_ids: Mapping[str, int],
    tools: Sequence[Tool] = (),
    is_required: bool = False,
    only_one: bool = False,
    has_constraint: bool = False,
    splits_reasoning: bool = True,
    in_reasoning: bool = False,
) -> AnswerGrammar:
    """The grammar of an answer that may or must call tools, or that must satisfy a constraint.

    ``special_ids``: the special tokens of the vocabulary, by their text. Raises NotExpressible.
    """
    maker = _Maker(special_ids)
    if notation.is_channels:
        maker.channels(tools, is_required=is_required, has_constraint=has_constraint)
    else:
        reasoning = notation.reasoning if splits_reasoning else None
        if reasoning is not None and not in_reasoning:
            maker.may_reason(reasoning)
        if tools and notation.calls is not None:
            body = maker.calls(
                notation.calls, tools, is_required=is_required, only_one=only_one, has_constraint=has_constraint
            )
        else:
            body = _Bodies.same(f"@{CONSTRAINT}" if has_constraint else "TEXT")
        start = body.later
        if reasoning is not None:
            start = maker.reasoning(reasoning, body, in_reasoning=in_reasoning)
            maker.before_answer.append(reasoning.end.strip() + reasoning.end[len(reasoning.end.rstrip()) :])
        maker.rules.insert(0, f"start: {start}")
    return AnswerGrammar(
        "\n".join([*maker.rules, "TEXT: /(.|\\n)*/"]) + "\n",
        tuple(maker.schemas),
        tuple((tool.name, tool.schema) for tool in tools if tool.schema is not None),
        tuple(maker.before_arguments),
        tuple(maker.before_answer) if has_constraint else (),
        may_begin_with_answer=has_constraint
        and not notation.is_channels
        and not (notation.reasoning is not None and splits_reasoning and in_reasoning),
        ends=tuple(dict.fromkeys(maker.ends)),
        relaxed=tuple((tool.name, tool.wished) for tool in tools if tool.wished is not None),
    )


class _Rule(NamedTuple):
    """A reference to other rules, where a body has no fixed text."""

    rule: str


_Body = list[str | _Rule]


class _Bodies(NamedTuple):
    """What an answer is behind its reasoning, and what one without reasoning is: its text does not begin as reasoning
    does."""

    later: str
    first: str

    @classmethod
    def same(cls, body: str) -> _Bodies:
        return cls(body, body)


class _Maker:
    """Collects the rules of one grammar."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.schemas: list[tuple[str, JSON | bool, str]] = []
        self.before_arguments: list[str] = []
        self.before_answer: list[str] = []
        self.ends: list[str] = []
        self._first_text = "TEXT"  # the terminal of the text that an answer may begin with
        self._special_ids = special_ids
        names = sorted(filter(None, special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None

    # -- texts ------------------------------------------------------------------------------

    def literal(self, text: str) -> str:
        """A fixed text: its special tokens by number, the rest as strings."""
        parts: list[str] = []
        at = 0
        for found in self._special.finditer(text) if self._special is not None else ():
            if found.start() > at:
                parts.append(_string(text[at : found.start()]))
            parts.append(f"<[{self._special_ids[found[0]]}]>")
            at = found.end()
        if at < len(text):
            parts.append(_string(text[at:]))
        return " ".join(parts)

    def until(self, text: str, name: str, before: str = "TEXT") -> str:
        """Free text up to and with a fixed text. ``before``: the terminal of the free text."""
        self.ends.append(text)
        first = None if self._special is None else self._special.match(text)
        if first is not None:
            return f"{before} {self.literal(text)}"
        found = None if self._special is None else self._special.search(text)
        plain = text if found is None else text[: found.start()]
        self.rules.append(f"{name}[lazy]: {before} {_string(plain)}")
        return f"{name} {self.literal(text[len(plain) :])}".rstrip()

    def may_reason(self, reasoning: Reasoning) -> None:
        """Keep the text that an answer may begin with apart from reasoning, where characters alone tell them apart."""
        begin = reasoning.begin.strip()
        if self._special is None or self._special.match(begin) is None:
            self._first_text = "UNREASONED"
            self.rules.append(f"BEGUN: /[{_SPACES}]*/ {_string(begin)}")
            self.rules.append("UNREASONED: TEXT & ~(BEGUN TEXT)")

    def reasoning(self, reasoning: Reasoning, body: _Bodies, *, in_reasoning: bool) -> str:
        """An answer that may begin with reasoning, or is in it."""
        rest = self.until(reasoning.end.strip(), "reasoning_end")
        after = reasoning.end[len(reasoning.end.rstrip()) :]
        rest += f" {_string(after)}" if after else ""
        if in_reasoning:
            return f"{rest} ({body.later})"
        if body.later == body.first:
            return f"({self.literal(reasoning.begin.strip())} {rest})? ({body.later})"
        # As the answer's parser reads it: in reasoning no call begins.
        return f"BEGUN ({rest} ({body.later}) | TEXT) | {body.first}"

    # -- calls ------------------------------------------------------------------------------

    def calls(
        self, calls: Calls, tools: Sequence[Tool], *, is_required: bool, only_one: bool, has_constraint: bool
    ) -> _Bodies:
        """The body of an answer with calls."""
        bodies = [self._call(calls.call, tool, number) for number, tool in enumerate(tools)]
        begin, end = calls.begin, calls.end
        if calls.is_list:
            begin, end = begin + "[", "]" + end
        between = calls.separator
        more = "" if only_one else f" ({self._joined(between)} call)*"
        alone = f"{self.literal(begin)} call{more} {self.literal(end)}".strip()
        if is_required or has_constraint or calls.trigger or between:
            self.rules.append("call: " + " | ".join(self._sequence(body) for body in bodies))
        if is_required:
            return _Bodies.same(alone)
        if has_constraint:
            return _Bodies.same(f"{alone} | @{CONSTRAINT}")
        if not calls.trigger:
            more = f" ({self._joined(between)} call)*" if not only_one and between else ""
            return self._bare(bodies, begin, f"{more} {self.literal(end)}".rstrip(), calls.content)
        tag = _TAG.match(calls.trigger)
        first = calls.trigger if tag is None else tag[0]
        if calls.has_section:
            called = f"{self.literal(begin.lstrip()[len(first) :])} call{more} {self.literal(end)}"
        else:
            rest = [[_after(body[0], first), *body[1:]] for body in bodies]
            self.rules.append("called: " + " | ".join(map(self._sequence, rest)))
            called = "called"
        self.rules.append(f"section: {self.until(first, 'head')} {called}")
        later, text = "section | TEXT" if only_one else "section* TEXT", self._first_text
        if text == "TEXT":
            return _Bodies.same(later)
        self.rules.append(f"first_section: {self.until(first, 'first_head', text)} {called}")
        return _Bodies(later, f"first_section{'' if only_one else ' section* TEXT'} | {text}")

    def _bare(self, bodies: Sequence[_Body], begin: str, more: str, content: str) -> _Bodies:
        """Calls that begin an answer without a tag: by their text up to the arguments, which has the tool's name."""
        options: list[str] = []
        for number, (text, *rest) in enumerate(bodies):
            assert isinstance(text, str)
            self.rules.append(f"bare_{number}[lazy]: {_string(begin + text)}")
            options.append(f"bare_{number} {self._sequence(rest)}{more}")
        if content:
            return _Bodies.same(" | ".join([*options, f"{_string(content)} TEXT"]))
        return _Bodies(" | ".join([*options, "TEXT"]), " | ".join([*options, self._first_text]))

    def _joined(self, separator: str) -> str:
        return self.literal(separator) if separator else '""'

    def _sequence(self, body: _Body) -> str:
        """The parts of a call."""
        written = [self.literal(part) if isinstance(part, str) else part.rule for part in _merged(body)]
        return " ".join(part for part in written if part) or '""'

    def _call(self, parts: Sequence[Part], tool: Tool, number: int) -> _Body:
        body: _Body = []
        for part in parts:
            match part:
                case Text(text):
                    body.append(text)
                case Name():
                    body.append(tool.name)
                case Id(pattern):
                    body.append(_Rule(f"/{pattern}/"))
                case Arguments():
                    body.append(_Rule(self._schema(f"arguments_{number}", tool.object_schema, tool.at)))
                case Envelope():
                    body += self._envelope(part, tool, number)
                case Parameters():
                    body += self._parameters(part, tool, number)
                case Keywords(separator):
                    body.append(_Rule(self._keywords(separator, tool, number)))
        body = _merged(body)
        for before, part_ in pairwise(body):
            if isinstance(before, str) and isinstance(part_, _Rule) and part_.rule.startswith("@"):
                self.before_arguments.append(before)
        return body

    def _schema(self, name: str, schema: JSON | bool, at: str) -> str:
        if all(name != known for known, _, _ in self.schemas):
            self.schemas.append((name, schema, at))
        return f"@{name}"

    def _envelope(self, part: Envelope, tool: Tool, number: int) -> _Body:
        if part.is_text:
            raise NotExpressible(tool.at, "this checkpoint writes arguments as JSON within a string")
        body: _Body = []
        for key in part.keys:
            separator = ", " if body else "{"
            if key == part.name_key:
                body.append(f"{separator}{json.dumps(key)}: {json.dumps(tool.name)}")
            elif key == part.arguments_key:
                body.append(f"{separator}{json.dumps(key)}: ")
                body.append(_Rule(self._schema(f"arguments_{number}", tool.object_schema, tool.at)))
            elif "id" in key.lower():
                body += [f'{separator}{json.dumps(key)}: "', _Rule(f"/{Id().pattern}/"), '"']
        return [*body, "}"]

    def _parameters(self, part: Parameters, tool: Tool, number: int) -> _Body:
        """One rule per parameter, in the order of the schema."""
        schema = tool.schema
        if schema is None:
            rule = f"parameter_{number}"
            key = self.until(part.after_key, f"{rule}_key")
            value = self.until(part.after_value, f"{rule}_value")
            self.rules.append(f"{rule}: {self.literal(part.before_key)} {key} {value}")
            return [_Rule(f"{rule}*")]
        properties, required = _named_parameters(tool)
        names: list[str] = []
        for index, key in enumerate(properties):
            rule = f"parameter_{number}_{index}"
            names.append(rule if key in required else f"{rule}?")
            self.rules.append(f"{rule}: {self._parameter(part, tool, key, rule)}")
        return [_Rule(" ".join(names))] if names else []

    def _keywords(self, separator: str, tool: Tool, number: int) -> str:
        """The rule of keyword arguments in the order of the schema, with a separator between those that are there."""
        name, between = f"keywords_{number}", self.literal(separator)
        if tool.schema is None:
            value = f'({self._schema(f"value_{number}", {}, tool.at)} | "True" | "False" | "None")'
            self.rules.append(f"{name}_one: /[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {value}")
            self.rules.append(f'{name}: {name}_one ({between} {name}_one)* | ""')
            return name
        properties, required = _named_parameters(tool)
        assert isinstance(tool.schema, dict)
        keys = list(properties)
        for index, key in reversed(list(enumerate(keys))):
            at = f"{tool.at}.properties.{key}"
            if not key.isascii() or not key.isidentifier():
                raise NotExpressible(at, "this checkpoint writes parameters as keywords, which this name cannot be")
            self.before_arguments.append(f"{key}=")
            value = self._python(parameter_schema(tool.schema, key), tool.schema, f"{name}_{index}_value", at)
            follow = f"{name}_{index + 1}" if index + 1 < len(keys) else None
            for rule, begin in ((f"{name}_{index}", f"{between} "), (f"{name}_{index}_first", "")):
                rest = "" if follow is None else f" {follow}"
                written = f"{begin}{self.literal(key + '=')} {value}{rest}"
                left_out = "" if follow is None else f"{follow}{'_first' if not begin else ''}"
                self.rules.append(f"{rule}: {written}" + ("" if key in required else f" | {left_out or _NOTHING}"))
        return f"{name}_0_first" if keys else _NOTHING

    def _python(self, schema: Any, root: JSON, rule: str, at: str) -> str:
        """A value as a literal of Python: JSON, but for the words for true, false and null."""
        if isinstance(schema, dict):
            about = schema.keys() - _ABOUT_KEYS
            branches = (
                [{**schema, "type": one} for one in schema["type"]] if isinstance(schema.get("type"), list) else []
            )
            if about == {"anyOf"}:
                branches = schema["anyOf"]
            if branches:
                return f"({' | '.join(self._python(one, root, f'{rule}_{n}', at) for n, one in enumerate(branches))})"
            if about == {"type"} and schema["type"] in _PYTHON_WORDS:
                return _PYTHON_WORDS[schema["type"]]
        shared: JSON = {name: root[name] for name in _ROOT_KEYS if name in root}
        return self._schema(rule, {**shared, **schema} if isinstance(schema, dict) else schema, at)

    def _parameter(self, part: Parameters, tool: Tool, key: str, rule: str) -> str:
        assert isinstance(tool.schema, dict)
        schema = parameter_schema(tool.schema, key)
        at = f"{tool.at}.properties.{key}"
        if is_text(tool.schema, key):
            opening = self.literal(part.before_key + key + part.after_key)
            texts = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
            if texts:
                return f"{opening} ({' | '.join(map(self.literal, texts))}) {self.literal(part.after_value)}"
            unknown = sorted(schema.keys() & _STRING_KEYS)
            if unknown:
                raise NotExpressible(at, f"{unknown[0]!r} cannot be expressed where a string is written without quotes")
            return f"{opening} {self.until(part.after_value, f'{rule}_end')}"
        after_key = part.after_other_key or part.after_key
        opening = self.literal(part.before_key + key + after_key)
        if not isinstance(schema, dict) or _may_be_text(schema):
            unknown = [] if not isinstance(schema, dict) else sorted(schema.keys() - _ANY_TEXT_KEYS)
            if unknown:
                raise NotExpressible(at, f"{unknown[0]!r} cannot be expressed where a string is written without quotes")
            # A text is a string where the schema allows one, so any text is a value.
            return f"{opening} {self.until(part.after_value, f'{rule}_end')}"
        root: JSON = {name: tool.schema[name] for name in _ROOT_KEYS if name in tool.schema}
        self.before_arguments.append(part.before_key + key + after_key)
        return f"{opening} {self._schema(rule, {**root, **schema}, at)} {self.literal(part.after_value)}"

    # -- channels ---------------------------------------------------------------------------

    def channels(self, tools: Sequence[Tool], *, is_required: bool, has_constraint: bool) -> None:
        """Messages with a channel and a recipient; the last one is a call or the final text."""
        token = self.literal
        calls: list[str] = []
        for number, tool in enumerate(tools):
            arguments = self._schema(f"arguments_{number}", tool.object_schema, tool.at)
            before = (
                f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>",
                f" to=functions.{tool.name}<|channel|>commentary json<|message|>",
            )
            self.before_arguments += before
            calls.append(f"({' | '.join(map(token, before))}) {arguments}")
        final = token(_FINAL) + (f" @{CONSTRAINT}" if has_constraint else " TEXT")
        self.before_answer.append(_FINAL)
        last = [*calls, *([] if is_required and calls else [final])]
        self.rules.append(f"start: (thought {token('<|start|>assistant')})* last")
        # What is said in the channel commentary is text of the answer, which a constraint or a forced call excludes.
        kinds = ["analysis"] if has_constraint or is_required else ["analysis", "commentary"]
        self.rules.append(
            f"thought: {token('<|channel|>')} ({' | '.join(map(_string, kinds))}) "
            f"{token('<|message|>')} TEXT {token('<|end|>')}"
        )
        self.rules.append("last: " + " | ".join(last))


_NOTHING: Final = '""'
_ABOUT_KEYS: Final = frozenset(("title", "description", "default", "examples"))
_PYTHON_WORDS: Final = {"boolean": '("True" | "False")', "null": '"None"'}
_OBJECT_KEYS: Final = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "strict", "default", "examples")
) | set(_ROOT_KEYS)
_ANY_TEXT_KEYS: Final = frozenset(("type", "title", "description", "default", "examples"))
_STRING_KEYS: Final = frozenset(("pattern", "minLength", "maxLength", "format", "not", "allOf", "if"))


def _named_parameters(tool: Tool) -> tuple[JSON, Sequence[str]]:
    """The parameters of a tool and the names of those that are required. Raises NotExpressible."""
    schema = tool.schema
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not isinstance(schema, dict):
        raise NotExpressible(tool.at, "this checkpoint writes parameters one by one, and the schema names none")
    unknown = sorted(schema.keys() - _OBJECT_KEYS)
    if unknown:
        raise NotExpressible(tool.at, f"{unknown[0]!r} cannot be expressed where parameters are written one by one")
    return properties, schema.get("required") or ()


def _may_be_text(schema: JSON) -> bool:
    named = schema.get("type")
    if isinstance(named, str):
        return named == "string"
    if isinstance(named, list):
        return "string" in named
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema.get("const")]
        return any(isinstance(value, str) for value in values)
    return True


def _merged(body: Sequence[str | _Rule]) -> _Body:
    """A body whose neighbouring texts are one."""
    merged: _Body = []
    for part in body:
        last = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        else:
            merged.append(part)
    return merged


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _after(text: str | _Rule, begin: str) -> str:
    """The text without its beginning."""
    assert isinstance(text, str)
    return text.lstrip()[len(begin) :]
