"""The form that a request demands of its answer: a constraint, tool calls, reasoning. Part of the types between
processes.

The worker enforces the form, because it knows the tokenizer and the checkpoint's notation of calls and reasoning. The
gateway reads the form from a dialect's fields and writes the parts of an answer (``inferd.types.Delta``) in that
dialect. A request without a form (``None``) gets the plain text of the model.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

JSON = dict[str, Any]


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, tag="json_schema", omit_defaults=True):
    """The answer is one JSON value that is valid against a schema (JSON Schema, draft 2020-12 unless it names another).

    ``at`` is the field of the request that holds the schema, for messages: ``response_format.json_schema.schema``.
    """

    schema: JSON | bool
    at: str = "constraint"
    # A regular expression of the white space between two parts of the JSON text; None: up to eight characters, empty:
    # there is none.
    whitespace: str | None = None


class Regex(msgspec.Struct, frozen=True, kw_only=True, tag="regex", omit_defaults=True):
    """The whole answer matches a regular expression (the syntax of Rust's ``regex`` crate, without look-around)."""

    pattern: str
    at: str = "constraint"


class Choices(msgspec.Struct, frozen=True, kw_only=True, tag="choices", omit_defaults=True):
    """The answer is one of these texts."""

    texts: tuple[str, ...]
    at: str = "constraint"


class Grammar(msgspec.Struct, frozen=True, kw_only=True, tag="grammar", omit_defaults=True):
    """The answer is a sentence of a context-free grammar: Lark with llguidance's extensions, or llama.cpp's GBNF."""

    text: str
    syntax: Literal["lark", "gbnf"]
    at: str = "constraint"


class TaggedStructure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Text between ``begin`` and ``end`` that is one JSON value, valid against a schema."""

    begin: str
    schema: JSON | bool
    end: str


class TaggedText(msgspec.Struct, frozen=True, kw_only=True, tag="tagged_text", omit_defaults=True):
    """Free text, in which one of the structures begins wherever one of the triggers occurs (vLLM's structural tag)."""

    structures: tuple[TaggedStructure, ...]
    triggers: tuple[str, ...]
    at: str = "constraint"


Constraint = JsonSchema | Regex | Choices | Grammar | TaggedText


class ToolUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The calls that an answer may or must have. The tools are those of the request's ``Chat``.

    A call is constrained from the moment it begins: its name is that of a tool, its arguments are valid against the
    tool's ``parameters``.
    """

    mode: Literal["auto", "required"] = "auto"  # required: at least one call and no other text
    names: tuple[str, ...] = ()  # only these tools may be called; empty: all
    is_parallel: bool = True  # False: at most one call
    # The fields of the request that hold the schemas of the tools, in their order, for messages; empty: as in OpenAI's
    # chats, tools[i].function.parameters.
    places: tuple[str, ...] = ()


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of an answer. Reasoning is free text before the rest; a constraint begins where the reasoning ends."""

    constraint: Constraint | None = None
    tools: ToolUse | None = None  # None: the answer has no calls, and text that looks like one stays text
    splits_reasoning: bool = True  # False: reasoning stays in the text, with its tags
    fit: bool = False  # the answer is complete within max_tokens; only where something constrains it
    reasoning_budget: int | None = None  # tokens of reasoning, after which it is closed; None: no limit but max_tokens

    @property
    def may_be_any_text(self) -> bool:
        """Whether nothing says what the answer must be."""
        return self.constraint is None and (self.tools is None or self.tools.mode != "required")
