"""KServe v2 over gRPC: a ModelInferRequest's bytes become a decoded request, a result the bytes of a
ModelInferResponse.

Knows the messages' field numbers (``inferd/gateway/grpc/inference.proto``). Tensors are views of the request's bytes
where their alignment allows it, and answers are raw bytes, as Triton's are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from inferd.errors import InvalidRequest
from inferd.predict.bounds import MAX_RANK, check_shape
from inferd.predict.codecs.duplicates import first_repeated
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import shown, wrong_input
from inferd.predict.codecs.tensors import check_datatype, from_bytes, num_elements, to_bytes
from inferd.predict.codecs.v2 import RESERVED, classes_of, wants_times
from inferd.predict.codecs.v2_parameters import parameter, parameter_entry
from inferd.predict.contract import NUMPY, Array, Contract, datatype_of, object_array
from inferd.predict.runtime import Result
from inferd.protowire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    broken,
    fields,
    head,
    packed,
    signed,
    sized,
    text,
    varint,
)
from inferd.types import ModelInfo, Prediction, PredictRequest

GRPC_TYPE: Final = "application/grpc"
_MAX_FIELDS: Final = 16_384  # of a message: tiny ones cost a hundred times their bytes
_VARINT_BYTES: Final = 10  # of the longest
_SMALL_BYTES: Final = 256  # of a tensor's description that is worth remembering
_FEW: Final = 16  # numbers that are read faster one by one

# InferTensorContents: the field of a datatype's values, and how they are written there.
_CONTENTS: Final[Mapping[str, int]] = {
    "BOOL": 1,
    **dict.fromkeys(("INT8", "INT16", "INT32"), 2),
    "INT64": 3,
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), 4),
    "UINT64": 5,
    "FP32": 6,
    "FP64": 7,
    "BYTES": 8,
}
_CONTENTS_NAMES: Final = (
    "",
    *("bool_contents", "int_contents", "int64_contents", "uint_contents", "uint64_contents"),
    *("fp32_contents", "fp64_contents", "bytes_contents"),
)


_FIXED_WIDTH: Final[Mapping[int, int]] = {6: 4, 7: 8}  # bytes of a number; those of other fields are varints


class _Tensor(NamedTuple):
    """An input as it is described; ``contents`` are the bytes of its InferTensorContents, None: it has none."""

    name: str
    datatype: str
    shape: list[int]  # shared: never changed
    contents: bytes | None


class _Form(NamedTuple):
    """The properties of the request that encoding the answer needs."""

    id: bytes
    classes: Mapping[str, int]  # by output: how many of the best classes are wanted instead of the values


class V2GrpcCodec:
    """Dialect ``v2.grpc``."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        body = request.body
        described: list[_Tensor] = []
        raws: list[tuple[int, int]] = []
        wanted: list[str] = []
        classes: dict[str, int] = {}
        parameters: dict[str, object] = {}
        request_id, is_timed = b"", False
        for field, wire, start, end in fields(body, 0, len(body), _MAX_FIELDS):
            if wire != LENGTH:
                continue
            if field == 5:
                described.append(_tensor(body[start:end]))
            elif field == 7:
                raws.append((start, end))
            elif field == 6:
                name, num_classes = _wanted(body[start:end])
                wanted.append(name)
                if num_classes:
                    classes[name] = num_classes
            elif field == 4:
                key, value = parameter(body, start, end)
                if key not in RESERVED:
                    parameters[key] = value
                elif key == "return_step_times":
                    is_timed = wants_times({key: value})
            elif field == 3:
                request_id = body[start:end]
                text(body, start, end)
        if raws:
            inputs = _from_raw(body, described, raws, contract)
        else:
            inputs = {tensor.name: _from_contents(tensor, contract) for tensor in described}
        if len(inputs) < len(described):
            twice = first_repeated(tensor.name for tensor in described) or ""
            raise wrong_input(twice, "comes twice; send it once")
        if not inputs:
            raise InvalidRequest("The request has no inputs; send at least one.", param="inputs")
        if len(set(wanted)) != len(wanted):
            twice = first_repeated(wanted) or ""
            raise InvalidRequest(f"The output {shown(twice)} is asked for twice; ask for it once.", param="outputs")
        return DecodedRequest(
            inputs=inputs,
            datatypes={tensor.name: tensor.datatype for tensor in described},
            wanted=tuple(wanted),
            parameters=parameters,
            wants_times=is_timed,
            form=_Form(request_id, classes),
        )

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        form = decoded.form
        assert isinstance(form, _Form), "a decoded request of this dialect has its form"
        version = info.version
        out = [_names(request.model.removesuffix(f"@{version}"), version)]
        if form.id:
            out.append(sized(3, form.id))
        for key, value in result.parameters.items():
            out.append(sized(4, parameter_entry(key, value)))
        raw: list[bytes] = []
        for name in decoded.wanted or result.outputs:
            array = result.outputs[name]
            spec = next((spec for spec in info.outputs if spec.name == name), None)
            datatype = spec.datatype if spec is not None else datatype_of(array.dtype)
            if name in form.classes:
                array = classes_of(array, datatype, spec, form.classes[name], batched=info.max_batch_size > 0)
                datatype = "BYTES"
            out.append(_described(name, datatype, array.shape))
            data = to_bytes(datatype, array)
            raw.append(head(6, len(data)))
            raw.append(data)
        return Prediction(b"".join(out + raw), GRPC_TYPE)


