"""Masks work over the tokens of every kind of tokenizer that can write the text; another one is named in the refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
import transformers
from tests.checkpoints.answers.test_detect import CASES, THINKING, TURNS
from tests.checkpoints.text.conftest import tokenizer_folders  # noqa: F401  (a fixture)
from tests.engine.deltas import deltas, joined
from tests.engine.test_forced_calls import SCHEMA, SCHEMAS, TOOLS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from inferd.answer_form import AnswerForm, Choices, JsonSchema, ToolUse
from inferd.checkpoints.answers.format import CHANNEL_MARKERS
from inferd.config import KVCacheConfig, ModelConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.errors import InvalidRequest
from inferd.types import Chat, Delta, GenerateRequest, SamplingParams

HERMES = TURNS.replace("CALLS", CASES[0][0]).replace("THINK", THINKING)
CHANNELS = """
{%- for m in messages %}{% if m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- else %}{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>
{%- endif %}{% for c in m.tool_calls %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json
{{- '<|message|>' }}{{ c.function.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>
{{- m.content }}<|end|>{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
CALL = AnswerForm(tools=ToolUse(mode="required", is_parallel=False))
ANSWER = AnswerForm(constraint=JsonSchema(schema=SCHEMA, at="response_format"))


def load(folder: Path, template: str) -> Engine:
    """A random model beside a tokenizer."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.token_to_id(settings["bos_token"]),
        eos_token_id=tokenizer.token_to_id(settings["eos_token"]),
    )
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    config = ModelConfig(
        source=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        kv_cache=KVCacheConfig(block_size=16, num_blocks=128),
    )
    engine = create_backend("m", config, lambda phase, done, total: None)
    assert "MISMATCH" not in engine.info.answer_format
    return engine


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def unigram(folder: Path) -> Path:
    """Metaspace without bytes, with every character of ASCII."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    ascii = [chr(code) for code in (10, *range(33, 127))]
    trainer = trainers.UnigramTrainer(
        vocab_size=160,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=ascii,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the city of Paris has the weather of Rome", " ".join(ascii)] * 4, trainer)
    return saved(tokenizer, folder)


def channels(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["commentary analysis final functions assistant json"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CHANNEL_MARKERS])
    return saved(tokenizer, folder)


@pytest.fixture(scope="module", params=["byte_level", "llama", "gemma", "unigram"])
def engine(
    request: pytest.FixtureRequest,
    tokenizer_folders: dict[str, Path],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "unigram":
        unigram(folder)
    else:
        shutil.copytree(tokenizer_folders[request.param], folder, dirs_exist_ok=True)
    loaded = load(folder, HERMES)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loaded = load(channels(tmp_path_factory.mktemp("harmony")), CHANNELS)
    assert loaded.info.answer_format.startswith("harmony (calls and reasoning in channels; from the table)")
    yield loaded
    loaded.close()


def ask(engine: Engine, form: AnswerForm, seed: int = 0, *, tokens: int = 600) -> list[Delta]:
    prompt = Chat(messages=[{"role": "user", "content": "weather"}], tools=None if form.tools is None else TOOLS)
    sampling = SamplingParams(temperature=1.5, seed=seed, max_tokens=tokens)
    explicit = ("temperature", "seed", "max_tokens")
    return deltas(
        engine, GenerateRequest(id="r", model="m", prompt=prompt, sampling=sampling, explicit=explicit, form=form)
    )


def check_call(parts: list[Delta]) -> None:
    text, _, ((name, arguments),) = joined(parts)
    assert (text, parts[-1].finish_reason) == ("", "stop")
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_a_required_call_is_valid_whatever_the_tokens_are(engine: Engine) -> None:
    for seed in range(6):
        parts = ask(engine, AnswerForm(tools=CALL.tools, splits_reasoning=False), seed)
        check_call(parts)


def test_an_answer_satisfies_its_schema_whatever_the_tokens_are(engine: Engine) -> None:
    form = AnswerForm(constraint=ANSWER.constraint, splits_reasoning=False)
    for seed in range(6):
        parts = ask(engine, form, seed)
        assert parts[-1].finish_reason == "stop"
        jsonschema.validate(json.loads(joined(parts)[0]), SCHEMA)


@pytest.mark.parametrize("kind", ["wordpiece", "words"])
def test_a_tokenizer_that_cannot_write_the_text_is_told_before_the_answer(
    kind: str,
    tokenizer_folders: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    shutil.copytree(tokenizer_folders[kind], tmp_path, dirs_exist_ok=True)
    engine = load(tmp_path, HERMES)
    for form, field in ((CALL, "tools"), (ANSWER, "response_format")):
        with pytest.raises(InvalidRequest, match="no text that the tokenizer of this model can write") as caught:
            ask(engine, form)
        assert caught.value.param == field
    engine.close()


@pytest.mark.parametrize("texts", [("the", "the ZZ"), ("the over ZZ", "the over {{")])
def test_a_tokenizer_without_a_letter_is_told_where_the_answer_needs_it(
    texts: tuple[str, str],
    tokenizer_folders: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    shutil.copytree(tokenizer_folders["unigram"], tmp_path, dirs_exist_ok=True)
    engine = load(tmp_path, HERMES)
    form = AnswerForm(constraint=Choices(texts=texts, at="c"), splits_reasoning=False)
    failures = set()
    for seed in range(8):
        prompt = Chat(messages=[{"role": "user", "content": "x"}])
        sampling = SamplingParams(temperature=1.5, seed=seed, max_tokens=20)
        request = GenerateRequest(id="r", model="m", prompt=prompt, sampling=sampling, form=form)
        engine.add(engine.prepare(request), 0.0)
        while engine.due(0.0) is not None:
            for output in engine.step(0.0)[0]:
                if output.end is not None and output.end.failure is not None:
                    failures.add((output.end.failure.kind, output.end.failure.code))
    assert failures == {("invalid_request", "unsupported_schema")}
    engine.close()


def test_calls_and_answers_in_channels_are_forced_behind_their_reasoning(harmony: Engine) -> None:
    called = answered = reasoned = 0
    for seed in range(8):
        parts = ask(harmony, CALL, seed, tokens=900)
        text, reasoning, calls = joined(parts)
        assert text == ""
        reasoned += bool(reasoning)
        if parts[-1].finish_reason == "stop":
            ((name, arguments),) = calls
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            called += 1
        parts = ask(harmony, ANSWER, seed, tokens=900)
        if parts[-1].finish_reason == "stop":
            jsonschema.validate(json.loads(joined(parts)[0]), SCHEMA)
            answered += 1
    assert min(called, answered, reasoned) > 0


def test_a_call_in_channels_that_is_free_to_begin_is_valid(harmony: Engine) -> None:
    called = 0
    for seed in range(16):
        parts = ask(harmony, AnswerForm(tools=ToolUse()), seed, tokens=400)
        if parts[-1].finish_reason == "stop":
            for name, arguments in joined(parts)[2]:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
                called += 1
    assert called
