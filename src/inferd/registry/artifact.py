"""Recognising a model's files: which runtime computes them, by their content first and their name second.

Reads first bytes, tables of archives and ``config.json``. Opens no model, runs no code and unpickles nothing. The
content of a file counts more than its name: a pickle with the name ``.onnx`` is refused as a pickle. Formats that are
known and not served are refused with the remedy.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

import msgspec

from inferd.config import ModelConfig, Runtime
from inferd.errors import ModelLoadError
from inferd.registry.content import Content, content_of
from inferd.registry.source import (
    MODEL_SUFFIXES,
    REFUSED_SUFFIXES,
    SHARED_SUFFIXES,
    Progress,
    check_code,
    check_folder,
    is_code,
    resolve,
    silent,
)
from inferd.types import ModelKind


class Artifact(msgspec.Struct, frozen=True):
    """A model's files, recognised."""

    runtime: Runtime  # never auto
    path: Path | str  # a file or folder; ``module:Class`` for the python runtime; the source itself for pipelines
    platform: str  # KServe v2's word: onnxruntime_onnx, pytorch_pt2, sklearn_skops, xgboost_json, ...
    kind: ModelKind


_PLATFORMS: Final[dict[Content, tuple[Runtime, str]]] = {
    "onnx": ("onnx", "onnxruntime_onnx"),
    "pt2": ("torch", "pytorch_pt2"),
    "torchscript": ("torch", "pytorch_torchscript"),
    "skops": ("sklearn", "sklearn_skops"),
    "pickle": ("sklearn", "sklearn_pickle"),
    "compressed": ("sklearn", "sklearn_pickle"),
    "xgboost_json": ("xgboost", "xgboost_json"),
    "xgboost_ubj": ("xgboost", "xgboost_ubj"),
    "lightgbm": ("lightgbm", "lightgbm_text"),
}
_SUFFIXES: Final[dict[Content, tuple[str, ...]]] = {
    "pickle": (".pkl", ".pickle", ".joblib"),
    "compressed": (".pkl", ".pickle", ".joblib", ".gz", ".z", ".bz2", ".xz", ".lzma"),
    "torchscript": (".pt", ".pth", ".jit", ".ts", ".torchscript"),
}
_PICKLE_ADVICE: Final = (
    "Save it with skops.io.dump, or convert it to ONNX; or set allow_pickle: true (--allow-pickle) if you made the "
    "file yourself."
)
_CODE_ADVICE: Final = (
    "Export it with torch.export.save to a .pt2, or to ONNX; or set allow_code: true (--allow-code) if you trust it as "
    "you trust this server's own code."
)
# What each content that is known and not served is, and what to do instead.
_UNSUPPORTED: Final[dict[Content, str]] = {
    "torch_pickle": "a PyTorch checkpoint (torch.save), which is a pickle of weights or objects without the program "
    "that uses them. Export the model with torch.export.save to a .pt2, or to ONNX",
    "torch_archive": "a TorchServe archive (.mar), which carries code. Export the model inside it with "
    "torch.export.save to a .pt2, or to ONNX",
    "safetensors": "a file of weights alone. Give the folder that holds it with config.json",
    "npz": "an archive of arrays, no model. Export the model to ONNX, or write a Python class that loads it "
    "(module:Class)",
    "npy": "an array, no model. Export the model to ONNX, or write a Python class that loads it (module:Class)",
    "keras": "a Keras model. Convert it to ONNX (python -m tf2onnx.convert, or model.export(..., format='onnx'))",
    "hdf5": "an HDF5 file, as Keras's .h5 models are. Convert it to ONNX (python -m tf2onnx.convert --keras)",
    "gguf": "a GGUF file of llama.cpp. Take the model's original checkpoint with *.safetensors, or serve the file with "
    "llama-server or Ollama and give inferd that server (openai:http://host/v1)",
    "ort": "a model in onnxruntime's own format. Give the ONNX model it was made from",
    "tflite": "a TensorFlow Lite model. Convert it to ONNX (python -m tf2onnx.convert --tflite)",
    "tensorrt": "a TensorRT plan, which holds for one GPU and one TensorRT version. Give the ONNX model it was built "
    "from",
    "openvino": "an OpenVINO IR. Give the ONNX model it was converted from",
    "pmml": "a PMML document. Convert it to ONNX, or train it again and save it with skops.io.dump",
    "catboost": "a CatBoost model. Save it with save_model(..., format='onnx')",
    "xgboost_binary": "an XGBoost model in the old binary format. Load it with the XGBoost that wrote it (before 3.1) "
    "and save it as .ubj or .json",
    "archive": "a compressed archive. Unpack it and give what is inside",
    "zip": "a zip archive of no kind that inferd knows. Unpack it and give what is inside",
    "json": "a JSON file, but not an XGBoost model (it has no 'learner'). Save one with "
    "booster.save_model('model.json')",
    "empty": "an empty file. Copy the model again",
}
# Folders and names that say what they are where no content does.
_UNSUPPORTED_NAMES: Final[tuple[tuple[str, str], ...]] = (
    ("saved_model.pb", "a TensorFlow SavedModel. Convert it to ONNX (python -m tf2onnx.convert --saved-model)"),
    ("model_index.json", "a diffusion pipeline, which inferd does not serve"),
    (
        "adapter_config.json",
        "an adapter (LoRA) without its base model. Serve the base model with --adapter NAME=FOLDER, or name it in the "
        "base model's adapters",
    ),
    ("openvino_model.xml", "an OpenVINO IR. Give the ONNX model it was converted from"),
    ("Manifest.json", "a Core ML package. Give the ONNX or PyTorch model it was converted from"),
)
_UNSUPPORTED_SUFFIXES: Final[dict[str, str]] = {
    ".mlmodel": "a Core ML model. Give the ONNX or PyTorch model it was converted from",
    ".pb": "a TensorFlow graph. Convert it to ONNX (python -m tf2onnx.convert --graphdef)",
    ".plan": _UNSUPPORTED["tensorrt"],
    ".engine": _UNSUPPORTED["tensorrt"],
    ".py": "Python code. Name the class in it: {name}:Model",
}
# Bare decoders (LlamaModel) are language models whose head is tied; bare encoders have these names.
_ENCODER_ARCHITECTURE: Final = re.compile(
    r"(?i:bert|mpnet|electra|deberta)\w*Model$|For(?:MaskedLM|PreTraining|SequenceClassification|TokenClassification)$"
)