# -- reading -------------------------------------------------------------------------------------


def _tensor(message: bytes) -> _Tensor:
    known = _known.get(message)
    if known is not None:
        return known
    tensor = _read_tensor(message)
    if len(message) <= _SMALL_BYTES and tensor.contents is None:  # contents are never shared between requests
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[message] = tensor
    return tensor


def _read_tensor(message: bytes) -> _Tensor:
    name = datatype = ""
    shape: list[int] = []
    contents: bytes | None = None
    for field, wire, start, end in fields(message, 0, len(message), _MAX_FIELDS):
        if field == 3:
            if wire != LENGTH or end - start <= MAX_RANK * _VARINT_BYTES:
                shape += [signed(value) for value in _varints_of(message, wire, start, end)]
            if len(shape) > MAX_RANK or end - start > MAX_RANK * _VARINT_BYTES:
                raise wrong_input(name, f"has more than {MAX_RANK} dimensions; at most {MAX_RANK} are expected")
        elif wire != LENGTH:
            continue
        elif field == 1:
            name = text(message, start, end)
        elif field == 2:
            datatype = text(message, start, end)
        elif field == 4:
            key, _ = parameter(message, start, end)
            if key.startswith("shared_memory"):
                raise wrong_input(
                    name, f"lies in shared memory ({shown(key)}), which this server does not read; send its data"
                )
        elif field == 5:
            contents = (contents or b"") + message[start:end]  # a message that comes twice is merged
    check_datatype(name, datatype)
    return _Tensor(name, datatype, shape, contents)


_MAX_KNOWN: Final = 1024
_known: Final[dict[bytes, _Tensor]] = {}
"""Descriptions of tensors (name, datatype, shape) that were read before, by their bytes."""


def _wanted(message: bytes) -> tuple[str, int]:
    """An InferRequestedOutputTensor: an output, and as how many of its best classes; 0: as the tensor it is."""
    name, num_classes = "", 0
    for field, wire, start, end in fields(message, 0, len(message), _MAX_FIELDS):
        if wire == LENGTH and field == 1:
            name = text(message, start, end)
        elif wire == LENGTH and field == 2:
            key, value = parameter(message, start, end)
            if key.startswith("shared_memory"):
                raise InvalidRequest(
                    f"The output {shown(name)} is wanted in shared memory ({shown(key)}), which this server does not "
                    "write; leave the parameter out.",
                    param="outputs",
                )
            if key == "classification":
                if type(value) is not int or not 1 <= value < 1 << 31:
                    raise InvalidRequest(
                        f"The output {shown(name)} has the classification {shown(str(value))}; a number of classes "
                        "from 1 is expected.",
                        param="outputs",
                    )
                num_classes = value
    return name, num_classes


def _from_raw(
    body: bytes, described: Sequence[_Tensor], raws: Sequence[tuple[int, int]], contract: Contract
) -> dict[str, Array]:
    if len(raws) != len(described):
        raise InvalidRequest(
            f"raw_input_contents has {len(raws)} entries and inputs has {len(described)}; send one for each input.",
            param="raw_input_contents",
        )
    inputs: dict[str, Array] = {}
    for tensor, (start, end) in zip(described, raws, strict=True):
        if tensor.contents:
            raise wrong_input(tensor.name, "has contents, and there are raw_input_contents; send one of the two")
        check_shape(tensor.name, tensor.datatype, tensor.shape, contract, is_listed=False)
        inputs[tensor.name] = from_bytes(tensor.name, tensor.datatype, tensor.shape, body, start, end - start)
    return inputs


