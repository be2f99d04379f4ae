"""The options of a stream of windows, and the plan that turns windows into requests for a model's inputs.

Knows tensors' shapes and bytes. Does not know connections.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest
from inferd.gateway.body.query import came_twice, query_pairs, query_struct
from inferd.gateway.errors import invalid, printable, shown
from inferd.types import ModelInfo, TensorSpec

MAX_SAMPLES: Final = 1 << 24
RATE_NAMES: Final = ("sr", "sample_rate", "sampling_rate")  # inputs that get the sample rate
_INPUTS: Final = "inputs."

# The struct formats of datatypes; BF16 has none, so its samples are accepted as bytes only.
_FORMATS: Final[dict[str, str]] = {
    "BOOL": "?",
    **{"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"},
    **{"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"},
    **{"FP16": "e", "FP32": "f", "FP64": "d"},
}
_SIZES: Final = {**{name: struct.calcsize("<" + word) for name, word in _FORMATS.items()}, "BF16": 2}

Samples = Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]


class WindowOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the query, or of the first message's ``open``."""

    window: Annotated[Samples | None, Meta(description="Samples of a window.")] = None
    hop: Annotated[Samples | None, Meta(description="From one window's first sample to the next one's; a window.")] = (
        None
    )
    context: Annotated[
        int, Meta(ge=0, le=MAX_SAMPLES, description="Samples from before a window that go in front of it.")
    ] = 0
    channels: Annotated[int, Meta(ge=1, le=65_536, description="Numbers of a sample, one beside the other.")] = 1
    sample_rate: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000_000)] | None,
        Meta(description="Samples per second; also the model's input of that name, or sr."),
    ] = None
    datatype: Annotated[
        str | None,
        Meta(description="Of the numbers sent: the input's, or INT16 where that is FP32 (divided by 32768)."),
    ] = None
    input: Annotated[str | None, Meta(description="The input that takes windows, where there are several.")] = None
    shape: Annotated[
        tuple[int, ...] | None, Meta(description="A window's shape where the input's does not say it; one -1 at most.")
    ] = None
    inputs: Annotated[
        dict[str, Any], Meta(description="Other inputs, the same with every window; in a query: inputs.NAME.")
    ] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How windows of samples become requests to a model."""

    window: int
    hop: int
    context: int
    sample_rate: int | None
    sample_bytes: int  # of the samples that the client sends
    datatype: str  # of the samples that the client sends
    head: bytes  # the JSON part of every request
    input: str
    is_scaled: bool  # the client sends INT16, and the input is FP32

    def body(self, data: bytes) -> bytes:
        """One window's request in KServe v2's binary form."""
        if self.is_scaled:
            count = len(data) // 2
            data = struct.pack(f"<{count}f", *[value / 32768 for value in struct.unpack(f"<{count}h", data)])
        return self.head + data

    def packed(self, numbers: list[int | float]) -> bytes:
        """Samples of a JSON message as bytes. Raises InvalidRequest."""
        word = _FORMATS.get(self.datatype)
        if word is None:
            raise invalid(
                "samples", f"Samples of {self.datatype} cannot be sent as JSON; send them as a binary message."
            )
        try:
            return struct.pack(f"<{len(numbers)}{word}", *numbers)
        except (struct.error, OverflowError, ValueError):
            raise invalid("samples", f"The samples do not fit {self.datatype}; send numbers that do.") from None

    def check(self, data: bytes) -> None:
        """Raises InvalidRequest if ``data`` is not a whole number of samples."""
        if len(data) % self.sample_bytes:
            each = f"{self.sample_bytes} bytes of {self.datatype}"
            raise InvalidRequest(
                f"A message of {len(data)} bytes is no whole number of samples, of which each has {each}.",
                param="samples",
                code="invalid_samples",
            )


def options_of(query: str) -> WindowOptions:
    """The options in a query. Raises InvalidRequest."""
    found: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    for name, text in query_pairs(query):
        into, key = (inputs, name[len(_INPUTS) :]) if name.startswith(_INPUTS) else (found, name)
        if key in into:
            raise came_twice(name)
        into[key] = text if into is found else _value(text)
    if "inputs" in found:
        raise invalid("inputs", "Inputs are sent one by one in a query: inputs.NAME=VALUE.")
    if "shape" in found:
        found["shape"] = found["shape"].split(",")
    names = f"{', '.join(WindowOptions.__struct_fields__[:-1])} and inputs.NAME"
    return query_struct({**found, "inputs": inputs}, WindowOptions, names)


def _value(text: str) -> object:
    """The value of a text that is JSON, else the text."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text