def artifact_of(config: ModelConfig, progress: Progress = silent) -> Artifact:
    """What a model's configuration asks to be loaded. Raises ModelLoadError."""
    if config.runtime == "pipeline" or (
        config.runtime == "auto" and (config.source == "pipeline" or config.pipeline.steps)
    ):
        return Artifact("pipeline", config.source, "ensemble", "predict")
    return recognise(
        config.source,
        config.runtime,
        task=config.task,
        allow_code=config.allow_code,
        allow_pickle=config.allow_pickle,
        progress=progress,
    )


def recognise(
    source: str,
    runtime: Runtime = "auto",
    *,
    task: str = "auto",
    allow_code: bool = False,
    allow_pickle: bool = False,
    progress: Progress = silent,
) -> Artifact:
    """The kind of ``source``: a file, a folder, ``module:Class``, a bundled model or a hub id, which is downloaded
    first.

    ``runtime``: the operator's setting; a contradiction to the files is refused. ``task``: the task of a checkpoint for
    texts; every value but auto makes it an encoder's. Raises ModelLoadError with the kind of the source and the remedy.
    """
    if runtime == "pipeline":
        return Artifact("pipeline", source, "ensemble", "predict")
    if is_code(source):
        if runtime not in ("auto", "python"):
            raise ModelLoadError(
                f"{source} names a Python class, but runtime says {runtime}; leave runtime out.", param="runtime"
            )
        check_code(source)
        return Artifact("python", source, "python", "predict")
    path = resolve(source, progress)
    if runtime == "triton_python" and not allow_code:
        raise ModelLoadError(
            f"{path} is Python code for Triton's backend, which inferd runs only where code is allowed. Set "
            "allow_code: true (--allow-code) if you trust it as you trust this server's own code.",
            param="allow_code",
        )
    if runtime in ("python", "triton_python"):
        return Artifact(runtime, path, "python", "predict")
    found = (
        _folder(path, runtime, task) if path.is_dir() else _file(path, allow_code=allow_code, allow_pickle=allow_pickle)
    )
    if isinstance(found, Path):
        found = _file(found, allow_code=allow_code, allow_pickle=allow_pickle)
    if runtime not in ("auto", found.runtime):
        raise ModelLoadError(
            f"{found.path} is for the runtime {found.runtime}, but runtime says {runtime}; leave runtime out, or give "
            f"a model of that kind.",
            param="runtime",
        )
    return found


