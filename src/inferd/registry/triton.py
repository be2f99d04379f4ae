"""A Triton model repository as inferd's configuration: a folder of models, each with config.pbtxt and numbered
versions.

Reads names and config.pbtxt; opens no model. A setting that inferd does not support is refused with the reason if the
answers would differ, and reported as ignored otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from inferd.config.versions import VERSION
from inferd.errors import ConfigError
from inferd.registry.text_format import TextFormatError, parse
from inferd.registry.triton_config import Control, DynamicBatching, Ensemble, Input, InstanceGroup, Output, TritonModel

CONFIG: Final = "config.pbtxt"
Tree = dict[str, object]

_BACKENDS: Final[Mapping[str, str]] = {
    "onnxruntime_onnx": "onnxruntime", "onnxruntime": "onnxruntime", "pytorch_libtorch": "pytorch",
    "pytorch": "pytorch", "python": "python", "ensemble": "ensemble",
}  # fmt: skip
_FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "onnxruntime": ("model.onnx",),
    "pytorch": ("model.pt2", "model.pt"),
    "python": ("model.py",),
}
_RUNTIMES: Final[Mapping[str, str]] = {"onnxruntime": "onnx", "pytorch": "torch", "python": "triton_python"}
_INSTEAD: Final[Mapping[str, str]] = {
    "tensorrt": "a TensorRT plan holds for one GPU and one TensorRT version; give the ONNX model it was built from",
    "tensorflow": "convert the model to ONNX (python -m tf2onnx.convert --saved-model)",
    "openvino": "give the ONNX model it was converted from",
    "vllm": "serve the checkpoint itself: inferd serve ORGANISATION/NAME",
    "tensorrtllm": "serve the checkpoint itself: inferd serve ORGANISATION/NAME",
    "fil": "serve the XGBoost or LightGBM file itself; its tensors then have inferd's names",
    "dali": "write the steps as a pipeline of image operations (docs/pipelines.md)",
}
# Known, and without effect on answers.
_HARMLESS: Final = frozenset(
    {"model_warmup", "optimization", "metric_tags", "model_metrics", "response_cache", "runtime"}
)
_DTYPES: Final[Mapping[str, str]] = {
    **{
        f"TYPE_{word}": word
        for word in ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
    },
    **{f"TYPE_{word}": word for word in ("FP16", "FP32", "FP64", "BF16")},
    "TYPE_STRING": "BYTES",
}
_CONTROLS: Final[Mapping[str, str]] = {
    "CONTROL_SEQUENCE_START": "start", "CONTROL_SEQUENCE_READY": "ready", "CONTROL_SEQUENCE_END": "end",
    "CONTROL_SEQUENCE_CORRID": "id",
}  # fmt: skip


class Repository(msgspec.Struct, frozen=True):
    """The contents of a repository: settings as in a configuration file's ``models``, and warnings about ignored
    settings."""

    models: dict[str, Tree]
    warnings: tuple[str, ...] = ()


class _RefusedError(ValueError):
    """The reason why one model cannot be served unchanged."""


def is_repository(folder: Path) -> bool:
    """Whether a folder is a model repository, or one model of one."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return False
    return (folder / CONFIG).is_file() or any(_is_model(sub) for sub in _folders(folder))


def read_repository(folder: Path) -> Repository:
    """Every model in it. Raises ConfigError that lists everything which cannot be served as it is."""
    folders = [folder] if (folder / CONFIG).is_file() else list(_folders(folder))
    models: dict[str, Tree] = {}
    problems: list[str] = []
    warnings: list[str] = []
    for sub in folders:
        if not _is_model(sub):
            warnings.append(f"{sub} is no model and is ignored: it has neither {CONFIG} nor a numbered folder.")
            continue
        name = sub.resolve().name
        try:
            models[name] = _model(name, sub, warnings)
        except (TextFormatError, _RefusedError) as error:
            problems.append(f"{sub / CONFIG if isinstance(error, TextFormatError) else sub}: {error}.")
    if problems:
        head = f"{len(problems)} models of the repository {folder} cannot be served:"
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  - ".join([head, *problems]), param="models")
    return Repository(models, tuple(warnings))


def _folders(folder: Path) -> Iterator[Path]:
    for sub in sorted(folder.iterdir()):
        if sub.is_dir() and not sub.name.startswith((".", "_")) and not VERSION.fullmatch(sub.name):
            yield sub


