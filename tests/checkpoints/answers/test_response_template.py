"""A declared response template is read as transformers reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from inferd.checkpoints.answers.detect import detect
from inferd.checkpoints.answers.format import AnswerFormat
from inferd.checkpoints.answers.parser import AnswerParser
from inferd.checkpoints.answers.response_template import Unsupported, notation_in
from inferd.checkpoints.text.chat_template import ChatTemplate

THINKING = {"open": "<think>", "close": "</think>"}
TEMPLATES: dict[str, dict[str, Any]] = {
    "json": {
        "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "named json": {
        "open_pattern": r"<function=(?P<name>[^>]+)>", "close": "</function>", "repeats": True, "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    "list": {
        "open": "[TOOL_CALLS]", "close": "[/TOOL_CALLS]", "content": "json", "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
    },
    "tags": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>", "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True, "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}  # fmt: skip
CALLS = {
    "json": '<tool_call>\n{{"name": "f", "arguments": {0}}}\n</tool_call>\n',
    "named json": "<function=f>{0}</function>",
    "tags": "<tool_call>\n<function=f>\n<parameter=x>\n{1}\n</parameter>\n</function>\n</tool_call>\n",
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
}


def spec(name: str) -> dict[str, Any]:
    return {
        "version": 1,
        "start_anchor": "<|assistant|>",
        "defaults": {"role": "assistant"},
        "fields": {"thinking": THINKING, "content": {"repeats": True, "join": ""}, "tool_calls": TEMPLATES[name]},
    }


def parsed(name: str, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    reasoning, calls = notation_in(spec(name))
    parser = AnswerParser(
        AnswerFormat("test", "response template", reasoning, calls),
        tools={"f": TOOL["function"]["parameters"]},  # type: ignore[index]
    )
    parts = [*parser.feed(text), *parser.finish()]
    found: list[tuple[str, str]] = []
    for part in (piece for each in parts for piece in each.calls):
        if part.name is not None:
            found.append((part.name, ""))
        found[-1] = (found[-1][0], found[-1][1] + part.arguments)
    decoded = [(called, json.loads(arguments)) for called, arguments in found]
    return "".join(p.text for p in parts).strip(), "".join(p.reasoning for p in parts).strip(), decoded


def oracle(name: str, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    message = parse_response(text, spec(name), prefix="<|assistant|>", tools=[TOOL])
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return (message.get("content") or "").strip(), (message.get("thinking") or "").strip(), calls


words = st.text(
    st.characters(codec="utf-8", exclude_characters="<>[]{}\x01\x02", exclude_categories=["Cc", "Zs", "Zl"])
)


@pytest.mark.parametrize("name", CALLS)
@given(reasoning=words, content=words, values=st.lists(words, max_size=3))
def test_answers_are_parsed_as_transformers_parses_them(
    name: str, reasoning: str, content: str, values: list[str]
) -> None:
    calls = [CALLS[name].format(json.dumps({"x": value}), value) for value in values]
    text = (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + content + "\n" * bool(calls) + "".join(calls)
    assert parsed(name, text) == oracle(name, text)


def test_a_list_of_calls_is_parsed_as_transformers_parses_it() -> None:
    text = 'Hi [TOOL_CALLS][{"tool_name": "f", "parameters": {"x": "a"}}, {"tool_name": "f", "parameters": {}}][/TOOL_CALLS]'
    assert parsed("list", text) == oracle("list", text) == ("Hi", "", [("f", {"x": "a"}), ("f", {})])


@pytest.mark.parametrize(
    "field",
    [
        {"open_pattern": r"<(?:call|tool)>", "close": "</call>", "content": "json"},
        {"open": "<call>", "content": "json", "content_args": {"unquoted_keys": True}},
        {"open": "<call>", "content": "kv-lines"},
        {"close": "</call>", "content": "json"},
        {"open": "<call>", "content": "json", "transform": {"function": {"name": "fixed", "arguments": "{content}"}}},
    ],
)
def test_a_region_without_a_description_is_left_to_the_chat_template(field: dict[str, Any]) -> None:
    declared = {"fields": {"tool_calls": field}}
    with pytest.raises(Unsupported):
        notation_in(declared)
    assert detect(ChatTemplate({"default": "{{ messages[0].content }}"}, {}, "test"), (), declared).description is None


def test_what_is_declared_comes_before_what_the_chat_template_shows() -> None:
    found = detect(ChatTemplate({"default": "{{ messages[0].content }}"}, {}, "test"), (), spec("tags"))
    assert found.description is not None
    assert found.description.source == "response template"