def _file(path: Path, *, allow_code: bool, allow_pickle: bool) -> Artifact:
    content = content_of(path)
    known = _PLATFORMS.get(content)
    if known is None:
        raise ModelLoadError(f"{path} is {_what(path, content)}.", param="source")
    suffix = path.suffix.lower()
    allowed = _SUFFIXES.get(content)
    if allowed is not None and suffix not in allowed:
        what = "a pickle" if content != "torchscript" else "TorchScript"
        raise ModelLoadError(
            f"{path} is {what}, whatever its name says; it was not opened, because {what} can run code when it is "
            "read. "
            f"{_PICKLE_ADVICE if content != 'torchscript' else _CODE_ADVICE} Its name must then end in {allowed[0]}.",
            param="source",
        )
    if content in ("pickle", "compressed") and not allow_pickle:
        raise ModelLoadError(
            f"{path} is a pickle, which can run any code when it is read, so it was not opened. {_PICKLE_ADVICE}",
            param="allow_pickle",
        )
    if content == "torchscript" and not allow_code:
        raise ModelLoadError(
            f"{path} is a TorchScript program, which inferd runs only where code is allowed. {_CODE_ADVICE}",
            param="allow_code",
        )
    return Artifact(known[0], path, known[1], "predict")


def _what(path: Path, content: Content) -> str:
    if content in _UNSUPPORTED:
        return _UNSUPPORTED[content]
    suffix = path.suffix.lower()
    if suffix in _UNSUPPORTED_SUFFIXES:
        return _UNSUPPORTED_SUFFIXES[suffix].format(name=path)
    if suffix in (".onnx", ".ort"):
        return "not an ONNX model: its bytes are no complete ModelProto. Export or copy it again"
    if suffix == ".pt2":
        return "not an archive of torch.export.save. Export or copy it again"
    if suffix == ".skops":
        return "not a file of skops.io.dump. Save or copy it again"
    return (
        "of no format that inferd knows. Served are ONNX, torch.export (.pt2), skops, XGBoost (.json, .ubj), LightGBM "
        "(.txt), folders with config.json and *.safetensors, and Python classes (module:Class)"
    )


def _folder(folder: Path, runtime: Runtime, task: str) -> Artifact | Path:
    """A checkpoint's artifact, or the one model file in the folder."""
    if (folder / "config.json").is_file() and not (folder / "model.onnx").is_file():
        return _checkpoint(folder, runtime, task)
    if runtime in ("llm", "encoder"):
        check_folder(folder)
    for name, what in _UNSUPPORTED_NAMES:
        if (folder / name).is_file():
            raise ModelLoadError(f"{folder} is {what}.", param="source")
    inside = _one_model(folder)
    if inside is not None:
        return inside
    versions = sorted((sub for sub in folder.iterdir() if sub.is_dir() and sub.name.isdecimal()), key=_number)
    if versions:
        newest = versions[-1]
        for name, what in _UNSUPPORTED_NAMES:
            if (newest / name).is_file() or (newest / "model.savedmodel" / name).is_file():
                raise ModelLoadError(f"{newest} is {what}.", param="source")
        inside = _one_model(newest)
        if inside is not None:
            return inside
    check_folder(folder)  # its message names what a checkpoint needs
    return _checkpoint(folder, runtime, task)


def _number(folder: Path) -> int:
    return int(folder.name)


def _one_model(folder: Path) -> Path | None:
    """The folder's one model file: ``model.*``, or the only file that may be one. Raises ModelLoadError for several."""
    found = sorted(path for path in folder.iterdir() if path.is_file() and _may_be_model(path))
    named = [path for path in found if path.name.partition(".")[0] == "model"]
    chosen = named or found
    if len(chosen) > 1:
        raise ModelLoadError(
            f"{folder} holds several models: {', '.join(path.name for path in chosen[:5])}; give the path of one.",
            param="source",
        )
    return chosen[0] if chosen else None


def _may_be_model(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix in SHARED_SUFFIXES:
        return content_of(path) in ("xgboost_json", "lightgbm")
    return suffix in MODEL_SUFFIXES or suffix in REFUSED_SUFFIXES


def _checkpoint(folder: Path, runtime: Runtime, task: str) -> Artifact:
    """A Hugging Face folder: a language model, or a text encoder."""
    check_folder(folder)
    is_encoder = task not in ("auto", "predict") or (folder / "modules.json").is_file()
    if not is_encoder and runtime == "auto":
        is_encoder = any(_ENCODER_ARCHITECTURE.search(name) for name in _architectures(folder))
    if runtime == "encoder" or (runtime == "auto" and is_encoder):
        return Artifact("encoder", folder, "inferd_encoder", "predict")
    return Artifact("llm", folder, "inferd_llm", "generate")


def _architectures(folder: Path) -> list[str]:
    """The architecture in config.json; empty when it has none (the loader then refuses the model)."""
    try:
        document = json.loads((folder / "config.json").read_bytes())
        named = document.get("architectures") if isinstance(document, dict) else None
        return [str(name) for name in named] if isinstance(named, list) else []
    except (OSError, ValueError, RecursionError):
        return []