def _from_contents(tensor: _Tensor, contract: Contract) -> Array:
    name, datatype, shape, contents = tensor
    field = _CONTENTS.get(datatype)
    if field is None:
        raise wrong_input(name, f"is {datatype}, which only raw_input_contents can hold; send it there")
    count = num_elements(name, shape)
    check_shape(name, datatype, shape, contract, is_listed=field not in _FIXED_WIDTH)
    values: list[Array] = []
    elements: list[bytes] = []
    given = 0
    body = contents or b""
    # A text is a field of its own; numbers come packed in one, or, few of them, one by one.
    for found, wire, start, end in fields(body, 0, len(body), _MAX_FIELDS + (count if field == 8 else 0)):
        if found == field == 8 and wire == LENGTH:
            elements.append(body[start:end])
            given += 1
        elif found == field:
            given += _count(body, field, wire, start, end)
            if given <= count:  # otherwise there are too many, which is reported below
                values.append(_numbers(body, field, wire, start, end))
        elif 1 <= found <= 8 and (wire != LENGTH or end > start):
            raise wrong_input(
                name, f"is {datatype} and has {_CONTENTS_NAMES[found]}; put its values into {_CONTENTS_NAMES[field]}"
            )
    if given != count:
        raise wrong_input(
            name,
            f"is {datatype} of shape {shape[:8]}, which takes "
            f"{count if count < 1 << 64 else 'too many'} "
            f"values; {given} came in {_CONTENTS_NAMES[field]}",
        )
    if field == 8:
        return object_array(elements).reshape(shape)
    if not values:
        return np.empty(shape, NUMPY[datatype])
    array: Array = values[0] if len(values) == 1 else np.concatenate(values)
    return _narrowed(name, datatype, array).reshape(shape)


def _count(body: bytes, field: int, wire: int, start: int, end: int) -> int:
    """The count of a repeated number, which is packed or written one by one."""
    if field in _FIXED_WIDTH:
        return (end - start) // _FIXED_WIDTH[field] if wire == LENGTH else 1
    if wire != LENGTH:
        return int(wire == VARINT)
    return int(np.count_nonzero(np.frombuffer(body, np.uint8, end - start, start) < 128))


def _numbers(body: bytes, field: int, wire: int, start: int, end: int) -> Array:
    """The values of a repeated number, which come together or one by one."""
    if field in (6, 7):
        dtype, alone = (np.dtype("<f4"), FIXED32) if field == 6 else (np.dtype("<f8"), FIXED64)
        if wire not in (LENGTH, alone) or (end - start) % dtype.itemsize:
            raise broken(start, f"{_CONTENTS_NAMES[field]} holds no numbers")
        return np.frombuffer(body, dtype, (end - start) // dtype.itemsize, start).copy()
    values = varints(body, start, end) if wire == LENGTH else np.array(_varints_of(body, wire, start, end), np.uint64)
    if field == 1:
        return values.astype(np.bool_)
    if field == 2:
        return values.astype(np.uint32).view(np.int32)
    if field == 3:
        return values.view(np.int64)
    return values.astype(np.uint32) if field == 4 else values


def _narrowed(name: str, datatype: str, array: Array) -> Array:
    """The numbers in the input's own datatype, where the field's is wider."""
    dtype = NUMPY[datatype]
    if array.dtype == dtype:
        return array
    narrow = array.astype(dtype)
    lost = np.flatnonzero(narrow != array)
    if len(lost):
        raise wrong_input(name, f"has the value {array[lost[0]]}, which is out of the range of {datatype}")
    return narrow


def _varints_of(body: bytes, wire: int, start: int, end: int) -> list[int]:
    """The varints of a field that may be packed."""
    if wire == VARINT:
        return [start]
    if wire != LENGTH:
        return []  # of another type: an unknown field
    found = []
    while start < end:
        value, start = varint(body, start, end)
        found.append(value)
    return found


def varints(body: bytes, start: int, end: int) -> npt.NDArray[np.uint64]:
    """Packed varints, many at a time: the bytes of each are gathered by their place within it."""
    if end - start <= _FEW:
        return np.array(_varints_of(body, LENGTH, start, end), np.uint64)
    data = np.frombuffer(body, np.uint8, end - start, start)
    lasts = np.flatnonzero(data < 128)
    if data[-1] >= 128:
        raise broken(end, "it ends within a number")
    firsts = np.empty_like(lasts)
    firsts[0] = 0
    firsts[1:] = lasts[:-1] + 1
    sizes = lasts - firsts + 1
    longest = int(sizes.max())
    if longest > 10:
        raise broken(start, "a number has more than ten bytes")
    values = (data[firsts] & 127).astype(np.uint64)
    for place in range(1, longest):
        has = np.flatnonzero(sizes > place)
        values[has] |= (data[firsts[has] + place] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * place)
    return values


# -- writing -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _names(model: str, version: str) -> bytes:
    return sized(1, model.encode()) + sized(2, version.encode())


@functools.lru_cache(maxsize=1024)
def _described(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """An InferOutputTensor without contents, as field 5 of the answer."""
    return sized(5, sized(1, name.encode()) + sized(2, datatype.encode()) + packed(3, shape))
