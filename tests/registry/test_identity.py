"""The name of a model's content: it changes with every file that decides what is computed, and with nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.predict.small_onnx import identity as small_model

from inferd.config import ModelConfig, StepConfig, TensorConfig
from inferd.registry import identity as module
from inferd.registry.identity import identity_of


def named(source: Path | str, **settings: Any) -> str:
    return identity_of(ModelConfig(source=str(source), **settings))


def test_a_copy_or_a_touched_file_is_the_same_model_and_another_byte_is_not(tmp_path: Path) -> None:
    file = small_model(tmp_path / "m.onnx")
    before = named(file)
    assert len(before) == 12
    os.utime(file, (1, 1))
    shutil.copy(file, tmp_path / "beside")
    (tmp_path / "beside").replace(file)
    assert named(file) == before
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert named(file) != before


def test_a_large_file_in_another_place_of_the_disk_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(module, "_PART_BYTES", 100)
    file = tmp_path / "m.bin"
    content = bytearray(5000)
    file.write_bytes(content)
    before = named(file)
    assert named(file) == before
    content[2500] = 1  # a byte that the identity does not read
    (tmp_path / "new").write_bytes(content)
    (tmp_path / "new").replace(file)
    assert named(file) != before


def test_a_folder_is_its_files_but_no_hidden_ones_and_no_caches(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "below").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "below" / "weights").write_text("w")
    before = named(folder)
    (folder / ".DS_Store").write_text("x")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "m.pyc").write_text("x")
    assert named(folder) == before
    (folder / "below" / "weights").write_text("v")
    changed = named(folder)
    assert changed != before
    (folder / "below" / "weights").rename(folder / "weights")
    assert named(folder) not in (before, changed)
    assert named(shutil.copytree(folder, tmp_path / "copy")) == named(folder)


def test_weights_beside_an_onnx_model_belong_to_it_and_none_outside_its_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weights = folder / "w.bin"
    weights.write_bytes(bytes(8))
    file = small_model(folder / "m.onnx", secret="w.bin")
    before = named(file)
    weights.write_bytes(bytes(7) + b"\1")
    assert named(file) != before
    outside = tmp_path / "secret"
    outside.write_bytes(bytes(8))
    file = small_model(folder / "m.onnx", secret="../secret")
    before = named(file)
    outside.write_bytes(bytes(7) + b"\1")
    assert named(file) == before


def test_files_that_settings_name_belong_to_a_model_and_so_do_a_pipelines_models(tmp_path: Path) -> None:
    file, labels = small_model(tmp_path / "m.onnx"), tmp_path / "labels.txt"
    ways: list[dict[str, Any]] = [
        {"options": {"files": [str(labels)]}},
        {"postprocess": (StepConfig(op="labels", options={"file": str(labels)}),)},
        {"outputs": (TensorConfig(name="y", datatype="FP32", shape=(-1, 2), labels_file=str(labels)),)},
        {"chat_template": str(labels)},
    ]
    for settings in ways:
        labels.write_text("a\nb\n")
        before = named(file, **settings)
        labels.write_text("a\nc\n")
        assert named(file, **settings) != before, settings
    pipeline = ModelConfig(source="pipeline")
    with_model = {"pipeline": type(pipeline.pipeline)(models={"inner": {"source": str(file)}})}
    before = named("pipeline", **with_model)
    file.write_bytes(file.read_bytes() + b"\0")
    assert named("pipeline", **with_model) != before


def test_code_is_found_where_python_finds_it_without_being_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')\n")
    before = named("mine:Model", allow_code=True)
    assert before == named("mine.py:Model", allow_code=True)
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run again')\n")
    assert named("mine:Model") != before


def test_what_has_no_files_here_has_no_name() -> None:
    assert [named(source) for source in ("openai:http://x/v1", "some/model@main", "pipeline", "nowhere:Class")] == [
        ""
    ] * 4
