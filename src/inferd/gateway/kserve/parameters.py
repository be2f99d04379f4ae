"""The fields of a request that the gateway reads, from its body and from its parameters (KServe v2).

Sources: the Open Inference Protocol, and Triton's extensions parameters, sequence and schedule_policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from inferd.gateway.admission import MAX_TIMEOUT_S
from inferd.gateway.body.decode import OFF_LOOP_BYTES, decode
from inferd.gateway.body.decode_cost import CHEAP_BYTES, MAX_DECODE_COST, check_decode_cost
from inferd.gateway.errors import invalid, shown
from inferd.gateway.kserve.outline import contains, outline
from inferd.gateway.kserve.wire import head_decoder, raw_head_decoder
from inferd.gateway.terms import PredictFields
from inferd.types import RANKS

DIALECT: Final = "v2"
MAX_SEQUENCE_CHARS: Final = 128
_LEVELS: Final = 2  # the body and its ``parameters``

# A request's priority: 0 is the default, 1 the highest, and every level from 4 on the lowest class.
_CLASSES: Final = (RANKS["critical"], RANKS["interactive"], RANKS["normal"], RANKS["batch"])


def read_infer(
    body: bytes, header_bytes: int = -1, version: str = "", *, most: tuple[int, int] | None = None
) -> PredictFields:
    """The fields of an infer request.

    ``header_bytes``: the length of the body's JSON part; -1: the whole body. ``most``: the largest number of values,
    and of lists and objects, that the model accepts as JSON; None: not known. Raises InvalidRequest for wrong
    parameters; the worker checks the rest of the body.
    """
    head = body if header_bytes < 0 else body[:header_bytes]
    # A header length above the body's length is left to the worker, which has a better message for it.
    if header_bytes > len(body) or not (contains(head, b'"parameters"') or contains(head, b"\\u")):
        return PredictFields(dialect=DIALECT, body=body, header_bytes=header_bytes, version=version)
    if len(head) > OFF_LOOP_BYTES:
        head = outline(head, _LEVELS, most)
        if len(head) > MAX_DECODE_COST:
            check_decode_cost(head, texts=False)
    try:
        if len(head) > CHEAP_BYTES and len(raw := bytes(raw_head_decoder.decode(head).parameters)) > CHEAP_BYTES:
            check_decode_cost(raw, texts=True)
        parameters = head_decoder.decode(head).parameters
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parameters = decode(head, head_decoder).parameters  # raises an InvalidRequest that names the field
    return predict_fields_of(DIALECT, body, parameters or {}, header_bytes=header_bytes, version=version)


def predict_fields_of(
    dialect: str,
    body: bytes,
    parameters: Mapping[str, object],
    *,
    header_bytes: int = -1,
    version: str = "",
) -> PredictFields:
    """The fields of a request for a prediction, from its body and parameters. Parameters that the gateway does not know
    are left to the model.

    Raises InvalidRequest.
    """
    if not parameters:
        return PredictFields(dialect=dialect, body=body, header_bytes=header_bytes, version=version)
    sequence = _sequence(parameters.get("sequence_id"))
    starts, ends = _flag(parameters, "sequence_start"), _flag(parameters, "sequence_end")
    if (starts or ends) and not sequence:
        raise invalid(
            "parameters.sequence_id",
            "parameters.sequence_start and sequence_end belong to a sequence; send its sequence_id (not 0 or empty).",
        )
    return PredictFields(
        dialect=dialect,
        body=body,
        header_bytes=header_bytes,
        version=version,
        sequence=sequence,
        sequence_start=starts,
        sequence_end=ends,
        may_wait=_flag(parameters, "batching", unset=True),
        priority=_priority(parameters.get("priority")),
        timeout=_timeout(parameters.get("timeout")),
    )


def _sequence(value: object) -> str:
    """The name of a request's sequence; empty: it has none. The number 7 and the text "7" are the same sequence."""
    if value is None or (value == 0 and not isinstance(value, bool)):
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 64:
        return str(value)
    if isinstance(value, str) and len(value) <= MAX_SEQUENCE_CHARS:
        return value
    raise invalid(
        "parameters.sequence_id",
        f"parameters.sequence_id must be a whole number of 64 bits or a text of at most {MAX_SEQUENCE_CHARS} "
        f"characters, not {shown(value)}.",
    )


def _flag(parameters: Mapping[str, object], name: str, *, unset: bool = False) -> bool:
    value = parameters.get(name)
    if value is None:
        return unset
    if not isinstance(value, bool):
        raise invalid(f"parameters.{name}", f"parameters.{name} must be true or false, not {shown(value)}.")
    return value


def _priority(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise invalid(
            "parameters.priority",
            f"parameters.priority must be a whole number from 0 (the default), where 1 is the highest, not "
            f"{shown(value)}.",
        )
    return None if value == 0 else _CLASSES[min(value, len(_CLASSES)) - 1]


def _timeout(value: object) -> float | None:
    """A timeout in seconds, from microseconds. None: no timeout."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TIMEOUT_S * 1e6:
        raise invalid(
            "parameters.timeout",
            f"parameters.timeout must be microseconds from 0 (none) to {MAX_TIMEOUT_S * 1e6:.0f}, not {shown(value)}.",
        )
    return value / 1e6 if value else None
