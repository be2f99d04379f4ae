"""Models written for Triton's Python backend: ``TritonPythonModel`` with initialize, execute and finalize.

The code is the operator's own and runs only with ``allow_code``, in the worker's process. Its inputs and outputs are
those in the configuration (config.pbtxt), or those that ``auto_complete_config`` adds.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from inferd.config import ModelConfig, TensorConfig
from inferd.errors import InferdError, InternalError, InvalidRequest, ModelLoadError
from inferd.predict.contract import NUMPY, Array, Contract
from inferd.predict.runtime import Item, Result
from inferd.predict.runtimes import triton_interface
from inferd.predict.runtimes.libraries import Option, check_options
from inferd.predict.runtimes.python import OPERATORS_CODE, failed
from inferd.registry.rows.verdict import Because
from inferd.registry.source import Progress
from inferd.types import TensorSpec

SHIM: Final = "triton_python_backend_utils"
_CLIENTS_FAULT: Final = (triton_interface.TritonError.INVALID_ARG, triton_interface.TritonError.UNSUPPORTED)


class Completed:
    """What ``auto_complete_config`` is given."""

    def __init__(self, config: dict[str, object]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, object]:
        return self._config

    def add_input(self, one: dict[str, object]) -> None:
        self._add("input", one)

    def add_output(self, one: dict[str, object]) -> None:
        self._add("output", one)

    def set_max_batch_size(self, size: int) -> None:
        self._config.setdefault("max_batch_size", size)

    def set_dynamic_batching(self) -> None:
        """Requests are batched by the configuration."""

    def set_model_transaction_policy(self, policy: dict[str, object]) -> None:
        self._config["model_transaction_policy"] = policy

    def _add(self, what: str, one: dict[str, object]) -> None:
        listed = self._config.setdefault(what, [])
        assert isinstance(listed, list)
        if all(known["name"] != one["name"] for known in listed):
            listed.append(one)


class TritonPython:
    """A ``Runtime`` over one ``TritonPythonModel``."""

    def __init__(self, name: str, model: object, contract: Contract) -> None:
        self.contract = contract
        self._name = name
        self._model = model
        self._outputs = {spec.name: spec for spec in contract.outputs}

    def prepare(self, item: Item) -> None:
        """Requests keep their own shapes: ``execute`` gets a list of them."""

    def predict(self, items: Sequence[Item]) -> Sequence[Result | InferdError]:
        requests = [self._request(item) for item in items]
        with OPERATORS_CODE:
            responses = self._model.execute(requests)  # type: ignore[attr-defined]
        if not isinstance(responses, Sequence) or len(responses) != len(items):
            count = len(responses) if isinstance(responses, Sequence) else type(responses).__name__
            raise InternalError(f"execute must return a list of {len(items)} responses, one per request; got {count}.")
        return [self._result(item, response) for item, response in zip(items, responses, strict=True)]

    def close(self) -> None:
        finalize = getattr(self._model, "finalize", None)
        if finalize is not None:
            finalize()

    def _request(self, item: Item) -> triton_interface.InferenceRequest:
        flags = triton_interface.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START * item.sequence_start
        flags |= triton_interface.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END * item.sequence_end
        return triton_interface.InferenceRequest(
            [triton_interface.Tensor(name, array) for name, array in item.inputs.items()],
            request_id=item.request_id,
            wanted=item.wanted or tuple(self._outputs),
            model_name=self._name,
            parameters=item.parameters,
            sequence=item.sequence,
            flags=flags,
        )

    def _result(self, item: Item, response: object) -> Result | InferdError:
        if not isinstance(response, triton_interface.InferenceResponse):
            raise InternalError(f"execute must return InferenceResponse objects; got {type(response).__name__}.")
        error = response.error()
        if error is not None:
            kind = InvalidRequest if error.code() in _CLIENTS_FAULT else InternalError
            return kind(f"The model refused the request: {error.message()}")
        outputs: dict[str, Array] = {}
        for tensor in response.output_tensors():
            spec = self._outputs.get(tensor.name())
            if spec is not None and (not item.wanted or spec.name in item.wanted):
                outputs[spec.name] = _typed(spec, tensor.as_numpy())
        missing = [name for name in item.wanted or self._outputs if name not in outputs]
        if missing:
            return InternalError(
                f"The model's response has no output {missing[0]!r}, which its configuration declares."
            )
        return Result(outputs=outputs)


def _typed(spec: TensorSpec, array: Array) -> Array:
    wanted = NUMPY[spec.datatype]
    if spec.datatype == "BYTES":
        values = [value.encode() if isinstance(value, str) else bytes(value) for value in array.ravel().tolist()]
        made = array.astype(object).copy()
        made.ravel()[:] = values
        return made
    return array.astype(wanted, copy=False)


def load(name: str, path: Path | str, config: ModelConfig, progress: Progress) -> TritonPython:
    """The model in the folder (or its newest version's), initialized. Raises ModelLoadError."""
    if not config.allow_code:
        raise ModelLoadError(
            f"The model {name} is Python code ({path}), and running it is not allowed. Set allow_code: true "
            "(--allow-code) if you trust it as you trust this server's own code.",
            param="allow_code",
        )
    file = _file(Path(path))
    cls = _class(name, file)
    settings = _settings(name, cls, config)
    model = _called(file, "the constructor", cls)
    initialize = getattr(model, "initialize", None)
    if initialize is not None:
        _called(file, "initialize", initialize, _arguments(name, file, settings))
    if not callable(getattr(model, "execute", None)):
        raise ModelLoadError(f"TritonPythonModel in {file} has no method execute.", param="source")
    return TritonPython(name, model, _contract(name, settings, config))


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    candidates = [path / "model.py"]
    if path.is_dir():
        numbered = sorted((sub for sub in path.iterdir() if sub.name.isdecimal()), key=lambda sub: -int(sub.name))
        candidates += [sub / "model.py" for sub in numbered]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise ModelLoadError(f"{path} has no model.py, nor a numbered folder with one.", param="source")
    return found


def _class(name: str, file: Path) -> type:
    sys.modules.setdefault(SHIM, triton_interface)
    sys.path.insert(0, str(file.resolve().parent))  # for the modules beside it
    spec = importlib.util.spec_from_file_location("model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _called(file, "importing it", spec.loader.exec_module, module)
    found = getattr(module, "TritonPythonModel", None)
    if not isinstance(found, type):
        raise ModelLoadError(f"{file} has no class TritonPythonModel.", param="source")
    return found


def _called(file: Path, what: str, function: object, *arguments: object) -> object:
    assert callable(function)
    try:
        return function(*arguments)
    except InferdError:
        raise
    except Exception as error:  # the operator's code may raise anything
        raise ModelLoadError(f"{file}: {what} failed: {type(error).__name__}: {error}.", param="source") from failed(
            error
        )


def _settings(name: str, cls: type, config: ModelConfig) -> dict[str, object]:
    """Triton's model configuration, completed by the model where nothing is declared."""
    check_options(name, "such a model", config, Option("model_config", (dict,), "a mapping, as in config.pbtxt"))
    given = config.options.get("model_config", {})
    settings: dict[str, object] = json.loads(json.dumps(given))  # its own, to be completed
    settings.setdefault("name", name)
    if not settings.get("input"):
        settings["input"] = [_triton_tensor(one, config) for one in config.inputs]
    if not settings.get("output"):
        settings["output"] = [_triton_tensor(one, config) for one in config.outputs]
    complete = getattr(cls, "auto_complete_config", None)
    if complete is not None and not (config.inputs and config.outputs):
        complete(Completed(settings))
    if triton_interface.using_decoupled_model_transaction_policy(settings):
        raise ModelLoadError(
            f"The model {name} answers in several parts (decoupled), which the Python backend's interface does not do "
            "here; write it as a Python class whose predict is a generator.",
            param="source",
        )
    return settings


def _triton_tensor(one: TensorConfig, config: ModelConfig) -> dict[str, object]:
    dims = one.shape[1:] if config.batching.max_batch_size else one.shape
    return {"name": one.name, "data_type": _word(one.datatype), "dims": list(dims)}


def _word(datatype: str) -> str:
    return f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}"


def _arguments(name: str, file: Path, settings: Mapping[str, object]) -> dict[str, str]:
    folder = file.resolve().parent
    return {
        "model_config": json.dumps(settings),
        "model_instance_kind": "CPU",
        "model_instance_name": f"{name}_0",
        "model_instance_device_id": "0",
        "model_repository": str(folder.parent if folder.name.isdecimal() else folder),
        "model_version": folder.name if folder.name.isdecimal() else "1",
        "model_name": name,
    }


def _contract(name: str, settings: Mapping[str, object], config: ModelConfig) -> Contract:
    rows = config.batching.max_batch_size
    if rows is None:
        size = settings.get("max_batch_size", 0)
        rows = size if isinstance(size, int) else 0
    inputs = _specs(name, "input", settings, config.inputs, has_rows=rows > 0)
    outputs = _specs(name, "output", settings, config.outputs, has_rows=rows > 0)
    because: Because | None = "declared" if rows else None
    return Contract(inputs=inputs, outputs=outputs, max_batch_size=rows, because=because, platform="python")


def _specs(
    name: str, what: str, settings: Mapping[str, object], declarations: Sequence[TensorConfig], *, has_rows: bool
) -> tuple[TensorSpec, ...]:
    if declarations:
        return tuple(TensorSpec(one.name, one.datatype, one.shape, one.optional) for one in declarations)
    first = (-1,) if has_rows else ()
    specs = []
    try:
        for one in msgspec.convert(settings.get(what, []), list[_Tensor]):
            datatype = one.data_type.removeprefix("TYPE_").replace("STRING", "BYTES")
            if datatype not in NUMPY:
                raise ValueError(f"{one.data_type} is no datatype")
            specs.append(TensorSpec(one.name, datatype, (*first, *one.dims), one.optional))
    except (msgspec.ValidationError, ValueError) as error:
        raise ModelLoadError(
            f"The {what} that the model {name} declares is not right: {error}.", param="source"
        ) from None
    if not specs:
        raise ModelLoadError(
            f"The model {name} declares no {what}; write it into config.pbtxt, or add it in auto_complete_config.",
            param="source",
        )
    return tuple(specs)


class _Tensor(msgspec.Struct, frozen=True):
    name: str
    data_type: str
    dims: list[int]
    optional: bool = False