def _is_model(folder: Path) -> bool:
    if (folder / CONFIG).is_file():
        return True
    return any(_model_file(folder / number, "") is not None for number in _versions(folder))


def _versions(folder: Path) -> list[str]:
    """Names of the numbered folders, the newest first."""
    found = [sub.name for sub in folder.iterdir() if VERSION.fullmatch(sub.name) and sub.is_dir()]
    return sorted(found, key=int, reverse=True)


def _model_file(version: Path, backend: str) -> str | None:
    names = [name for key, names in _FILES.items() if backend in ("", key) for name in names]
    return next((name for name in names if (version / name).exists()), None)


# -- one model -----------------------------------------------------------------------------------


def _model(name: str, folder: Path, warnings: list[str]) -> Tree:
    """Its settings. Raises TextFormatError or _RefusedError."""
    config = TritonModel()
    if (folder / CONFIG).is_file():
        try:
            text = (folder / CONFIG).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise _RefusedError(f"{CONFIG} cannot be read: {error}") from None
        unknown: list[str] = []
        config = parse(text, TritonModel, unknown)
        _warn_of_unknown(folder, unknown, warnings)
    if config.name not in ("", name):
        raise _RefusedError(f"{CONFIG} calls the model {config.name!r}, but its folder is called {name!r}")
    if config.max_batch_size < 0:
        raise _RefusedError(f"max_batch_size is {config.max_batch_size}; it is 0 or more")
    backend = _backend(config, folder)
    if backend == "ensemble":
        return _ensemble(name, config)
    tree: Tree = {"runtime": _RUNTIMES[backend], "source": str(folder)}
    _place(tree, config, folder, backend)
    tree |= _tensors(config, folder)
    tree |= _batching(config.dynamic_batching or _sequences_together(config), config.max_batch_size)
    tree |= _instances(config.instance_group, folder, warnings)
    tree |= _sequences(config, folder)
    if backend == "python":
        tree["options"] = {"model_config": _triton_json(name, config)}
    elif config.model_transaction_policy is not None and config.model_transaction_policy.decoupled:
        raise _RefusedError("model_transaction_policy.decoupled is for models in Python")
    return tree


def _warn_of_unknown(folder: Path, unknown: list[str], warnings: list[str]) -> None:
    for path in unknown:
        if path in ("batch_input", "batch_output", "model_repository_agents"):
            raise _RefusedError(f"{path} is not supported; make what it adds a part of the model, or of a pipeline")
        if path == "model_operations":
            raise _RefusedError(
                "model_operations names libraries of operators; set options.custom_ops in an inferd.yaml"
            )
        if path.partition(".")[0] not in _HARMLESS:
            warnings.append(f"{folder / CONFIG}: {path} is not known and is ignored.")


def _backend(config: TritonModel, folder: Path) -> str:
    """onnxruntime, pytorch, python or ensemble. Raises _RefusedError."""
    said = config.backend or config.platform
    if config.ensemble_scheduling is not None:
        said = said or "ensemble"
    if not said:
        file = next((file for number in _versions(folder) if (file := _model_file(folder / number, ""))), None)
        found = next((key for key, names in _FILES.items() if file in names), None)
        if found is None:
            raise _RefusedError(
                "it names no backend, and its newest version has no model.onnx, model.pt2, model.pt or model.py"
            )
        return found
    backend = _BACKENDS.get(said)
    if backend is None:
        instead = next((text for key, text in _INSTEAD.items() if said.startswith(key)), "give the model as ONNX")
        raise _RefusedError(f"the backend {said!r} is not part of inferd: {instead}")
    return backend


