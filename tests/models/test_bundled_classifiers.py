"""The bundled classifiers tell what their card says, through the steps they are served with, and their scripts make them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import yaml
from tests.predict.steps.pictures import file_of
from tests.tiers import THOROUGH
from training.classifiers import digits, intents, scores
from training.classifiers.digits import drawn
from training.classifiers.phrases import LABELS, WORDS, phrases, words

from inferd import models
from inferd.config import ModelConfig
from inferd.predict.contract import Array, Tensors, object_array
from inferd.predict.load import load_runtime
from inferd.predict.runtime import Item, Result, Runtime
from inferd.registry.artifact import artifact_of
from inferd.registry.source import silent

CARD = json.loads(scores.FILE.read_text())
BUNDLE = yaml.safe_load(models.BUNDLE.read_text())["models"]


@pytest.fixture(scope="module")
def loaded() -> dict[str, Runtime]:
    configs = {name: msgspec.convert(BUNDLE[name], ModelConfig) for name in ("digits", "intents")}
    return {name: load_runtime(name, artifact_of(config), config, silent) for name, config in configs.items()}


def answered(runtime: Runtime, **inputs: Array) -> Tensors:
    rows = len(next(iter(inputs.values())))
    item = Item(request_id="r", inputs=inputs, rows=rows, size=rows)
    runtime.prepare(item)
    (result,) = runtime.predict([item])
    assert isinstance(result, Result), result
    return result.outputs


def accuracy(outputs: Tensors, expected: list[str]) -> float:
    found = [label.decode() for label in outputs["label"].tolist()]
    return float(np.mean([one == other for one, other in zip(found, expected, strict=True)]))


def test_digits_are_told_as_often_as_the_card_says(loaded: dict[str, Runtime]) -> None:
    _, (pixels, classes) = digits.examples()
    expected = [str(label) for label in classes]
    as_numbers, as_pictures = CARD["digits"].values()
    outputs = answered(loaded["digits"], pixels=pixels)
    assert accuracy(outputs, expected) == pytest.approx(as_numbers, abs=0.003)
    assert outputs["probabilities"].astype(np.float32).sum(axis=1) == pytest.approx(1, abs=1e-5)
    pictures = object_array([file_of(255 - drawn(row, at=0.4)[..., np.newaxis], "PNG") for row in pixels])
    assert accuracy(answered(loaded["digits"], image=pictures), expected) == pytest.approx(as_pictures, abs=0.003)
    assert as_numbers > 0.95
    assert as_pictures > 0.95


def test_a_digits_place_size_and_colours_do_not_matter(loaded: dict[str, Runtime]) -> None:
    _, (pixels, classes) = digits.examples()
    files = []
    for row in pixels[:40]:
        page = np.full((300, 500, 3), (250, 245, 225), np.uint8)
        pen = np.repeat(np.repeat(drawn(row, at=0.4), 2, axis=0), 2, axis=1) > 0
        page[40 : 40 + pen.shape[0], 200 : 200 + pen.shape[1]][pen] = (30, 30, 140)
        files.append(file_of(page, "JPEG", quality=85))
    expected = [str(label) for label in classes[:40]]
    assert accuracy(answered(loaded["digits"], image=object_array(files)), expected) >= 0.9


def test_intents_are_told_as_often_as_the_card_says(loaded: dict[str, Runtime]) -> None:
    phrases, expected = intents.examples("held-out")
    shouted = object_array([f"  {phrase.upper()} ".encode() for phrase in phrases])
    on_card, on_card_known = CARD["intents"].values()
    assert accuracy(answered(loaded["intents"], text=shouted), expected) == pytest.approx(on_card, abs=0.003)
    known, expected = intents.examples("train", of_words="held-out")
    outputs = answered(loaded["intents"], text=object_array([text.encode() for text in known]))
    assert accuracy(outputs, expected) == pytest.approx(on_card_known, abs=0.003)


def test_the_graph_of_intents_is_scikit_learns_pipeline(loaded: dict[str, Runtime]) -> None:
    vectors, model = intents.fitted()
    said, _ = intents.examples("held-out")
    said += ["", "zzz qqq", "it's 5am"]
    ours = answered(loaded["intents"], text=object_array([text.encode() for text in said]))["probabilities"].astype(
        np.float32
    )
    np.testing.assert_allclose(ours, model.predict_proba(vectors.transform(said)), atol=2e-3)


@THOROUGH
@pytest.mark.slow
def test_the_script_makes_a_classifier_of_digits_that_is_as_good() -> None:
    """Not the same bits: another processor or scikit-learn rounds otherwise. Of intents the test above says it."""
    found = digits.measure(digits.train())
    assert found == pytest.approx(CARD["digits"], abs=0.01)


def test_nothing_held_out_is_in_a_training_phrase() -> None:
    training = {text for text, _ in phrases("train", 40, seed=1)}
    held_out = {text for text, _ in phrases("held-out", 10, seed=2)}
    assert training.isdisjoint(held_out)
    said = " | ".join(training)
    for slot in WORDS:
        for word in words(slot, "held-out"):
            if " " in word:
                assert word not in said


@pytest.mark.parametrize(("name", "labels"), [("digits", tuple("0123456789")), ("intents", LABELS)])
def test_the_files_are_small_and_say_what_they_are(
    loaded: dict[str, Runtime], name: str, labels: tuple[str, ...]
) -> None:
    file = models.path(f"demo-{name}") / "model.onnx"
    assert file.stat().st_size < 200_000
    made_by = re.search(r"training/classifiers/\w+\.py", onnx.load(file).doc_string)
    assert made_by is not None
    assert (Path(__file__).parents[2] / made_by[0]).is_file()
    (probabilities,) = [spec for spec in loaded[name].contract.outputs if spec.name == "probabilities"]
    assert probabilities.labels == labels
