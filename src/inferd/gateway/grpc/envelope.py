"""The fields of a ModelInferRequest that the gateway reads: the model, the version, the id and the parameters.

Tensors are skipped; the worker reads them from the same bytes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest
from inferd.http.cost import PROTOBUF_FIELD
from inferd.predict.codecs.v2_parameters import Value, parameter
from inferd.protowire import LENGTH, Field, fields, text


class Envelope(NamedTuple):
    model: str
    version: str
    id: str
    parameters: dict[str, Value]


MAX_FIELDS: Final = 2048  # of a message: enough for a thousand tensors and their contents
MAX_PARAMETERS: Final = 256
MAX_BYTES: Final = 1 << 20  # of a message beside its tensors: texts are made of them in the event loop

_PARAMETER_COST: Final = 40 * PROTOBUF_FIELD
_WORST_COST: Final = MAX_FIELDS * PROTOBUF_FIELD + MAX_PARAMETERS * _PARAMETER_COST

MAX_KNOWN: Final = 256
_MAX_KNOWN_BYTES: Final = 1024  # of the part before a message's last field


class Envelopes:
    """A cache of the envelopes of messages.

    The requests of a client often differ in their tensors' numbers alone. Two messages have the same envelope if they
    have the same length and are equal up to the content of the last field, which is a tensor.
    """

    __slots__ = ("_known", "cost")

    def __init__(self) -> None:
        self.cost = 0  # of the last call of ``read``, refused or not, in units of ``http.cost``
        self._known: dict[int, tuple[bytes, Envelope]] = {}  # by the message's length

    def read(self, body: bytes) -> Envelope:
        """As ``read_envelope``, from the cache if possible. Sets ``cost``."""
        known = self._known.get(len(body))
        if known is not None and body.startswith(known[0]):
            self.cost = 0
            return known[1]
        self.cost = min(len(body) * PROTOBUF_FIELD, _WORST_COST)
        found = fields(body, 0, len(body), MAX_FIELDS)
        envelope, num_parameters = _read(body, found)
        self.cost = len(found) * PROTOBUF_FIELD + num_parameters * _PARAMETER_COST
        last, wire, start, end = found[-1] if found else (0, 0, 0, 0)
        if last > 4 and wire == LENGTH and end == len(body) and start <= _MAX_KNOWN_BYTES:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[len(body)] = body[:start], envelope
        return envelope


def read_envelope(body: bytes) -> Envelope:
    """The envelope of a message. Raises InvalidRequest when the bytes are no ModelInferRequest, or have too many
    fields."""
    return _read(body, fields(body, 0, len(body), MAX_FIELDS))[0]


def _read(body: bytes, found: list[Field]) -> tuple[Envelope, int]:
    """The envelope, and the number of parameters that were read for it."""
    model = version = request_id = ""
    parameters: dict[str, Value] = {}
    num_parameters = num_bytes = 0
    for field, wire, start, end in found:
        if field > 4 or wire != LENGTH:
            continue
        num_bytes += end - start
        if num_bytes > MAX_BYTES:
            raise InvalidRequest(
                f"The names, ids and parameters of the request have more than {bytes_text(MAX_BYTES)}; shorten them.",
                param="parameters",
                code="too_many_values",
            )
        if field == 1:
            model = text(body, start, end)
        elif field == 2:
            version = text(body, start, end)
        elif field == 3:
            request_id = text(body, start, end)
        else:
            num_parameters += 1
            if num_parameters > MAX_PARAMETERS:
                raise InvalidRequest(
                    f"The request has more than {MAX_PARAMETERS} parameters; send fewer.",
                    param="parameters",
                    code="too_many_fields",
                )
            key, value = parameter(body, start, end)
            parameters[key] = value
    return Envelope(model, version, request_id, parameters), num_parameters
