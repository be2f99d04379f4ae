"""Models that write, asked like models that compute: ``text_input`` in, ``text_output`` out, BYTES of one element.

The request's parameters, and the optional input ``sampling_parameters`` (JSON), are the fields of /v1/completions.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Mapping
from typing import Final

import msgspec

from inferd.errors import InternalError, InvalidRequest
from inferd.gateway.completions import completion_sampling, prompts_of
from inferd.gateway.decode import decode_body
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation import collect, failure_of, note_end, submit_all
from inferd.gateway.grpc.envelope import Envelope
from inferd.gateway.grpc.statuses import Unsupported
from inferd.gateway.http import Call
from inferd.gateway.kserve import Served, Value, asked_of
from inferd.gateway.openai_wire import completion_decoder
from inferd.gateway.room import Room
from inferd.gateway.sampling import check_unsupported
from inferd.gateway.upstream import ModelStatus, Stream
from inferd.predict.codecs.protowire import LENGTH, fields, sized, text
from inferd.types import Output

INPUT: Final = "text_input"
OPTIONS: Final = "sampling_parameters"
IGNORED: Final = frozenset({"stream", "exclude_input_in_output"})  # other inputs that clients of Triton's vLLM send
_OUTPUT: Final = sized(5, sized(1, b"text_output") + sized(2, b"BYTES") + sized(3, b"\x01"))
_LENGTH: Final = struct.Struct("<I")
_RESERVED: Final = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers"})
_options_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def writes_texts(model: ModelStatus) -> bool:
    return model.info is not None and model.info.kind == "generate"


async def completed(
    room: Room, call: Call, served: Served, envelope: Envelope, body: bytes, left: float | None, head: bytes
) -> bytes:
    """The whole text, behind ``head``."""
    stream = await _submitted(room, call, served.status, envelope, body, left, is_stream=False)
    collected = await collect(call, stream, 1)
    return head + write_text("".join(collected.choices[0].texts))


async def completions(
    room: Room, call: Call, served: Served, envelope: Envelope, body: bytes, left: float | None, head: bytes
) -> AsyncGenerator[tuple[bytes, bool], None]:
    """The text in pieces as it is written, each behind ``head``, and whether it is the last one."""
    stream = await _submitted(room, call, served.status, envelope, body, left, is_stream=True)
    async for output in stream:
        if not isinstance(output, Output):
            raise InternalError("A relayed answer came where outputs were expected. This is a bug.")
        if output.prompt is not None:
            call.learned(output.prompt.num_tokens)
        end = output.end
        if end is not None:
            note_end(call, end)
            error = failure_of(end)
            if error is not None:
                raise error
        piece = "".join([delta.text for delta in output.deltas])
        if piece or end is not None:
            yield head + write_text(piece), end is not None


async def _submitted(
    room: Room, call: Call, model: ModelStatus, envelope: Envelope, body: bytes, left: float | None, *, is_stream: bool
) -> Stream:
    if not model.has_local:
        raise Unsupported(f"The model {model.name!r} runs on servers that speak OpenAI's protocol; ask it over HTTP.")
    given = read_texts(body)
    options: dict[str, object] = dict(_options_of(given.pop(OPTIONS, None)))
    options.update(_sampling_of(envelope.parameters))
    asked = asked_of("", b"", {name: envelope.parameters.get(name) for name in ("priority", "timeout")})
    times = [seconds for seconds in (asked.timeout, left) if seconds is not None]
    options |= {"model": model.name, "prompt": given[INPUT], "stream": is_stream}
    if asked.priority is not None:
        options["priority"] = asked.priority
    if times:
        options["timeout"] = min(times)
    raw = msgspec.json.encode(options)
    fields_given = await decode_body(raw, completion_decoder)
    call.model = model.name
    call.ignored = check_unsupported(fields_given)
    sampling, explicit = completion_sampling(fields_given)
    if sampling.width != 1:
        raise invalid("n", "n and best_of must be 1 here: there is one text_output.")
    [stream] = submit_all(
        room,
        call,
        fields_given,
        model,
        call.response_id("infer"),
        prompts_of(fields_given),
        sampling,
        explicit,
        raw=raw,
        return_prompt_ids=False,
        may_relay=False,
    )
    return stream


def _sampling_of(parameters: Mapping[str, Value]) -> dict[str, Value]:
    return {
        name: value for name, value in parameters.items() if name not in _RESERVED and not name.startswith("triton_")
    }


def _options_of(said: str | None) -> Mapping[str, msgspec.Raw]:
    if said is None:
        return {}
    try:
        return _options_decoder.decode(said)
    except msgspec.DecodeError as error:
        raise invalid(f"inputs.{OPTIONS}", f"The input {OPTIONS!r} is not a JSON object ({error}).") from None


def write_text(said: str) -> bytes:
    """The output and its bytes, as fields of a ModelInferResponse."""
    content = said.encode()
    return _OUTPUT + sized(6, _LENGTH.pack(len(content)) + content)


# -- the request's texts, without numpy ----------------------------------------------------------


def read_texts(body: bytes) -> dict[str, str]:
    """The inputs that are texts of one element, by name. Raises InvalidRequest."""
    described: list[tuple[str, str, bytes]] = []
    raws: list[bytes] = []
    for field, wire, start, end in fields(body, 0, len(body)):
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
    for field, wire, at, stop in fields(body, start, end):
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
    elements = [contents[at:stop] for field, wire, at, stop in fields(contents, 0, len(contents)) if field == 8]
    if len(elements) != 1:
        raise invalid(f"inputs.{name}", f"The input {name!r} has {len(elements)} elements; one is expected.")
    return _utf8(name, elements[0])


def _utf8(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise invalid(f"inputs.{name}", f"The input {name!r} is not UTF-8.") from None
