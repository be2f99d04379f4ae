"""Verification before loading, for every kind of source: what is loaded is what was verified, or nothing."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx.external_data_helper import convert_model_to_external_data
from tests.artefacts.signers import key, private_pem, public_pem
from tests.artefacts.test_manifest import files_of
from tests.predict.small_onnx import identity as small_model

from inferd import models
from inferd.artefacts.manifest import manifest_of
from inferd.artefacts.signature import sign
from inferd.artefacts.store import store_folder
from inferd.config import ModelConfig, PipelineConfig, SignatureConfig, StepConfig, VerifyConfig
from inferd.errors import ModelLoadError
from inferd.predict.backend import PredictBackend
from inferd.predict.load import create_backend
from inferd.registry import hub
from inferd.registry.artifact import artifact_of
from inferd.registry.identity import identity_of
from inferd.registry.pinned import pin_files
from inferd.registry.verified import FAILED, artefact_of, verified, verified_models, verify_source


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An ONNX model with weights in a file of their own."""
    made = tmp_path / "model"
    made.mkdir()
    proto = onnx.load(small_model(tmp_path / "m.onnx"))
    convert_model_to_external_data(proto, location="weights.bin", size_threshold=0)
    onnx.save(proto, made / "model.onnx")
    assert files_of(made) == ["model.onnx", "weights.bin"]
    return made


def pinned(source: Path, mode: str = "enforce", **settings: object) -> ModelConfig:
    """Settings that ask for what the source is now."""
    verify = VerifyConfig(mode=mode, digest=manifest_of(source).tree_digest)  # type: ignore[arg-type]
    return ModelConfig(source=str(source), verify=verify, **settings)  # type: ignore[arg-type]


def signed(source: Path, mode: str = "enforce") -> ModelConfig:
    folder = source.parent.parent
    sign(source, private_pem(folder, key()))
    signature = SignatureConfig(public_key_file=str(public_pem(folder, key())))
    return ModelConfig(source=str(source), verify=VerifyConfig(mode=mode, signature=signature))  # type: ignore[arg-type]


def refusal(config: ModelConfig) -> str:
    with pytest.raises(ModelLoadError) as caught:
        verified("m", config)
    assert caught.value.code == "model_not_verified"
    with pytest.raises(ModelLoadError):
        verify_source(config)
    return caught.value.message


def loaded(config: ModelConfig) -> PredictBackend:
    return create_backend("m", config, lambda phase, done, total: None)


def test_without_settings_nothing_is_verified(folder: Path) -> None:
    for verify in (None, VerifyConfig(mode="off", digest=f"sha256:{'0' * 64}")):
        config = ModelConfig(source=str(folder), verify=verify)
        assert verified("m", config) == (config, "")
        assert list(verified_models("m", config)) == []
    assert not store_folder().exists()


@pytest.mark.parametrize("settings", [pinned, signed])
def test_a_folder_is_loaded_from_a_copy(folder: Path, settings: object) -> None:
    assert callable(settings)
    config: ModelConfig = settings(folder)
    found, words = verified("m", config)
    assert words.startswith(("digest tree-sha256:", "signature by key "))
    assert Path(found.source).is_relative_to(store_folder())
    assert artifact_of(found).runtime == "onnx"
    assert verify_source(config) == words
    # What replaces the source between the check and the load does not reach the model.
    for path in files_of(folder):
        (folder / path).write_bytes(b"evil")
    loaded(found).close()


@pytest.mark.parametrize("settings", [pinned, signed])
@pytest.mark.parametrize("change", ["model.onnx", "weights.bin", "added", "removed", "link"])
def test_nothing_is_loaded_that_was_changed_its_external_data_included(
    folder: Path, tmp_path: Path, settings: object, change: str
) -> None:
    assert callable(settings)
    config: ModelConfig = settings(folder)
    if change == "added":
        (folder / "custom_ops.so").touch()
    elif change == "removed":
        (folder / "weights.bin").unlink()
    elif change == "link":
        (folder / "weights.bin").rename(tmp_path / "elsewhere")
        (folder / "weights.bin").symlink_to(tmp_path / "elsewhere")
    else:
        data = (folder / change).read_bytes()
        (folder / change).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    message = refusal(config)
    assert str(folder) in message
    if settings is signed and change in ("model.onnx", "weights.bin"):
        assert change in message


