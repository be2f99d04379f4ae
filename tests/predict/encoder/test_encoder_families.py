"""Every family gives what transformers gives, and a batch what its texts give alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.predict.encoder.tiny_encoders import SIZES, VOCABULARY, write_encoder

from inferd.config import ModelConfig
from inferd.predict.encoder.load import load_text_model
from inferd.predict.runtime import Item, Result
from inferd.predict.runtimes import encoder
from inferd.predict.runtimes.encoder import EncoderRuntime

TEXTS = [
    "the cat sits outside",
    "dogs",
    "a king plays in the garden, and the dogs play outside. Is that all? No!",
    "",
    "Paris",
    "the dog sits outside",
]
PAIRS = [("the cat", "sits outside"), ("a king?", "plays in the garden of Berlin, all day"), ("x", "y")]
ENCODERS = ["BertModel", "RobertaModel", "XLMRobertaModel", "MPNetModel", "DistilBertModel", "ModernBertModel"]
DECODERS = ["Qwen3Model", "LlamaModel"]
CLASSIFIERS = [name.replace("Model", "ForSequenceClassification") for name in ENCODERS]
TAGGERS = [name.replace("Model", "ForTokenClassification") for name in ENCODERS]


def load(folder: Path, **settings: Any) -> EncoderRuntime:
    settings = {"dtype": "float32", "device": "cpu", "threads": 1, **settings}
    return encoder.load("tiny", folder, ModelConfig(source=str(folder), **settings), lambda *_: None)


def texts(values: list[str]) -> npt.NDArray[np.object_]:
    made = np.empty(len(values), dtype=np.object_)
    made[:] = [value.encode() for value in values]
    return made


def ask(runtime: EncoderRuntime, *questions: dict[str, list[str]], **parameters: object) -> list[Result]:
    items = []
    for number, question in enumerate(questions):
        inputs = {name: texts(values) for name, values in question.items()}
        rows = len(next(iter(inputs.values())))
        items.append(Item(request_id=str(number), inputs=inputs, rows=rows, parameters=parameters))
        runtime.prepare(items[-1])
    results = []
    for result in runtime.predict(items):
        assert isinstance(result, Result)
        results.append(result)
    return results


def oracle(folder: Path, kind: str = "AutoModel") -> tuple[Any, Any]:
    make_model: Any = getattr(transformers, kind)
    make_tokenizer: Any = transformers.PreTrainedTokenizerFast
    model = make_model.from_pretrained(folder, attn_implementation="eager").eval()
    return model, make_tokenizer.from_pretrained(folder)


def hidden_states(folder: Path, text: str) -> torch.Tensor:
    model, tokenizer = oracle(folder)
    with torch.no_grad():
        hidden: torch.Tensor = model(input_ids=tokenizer(text, return_tensors="pt").input_ids).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("architecture", [*ENCODERS, *DECODERS])
def test_vectors_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    folder = write_encoder(tmp_path, architecture)
    runtime = load(folder, options={"normalize": False})
    (result,) = ask(runtime, {"text": TEXTS})
    for text, vector in zip(TEXTS, result.outputs["embedding"], strict=True):
        hidden = hidden_states(folder, text)
        expected = hidden[-1] if architecture in DECODERS else hidden.mean(0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_a_decoders_head_that_writes_text_is_not_loaded(tmp_path: Path) -> None:
    """Of a checkpoint that was saved with it."""
    folder = write_encoder(tmp_path, "Qwen3Model")
    plain = load_text_model(folder, device=torch.device("cpu"), dtype="float32").num_parameters
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.randn(len(VOCABULARY), SIZES["hidden_size"])
    save_file(tensors, path, {"format": "pt"})
    assert load_text_model(folder, device=torch.device("cpu"), dtype="float32").num_parameters == plain


@pytest.mark.parametrize("architecture", [*CLASSIFIERS, "Qwen3ForSequenceClassification"])
@pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification"])
def test_classes_are_those_of_transformers(tmp_path: Path, architecture: str, problem_type: str) -> None:
    folder = write_encoder(tmp_path, architecture, labels=3, problem_type=problem_type)
    model, tokenizer = oracle(folder, "AutoModelForSequenceClassification")
    runtime = load(folder)
    (result,) = ask(runtime, {"text": TEXTS})
    (raw,) = ask(runtime, {"text": TEXTS}, raw_scores=True)
    for i, text in enumerate(TEXTS):
        with torch.no_grad():
            logits = model(input_ids=tokenizer(text, return_tensors="pt").input_ids).logits[0]
        expected = logits.softmax(-1) if problem_type.startswith("single") else logits.sigmoid()
        np.testing.assert_allclose(raw.outputs["probabilities"][i], logits.numpy(), atol=1e-4)
        np.testing.assert_allclose(result.outputs["probabilities"][i], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_cross_encoder_reads_pairs_as_transformers_does(tmp_path: Path, architecture: str) -> None:
    folder = write_encoder(tmp_path, architecture, labels=1)
    model, tokenizer = oracle(folder, "AutoModelForSequenceClassification")
    has_types = getattr(model.config, "type_vocab_size", 0) > 1
    queries, documents = [list(side) for side in zip(*PAIRS, strict=True)]
    (result,) = ask(load(folder), {"query": queries, "text": documents})
    for pair, score in zip(PAIRS, result.outputs["score"], strict=True):
        read = tokenizer(*pair, return_tensors="pt", return_token_type_ids=True)
        kinds = {"token_type_ids": read.token_type_ids} if has_types else {}
        with torch.no_grad():
            expected = model(input_ids=read.input_ids, **kinds).logits[0, 0].sigmoid()
        assert float(score) == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("architecture", TAGGERS)
def test_labels_of_tokens_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    labels = {0: "O", 1: "B-ANIMAL", 2: "I-ANIMAL", 3: "B-PLACE", 4: "I-PLACE"}
    folder = write_encoder(tmp_path, architecture, id2label=labels)
    model, tokenizer = oracle(folder, "AutoModelForTokenClassification")
    make_pipeline: Any = transformers.pipeline
    runtime = load(folder)
    for strategy in ("none", "simple"):
        oracle_of = make_pipeline("token-classification", model, tokenizer=tokenizer, aggregation_strategy=strategy)
        (result,) = ask(runtime, {"text": TEXTS}, aggregation_strategy=strategy)
        for text, found in zip(TEXTS, result.outputs["entities"], strict=True):
            entities = json.loads(found)
            expected = oracle_of(text)
            assert len(entities) == len(expected)
            for mine, other in zip(entities, expected, strict=True):
                assert mine["score"] == pytest.approx(float(other["score"]), abs=1e-4)
                same = ("start", "end", *(("entity", "index") if strategy == "none" else ("entity_group",)))
                assert [mine[key] for key in same] == [other[key] for key in same]
                assert mine["word"] == text[mine["start"] : mine["end"]]


@pytest.mark.parametrize("architecture", [*ENCODERS, *DECODERS])
def test_a_batch_gives_what_its_texts_give_alone(tmp_path: Path, architecture: str) -> None:
    runtime = load(write_encoder(tmp_path, architecture))
    together = ask(runtime, {"text": TEXTS[:3]}, {"text": TEXTS[3:]})
    joined = np.concatenate([result.outputs["embedding"] for result in together])
    for text, vector in zip(TEXTS, joined, strict=True):
        (alone,) = ask(runtime, {"text": [text]})
        np.testing.assert_allclose(vector, alone.outputs["embedding"][0], atol=1e-5)


def test_threads_share_a_batch_and_change_nothing(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "BertModel")
    texts = [" ".join(["cat", "dog", "sits"][i % 3] for i in range(1 + n % 30)) for n in range(80)]
    before = torch.get_num_threads()
    try:
        shared = load(folder, threads=3)
        (together,) = ask(shared, {"text": texts})
        assert torch.get_num_threads() == 3
        shared.close()
        (alone,) = ask(load(folder, threads=1), {"text": texts})
    finally:
        torch.set_num_threads(before)
    found, expected = (result.outputs["embedding"].astype(np.float32) for result in (together, alone))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    budget=st.integers(1, 600),
    threads=st.integers(1, 4),
)
def test_chunks_hold_every_text_once_in_order_and_about_the_budget(
    lengths: list[int], budget: int, threads: int
) -> None:
    rows = [(length, 0, place) for place, length in enumerate(sorted(lengths))]
    chunks = encoder._chunks(rows, budget, threads)
    assert [row for chunk in chunks for row in chunk] == rows
    assert all(chunks)
    longest = max(lengths)
    for chunk in chunks:
        assert sum(row[0] for row in chunk) <= max(budget, longest) + longest
