"""The files in examples/ do what they say: digits are read, faces and objects are found where they are."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.predict.steps.pictures import file_of

from inferd.config import ModelConfig, load_config
from inferd.predict.contract import Array, object_array
from inferd.predict.load import load_runtime
from inferd.predict.runtime import Item, Result, Runtime
from inferd.registry.artifact import artifact_of
from inferd.registry.source import silent

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
MODELS = ROOT.parent / "shared" / "data" / "onnx-models"


def example(name: str) -> ModelConfig:
    return load_config(EXAMPLES / f"{name}.yaml", {}, {}).models[name]


def loaded(config: ModelConfig) -> Runtime:
    return load_runtime("m", artifact_of(config), config, silent)


def answer(runtime: Runtime, name: str, *files: bytes) -> dict[str, Array]:
    item = Item(request_id="r", inputs={name: object_array(files)}, rows=len(files))
    runtime.prepare(item)
    (result,) = runtime.predict([item])
    assert isinstance(result, Result), result
    return dict(result.outputs)


def test_photos_of_digits_are_read(tmp_path: Path) -> None:
    import onnxruntime
    from PIL import Image
    from sklearn.datasets import load_digits

    made = tmp_path / "digits.onnx"
    runpy.run_path(str(EXAMPLES / "digits.py"))["main"](made)
    runtime = loaded(msgspec.structs.replace(example("digits"), source=str(made)))
    pixels, digits = load_digits(return_X_y=True)
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rows, told = pixels[1500:1700], digits[1500:1700]
    files = []
    for row in rows:
        photo = Image.fromarray((row.reshape(8, 8) * 255 / 16).astype(np.uint8)).resize(
            (80, 80), Image.Resampling.NEAREST
        )
        files.append(file_of(np.asarray(photo)[..., np.newaxis], "JPEG", quality=95))
    labels = answer(runtime, "image", *files)["labels"]
    assert labels.shape == (200, 3)
    read = [words.index(label.decode()) for label in labels[:, 0]]
    session = onnxruntime.InferenceSession(str(made), providers=["CPUExecutionProvider"])
    (exact,) = session.run(["label"], {"X": rows.astype(np.float32)})
    assert np.mean(np.array(read) == exact) > 0.97, "a photo says what its pixels say"
    assert np.mean(np.array(read) == told) > 0.8


@pytest.fixture(scope="module")
def faces() -> Runtime:
    config = example("faces")
    boxes = msgspec.structs.replace(
        config.postprocess[0], options={**config.postprocess[0].options, "output": "relative"}
    )
    source = str(MODELS / "ultraface" / "version-RFB-320.onnx")
    postprocess = (
        boxes,
        config.postprocess[1],
        msgspec.structs.replace(config.postprocess[2], options={**config.postprocess[2].options, "digits": 4}),
    )
    return loaded(msgspec.structs.replace(config, source=source, postprocess=postprocess))


def golden() -> list[dict[str, Any]]:
    file = MODELS / "ultraface" / "golden_faces.json"
    found: list[dict[str, Any]] = json.loads(file.read_text())["cases"] if file.is_file() else []
    return found


@pytest.mark.parametrize("case", golden(), ids=lambda case: str(case["file"]))
@pytest.mark.shared
@pytest.mark.skipif(not MODELS.is_dir(), reason="the shared test data is not here")
def test_every_face_of_the_golden_photos_is_found(faces: Runtime, case: dict[str, Any]) -> None:
    photo = (MODELS / "ultraface" / "images" / case["file"]).read_bytes()
    found = json.loads(answer(faces, "image", photo)["json"][0])
    assert len(found) == case["faces"]
    assert {one["label"] for one in found} == {"face"}
    for one, (*box, score) in zip(found, case["boxes"], strict=False):
        assert one["box"] == pytest.approx(box, abs=2e-4)
        assert one["score"] == pytest.approx(score, abs=2e-4)


@pytest.mark.shared
@pytest.mark.skipif(not MODELS.is_dir(), reason="the shared test data is not here")
def test_the_objects_of_a_photo_are_found_in_its_own_pixels() -> None:
    import onnxruntime
    from PIL import Image

    config = example("objects")
    model = MODELS / "vision-ort-extensions" / "FastestDet.onnx"
    pipeline = msgspec.structs.replace(config.pipeline, models={"fastestdet": {"source": str(model)}})
    photo = MODELS / "vision-ort-extensions" / "wolves.jpg"
    outputs = answer(loaded(msgspec.structs.replace(config, pipeline=pipeline)), "photo", photo.read_bytes())

    with Image.open(photo) as opened:
        width, height = opened.size
        pixels = np.asarray(opened.convert("RGB").resize((352, 352), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (rows,) = session.run(None, {session.get_inputs()[0].name: pixels.transpose(2, 0, 1)[np.newaxis]})
    candidates = rows[0][(rows[0][:, 4:5] * rows[0][:, 5:]).max(axis=1) >= 0.4]
    best = max(candidates, key=lambda row: row[4] * row[5:].max())
    x, y, w, h = best[:4] / 352 * np.array([width, height, width, height])
    assert outputs["scores"][0, 0] == pytest.approx(best[4] * best[5:].max(), abs=1e-4)
    assert outputs["classes"][0, 0] == best[5:].argmax()
    assert outputs["boxes"][0, 0] == pytest.approx(
        [max(x - w / 2, 0), y - h / 2, x + w / 2, min(y + h / 2, height)], abs=0.05
    )
    assert 1 <= outputs["count"][0] <= len(candidates)
    assert (outputs["boxes"][0] >= 0).all()
    assert (outputs["boxes"][0] <= [width, height, width, height]).all()
