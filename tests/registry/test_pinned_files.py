"""Files kept as they were loaded: they load again whatever takes their place, and nothing is kept that would not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.external_data_helper import convert_model_to_external_data
from tests.predict.small_onnx import identity as small_model

from inferd.config import ModelConfig, PipelineConfig, SpeculationConfig
from inferd.registry import identity, pinned
from inferd.registry.identity import identity_of
from inferd.registry.pinned import pin_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files as a checkpoint has them, of which none may be missed."""
    folder = tmp_path / "model"
    (folder / "below").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "below/weights.bin"):
        (folder / name).write_bytes(name.encode() * 500)
    return folder


def kept_of(config: ModelConfig, place: Path) -> ModelConfig:
    found = pin_files(config, identity_of(config), place)
    assert found is not None
    return found


def test_what_is_kept_outlives_files_that_are_written_over_where_they_lie(tmp_path: Path, folder: Path) -> None:
    file = small_model(tmp_path / "m.onnx")
    for source in (file, folder):
        config = ModelConfig(source=str(source))
        before = identity_of(config)
        ours = kept_of(config, tmp_path / "kept" / source.name)
        for changed in [source] if source.is_file() else [path for path in folder.rglob("*") if path.is_file()]:
            changed.write_bytes(b"broken")
        assert identity_of(config) != before
        assert identity_of(ours) == before
        assert Path(ours.source).name == source.name


def test_large_files_are_linked_and_outlive_a_replacement_by_renaming(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (identity, pinned):
        monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "_PART_BYTES", 100)
    config = ModelConfig(source=str(folder))
    before = identity_of(config)
    ours = kept_of(config, tmp_path / "kept")
    assert (Path(ours.source) / "model.safetensors").samefile(folder / "model.safetensors")
    (tmp_path / "new").write_bytes(b"other" * 5000)
    (tmp_path / "new").replace(folder / "model.safetensors")
    assert identity_of(config) != before
    assert identity_of(ours) == before
    # What is written over where it lies is gone, and is not taken for what it was.
    (folder / "below" / "weights.bin").write_bytes(b"other" * 5000)
    assert identity_of(ours) != before


def test_copies_are_bounded(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "MAX_COPIED_BYTES", 9000)
    ours = Path(kept_of(ModelConfig(source=str(folder)), tmp_path / "kept").source)
    linked = [
        path.name for path in folder.rglob("*") if path.is_file() and path.samefile(ours / path.relative_to(folder))
    ]
    assert len(linked) == 2


def test_external_weights_a_draft_and_the_parts_of_a_pipeline_are_kept_as_well(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "weights").mkdir()
    file = small_model(tmp_path / "weights" / "m.onnx")
    proto = onnx.load(file)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(2, np.float32), "w"))
    convert_model_to_external_data(proto, location="m.data", size_threshold=0)
    onnx.save(proto, file)
    assert (file.parent / "m.data").exists()
    config = ModelConfig(
        source=str(file),
        speculation=SpeculationConfig(draft=str(folder)),
        pipeline=PipelineConfig(models={"part": {"source": str(folder)}}),
    )
    before = identity_of(config)
    ours = kept_of(config, tmp_path / "kept")
    shutil.rmtree(tmp_path / "weights")
    shutil.rmtree(folder)
    assert identity_of(config) != before
    assert identity_of(ours) == before


def test_what_could_not_be_loaded_again_is_not_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "kept"
    config = ModelConfig(source=str(folder))
    loaded = identity_of(config)
    (folder / "config.json").write_bytes(b"replaced meanwhile")
    assert pin_files(config, loaded, place) is None
    code = ModelConfig(source=str(folder), allow_code=True)
    assert pin_files(code, identity_of(code), place) is None

    def full(source: Path, to: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert pin_files(config, identity_of(config), place) is None
    assert not place.exists()
