"""The module that models for Triton's Python backend import as ``triton_python_backend_utils``.

The names and meanings are Triton's (python_backend/README.md). Calls from one model to another and answers in several
parts are refused: pipelines and Python classes with a generator do that here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from inferd.predict.contract import NUMPY, Array, datatype_of

_log = logging.getLogger("inferd.predict.model")

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    """The error that a model raises, and that it gets for unsupported calls."""


class TritonError:
    """Why one request failed."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: object) -> None:
        self._name = name
        found = np.asarray(array)
        if found.dtype.kind in "SU":
            found = found.astype(np.object_)
        self._array = found

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        return True

    def __dlpack__(self, **options: object) -> object:
        return self._array.__dlpack__(**options)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def to_dlpack(self) -> object:
        return self._array.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: object) -> Tensor:
        return Tensor(name, np.from_dlpack(tensor))  # type: ignore[arg-type]


class InferenceRequest:
    """One request, as ``execute`` gets it."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        *,
        request_id: str = "",
        wanted: Sequence[str] = (),
        model_name: str = "",
        parameters: Mapping[str, object] | None = None,
        sequence: str = "",
        flags: int = 0,
    ) -> None:
        self._inputs = list(inputs)
        self._request_id = request_id
        self._wanted = list(wanted)
        self._model_name = model_name
        self._parameters = dict(parameters or {})
        self._sequence = sequence
        self._flags = flags

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return int(self._sequence) if self._sequence.isdecimal() else self._sequence or 0

    def requested_output_names(self) -> list[str]:
        return self._wanted

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return 1

    def parameters(self) -> str:
        """As JSON, as Triton gives them."""
        return json.dumps(self._parameters, default=str)

    def flags(self) -> int:
        return self._flags

    def timeout(self) -> int:
        return 0

    def is_cancelled(self) -> bool:
        return False

    def get_response_sender(self) -> object:
        raise TritonModelException("Answers in several parts need a Python class whose predict is a generator.")

    def exec(self, decoupled: bool = False) -> object:
        raise TritonModelException("A model cannot call another one; write both as steps of a pipeline.")

    async_exec = exec


class InferenceResponse:
    """One answer: tensors, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | str | None = None) -> None:
        self._tensors = list(output_tensors)
        self._error = TritonError(error) if isinstance(error, str) else error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Logger:
    """Lines of the worker's log."""

    @staticmethod
    def log_info(message: str) -> None:
        _log.info("%s", message)

    @staticmethod
    def log_warn(message: str) -> None:
        _log.warning("%s", message)

    @staticmethod
    def log_error(message: str) -> None:
        _log.error("%s", message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log.debug("%s", message)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(config: Mapping[str, Sequence[Mapping[str, object]]], name: str) -> object:
    return next((one for one in config.get("input", ()) if one["name"] == name), None)


def get_output_config_by_name(config: Mapping[str, Sequence[Mapping[str, object]]], name: str) -> object:
    return next((one for one in config.get("output", ()) if one["name"] == name), None)


def using_decoupled_model_transaction_policy(config: Mapping[str, object]) -> bool:
    policy = config.get("model_transaction_policy")
    return isinstance(policy, Mapping) and bool(policy.get("decoupled"))


# Triton's numbers for datatypes (TRITONSERVER_DataType).
_NUMBERS = (
    "", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "BYTES", "BF16",
)  # fmt: skip


def triton_to_numpy_type(number: int) -> type:
    return NUMPY[_NUMBERS[number]].type


def numpy_to_triton_type(dtype: object) -> int:
    return _NUMBERS.index(datatype_of(np.dtype(dtype)))  # type: ignore[call-overload]


def triton_string_to_numpy(word: str) -> type:
    """TYPE_FP32 to numpy.float32."""
    name = word.removeprefix("TYPE_")
    return NUMPY["BYTES" if name == "STRING" else name].type
