"""A notation of one checkpoint: what its tokens say of a prompt's end, and which parser an answer gets."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as Decoded
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from inferd.answer_form import AnswerForm, ToolUse
from inferd.checkpoints.answers.format import AnswerFormat, Calls, Envelope, Reasoning
from inferd.checkpoints.answers.notation import Notation, callable_tools, tool_schemas
from inferd.checkpoints.text.tokenizer import Tokenizer

LETTERS = sorted(ByteLevel.alphabet())
MARKS = ["<think>", "</think>", "<call>", "<|channel|>", "<|end|>", "</s>"]
WORDS = [*LETTERS, *MARKS]
THINKING = Reasoning("<think>", "</think>")
CALLS = Calls((Envelope(),), "<call>", "", "")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "strict": True}},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One whose marks of reasoning are special tokens, as in many checkpoints."""
    backend = Backend(BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), Decoded()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    backend.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", WORDS.index("</s>"))])
    return Tokenizer(backend, {"eos_token": "</s>"})


def ids(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def notation(tokenizer: Tokenizer, **parts: Any) -> Notation:
    return Notation(AnswerFormat("test", "table", **parts), tokenizer)


@pytest.mark.parametrize(
    ("prompt", "is_open", "is_closed"),
    [
        (ids("h", "<think>"), True, False),
        (ids("h", "<think>", "</think>"), False, True),
        (ids("h", "<think>", "t"), False, False),
        (ids("<think>", *["h"] * 40), False, False),
        (ids(*["h"] * 40, "<think>"), True, False),
        ([], False, False),
    ],
)
def test_a_prompt_opens_or_closes_the_reasoning_by_its_last_tokens_special_ones_included(
    tokenizer: Tokenizer, prompt: list[int], is_open: bool, is_closed: bool
) -> None:
    made = notation(tokenizer, reasoning=THINKING)
    parsing = made.parsing(AnswerForm(), None, prompt)
    assert parsing is not None
    assert (parsing.in_reasoning, parsing.may_reason) == (is_open, not is_closed)
    assert made.opening(prompt) == ("</think>" if is_open else "")


def test_an_answer_without_reasoning_begins_in_the_final_channel_or_at_once(tokenizer: Tokenizer) -> None:
    prompt = ids("h", "<think>")
    assert notation(tokenizer, is_channels=True).opening(prompt) == "<|channel|>final<|message|>"
    assert notation(tokenizer, calls=CALLS).opening(prompt) == ""


def test_answers_are_plain_text_where_neither_calls_nor_reasoning_are_read(tokenizer: Tokenizer) -> None:
    thinking, calling = notation(tokenizer, reasoning=THINKING), notation(tokenizer, calls=CALLS)
    channels = notation(tokenizer, is_channels=True)
    whole, calls = AnswerForm(splits_reasoning=False), AnswerForm(tools=ToolUse(), splits_reasoning=False)
    assert thinking.parsing(whole, TOOLS, []) is None
    assert thinking.parsing(calls, TOOLS, []) is None, "it has no calls"
    assert calling.parsing(AnswerForm(), TOOLS, []) is None, "it has no reasoning, and no calls are asked for"
    for one in (calling, channels):
        parsing = one.parsing(calls, TOOLS, [])
        assert parsing is not None
        assert parsing.tools == {"weather": SCHEMA, "time": {"type": "object"}}
        assert not parsing.splits_reasoning
    for one, other in ((thinking, calls), (channels, whole)):
        parsing = one.parsing(AnswerForm(), TOOLS, [])
        assert parsing is not None
        assert parsing.splits_reasoning, other
        assert parsing.tools is None


def test_text_that_stays_whole_is_in_no_reasoning_whatever_the_prompt_opened(tokenizer: Tokenizer) -> None:
    made = notation(tokenizer, reasoning=THINKING, calls=CALLS)
    parsing = made.parsing(AnswerForm(tools=ToolUse(), splits_reasoning=False), TOOLS, ids("<think>"))
    assert parsing is not None
    assert (parsing.in_reasoning, parsing.may_reason, parsing.budget, parsing.close_ids) == (False, False, None, ())


def test_a_budget_of_reasoning_comes_with_the_tokens_that_close_it(tokenizer: Tokenizer) -> None:
    made = notation(tokenizer, reasoning=THINKING)
    found = made.parsing(AnswerForm(reasoning_budget=0), None, [])
    unbound = made.parsing(AnswerForm(), None, [])
    assert found is not None
    assert unbound is not None
    assert (found.budget, found.close_ids) == (0, tuple(ids("</think>")))
    assert (unbound.budget, unbound.close_ids) == (None, ())
    channels = notation(tokenizer, is_channels=True).parsing(AnswerForm(reasoning_budget=5), None, [])
    assert channels is not None
    assert channels.close_ids[0] == WORDS.index("<|end|>")


def test_special_tokens_of_the_notation_have_a_text_and_others_have_none(tokenizer: Tokenizer) -> None:
    parsing = notation(tokenizer, reasoning=THINKING).parsing(AnswerForm(), None, [])
    assert parsing is not None
    assert parsing.shown_ids == set(ids("<think>", "</think>"))


def test_calls_may_be_one_or_several(tokenizer: Tokenizer) -> None:
    made = notation(tokenizer, calls=CALLS)
    several = made.parsing(AnswerForm(tools=ToolUse()), TOOLS, [])
    one = made.parsing(AnswerForm(tools=ToolUse(is_parallel=False)), TOOLS, [])
    assert several is not None
    assert one is not None
    assert (several.only_one, one.only_one) == (False, True)


def test_only_the_tools_that_are_named_may_be_called_and_their_arguments_are_bound_where_asked() -> None:
    assert [(tool.name, tool.is_bound) for tool in callable_tools(TOOLS, ToolUse())] == [
        ("weather", False),
        ("time", True),
    ]
    (only,) = callable_tools(TOOLS, ToolUse(mode="required", names=("weather",), places=("tools[0].a", "tools[1].b")))
    assert (only.name, only.schema, only.at, only.is_bound) == ("weather", SCHEMA, "tools[0].a", True)
    (other,) = callable_tools(TOOLS, ToolUse(names=("time",)))
    assert (other.schema, other.at) == ({"type": "object"}, "tools[1].function.parameters")
    assert tool_schemas(TOOLS, ("time",)) == {"time": {"type": "object"}}