def test_a_file_alone_is_verified_and_one_with_weights_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    whole = small_model(tmp_path / "whole.onnx")
    found, _ = verified("m", pinned(whole))
    assert Path(found.source).name == "whole.onnx"
    loaded(found).close()
    assert "keeps weights in weights.bin" in refusal(pinned(folder / "model.onnx"))


def test_the_files_beside_an_unverified_onnx_file_are_not_even_looked_up(folder: Path) -> None:
    """Finding them means to read the file, which is not verified yet."""
    config = pinned(folder / "model.onnx")
    before = identity_of(config)
    (folder / "weights.bin").write_bytes(b"other")
    assert identity_of(config) == before
    assert identity_of(ModelConfig(source=config.source)) != before


def test_a_version_folder_of_a_repository_keeps_its_number(folder: Path, tmp_path: Path) -> None:
    version = tmp_path / "repository" / "m" / "3"
    shutil.copytree(folder, version)
    (tmp_path / "repository" / "m" / "config.pbtxt").write_text('name: "m"')
    found, _ = verified("m", pinned(version))
    assert Path(found.source).name == "3"
    loaded(found).close()


CODE = (
    "import numpy as np\n\nclass Model:\n    def predict(self, x: np.ndarray) -> np.ndarray:\n        return x + {}\n"
)


