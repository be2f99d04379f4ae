"""A notation bound to one checkpoint's tokenizer: which parser an answer gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferd.answer_form import AnswerForm, ToolUse
from inferd.checkpoints.answers.detect import described, detect, is_closed, is_open
from inferd.checkpoints.answers.format import AnswerFormat
from inferd.checkpoints.answers.grammar import Tool
from inferd.checkpoints.answers.parser import AnswerParser
from inferd.checkpoints.answers.response_template import read_response_template
from inferd.checkpoints.generation_config import load_generation_defaults
from inferd.checkpoints.text.chat_template import ChatTemplate
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.types import JSON

_FINAL_CHANNEL = "<|channel|>final<|message|>"
_CLOSED_CHANNEL = f"<|end|><|start|>assistant{_FINAL_CHANNEL}"
_TAIL_TOKENS = 16  # of a prompt, in which the beginning of reasoning is looked for


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the answers to one request are parsed."""

    notation: AnswerFormat
    tools: Mapping[str, Any] | None  # name -> schema of the arguments; None: calls stay text
    only_one: bool
    splits_reasoning: bool
    in_reasoning: bool
    may_reason: bool  # False: the prompt has closed the reasoning
    budget: int | None  # tokens of reasoning, after which it is closed
    close_ids: tuple[int, ...]  # the tokens that close it
    shown_ids: frozenset[int]  # special tokens of the notation, which have a text here

    def parser(self) -> AnswerParser:
        """A parser for one choice."""
        return AnswerParser(
            self.notation,
            tools=self.tools,
            only_one=self.only_one,
            splits_reasoning=self.splits_reasoning,
            in_reasoning=self.in_reasoning,
        )


class Notation:
    """The notation of a loaded checkpoint. ``told`` is its description in words."""

    def __init__(self, description: AnswerFormat, tokenizer: Tokenizer, told: str = "", defect: str = "") -> None:
        self.description = description
        self.told = told
        self.defect = defect  # why a rendered call is not parsed back; empty: it is
        self._tokenizer = tokenizer
        self.special_ids = {tokenizer.token_string(id): id for id in sorted(tokenizer.special_ids)}
        markers = description.markers
        self._shown_ids = frozenset(
            id for text, id in self.special_ids.items() if any(text in marker for marker in markers)
        )

    def parsing(self, form: AnswerForm, tools: Sequence[JSON] | None, prompt_ids: Sequence[int]) -> Parsing | None:
        """How the answers to a request are parsed; None: they are plain text."""
        description = self.description
        schemas = None
        if form.tools is not None and (description.calls is not None or description.is_channels):
            schemas = tool_schemas(tools or (), form.tools.names)
        splits = form.splits_reasoning and (description.reasoning is not None or description.is_channels)
        if schemas is None and not splits:
            return None
        tail = self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        return Parsing(
            description,
            schemas,
            form.tools is not None and not form.tools.is_parallel,
            splits,
            splits and is_open(description, tail),
            splits and not is_closed(description, tail),
            form.reasoning_budget if splits else None,
            self._close_ids() if splits and form.reasoning_budget is not None else (),
            self._shown_ids,
        )

    def opening(self, prompt_ids: Sequence[int]) -> str:
        """The text that precedes the text of an answer without reasoning: what closes the reasoning that the prompt has
        opened, or names the channel of the answer."""
        description = self.description
        if description.is_channels:
            return _FINAL_CHANNEL
        tail = self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        return description.reasoning.end if description.reasoning and is_open(description, tail) else ""

    def _close_ids(self) -> tuple[int, ...]:
        reasoning = self.description.reasoning
        text = _CLOSED_CHANNEL if reasoning is None else reasoning.end
        return tuple(self._tokenizer.encode(text, False))


def notation_of(
    folder: Path, template: ChatTemplate, tokenizer: Tokenizer, eos_ids: Collection[int]
) -> Notation | None:
    """The notation of a checkpoint; None: neither its response template nor its chat template shows one."""
    ends = [tokenizer.token_string(id) for id in sorted(eos_ids)]
    detected = detect(template, ends, read_response_template(folder))
    if detected.description is None:
        return None
    return Notation(detected.description, tokenizer, described(detected), detected.defect)


def told_of(folder: Path, override: Path | None) -> tuple[str, str]:
    """The notation of a checkpoint's folder in words, and its defect; empty where there is none.

    ``override``: the file with another chat template. Raises ModelLoadError.
    """
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer, override)
    if template is None:
        return "", ""
    ends = set(load_generation_defaults(folder).eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    notation = notation_of(folder, template, tokenizer, ends)
    return ("", "") if notation is None else (notation.told, notation.defect)


def callable_tools(tools: Sequence[JSON], use: ToolUse) -> list[Tool]:
    """The tools that may be called."""
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if not use.names or function["name"] in use.names:
            is_bound = use.mode == "required" or function.get("strict") is True
            schema = function.get("parameters") or {"type": "object"}
            at = use.places[index] if use.places else f"tools[{index}].function.parameters"
            found.append(Tool(function["name"], schema, at, is_bound))
    return found


def tool_schemas(tools: Sequence[JSON], names: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON Schema of each tool's arguments, by the tool's name. ``names``: only these; empty: all."""
    functions = [tool["function"] for tool in tools]
    return {
        function["name"]: function.get("parameters") or {"type": "object"}
        for function in functions
        if not names or function["name"] in names
    }