def plan_of(name: str, info: ModelInfo, options: WindowOptions, max_bytes: int) -> Plan:
    """The plan for a model and options. Raises InvalidRequest for options that do not fit the model or are missing."""
    if info.kind != "predict":
        raise InvalidRequest(
            f"The model {name!r} writes text; windows of samples are for models that take tensors.",
            param="model",
            code="unsupported_task",
        )
    specs = {spec.name: spec for spec in info.inputs}
    constants = _constants(options, specs)
    spec = _input(name, options, specs, constants)
    window = options.window
    if window is None:
        raise invalid("window", "The option 'window' is missing; say how many samples a window has.", "missing_window")
    sent = options.datatype or spec.datatype
    is_scaled = sent == "INT16" and spec.datatype == "FP32"
    if spec.datatype not in _SIZES or (sent != spec.datatype and not is_scaled):
        raise invalid(
            "datatype", f"The input {spec.name!r} of {name} takes {spec.datatype}, not samples of {printable(sent)!r}."
        )
    missing = [
        other.name
        for other in info.inputs
        if not other.is_optional and other.name != spec.name and other.name not in constants
    ]
    if missing:
        raise invalid("inputs", f"The model {name!r} also needs {', '.join(missing)}; send inputs.{missing[0]}.")
    length = options.context + window
    num_bytes = length * options.channels * _SIZES[spec.datatype]
    if num_bytes > max_bytes:
        raise invalid(
            "window",
            f"A window of {bytes_text(num_bytes)} is larger than server.max_body_bytes, {bytes_text(max_bytes)}.",
        )
    tensor: dict[str, object] = {
        "name": spec.name,
        "shape": _shape(options, spec, length),
        "datatype": spec.datatype,
        "parameters": {"binary_data_size": num_bytes},
    }
    return Plan(
        window=window,
        hop=options.hop or window,
        context=options.context,
        sample_rate=options.sample_rate,
        sample_bytes=options.channels * _SIZES[sent],
        datatype=sent,
        head=msgspec.json.encode({"inputs": [tensor, *constants.values()]}),
        input=spec.name,
        is_scaled=is_scaled,
    )


def _constants(options: WindowOptions, specs: Mapping[str, TensorSpec]) -> dict[str, dict[str, object]]:
    given = dict(options.inputs)
    if options.sample_rate is not None:
        for name in RATE_NAMES:
            if name in specs and name != options.input:
                given.setdefault(name, options.sample_rate)
    found: dict[str, dict[str, object]] = {}
    for name, value in given.items():
        spec = specs.get(name)
        if spec is None:
            raise invalid(
                f"inputs.{name[:64]}", f"There is no input {shown(name)}; there are {', '.join(specs) or 'none'}."
            )
        shape = _shape_of(value) if isinstance(value, list) else [1] * len(spec.shape)
        data = value if isinstance(value, list) else [value]
        found[name] = {"name": name, "shape": shape, "datatype": spec.datatype, "data": data}
    return found


def _shape_of(value: object) -> list[int]:
    """The shape of nested lists, by the first element of each. The worker checks the other elements."""
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _input(
    name: str, options: WindowOptions, specs: Mapping[str, TensorSpec], constants: Mapping[str, object]
) -> TensorSpec:
    if options.input is not None:
        spec = specs.get(options.input)
        if spec is None:
            raise invalid("input", f"There is no input {shown(options.input)}; there are {', '.join(specs)}.")
        if spec.name in constants:
            raise invalid("input", f"The input {spec.name!r} takes windows and cannot be the same with each of them.")
        return spec
    open_ones = [spec for spec in specs.values() if not spec.is_optional and spec.name not in constants]
    if len(open_ones) != 1:
        names = ", ".join(spec.name for spec in open_ones) or "none"
        raise invalid(
            "input",
            f"The model {name!r} has {len(open_ones)} inputs that could take windows ({names}); name one as 'input', "
            "and send the others as inputs.NAME.",
        )
    return open_ones[0]


def _shape(options: WindowOptions, spec: TensorSpec, length: int) -> list[int]:
    """A window's shape: the option ``shape``, or the first of the usual shapes that the input accepts. Raises
    InvalidRequest."""
    channels, rank = options.channels, len(spec.shape)
    size = length * channels
    if options.shape is not None:
        shape = list(options.shape)
        known = math.prod(one for one in shape if one != -1)
        if shape.count(-1) == 1 and known > 0 and size % known == 0:
            shape[shape.index(-1)] = size // known
        if math.prod(shape) != size or any(one < 1 for one in shape):
            raise invalid(
                "shape", f"The shape {list(options.shape)} does not hold {length} samples of {channels} numbers."
            )
        candidates = [shape]
    elif channels == 1:
        candidates = [[length], [1, length], [length, 1], [1, length, 1], [1, 1, length]]
    else:
        candidates = [[length, channels], [1, length, channels]]
    for shape in candidates:
        if len(shape) == rank and all(has in (-1, one) for has, one in zip(spec.shape, shape, strict=True)):
            return shape
    raise invalid(
        "shape",
        f"The input {spec.name!r} takes {list(spec.shape)}, and a window has {length} samples of {channels} numbers "
        "with its context; choose other sizes, or send the option 'shape'.",
    )