def test_code_runs_from_the_copy_alone(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "model.py"
    file.write_text(CODE.format(1))
    (tmp_path / "code" / "neighbour.py").write_text("raise RuntimeError('not verified')")
    verify = VerifyConfig(digest=manifest_of(file).tree_digest)
    config = ModelConfig(source=f"{file}:Model", allow_code=True, verify=verify)
    found, _ = verified("m", config)
    place, _, name = found.source.rpartition(":")
    assert (Path(place).name, name) == ("model.py", "Model")
    assert files_of(Path(place).parent) == ["model.py"]  # nothing beside it can be imported
    assert sys.dont_write_bytecode
    file.write_text("raise RuntimeError('swapped')")
    loaded(found).close()
    assert verified("m", msgspec.structs.replace(config, source=f"{place}:Model"))[0].source == found.source
    assert "model.py" in refusal(config)


def test_a_folder_of_code_is_verified_with_its_modules(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "model.py").write_text("import beside_model\n" + CODE.format(1))
    (code / "beside_model.py").write_text("")
    config = pinned(code, runtime="python", allow_code=True)
    found, _ = verified("m", config)
    loaded(found).close()
    assert files_of(Path(found.source)) == ["beside_model.py", "model.py"]
    (code / "beside_model.py").write_text("raise RuntimeError('changed')")
    assert str(code) in refusal(config)


def test_a_module_on_pythons_path_cannot_be_verified() -> None:
    config = ModelConfig(source="package.module:Model", verify=VerifyConfig(digest=f"sha256:{'0' * 64}"))
    assert "cannot be verified" in refusal(config)


def test_a_hub_snapshot_is_verified_through_its_links(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / "abc").mkdir(parents=True)
    for number, path in enumerate(files_of(folder)):
        shutil.copyfile(folder / path, repo / "blobs" / f"{number}")
        (repo / "snapshots" / "abc" / path).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(hub, "download", lambda repo_id, revision, progress: repo / "snapshots" / "abc")
    verify = VerifyConfig(digest=manifest_of(folder).tree_digest)
    config = ModelConfig(source="org/name@abc", verify=verify)
    assert artefact_of(config) == (repo / "snapshots" / "abc", repo / "blobs")
    found, _ = verified("m", config)
    assert not (Path(found.source) / "model.onnx").is_symlink()
    loaded(found).close()
    (repo / "snapshots" / "abc" / "model.onnx").unlink()
    (repo / "snapshots" / "abc" / "model.onnx").symlink_to(folder / "model.onnx")
    assert "no file below" in refusal(config)
    signature = SignatureConfig(public_key_file="key.pub")
    assert "not downloaded to serve it" in refusal(
        ModelConfig(source="org/name@abc", verify=VerifyConfig(signature=signature))
    )


def test_a_bundled_model_can_be_pinned() -> None:
    name = models.CLASSIFIERS[0]
    verify = VerifyConfig(digest=manifest_of(models.path(name)).tree_digest)
    found, _ = verified("m", ModelConfig(source=name, verify=verify))
    loaded(found).close()


def test_every_model_of_a_pipeline_is_verified(folder: Path) -> None:
    steps = (StepConfig(model="a", inputs={"x": "x"}),)
    config = ModelConfig(source="pipeline", pipeline=PipelineConfig(steps=steps, models={"a": pinned(folder)}))
    assert [place for place, _ in verified_models("p", config)] == ["p.pipeline.models.a"]
    found, words = verified("p", config)
    assert words.startswith("a: digest tree-sha256:")
    part = found.pipeline.models["a"]
    assert isinstance(part, ModelConfig)
    assert Path(part.source).is_relative_to(store_folder())
    (folder / "weights.bin").write_bytes(b"evil")
    with pytest.raises(ModelLoadError, match=r"verify\.digest"):
        verified("p", config)


@pytest.mark.parametrize("settings", [pinned, signed])
def test_a_warning_is_told_and_the_model_is_loaded_from_its_place(
    folder: Path, settings: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(settings)
    config: ModelConfig = settings(folder, "warn")
    found, words = verified("m", config)
    assert found == config
    assert not words.startswith(FAILED)
    assert caplog.records == []
    (folder / "added").touch()
    with caplog.at_level(logging.WARNING):
        found, words = verified("m", config)
    assert found == config
    assert words.startswith(FAILED)
    assert "m is loaded although it does not verify" in caplog.text
    assert not store_folder().exists()


def test_a_signature_elsewhere_is_found_by_its_path(folder: Path, tmp_path: Path) -> None:
    config = signed(folder)
    for bundle, place in (("release.sig", folder / "release.sig"), (str(tmp_path / "x.sig"), tmp_path / "x.sig")):
        shutil.move(folder / "model.sig", place)
        assert "model.sig cannot be read" in refusal(config)
        assert config.verify is not None
        assert config.verify.signature is not None
        signature = msgspec.structs.replace(config.verify.signature, bundle=bundle)
        elsewhere = ModelConfig(source=config.source, verify=VerifyConfig(signature=signature))
        assert verified("m", elsewhere)[1].startswith("signature by")
        shutil.move(place, folder / "model.sig")


def test_unsigned_files_do_not_reach_the_model(folder: Path) -> None:
    config = signed(folder)
    (folder / "other.onnx").write_bytes(b"evil")
    assert "other.onnx, which was not signed" in refusal(config)
    assert config.verify is not None
    lenient = ModelConfig(
        source=config.source, verify=VerifyConfig(signature=config.verify.signature, ignore_unsigned_files=True)
    )
    found, _ = verified("m", lenient)
    assert files_of(Path(found.source)) == ["model.onnx", "weights.bin"]


def test_files_that_are_verified_are_not_pinned_unverified(folder: Path, tmp_path: Path) -> None:
    config = pinned(folder)
    assert pin_files(config, identity_of(config), tmp_path / "pins") is None
    assert not (tmp_path / "pins").exists()


def test_answers_are_those_of_the_unverified_model(folder: Path) -> None:
    """The copy computes what the source computes, under the source's own fingerprint of content."""
    found, _ = verified("m", pinned(folder))
    assert np.array_equal(
        onnx.numpy_helper.to_array(onnx.load(Path(found.source) / "model.onnx").graph.initializer[0]),
        onnx.numpy_helper.to_array(onnx.load(folder / "model.onnx").graph.initializer[0]),
    )
    assert os.stat(Path(found.source) / "weights.bin").st_mode & 0o777 == 0o400
