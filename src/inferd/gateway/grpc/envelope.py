"""What this process reads of a ModelInferRequest: whom it is for, what it is called, its parameters.

Tensors are stepped over: the worker that knows the model reads them from the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from inferd.predict.codecs.protowire import LENGTH, fields, text
from inferd.predict.codecs.v2_parameters import Value, parameter


class Envelope(NamedTuple):
    model: str
    version: str
    id: str
    parameters: dict[str, Value]


def read_envelope(body: bytes) -> Envelope:
    """Raises InvalidRequest where the bytes are no such message."""
    model = version = request_id = ""
    parameters: dict[str, Value] = {}
    for field, wire, start, end in fields(body, 0, len(body)):
        if field > 4 or wire != LENGTH:
            continue
        if field == 1:
            model = text(body, start, end)
        elif field == 2:
            version = text(body, start, end)
        elif field == 3:
            request_id = text(body, start, end)
        else:
            key, value = parameter(body, start, end)
            parameters[key] = value
    return Envelope(model, version, request_id, parameters)
