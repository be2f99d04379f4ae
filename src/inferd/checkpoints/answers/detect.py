"""Which notation a checkpoint has, and whether a call that its template renders is parsed back."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from inferd.checkpoints.answers.analysis import (
    TOOL,
    TOOLS,
    Render,
    answer_of,
    call,
    call_text,
    calls_of,
    conversation,
    reasoning_of,
)
from inferd.checkpoints.answers.format import AnswerFormat, Calls, Envelope, Keywords, Parameters, Text
from inferd.checkpoints.answers.parser import AnswerParser, Parts
from inferd.checkpoints.answers.response_template import Unsupported, notation_in
from inferd.checkpoints.answers.table import CHANNELS, known_calls, known_reasoning
from inferd.checkpoints.text.chat_template import ChatTemplate
from inferd.types import JSON

_log = logging.getLogger("inferd.engine")
_ARGUMENTS: Final[tuple[JSON, ...]] = (
    {"zq_key": 'A "text" of <two>\nlines, {1}', "zq_number": -12},
    {"zq_key": "other"},
)
_CONTENT: Final = "An answer."
_REASON: Final = "A thought,\nand another."


class Detected(NamedTuple):
    """What was found in a checkpoint."""

    description: AnswerFormat | None  # None: no notation was found
    defect: str  # why what the template renders is not parsed back; empty: it is, or nothing was found
    checked: tuple[str, ...]  # what was rendered and parsed back


def detect(template: ChatTemplate, ends: Sequence[str] = (), declared: JSON | None = None) -> Detected:
    """The notation of a chat template. ``ends``: texts of the tokens that end an answer. ``declared``: the checkpoint's
    ``response_template``.

    Where the template takes arguments as text only, the template is told to give them so.
    """
    source = template.tool_source
    if declared is not None:
        try:
            reasoning, calls = notation_in(declared)
        except Unsupported as error:
            _log.info("%s; the chat template tells the notation of calls and reasoning instead.", error)
        else:
            if reasoning is not None or calls is not None:
                family = _family(calls)
                return checked(AnswerFormat(family, "response template", reasoning, calls), template.render, ends)
    if all(text in source for text in CHANNELS):
        return checked(AnswerFormat("harmony", "table", is_channels=True), template.render, ends)
    analysed = reasoning_of(template.render)
    reasoning = analysed or known_reasoning(source)
    calls = calls_of(template.render, reasoning, ends)
    if calls is None:
        template.arguments_as_text = True
        calls = calls_of(template.render, reasoning, ends)
        template.arguments_as_text = calls is not None
    known = known_calls(source)
    if calls is not None:
        described = AnswerFormat(_family(calls), "chat template", reasoning, calls)
        found = checked(described, template.render, ends)
        if known is None or (calls.trigger and not found.defect):
            return found
    if known is not None:
        family, calls = known
        return checked(AnswerFormat(family, "table", reasoning, calls), template.render, ends)
    if reasoning is None:
        return Detected(None, "", ())
    return checked(
        AnswerFormat("reasoning", "table" if analysed is None else "chat template", reasoning), template.render, ends
    )


def checked(description: AnswerFormat, render: Render, ends: Sequence[str] = ()) -> Detected:
    """Render a synthetic call, two calls and reasoning, and parse them back."""
    done: list[str] = []
    defects: list[str] = []
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    if description.calls is not None or description.is_channels:
        for name, arguments in (("a call", _ARGUMENTS[:1]), ("two calls", _ARGUMENTS)):
            calls = [call(number, each) for number, each in enumerate(arguments, 1)]
            text = call_text(render, calls, description.reasoning, ends)
            if text is None or text.count(TOOL) < len(arguments):
                continue
            parser = AnswerParser(description, tools=schemas)
            found = _joined([*parser.feed(text), *parser.finish()])
            if found.calls != list(arguments) or found.text.strip():
                defects.append(f"{name} rendered as {text!r} and parsed as {found}")
            done.append(name)
    if description.reasoning is not None or description.is_channels:
        answer = answer_of(render, conversation(content=_CONTENT, reasoning=_REASON), ends)
        if answer is not None and _REASON in answer.text:
            begin = "" if description.reasoning is None else description.reasoning.begin.strip()
            parser = AnswerParser(description, in_reasoning=begin not in answer.text)  # else the prompt opens it
            found = _joined([*parser.feed(answer.text), *parser.finish()])
            if (found.reasoning.strip(), found.text.strip()) != (_REASON, _CONTENT):
                defects.append(f"reasoning rendered as {answer.text!r} and parsed as {found}")
            done.append("reasoning")
    return Detected(description, "; ".join(defects), tuple(done))


class _Answer(NamedTuple):
    text: str
    reasoning: str
    calls: list[object]


def _joined(parts: Sequence[Parts]) -> _Answer:
    calls: dict[int, str] = {}
    for part in (piece for each in parts for piece in each.calls):
        calls[part.index] = calls.get(part.index, "") + part.arguments
    return _Answer(
        "".join(each.text for each in parts),
        "".join(each.reasoning for each in parts),
        [_decoded(text) for text in calls.values()],
    )


def described(detected: Detected) -> str:
    """The notation in words, for logs and status; empty: none was found."""
    description = detected.description
    if description is None:
        return ""
    parts: list[str] = []
    if description.is_channels:
        parts.append("calls and reasoning in channels")
    if description.calls is not None:
        parts.append(f"calls {_shape(description.calls)}")
    if description.reasoning is not None:
        parts.append(f"reasoning {description.reasoning.begin.strip()}")
    told = f"{description.family} ({', '.join(parts)}; from the {description.source})"
    if detected.defect:
        return f"{told}, MISMATCH: {detected.defect}"
    return f"{told}, {' and '.join(detected.checked)} parsed back" if detected.checked else f"{told}, not rendered"


def is_open(description: AnswerFormat, prompt: str) -> bool:
    """Whether a prompt has opened the reasoning, so that the answer begins in it."""
    reasoning = description.reasoning
    return reasoning is not None and prompt.rstrip().endswith(reasoning.begin.strip())


def is_closed(description: AnswerFormat, prompt: str) -> bool:
    """Whether a prompt has closed the reasoning, so that the answer begins after it."""
    reasoning = description.reasoning
    return reasoning is not None and prompt.rstrip().endswith(reasoning.end.strip())


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shape(calls: Calls) -> str:
    return calls.trigger or ("as a list alone" if calls.is_list else "as a JSON object alone")


def _family(calls: Calls | None) -> str:
    if calls is None:
        return "reasoning"
    if any(isinstance(part, Parameters) for part in calls.call):
        return "tagged parameters"
    if any(isinstance(part, Keywords) for part in calls.call):
        return "pythonic"
    if any(isinstance(part, Envelope) for part in calls.call):
        is_hermes = isinstance(calls.call[0], Text) and calls.trigger == "<tool_call>"
        return "hermes" if is_hermes else "json list" if calls.is_list else "json object"
    return "named json"