def _place(tree: Tree, config: TritonModel, folder: Path, backend: str) -> None:
    """The files and versions to serve."""
    policy = config.version_policy
    if policy is not None and policy.all is not None:
        tree["versions"] = {"policy": "all"}
    elif policy is not None and policy.specific is not None:
        tree["versions"] = {"policy": "specific", "only": list(policy.specific.versions)}
    elif policy is not None and policy.latest is not None:
        tree["versions"] = {"policy": "latest", "count": max(1, policy.latest.num_versions)}
    numbers = _versions(folder)
    if not numbers:
        raise _RefusedError("it has no version: put the model into a folder called 1")
    named = config.default_model_filename
    if named and (Path(named).name != named or named in (".", "..")):
        raise _RefusedError(f"default_model_filename {named!r} is no name of a file in a version's folder")
    for number in numbers:
        file = named or _model_file(folder / number, backend)
        if file is None or not (folder / number / file).exists():
            expected = named or " or ".join(_FILES[backend])
            raise _RefusedError(f"version {number} has no {expected}")
    file = named or _model_file(folder / numbers[0], backend)
    assert file is not None
    if (named and named not in _FILES[backend]) or (folder / numbers[0] / file).is_dir():
        if len(numbers) > 1 and policy is not None and (policy.all or policy.specific):
            raise _RefusedError(
                "several versions are served of files called model.onnx, model.pt2, model.pt or model.py alone"
            )
        tree.pop("versions", None)
        tree["source"], tree["version"] = str(folder / numbers[0] / file), numbers[0]


def _tensors(config: TritonModel, folder: Path) -> Tree:
    has_rows = config.max_batch_size > 0
    tree: Tree = {}
    if config.input:
        tree["inputs"] = [
            _tensor(one, has_rows=has_rows) | ({"optional": True} if one.optional else {}) for one in config.input
        ]
    if config.output:
        tree["outputs"] = [_tensor(one, has_rows=has_rows) | _labels(one, folder) for one in config.output]
    return tree


def _tensor(one: Input | Output, *, has_rows: bool) -> Tree:
    if not one.name:
        raise _RefusedError("an input or output has no name")
    datatype = _datatype(one.name, one.data_type)
    if one.is_shape_tensor or one.is_non_linear_format_io:
        raise _RefusedError(
            f"{one.name} is a shape tensor or has a format of TensorRT's own, which inferd does not know"
        )
    first = (-1,) if has_rows else ()
    tree: Tree = {"name": one.name, "datatype": datatype, "shape": list(_shape(one.name, (*first, *one.dims)))}
    if one.reshape is not None:
        tree["reshape"] = list(_shape(one.name, (*first, *one.reshape.shape)))
    return tree


def _datatype(name: str, word: str) -> str:
    datatype = _DTYPES.get(word)
    if datatype is None:
        raise _RefusedError(f"{name} has the data_type {word}; expected one of {', '.join(_DTYPES)}")
    return datatype


def _shape(name: str, dims: tuple[int, ...]) -> tuple[int, ...]:
    if any(size < -1 for size in dims):
        raise _RefusedError(f"{name} has the dims {list(dims)}; a size is -1, for any, or more")
    return dims


def _labels(one: Output, folder: Path) -> Tree:
    if not one.label_filename:
        return {}
    file = folder / one.label_filename
    if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
        raise _RefusedError(f"label_filename {one.label_filename!r} of {one.name} is no file in the model's folder")
    return {"labels_file": str(file)}


def _batching(dynamic: DynamicBatching | None, max_batch_size: int) -> Tree:
    """As Triton does: without dynamic_batching requests are computed one by one."""
    if dynamic is None or not max_batch_size:
        rows = {"max_batch_size": max_batch_size} if max_batch_size else {}
        return {"batching": {"mode": "off", **rows}}
    tree: Tree = {
        "batching": {
            "max_batch_size": max_batch_size,
            "max_delay_ms": dynamic.max_queue_delay_microseconds / 1000,
            "preferred_sizes": list(dynamic.preferred_batch_size),
        }
    }
    policy = dynamic.default_queue_policy
    queue: Tree = {}
    if policy is not None and policy.max_queue_size:
        queue["max_requests"] = policy.max_queue_size
    if policy is not None and policy.default_timeout_microseconds and policy.timeout_action == "REJECT":
        queue["timeout_s"] = policy.default_timeout_microseconds / 1e6
    return tree | ({"queue": queue} if queue else {})


def _sequences_together(config: TritonModel) -> DynamicBatching | None:
    """Settings by which requests of different sequences are computed together, as Triton always does."""
    sequence = config.sequence_batching
    if sequence is None:
        return None
    strategy = sequence.oldest or sequence.direct
    return DynamicBatching(max_queue_delay_microseconds=strategy.max_queue_delay_microseconds if strategy else 0)


