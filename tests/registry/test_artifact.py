"""Sources are recognised by their content: what is served by which runtime, and what is refused with a remedy."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inferd.config import ModelConfig, Runtime, model_name
from inferd.errors import ModelLoadError
from inferd.registry.artifact import artifact_of, recognise
from inferd.registry.content import content_of


def zipped(**entries: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name.replace("__", "/").replace("_dot_", "."), data)
    return buffer.getvalue()


def onnx_bytes() -> bytes:
    """The outermost fields of a ModelProto: ir_version 9, an opset, an empty graph."""
    return b"\x08\x09" + b"\x42\x02\x10\x11" + b"\x3a\x00"


ONNX = onnx_bytes()
PICKLE = pickle.dumps({"weights": [1.0]})
TORCHSCRIPT = zipped(m__data_dot_pkl=b"", m__constants_dot_pkl=b"", m__code__forward_dot_py=b"")
PT2 = zipped(m__archive_format=b"pt2", m__models__model_dot_json=b"{}")
SKOPS = zipped(schema_dot_json=b"{}")
XGBOOST = b'{"learner":{"attributes":{}},"version":[3,0,0]}'
XGBOOST_UBJ = b"{L" + struct.pack(">q", 7) + b"learner{"
LIGHTGBM = b"tree\nversion=v4\nnum_class=1\n"


@pytest.mark.parametrize(
    ("name", "data", "runtime", "platform"),
    [
        ("model.onnx", ONNX, "onnx", "onnxruntime_onnx"),
        ("classifier.pkl.onnx", ONNX, "onnx", "onnxruntime_onnx"),
        ("no_suffix", ONNX, "onnx", "onnxruntime_onnx"),
        ("net.pt2", PT2, "torch", "pytorch_pt2"),
        ("m.skops", SKOPS, "sklearn", "sklearn_skops"),
        ("m.json", XGBOOST, "xgboost", "xgboost_json"),
        ("m.json", b' \n{ "version":[1,6,2], "learner": {}}', "xgboost", "xgboost_json"),
        ("m.ubj", XGBOOST_UBJ, "xgboost", "xgboost_ubj"),
        ("m.txt", LIGHTGBM, "lightgbm", "lightgbm_text"),
        ("m.model", LIGHTGBM, "lightgbm", "lightgbm_text"),
    ],
)
def test_a_file_is_what_its_content_is(tmp_path: Path, name: str, data: bytes, runtime: str, platform: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    found = recognise(str(path))
    assert (found.runtime, found.platform, found.path, found.kind) == (runtime, platform, path, "predict")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("m.onnx", PICKLE, "is a pickle, whatever its name says; it was not opened"),
        ("m.json", PICKLE, "is a pickle, whatever its name says"),
        ("m.txt", pickle.dumps([1], protocol=0), "is a pickle, whatever its name says"),
        ("m.skops", PICKLE, "is a pickle, whatever its name says"),
        ("m.onnx", TORCHSCRIPT, "is TorchScript, whatever its name says"),
        ("m.pkl", PICKLE, "allow_pickle"),
        ("m.joblib", b"\x78\x9c" + PICKLE, "allow_pickle"),
        ("m.pt", TORCHSCRIPT, "allow_code"),
        ("m.pt", zipped(m__data_dot_pkl=PICKLE), "torch.export.save"),
        ("m.pth", zipped(m__data_dot_pkl=PICKLE), "torch.export.save"),
        ("m.npz", zipped(a_dot_npy=PICKLE), "an archive of arrays"),
        ("m.mar", zipped(**{"MAR-INF__MANIFEST_dot_json": b"{}"}), "TorchServe"),
        ("m.gguf", b"GGUF\x03\0\0\0", "llama-server"),
        ("m.tflite", b"\x1c\0\0\0TFL3" + b"\0" * 40, "tf2onnx"),
        ("m.ort", b"\x1c\0\0\0ORTM" + b"\0" * 40, "ONNX model it was made from"),
        ("m.plan", b"ftrt" + b"\0" * 40, "TensorRT"),
        ("m.h5", b"\x89HDF\r\n\x1a\n" + b"\0" * 40, "tf2onnx"),
        ("m.keras", zipped(config_dot_json=b"{}", model_dot_weights_dot_h5=b""), "Keras"),
        ("m.xml", b'<?xml version="1.0"?>\n<net name="x">', "OpenVINO"),
        ("m.pmml", b'<?xml version="1.0"?>\n<PMML version="4">', "PMML"),
        ("m.cbm", b"CBM1" + b"\0" * 40, "CatBoost"),
        ("m.bin", b"binf" + b"\0" * 40, "old binary format"),
        ("m.mlmodel", b"\x08\x01\x12\x02ab", "Core ML"),
        ("m.pb", b"\x0a\x02ab", "TensorFlow"),
        ("m.safetensors", struct.pack("<Q", 2) + b"{}" + b"\0" * 8, "Give the folder"),
        ("m.json", b'{"a": 1}', "no 'learner'"),
        ("m.onnx", ONNX[:-1], "no complete ModelProto"),
        ("m.onnx", b"", "empty"),
        ("m.pt2", b"PK\x03\x04 cut", "Export or copy it again"),
        ("model.py", b"class Model: ...", "model.py:Model"),
        ("notes.md", b"# Notes", "of no format that inferd knows"),
    ],
)
def test_what_is_not_served_is_refused_with_what_to_do(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        recognise(str(path))
    assert said in caught.value.message


def test_what_can_run_code_needs_the_operators_word_and_its_own_name(tmp_path: Path) -> None:
    pickled, script = tmp_path / "m.pkl", tmp_path / "m.pt"
    pickled.write_bytes(PICKLE)
    script.write_bytes(TORCHSCRIPT)
    assert recognise(str(pickled), allow_pickle=True).platform == "sklearn_pickle"
    assert recognise(str(script), allow_code=True).platform == "pytorch_torchscript"
    with pytest.raises(ModelLoadError):
        recognise(str(pickled), allow_code=True)
    with pytest.raises(ModelLoadError):
        recognise(str(script), allow_pickle=True)
    disguised = tmp_path / "m.onnx"
    disguised.write_bytes(PICKLE)
    with pytest.raises(ModelLoadError, match="whatever its name says"):
        recognise(str(disguised), allow_pickle=True, allow_code=True)


def checkpoint(folder: Path, architecture: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("architecture", "runtime"),
    [
        ("LlamaForCausalLM", "llm"),
        ("GPT2Model", "llm"),
        ("Qwen3ForCausalLM", "llm"),
        ("BertModel", "encoder"),
        ("XLMRobertaModel", "encoder"),
        ("MPNetForMaskedLM", "encoder"),
        ("ModernBertForSequenceClassification", "encoder"),
        ("Qwen3ForSequenceClassification", "encoder"),
        ("BertForTokenClassification", "encoder"),
    ],
)
def test_a_checkpoint_is_a_language_model_or_an_encoder(tmp_path: Path, architecture: str, runtime: str) -> None:
    assert recognise(str(checkpoint(tmp_path, architecture))).runtime == runtime


def test_a_task_a_runtime_or_a_list_of_modules_makes_a_decoder_an_encoder(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "Qwen3ForCausalLM")
    assert recognise(str(folder), task="embed").runtime == "encoder"
    assert recognise(str(folder), "encoder").runtime == "encoder"
    (folder / "modules.json").write_text("[]")
    assert recognise(str(folder)).runtime == "encoder"
    assert recognise(str(folder), "llm").runtime == "llm"


def test_a_folder_is_the_one_model_inside_it(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "weights.onnx").write_bytes(ONNX)
    assert recognise(str(tmp_path)).path == tmp_path / "weights.onnx"
    (tmp_path / "other.onnx").write_bytes(ONNX)
    with pytest.raises(ModelLoadError, match=r"several models: other.onnx, weights.onnx; give the path of one"):
        recognise(str(tmp_path))
    (tmp_path / "model.onnx").write_bytes(ONNX)
    assert recognise(str(tmp_path)).path == tmp_path / "model.onnx"


def test_of_numbered_folders_the_newest_is_served(tmp_path: Path) -> None:
    for version in ("2", "10"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "model.onnx").write_bytes(ONNX)
    assert recognise(str(tmp_path)).path == tmp_path / "10" / "model.onnx"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("saved_model.pb", "SavedModel"),
        ("1/model.savedmodel/saved_model.pb", "SavedModel"),
        ("adapter_config.json", "adapter"),
        ("model_index.json", "diffusion"),
        ("pytorch_model.bin", "config.json"),
    ],
)
def test_folders_of_other_kinds_are_refused_with_what_to_do(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ModelLoadError) as caught:
        recognise(str(tmp_path))
    assert said in caught.value.message


def test_a_class_is_named_by_its_module_or_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("class Model: ...\n")
    for source in ("my_module:Model", "a.b.c:Model", f"{tmp_path}/model.py:Model"):
        found = recognise(source)
        assert (found.runtime, found.path, found.platform) == ("python", source, "python")
    with pytest.raises(ModelLoadError, match="names a Python class, but runtime says onnx"):
        recognise("a:B", "onnx")


def test_a_runtime_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(ONNX)
    wrong: tuple[Runtime, ...] = ("torch", "sklearn", "llm")
    for runtime in wrong:
        with pytest.raises(ModelLoadError, match=f"is for the runtime onnx, but runtime says {runtime}"):
            recognise(str(tmp_path / "m.onnx"), runtime)


def test_a_configuration_says_what_may_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "m.pkl"
    path.write_bytes(PICKLE)
    assert artifact_of(ModelConfig(source=str(path), allow_pickle=True)).runtime == "sklearn"
    with pytest.raises(ModelLoadError, match="allow_pickle"):
        artifact_of(ModelConfig(source=str(path)))


def test_files_and_classes_have_names(tmp_path: Path) -> None:
    for file, name in (("classifier.pkl.onnx", "classifier"), ("resnet.v1.5.onnx", "resnet.v1.5"), ("m.ubj", "m")):
        (tmp_path / file).write_bytes(b"x")
        assert model_name(str(tmp_path / file)) == name
    assert model_name("my_module:Model") == "Model"
    assert model_name("./steps.py:Model") == "Model"


@example(data=b"\x80")  # begins like a pickle, and ends
@given(data=st.binary(max_size=300))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_have_a_content(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.onnx"
    path.write_bytes(data)
    content_of(path)
    for prefix in (b"\x08\x09", b"PK\x03\x04", b"{", b"\x80\x04"):
        path.write_bytes(prefix + data)
        content_of(path)
