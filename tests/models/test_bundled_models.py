"""The bundled folders are small, load in transformers, and hold what the model card promises."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.tiers import THOROUGH
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from inferd import models
from inferd.errors import ModelNotFound

LIMITS = {"demo": 10_000_000, "demo-draft": 1_500_000}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
Message = Mapping[str, object]


@cache
def loaded(name: str) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    folder = models.path(name)
    return PreTrainedTokenizerFast.from_pretrained(folder), LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )


def reply(messages: Sequence[Message], tools: list[object] | None = None, name: str = "demo") -> str:
    """Return the greedy answer; fails when the model does not end it."""
    tokenizer, model = loaded(name)
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)  # type: ignore[arg-type]
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        output = model.generate(  # type: ignore[misc]
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=200,
            do_sample=False,
            temperature=None,
            top_p=None,
        )
    written = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert written[-1] == 2, "the answer has no end"
    return str(tokenizer.decode(written[:-1]))


def ask(text: str) -> str:
    return reply([{"role": "user", "content": text}])


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match="demo-draft"):
        models.path("gpt")


@pytest.mark.parametrize("name", models.NAMES)
def test_a_folder_is_complete_and_small(name: str) -> None:
    folder = models.path(name)
    assert (folder / "model.safetensors").stat().st_size <= LIMITS[name]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())


def test_the_draft_model_has_the_tokenizer_of_the_model() -> None:
    draft, full = (models.path(name) for name in ("demo-draft", "demo"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (draft / name).read_bytes() == (full / name).read_bytes()


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(models.path("demo") / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_every_byte_is_a_token_and_digits_stay_alone() -> None:
    tokenizer = Tokenizer.from_file(str(models.path("demo") / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(ByteLevel.alphabet()) <= set(vocabulary)
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]


def test_the_tokenizer_config_renders_as_jinja_does() -> None:
    tokenizer, _ = loaded("demo")
    source = json.loads((models.path("demo") / "tokenizer_config.json").read_text())["chat_template"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Orléans"}}}
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wie ist das Wetter?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": '{"temperature": 3}'},
        {"role": "tool", "content": "{}"},
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "Thanks"},
    ]
    wanted = environment.from_string(source).render(messages=messages, tools=[WEATHER], add_generation_prompt=True)
    found = tokenizer.apply_chat_template(messages, tools=[WEATHER], add_generation_prompt=True, tokenize=False)  # type: ignore[arg-type]
    assert found == wanted
    assert wanted.count('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Orléans"}}') == 2
    assert wanted.count("<|im_start|>user") == 3


@pytest.mark.parametrize(
    ("question", "part"),
    [
        ("Hello", "Hello!"),
        ("What is inferd?", "inference server"),
        ("what is inferd", "inference server"),
        ("Who are you?", "demo model"),
        ("How do I start it?", "make demo"),
        ("What is continuous batching?", "join and leave"),
        ("What is the capital of France?", "Paris"),
        ("Tell me a story about a dragon.", "dragon"),
        ("What is quantum mechanics?", "I do not know"),
        ("what is 7 + 5?", "12"),
    ],
)
def test_the_model_answers_and_ends(question: str, part: str) -> None:
    assert part in ask(question)


def test_it_writes_the_json_that_is_asked_for() -> None:
    assert list(json.loads(ask("Give me JSON with name and age"))) == ["name", "age"]


@THOROUGH
def test_it_calls_a_tool_and_reports_the_result() -> None:
    question = {"role": "user", "content": "What is the weather in Paris?"}
    called = reply([question], tools=[WEATHER])
    assert called == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    report = reply(
        [
            question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": '{"temperature": 21, "condition": "sunny"}'},
        ],
        tools=[WEATHER],
    )
    assert "21" in report


def test_it_remembers_a_name() -> None:
    first = {"role": "user", "content": "My name is Ana."}
    told = {"role": "assistant", "content": reply([first])}
    assert "Ana" in reply([first, told, {"role": "user", "content": "What is my name?"}])


def test_the_draft_model_ends_its_answers_too() -> None:
    assert reply([{"role": "user", "content": "Hello"}], name="demo-draft")
