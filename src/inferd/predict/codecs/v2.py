"""KServe v2 (Open Inference Protocol) over REST: JSON, and tensors as binary data behind it.

Source: the protocol's inference_rest.md with Triton's extensions binary_tensor_data, classification and parameters.
Knows requests and answers, not how tensors are laid out (``tensors``).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from inferd.errors import InvalidRequest
from inferd.predict.bounds import check_shape
from inferd.predict.codecs.duplicates import first_repeated
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read, shown, wrong_input
from inferd.predict.codecs.tensors import check_datatype, from_bytes, from_json, to_bytes, to_json
from inferd.predict.contract import NUMPY, Array, Contract, Tensors, datatype_of, object_array
from inferd.predict.runtime import Parameters, Result
from inferd.types import ModelInfo, Prediction, PredictRequest, TensorSpec

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
BINARY_TYPE: Final = "application/octet-stream"

# What the gateway has read of a request's parameters; the rest is the model's.
RESERVED: Final = frozenset(
    (
        "batching",
        "binary_data_output",
        "headers",
        "priority",
        "return_step_times",
        "sequence_end",
        "sequence_id",
        "sequence_start",
        "timeout",
    )
)

Value = str | int | float | bool | None


# Optional fields are UNSET when they are missing, so that a request is written again as it was read.
class WireInput(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Value] | msgspec.UnsetType | None = msgspec.UNSET
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class WireOutput(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    parameters: dict[str, Value] | msgspec.UnsetType | None = msgspec.UNSET


class WireRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    inputs: list[WireInput]
    id: str | msgspec.UnsetType | None = msgspec.UNSET
    outputs: list[WireOutput] | msgspec.UnsetType | None = msgspec.UNSET
    parameters: dict[str, Value] | msgspec.UnsetType | None = msgspec.UNSET
    model_name: str | msgspec.UnsetType | None = msgspec.UNSET  # KServe's client repeats the model's name of the path
    model_version: str | msgspec.UnsetType | None = msgspec.UNSET


class WireTensor(msgspec.Struct, gc=False):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    data: list[object] | msgspec.UnsetType = msgspec.UNSET


class WireResponse(msgspec.Struct, gc=False):
    model_name: str
    model_version: str
    outputs: list[WireTensor]
    id: str | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters | msgspec.UnsetType = msgspec.UNSET


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The form in which one output is requested."""

    is_binary: bool
    num_classes: int = 0  # 0: the tensor itself


class Form(msgspec.Struct, frozen=True):
    """What the answer must look like."""

    id: str | msgspec.UnsetType = msgspec.UNSET
    is_binary: bool = False  # outputs without parameters of their own
    choices: dict[str, Choice] = {}


_PLAIN: Final = Form()
_decoder: Final = msgspec.json.Decoder(WireRequest)
_encode: Final = msgspec.json.Encoder().encode