def _instances(groups: tuple[InstanceGroup, ...], folder: Path, warnings: list[str]) -> Tree:
    active = [group for group in groups if not group.passive]
    if not active:
        return {}
    kinds = {group.kind for group in active}
    if len(kinds) > 1:
        raise _RefusedError(
            f"instance_group mixes {' and '.join(sorted(kinds))}; a model's replicas run on one kind of device"
        )
    tree: Tree = {"replicas": sum(max(1, group.count) for group in active)}
    gpus = sorted({gpu for group in active for gpu in group.gpus})
    if kinds == {"KIND_CPU"}:
        tree["device"] = "cpu"
    elif kinds == {"KIND_GPU"}:
        tree["device"] = f"cuda:{gpus[0]}" if gpus else "cuda"
    if len(gpus) > 1:
        warnings.append(f"{folder / CONFIG}: instance_group names the GPUs {gpus}; all replicas run on {gpus[0]}.")
    return tree


def _sequences(config: TritonModel, folder: Path) -> Tree:
    sequence = config.sequence_batching
    if sequence is None:
        return {}
    states: Tree = {}
    for state in sequence.state:
        for initial in state.initial_state:
            if initial.data_file:
                raise _RefusedError(
                    f"the state {state.input_name} begins with the file {initial.data_file!r}; only zeros are supported"
                )
        states[state.output_name] = state.input_name
    controls: Tree = {}
    for one in sequence.control_input:
        for control in one.control:
            controls[one.name] = _control(one.name, control)
    tree: Tree = {"states": states, "controls": controls}
    if sequence.max_sequence_idle_microseconds:
        tree["idle_s"] = sequence.max_sequence_idle_microseconds / 1e6
    return {"sequence": tree}


def _control(name: str, control: Control) -> str:
    for values in (control.int32_false_true, control.fp32_false_true, control.bool_false_true):
        if values and (len(values) != 2 or bool(values[0]) or values[1] != 1):
            raise _RefusedError(
                f"the control input {name} is {list(values)} for false and true; only 0 and 1 are supported"
            )
    return _CONTROLS[control.kind]


# -- ensembles -----------------------------------------------------------------------------------


def _ensemble(name: str, config: TritonModel) -> Tree:
    """A pipeline: each tensor of the ensemble becomes a reference to the step that makes it."""
    assert config.ensemble_scheduling is not None or config.platform == "ensemble" or config.backend == "ensemble"
    steps = (config.ensemble_scheduling or Ensemble()).step
    if not steps:
        raise _RefusedError("ensemble_scheduling has no step")
    has_rows = config.max_batch_size > 0
    inputs = {one.name: _tensor(one, has_rows=has_rows) for one in config.input}
    taken = set(inputs)
    names: list[str] = []
    made: dict[str, str] = {}
    for step in steps:
        word = "".join(sign if sign.isalnum() or sign in "_-" else "_" for sign in step.model_name)
        names.append(_unique(word or "step", taken))
        for output, tensor in step.output_map.items():
            if tensor in made or tensor in inputs:
                raise _RefusedError(f"the ensemble's tensor {tensor!r} is made twice")
            made[tensor] = f"{names[-1]}.{output}"

    def reference(tensor: str, where: str) -> str:
        if tensor in inputs:
            return tensor
        if tensor not in made:
            raise _RefusedError(f"{where} takes {tensor!r}, which is no input of the ensemble and no step's output")
        return made[tensor]

    return {
        "source": "pipeline",
        "pipeline": {
            "inputs": {tensor: f"{tree['datatype']} {tree['shape']}" for tensor, tree in inputs.items()},
            "steps": [
                {
                    "name": given,
                    "model": step.model_name if step.model_version < 0 else f"{step.model_name}@{step.model_version}",
                    "inputs": {key: reference(tensor, f"step {given}") for key, tensor in step.input_map.items()},
                }
                for given, step in zip(names, steps, strict=True)
            ],
            "outputs": {one.name: reference(one.name, "the output") for one in config.output},
        },
    }


def _unique(word: str, taken: set[str]) -> str:
    chosen, number = word, 2
    while chosen in taken:
        chosen, number = f"{word}_{number}", number + 1
    taken.add(chosen)
    return chosen


def _triton_json(name: str, config: TritonModel) -> Tree:
    """The configuration as models in Python are given it."""
    tree: Tree = msgspec.to_builtins(config)
    tree["name"], tree["backend"] = name, "python"
    return tree
