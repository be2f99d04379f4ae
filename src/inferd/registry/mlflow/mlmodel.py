"""The file ``MLmodel``: which flavour of a model is served, and which of its files that needs.

YAML is read without tags, so nothing in it can run. A flavour that is code, or that only its own library reads, is
refused with the remedy before anything else is downloaded. Fields: mlflow/models/model.py and each flavour's
``save_model``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import yaml

from inferd.artefacts.tree import checked_name, not_verified
from inferd.errors import ModelLoadError

FILE: Final = "MLmodel"
MAX_BYTES: Final = 1 << 20


class Served(msgspec.Struct, frozen=True):
    """What is served of a model."""

    flavour: str
    files: Mapping[str, str]  # path in the version -> path in the folder that is served
    is_folder: bool = False  # the folder is the model; otherwise its one file is


class MLModel(msgspec.Struct, frozen=True):
    """The parts of an MLmodel that count here."""

    flavours: Mapping[str, Mapping[str, Any]]
    signature: Mapping[str, Any]
    mlflow_version: str = ""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads plain data alone, by libyaml where it is there, which is faster."""


_REMEDY: Final = "convert the model to ONNX and log it with mlflow.onnx.log_model"
# Flavours whose files only their own library reads, with what to do instead.
_REFUSED: Final[Mapping[str, str]] = {
    "tensorflow": f"a TensorFlow or Keras model; {_REMEDY} (python -m tf2onnx.convert)",
    "keras": f"a Keras model; {_REMEDY} (model.export(..., format='onnx'))",
    "catboost": f"a CatBoost model; {_REMEDY} (save_model(..., format='onnx'))",
    "spark": f"a Spark model; {_REMEDY}",
    "sentence_transformers": "a sentence-transformers folder inside MLflow's own layout; log the folder itself as an "
    "artifact, or give the Hub id as the source",
}


def read_mlmodel(text: bytes, shown: str) -> MLModel:
    """Raises ModelLoadError for anything that is not an MLmodel."""
    try:
        document = yaml.load(text, _Loader) if len(text) <= MAX_BYTES else None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        said = " ".join(str(error).split())[:200]
        raise ModelLoadError(f"The MLmodel of {shown} is not valid YAML: {said}.", param="source") from None
    if not isinstance(document, dict) or not isinstance(document.get("flavors"), dict):
        raise ModelLoadError(
            f"The MLmodel of {shown} lists no flavors; log the model again with MLflow 2 or 3.", param="source"
        )
    flavours = {
        str(name): below if isinstance(below, dict) else {} for name, below in list(document["flavors"].items())[:64]
    }
    signature = document.get("signature")
    return MLModel(
        flavours, signature if isinstance(signature, dict) else {}, str(document.get("mlflow_version", ""))[:64]
    )


def choose(model: MLModel, paths: Sequence[str], shown: str, *, allow_pickle: bool) -> Served:
    """The flavour that is served, of those that the model has: ONNX first, which describes itself best. ``paths``: of
    all files of the version. Raises ModelLoadError with the remedy for each flavour that is not served."""
    reasons = []
    for read in (_onnx, _skops_or_pickle, _xgboost, _lightgbm, _pytorch, _transformers):
        try:
            found = read(model.flavours, paths, allow_pickle)
        except ModelLoadError as error:
            reasons.append(error.message)
            continue
        if found is not None:
            missing = sorted(set(found.files) - set(paths))
            if missing:
                raise not_verified(
                    f"{shown} lacks the file {missing[0]!r} that its MLmodel names; log the model again.",
                    param="source",
                )
            return found
    reasons += [f"it is {what}." for name, what in _REFUSED.items() if name in model.flavours]
    if not reasons and "python_function" in model.flavours:
        reasons.append(
            "it is Python code (python_function), which would run with the rights of the server. Log the model behind "
            "it in a format of its own (mlflow.onnx, mlflow.sklearn with serialization_format='skops'), or write its "
            "code as a class of yours and serve path/file.py:Class."
        )
    if not reasons:
        known = ", ".join(sorted(model.flavours)[:8]) or "none"
        reasons.append(f"its flavours are {known}; served are onnx, sklearn, xgboost, lightgbm, pytorch, transformers.")
    raise ModelLoadError(f"{shown} cannot be served: {' '.join(reasons)}", param="source")


def _onnx(flavours: Mapping[str, Mapping[str, Any]], paths: Sequence[str], allow_pickle: bool) -> Served | None:
    flavour = flavours.get("onnx")
    if flavour is None:
        return None
    data = _path(flavour, "onnx", "data")
    folder = data.rpartition("/")[0]
    # Weights beside the model (save_as_external_data) have any name; the folder is served if there are some.
    beside = [path for path in paths if path != data and path.rpartition("/")[0] == folder and not _is_mlflows(path)]
    if not beside:
        return Served("onnx", {data: data.rpartition("/")[2]})
    return Served("onnx", {path: path.rpartition("/")[2] for path in (data, *beside)}, is_folder=True)