class V2Codec:
    """Dialect ``v2``."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        body, end = request.body, request.header_bytes
        if end == 0:
            return _raw(body, contract)
        if end > len(body):
            raise InvalidRequest(
                f"{HEADER_LENGTH} is {end}, and the body has {len(body)} bytes; it is the length of its JSON part.",
                param=HEADER_LENGTH,
            )
        wire = read(body if end < 0 else body[:end], _decoder, contract)
        if wire.model_name or wire.model_version:
            _check_model(wire, request)
        inputs: dict[str, Array] = {}
        datatypes: dict[str, str] = {}
        at = len(body) if end < 0 else end
        for tensor in wire.inputs:
            name = tensor.name
            if name in inputs:
                raise wrong_input(name, "comes twice; send it once")
            size = _binary_size(tensor) if tensor.parameters else None
            check_shape(name, tensor.datatype, tensor.shape, contract, is_listed=size is None)
            if size is None:
                inputs[name] = _listed(tensor)
            else:
                if size > len(body) - at:
                    raise wrong_input(
                        name,
                        f"has {size} bytes of binary data; {len(body) - at} bytes are left of "
                        "the body behind its JSON "
                        f"part{'' if end >= 0 else f' (the header {HEADER_LENGTH} is missing)'}",
                    )
                inputs[name] = from_bytes(name, tensor.datatype, tensor.shape, body, at, size)
                at += size
            datatypes[name] = tensor.datatype
        if at != len(body):
            raise InvalidRequest(
                f"{len(body) - at} bytes of the body belong to no input; every binary tensor has a binary_data_size, "
                "and together they are the body behind its JSON part.",
                param="inputs",
            )
        if not inputs:
            raise InvalidRequest("The request has no inputs; send at least one.", param="inputs")
        wanted = _wanted(wire) if wire.outputs else ()
        form = _form(wire)
        return DecodedRequest(
            inputs=inputs,
            datatypes=datatypes,
            wanted=wanted,
            parameters=_parameters(wire.parameters) if wire.parameters else {},
            wants_times=wants_times(wire.parameters) if wire.parameters else False,
            is_json_answer=not form.is_binary and not form.choices,
            form=form,
        )

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        form = decoded.form
        assert isinstance(form, Form), "a decoded v2 request has a v2 form"
        specs = {spec.name: spec for spec in info.outputs}
        tensors: list[WireTensor] = []
        binaries: list[bytes] = []
        for name in decoded.wanted or result.outputs:
            array = result.outputs[name]
            spec = specs.get(name)
            datatype = spec.datatype if spec is not None else datatype_of(array.dtype)
            choice = form.choices.get(name) if form.choices else None
            if choice is not None and choice.num_classes:
                array = classes_of(array, datatype, spec, choice.num_classes, batched=info.max_batch_size > 0)
                datatype = "BYTES"
            tensor = WireTensor(name, datatype, array.shape)
            if choice.is_binary if choice is not None else form.is_binary:
                data = to_bytes(datatype, array)
                binaries.append(data)
                tensor.parameters = {"binary_data_size": len(data)}
            else:
                tensor.data = to_json(name, datatype, array)
            tensors.append(tensor)
        answer = WireResponse(_model_name(request, info.version), info.version, tensors, form.id)
        if result.parameters:
            answer.parameters = result.parameters
        head = _encode(answer)
        if not binaries:
            return Prediction(head)
        headers = ((HEADER_LENGTH, str(len(head))),)
        return Prediction(b"".join((head, *binaries)), BINARY_TYPE, headers)


def _model_name(request: PredictRequest, version: str) -> str:
    """The model's name in v2: its entry's name without the version."""
    return request.model.removesuffix(f"@{version}")


# -- reading -------------------------------------------------------------------------------------


def _check_model(wire: WireRequest, request: PredictRequest) -> None:
    """Raises InvalidRequest where the body names another model than the path."""
    if isinstance(wire.model_name, str) and wire.model_name not in ("", _model_name(request, request.version)):
        raise InvalidRequest(
            f"model_name is {shown(wire.model_name)}, and the path asks for "
            f"{_model_name(request, request.version)!r}; leave it out of the body.",
            param="model_name",
        )
    if isinstance(wire.model_version, str) and wire.model_version not in ("", request.version):
        raise InvalidRequest(
            f"model_version is {shown(wire.model_version)}, and the path asks for "
            f"{request.version or 'the newest'!r}; name the version in the path.",
            param="model_version",
        )


def _listed(tensor: WireInput) -> Array:
    name, data = tensor.name, tensor.data
    if isinstance(data, msgspec.UnsetType):
        check_datatype(name, tensor.datatype)
        raise wrong_input(name, "has no data; send 'data', or binary data and its binary_data_size")
    is_base64 = bool(tensor.parameters) and tensor.parameters.get("content_type") == "base64"  # type: ignore[union-attr]
    return from_json(name, tensor.datatype, tensor.shape, bytes(data), is_base64=is_base64)


def _binary_size(tensor: WireInput) -> int | None:
    """How many bytes of the body behind the JSON are this input's; None: it is a list. Raises InvalidRequest."""
    assert tensor.parameters
    for name in tensor.parameters:
        if name.startswith("shared_memory_"):
            raise wrong_input(
                tensor.name, f"lies in shared memory ({shown(name)}), which this server does not read; send its data"
            )
    size = tensor.parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise wrong_input(tensor.name, f"has the binary_data_size {shown(str(size))}; a number of bytes is expected")
    if tensor.data is not msgspec.UNSET:
        raise wrong_input(tensor.name, "has both data and binary_data_size; send one of them")
    return size


def _wanted(wire: WireRequest) -> tuple[str, ...]:
    """The names of the wanted outputs. Raises InvalidRequest for a repeated one."""
    assert wire.outputs
    names = tuple([output.name for output in wire.outputs])
    twice = first_repeated(names)
    if twice is not None:
        raise InvalidRequest(f"The output {shown(twice)} is asked for twice; ask for it once.", param="outputs")
    return names


def wants_times(given: dict[str, Value]) -> bool:
    """Whether the answer should contain the time of each step. Raises InvalidRequest."""
    value = given.get("return_step_times", False)
    if not isinstance(value, bool):
        raise InvalidRequest(
            f"parameters.return_step_times must be true or false, not {shown(str(value))}.",
            param="parameters.return_step_times",
        )
    return value


def _parameters(given: dict[str, Value]) -> Parameters:
    """The request's own parameters, which are the model's to read."""
    return {name: value for name, value in given.items() if name not in RESERVED}


