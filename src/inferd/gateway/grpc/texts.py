"""Text generation through the messages of predictions.

The input ``text_input`` and the output ``text_output`` are BYTES tensors of one element.

The request's parameters, and the optional input ``sampling_parameters`` (JSON), are the fields of /v1/completions.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from inferd import clock
from inferd.config.units import bytes_text
from inferd.errors import InferdError, InvalidRequest
from inferd.gateway.admission import reserve
from inferd.gateway.body.decode import OFF_LOOP_BYTES
from inferd.gateway.body.embedded import MAX_TEXT_BYTES, decoded_text
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import check_end, invalid, shown
from inferd.gateway.generation.outputs import merge
from inferd.gateway.grpc.calls import CONTENT_TYPE
from inferd.gateway.grpc.envelope import MAX_FIELDS, Envelope, read_envelope
from inferd.gateway.kserve.generate import TextRequest, TextWork, generation_of, whole_text
from inferd.gateway.kserve.served import Served
from inferd.gateway.operations import TEXT_COMPLETION
from inferd.gateway.upstream import ModelStatus
from inferd.observe.payloads.texts import REPEATED
from inferd.protowire import LENGTH, fields, sized, text
from inferd.router.stream import Stream

DIALECT: Final = "v2.grpc"
INPUT: Final = "text_input"
OPTIONS: Final = "sampling_parameters"
IGNORED: Final = frozenset({"stream", "exclude_input_in_output"})  # other inputs that clients of Triton's vLLM send
_OUTPUT: Final = sized(5, sized(1, b"text_output") + sized(2, b"BYTES") + sized(3, b"\x01"))
_LENGTH: Final = struct.Struct("<I")
_MAX_FIELDS: Final = 64  # of a message of a tensor with one element, and of its contents
_SEQUENCE: Final = frozenset({"sequence_id", "sequence_start", "sequence_end"})  # generation has no sequences


def writes_texts(model: ModelStatus) -> bool:
    """Whether a model is known to generate text."""
    return model.info is not None and model.info.kind == "generate"


async def text_work(
    call: Call,
    served: Served,
    envelope: Envelope,
    body: bytes,
    remaining_s: float | None,
    head: bytes,
) -> TextWork:
    """Decode and check a request for a whole text. Raises InvalidRequest."""
    request, options = await _read_request(envelope, body, remaining_s)
    generation = await generation_of(call, served, request, options, is_stream=False)
    identity = f"{served.status.name} {served.requested_version} {DIALECT}\n".encode() + body
    before = request.text_input if options.get("exclude_input_in_output") is False else ""

    async def answer(call: Call, stream: Stream) -> Answer:
        written, _ = await whole_text(call, stream)
        return Response(200, head + write_text(before + written), CONTENT_TYPE)

    return TextWork(generation, identity, answer)


async def completions(
    context: Context,
    call: Call,
    served: Served,
    envelope: Envelope,
    body: bytes,
    remaining_s: float | None,
    head: bytes,
) -> AsyncGenerator[tuple[bytes, bool], None]:
    """A message for each piece of the text (``head`` and the output), and whether it is the last one."""
    request, options = await _read_request(envelope, body, remaining_s)
    generation = await generation_of(call, served, request, options, is_stream=True)
    call.received_at = clock.now()
    cost = generation.prepare(call, b"")
    reserve(context, call, served.status.name, prompt_tokens=cost.max_prompt, max_tokens=cost.max_answer)
    call.submitted_at = clock.now()
    [stream] = await generation.submit(context, call)
    async for _, output in merge(call, [stream]):
        end = output.end
        if end is not None:
            check_end(end)
        for delta in output.deltas:
            if delta.finish_reason is not None:
                call.finish_reasons = (delta.finish_reason,)
        piece = "".join([delta.text for delta in output.deltas])
        if piece or end is not None:
            yield head + write_text(piece), end is not None


async def _read_request(
    envelope: Envelope, body: bytes, remaining_s: float | None
) -> tuple[TextRequest, dict[str, object]]:
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(_text_request, envelope, body, remaining_s)
    return _text_request(envelope, body, remaining_s)


def _text_request(envelope: Envelope, body: bytes, remaining_s: float | None) -> tuple[TextRequest, dict[str, object]]:
    """The text, and the fields of /v1/completions. Parameters override the input ``sampling_parameters``."""
    given = read_texts(body)
    options = _options_of(given[OPTIONS]) if OPTIONS in given else {}
    for name, value in envelope.parameters.items():
        if name not in _SEQUENCE and not name.startswith("triton_"):
            options[name] = value
    if remaining_s is not None:
        microseconds = options.get("timeout")
        least = (
            min(remaining_s, microseconds / 1e6) if isinstance(microseconds, int) and microseconds > 0 else remaining_s
        )
        options["timeout"] = max(1, round(least * 1e6))
    return TextRequest(text_input=given[INPUT]), options


class _RecordedTexts:
    """The texts of messages, for records of payloads."""

    left_out: Final = REPEATED
    generated: Final = frozenset(("text_output",))

    def of_request(self, body: bytes) -> object:
        """The texts and the parameters."""
        try:
            return {**read_texts(body), "parameters": read_envelope(body).parameters}
        except InferdError:
            return None

    def of_answer(self, parts: Sequence[bytes], *, is_streamed: bool) -> object:
        pieces = [
            part[start + _LENGTH.size : end]
            for part in parts
            for field, wire, start, end in fields(part, 0, len(part), _MAX_FIELDS)
            if field == 6 and wire == LENGTH
        ]
        return {"text_output": b"".join(pieces).decode("utf-8", "replace")} if pieces else None


_RECORDED_TEXTS: Final = _RecordedTexts()


def note_texts(call: Call) -> None:
    """Note that a call of a method for predictions asks for a text, as its model tells."""
    call.operation = TEXT_COMPLETION
    if call.capture is not None:
        call.capture.texts = _RECORDED_TEXTS


def _options_of(written: str) -> dict[str, object]:
    try:
        options = decoded_text(written)
    except ValueError as error:
        raise invalid(f"inputs.{OPTIONS}", f"The input {OPTIONS!r} is not a JSON object ({error}).") from None
    if not isinstance(options, dict):
        raise invalid(f"inputs.{OPTIONS}", f"The input {OPTIONS!r} is {shown(options)}; send a JSON object.")
    return options


def write_text(written: str) -> bytes:
    """The output with a text, as fields of a ModelInferResponse."""
    content = written.encode()
    return _OUTPUT + sized(6, _LENGTH.pack(len(content)) + content)


# -- the request's texts, without numpy ----------------------------------------------------------


def read_texts(body: bytes) -> dict[str, str]:
    """The texts of the inputs, by name. Raises InvalidRequest for an input that is not BYTES of one element, and for a
    message that is longer than its texts may be."""
    if len(body) > MAX_TEXT_BYTES:
        raise invalid(
            f"inputs.{INPUT}",
            f"The message has {bytes_text(len(body))}; {bytes_text(MAX_TEXT_BYTES)} of texts are read at most. Shorten "
            "the text.",
            "too_many_values",
        )
    described: list[tuple[str, str, bytes]] = []
    raws: list[bytes] = []
    for field, wire, start, end in fields(body, 0, len(body), MAX_FIELDS):
        if wire == LENGTH and field == 5:
            described.append(_tensor(body, start, end))
        elif wire == LENGTH and field == 7:
            raws.append(body[start:end])
    if raws and len(raws) != len(described):
        raise InvalidRequest(
            f"raw_input_contents has {len(raws)} entries and inputs has {len(described)}; send one for each input.",
            param="raw_input_contents",
        )
    found: dict[str, str] = {}
    for index, (name, datatype, contents) in enumerate(described):
        if name in IGNORED:
            continue
        if name not in (INPUT, OPTIONS):
            raise invalid(
                f"inputs.{name[:64]}", f"There is no input {shown(name)}; this model takes {INPUT} and {OPTIONS}."
            )
        if datatype != "BYTES":
            raise invalid(
                f"inputs.{name}", f"The input {name!r} is {shown(datatype)}; BYTES of one element is expected."
            )
        found[name] = _only_text(name, raws[index]) if raws else _only_content(name, contents)
    if INPUT not in found:
        raise invalid(f"inputs.{INPUT}", f"The input {INPUT!r} is missing; send it, BYTES of one element.")
    return found


def _tensor(body: bytes, start: int, end: int) -> tuple[str, str, bytes]:
    name, datatype, contents = "", "", b""
    for field, wire, at, stop in fields(body, start, end, _MAX_FIELDS):
        if wire != LENGTH:
            continue
        if field == 1:
            name = text(body, at, stop)
        elif field == 2:
            datatype = text(body, at, stop)
        elif field == 5:
            contents += body[at:stop]
    return name, datatype, contents


def _only_text(name: str, raw: bytes) -> str:
    if len(raw) < 4 or _LENGTH.unpack_from(raw)[0] != len(raw) - 4:
        raise invalid(
            f"inputs.{name}", f"The input {name!r} must be one element: its length in four bytes, and its bytes."
        )
    return _utf8(name, raw[4:])


def _only_content(name: str, contents: bytes) -> str:
    found = fields(contents, 0, len(contents), _MAX_FIELDS)
    elements = [contents[at:stop] for field, wire, at, stop in found if field == 8]
    if len(elements) != 1:
        raise invalid(f"inputs.{name}", f"The input {name!r} has {len(elements)} elements; one is expected.")
    return _utf8(name, elements[0])


def _utf8(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise invalid(f"inputs.{name}", f"The input {name!r} is not UTF-8.") from None