def _skops_or_pickle(
    flavours: Mapping[str, Mapping[str, Any]], paths: Sequence[str], allow_pickle: bool
) -> Served | None:
    flavour = flavours.get("sklearn")
    if flavour is None:
        return None
    data = _path(flavour, "sklearn", "pickled_model")
    if flavour.get("serialization_format") != "skops":
        _refuse_pickle("scikit-learn", flavour, allow_pickle)
    return Served("sklearn", {data: data.rpartition("/")[2]})


def _xgboost(flavours: Mapping[str, Mapping[str, Any]], paths: Sequence[str], allow_pickle: bool) -> Served | None:
    flavour = flavours.get("xgboost")
    if flavour is None:
        return None
    data = _path(flavour, "xgboost", "data")
    return Served("xgboost", {data: data.rpartition("/")[2]})


def _lightgbm(flavours: Mapping[str, Mapping[str, Any]], paths: Sequence[str], allow_pickle: bool) -> Served | None:
    flavour = flavours.get("lightgbm")
    if flavour is None:
        return None
    data = _path(flavour, "lightgbm", "data")
    if not data.endswith((".lgb", ".txt")):
        raise ModelLoadError(
            "its LightGBM model is a wrapper of scikit-learn's kind, saved as Python objects. Log its booster: "
            "mlflow.lightgbm.log_model(model.booster_, ...).",
            param="source",
        )
    return Served("lightgbm", {data: data.rpartition("/")[2]})


def _pytorch(flavours: Mapping[str, Mapping[str, Any]], paths: Sequence[str], allow_pickle: bool) -> Served | None:
    flavour = flavours.get("pytorch")
    if flavour is None:
        return None
    folder = _path(flavour, "pytorch", "model_data")
    for name in ("model.pt2", "model.pth"):
        if f"{folder}/{name}" in paths:
            return Served("pytorch", {f"{folder}/{name}": name})
    raise ModelLoadError(
        "its PyTorch flavour has neither model.pt2 nor model.pth. Log it with serialization_format='pt2'.",
        param="source",
    )


def _transformers(flavours: Mapping[str, Mapping[str, Any]], paths: Sequence[str], allow_pickle: bool) -> Served | None:
    flavour = flavours.get("transformers")
    if flavour is None:
        return None
    if "model_binary" not in flavour:
        name = str(flavour.get("source_model_name", ""))[:100]
        raise ModelLoadError(
            f"its weights are not stored (save_pretrained=False); give {name or 'the Hub id'} as the source.",
            param="source",
        )
    model = _path(flavour, "transformers", "model_binary")
    files = dict(_below(paths, model))
    for path, name in _below(paths, "components/tokenizer"):
        if name not in files.values():
            files[path] = name
    if not files:
        raise ModelLoadError(f"its folder {model} is empty; log the model again.", param="source")
    return Served("transformers", files, is_folder=True)


def _below(paths: Sequence[str], folder: str) -> Iterator[tuple[str, str]]:
    for path in paths:
        if path.startswith(f"{folder}/"):
            yield path, path.removeprefix(f"{folder}/")


def _path(flavour: Mapping[str, Any], name: str, field: str) -> str:
    """A path that a flavour names. Raises ModelLoadError where it leads out of the model's folder."""
    found = flavour.get(field)
    if not isinstance(found, str):
        raise ModelLoadError(f"its flavour {name} does not say its {field}; log the model again.", param="source")
    return checked_name(found)


def _refuse_pickle(what: str, flavour: Mapping[str, Any], allow_pickle: bool) -> None:
    if not allow_pickle:
        raise ModelLoadError(
            f"its {what} model is saved by {str(flavour.get('serialization_format', 'pickle'))[:32]}, which can run "
            "any code when it is read. Log it with serialization_format='skops', or convert it to ONNX; or set "
            "allow_pickle: true if you made it yourself.",
            param="source",
        )
    if flavour.get("code"):
        raise ModelLoadError(
            "its pickle needs the Python files in its folder 'code', which are not loaded. Log it without code_paths.",
            param="source",
        )


def _is_mlflows(path: str) -> bool:
    """Whether a file is MLflow's own, beside the model."""
    name = path.rpartition("/")[2]
    return name in (
        *(FILE, "conda.yaml", "python_env.yaml", "requirements.txt", "registered_model_meta", "model.sig"),
        *("input_example.json", "serving_input_example.json", "input_example.npy", "input_example"),
    ) or name.endswith((".md", ".txt", ".yaml"))