def _form(wire: WireRequest) -> Form:
    if not wire.outputs and not wire.parameters and not wire.id:
        return _PLAIN
    is_binary = False
    if wire.parameters:
        is_binary = _flag(wire.parameters, "binary_data_output", "parameters", False)
    choices: dict[str, Choice] = {}
    for index, output in enumerate(wire.outputs or ()):
        if output.parameters:
            choices[output.name] = _choice(output, f"outputs[{index}].parameters", is_binary)
    return Form(wire.id if isinstance(wire.id, str) else msgspec.UNSET, is_binary, choices)


def _choice(output: WireOutput, place: str, is_binary: bool) -> Choice:
    assert output.parameters
    for name in output.parameters:
        if name.startswith("shared_memory_"):
            raise InvalidRequest(
                f"The output {shown(output.name)} is wanted in shared memory ({shown(name)}), which this server does "
                "not write; leave the parameter out.",
                param=f"{place}.{name[:64]}",
            )
    classes = output.parameters.get("classification")
    if classes is None:
        classes = 0
    elif type(classes) is not int or not 1 <= classes < 1 << 31:
        raise InvalidRequest(
            f"The output {shown(output.name)} has the classification {shown(str(classes))}; a number of classes from 1 "
            f"to {(1 << 31) - 1} is expected.",
            param=f"{place}.classification",
        )
    return Choice(_flag(output.parameters, "binary_data", place, is_binary), classes)


def _flag(parameters: dict[str, Value], name: str, place: str, default: bool) -> bool:
    value = parameters.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(
            f"{place}.{name} is {shown(str(value))}; true or false is expected.", param=f"{place}.{name}"
        )
    return value


def _raw(body: bytes, contract: Contract) -> DecodedRequest:
    """A body that is one tensor and nothing else: name, datatype and shape are the model's only input's."""
    if len(contract.inputs) != 1:
        raise InvalidRequest(
            f"{HEADER_LENGTH} is 0, and a body without JSON is for models with one input; this one has "
            f"{len(contract.inputs)}: {', '.join(spec.name for spec in contract.inputs)}.",
            param=HEADER_LENGTH,
        )
    spec = contract.inputs[0]
    shape = list(spec.shape)
    if contract.max_batch_size > 0 and shape:
        shape[0] = 1
    inputs: Tensors
    if spec.datatype == "BYTES":
        if any(size not in (1, -1) for size in shape):
            raise InvalidRequest(
                f"{HEADER_LENGTH} is 0, and the input {spec.name!r} is BYTES of shape {shape}; a body without JSON is "
                "one element.",
                param=HEADER_LENGTH,
            )
        inputs = {spec.name: object_array([body]).reshape([1] * len(shape))}
    else:
        open_places = [place for place, size in enumerate(shape) if size < 0]
        if len(open_places) > 1:
            raise InvalidRequest(
                f"{HEADER_LENGTH} is 0, and the input {spec.name!r} has {len(open_places)} variable dimensions "
                f"({list(spec.shape)}); a body without JSON leaves at most one open.",
                param=HEADER_LENGTH,
            )
        if open_places:
            each = NUMPY[spec.datatype].itemsize
            for place, size in enumerate(shape):
                each *= size if place != open_places[0] else 1
            shape[open_places[0]] = len(body) // each if each else 0
        inputs = {spec.name: from_bytes(spec.name, spec.datatype, shape, body, 0, len(body))}
    return DecodedRequest(inputs=inputs, datatypes={spec.name: spec.datatype}, form=Form(is_binary=True))


# -- writing -------------------------------------------------------------------------------------


def classes_of(array: Array, datatype: str, spec: TensorSpec | None, num_classes: int, *, batched: bool) -> Array:
    """The best ``num_classes`` places of each row as "value:index" or "value:index:label", best first."""
    if datatype in ("BYTES", "BF16"):
        raise InvalidRequest(
            f"The output {spec.name if spec else ''!r} is {datatype}, which cannot be returned as classes; leave out "
            "the parameter classification.",
            param="outputs",
        )
    rows = array.reshape(array.shape[0], -1) if batched and array.ndim > 1 else array.reshape(1, -1)
    labels = spec.labels if spec is not None else ()
    best = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :num_classes]
    texts: list[bytes] = []
    for row, places in zip(rows.tolist(), best.tolist(), strict=True):
        for place in places:
            value = row[place]
            text = f"{value:f}:{place}" if isinstance(value, float) else f"{int(value)}:{place}"
            texts.append((f"{text}:{labels[place]}" if place < len(labels) else text).encode("utf-8"))
    found = object_array(texts)
    return found.reshape(best.shape) if batched and array.ndim > 1 else found
