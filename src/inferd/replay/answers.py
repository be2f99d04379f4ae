"""Answers of every dialect in one form: texts, tensors, labels, and a document without what differs each time.

A stream becomes the document that its events add up to, so the places at which it was cut do not count. Knows the forms
of answers, whole and streamed. Pure.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from inferd.errors import InferdError
from inferd.predict.codecs.tensors import from_bytes, from_json
from inferd.predict.contract import Array, widened

VOLATILE: Final = frozenset(
    (
        *("created", "created_at", "completed_at", "request_id", "system_fingerprint", "service_tier", "timings"),
        *("model", "model_name", "model_version", "usage", "prompt_cache_key", "kv_transfer_params", "metrics"),
    )
)
"""Fields whose value does not depend on the model's numbers: times, names, counts of cached tokens."""

_IDS: Final = frozenset(("id", "call_id", "item_id", "response_id", "tool_call_id", "tool_use_id"))
_JOINED: Final = frozenset(
    (
        *("content", "text", "arguments", "reasoning_content", "reasoning", "refusal", "partial_json", "thinking"),
        *("text_output", "output_text"),
    )
)
"""Fields whose texts are written by the model, which streams send in pieces."""

_FINISHED: Final = ("response.completed", "response.incomplete", "response.failed")
_FLOATS: Final = ("FP16", "FP32", "FP64", "BF16")
_MAX_LABELS: Final = 4096
_any: Final = msgspec.json.Decoder()


class Answer(NamedTuple):
    """What was answered."""

    status: int
    exact: bytes  # equal for answers that are equal to the bit; of a failed one the kind of its error
    texts: dict[str, str]  # that the model has written, by their place
    tensors: dict[str, Array]
    labels: tuple[str, ...]  # the classes that were chosen, the first rank, or the values of integers and texts
    finish: tuple[str, ...]
    usage: tuple[int, int] | None  # tokens of the prompt and of the answer
    error: str  # the server's sentence; empty: it is an answer

    @property
    def text(self) -> str:
        """All texts of the answer, in the order of their places."""
        return "\n".join(self.texts.values())


def read_answer(route: str, status: int, body: bytes, *, is_stream: bool) -> Answer:
    """The answer of a route's pattern. A stream that broke off, and an answer that is not understood, have an
    ``error``."""
    document: Any
    tail = b""
    if status == 200 and is_stream:
        events = list(_events(body))
        document = _document_of(events)
    else:
        document, tail = _split(body)
    if status != 200 or _is_error(document):
        return Answer(status, f"{status} {_code(document)}".encode(), {}, {}, (), (), None, _sentence(document, status))
    if document is None:
        return Answer(status, body, {}, {}, (), (), None, "the answer is no JSON")
    try:
        tensors = _tensors(route, document, tail)
    except (InferdError, KeyError, TypeError, ValueError) as error:
        return Answer(status, body, {}, {}, (), (), None, f"the answer is not understood ({str(error)[:200]})")
    plain = _without_volatile(document)
    return Answer(
        status,
        msgspec.json.encode(plain, order="sorted") + tail,
        dict(_texts(plain, "")),
        tensors,
        _labels(document, tensors),
        tuple(_named(document, ("finish_reason", "stop_reason"))),
        _usage(document),
        "",
    )


# -- documents -----------------------------------------------------------------------------------


def _events(body: bytes) -> Iterator[Any]:
    for event in body.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = b"\n".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])
        if data and data != b"[DONE]":
            try:
                yield _any.decode(data)
            except (ValueError, RecursionError):
                yield {"error": {"message": "an event of the stream is no JSON"}}


def _document_of(events: Sequence[Any]) -> Any:
    """What the events of a stream add up to. An error among them is the document."""
    whole: dict[str, Any] = {}
    for event in events:
        if not isinstance(event, dict):
            continue
        if event.get("error") is not None:
            return event
        if event.get("type") in _FINISHED:
            return event.get("response")
        _merge(whole, _addressed(event))
    return whole or None


def _addressed(event: dict[str, Any]) -> dict[str, Any]:
    """An event of the Messages API as a part of the message; any other event as it is."""
    kind = event.get("type")
    match kind:
        case "message_start":
            return {name: value for name, value in event.get("message", {}).items() if name != "content"}
        case "content_block_start" | "content_block_delta":
            block = dict(event.get("content_block", event.get("delta", {})))
            if kind == "content_block_delta":
                block.pop("type", None)
            return {"content": [{"index": event.get("index", 0), **block}]}
        case "message_delta":
            return {**event.get("delta", {}), "usage": event.get("usage")}
        case "content_block_stop" | "message_stop" | "ping":
            return {}
        case _:
            return event


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        known = whole.get(name)
        if isinstance(value, dict):
            if not isinstance(known, dict):
                known = whole[name] = {}
            _merge(known, value)
        elif isinstance(value, list) and value and all(isinstance(one, dict) and "index" in one for one in value):
            if not isinstance(known, dict):
                known = whole[name] = {}
            for one in value:
                _merge(known.setdefault(f"{one['index']:06d}", {}), one)
        elif isinstance(value, list):
            whole[name] = [*known, *value] if isinstance(known, list) else value
        elif isinstance(value, str) and isinstance(known, str) and name in _JOINED:
            whole[name] = known + value
        elif value is not None or name not in whole:
            whole[name] = value


def _split(body: bytes) -> tuple[Any, bytes]:
    """The JSON document at the beginning of an answer, and the bytes of binary tensors behind it."""
    try:
        return _any.decode(body), b""
    except (ValueError, RecursionError):
        pass
    try:
        document, stop = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    except (ValueError, RecursionError):
        return None, b""
    if not isinstance(document, dict) or "outputs" not in document:
        return None, b""
    return document, body[stop:]


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_volatile(below)
            for name, below in value.items()
            if name not in VOLATILE and not (name in _IDS and isinstance(below, str))
        }
    return [_without_volatile(one) for one in value] if isinstance(value, list) else value


def _is_error(document: Any) -> bool:
    return isinstance(document, dict) and (document.get("error") is not None or document.get("type") == "error")


def _sentence(document: Any, status: int) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f"{status}: {str(message)[:300]}" if message else f"{status}"


def _code(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    return str(error.get("code") or error.get("type")) if isinstance(error, dict) else ""


# -- parts ---------------------------------------------------------------------------------------


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name in sorted(value):
            below = value[name]
            here = f"{place}.{name}".lstrip(".")
            if isinstance(below, str):
                if name in _JOINED and below:
                    yield here, below
            elif name != "logprobs":
                yield from _texts(below, here)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _texts(one, f"{place}[{index}]")


def _named(value: Any, names: Sequence[str]) -> Iterator[str]:
    if isinstance(value, dict):
        for name in sorted(value):
            if name in names and isinstance(value[name], str):
                yield value[name]
            elif not isinstance(value[name], str):
                yield from _named(value[name], names)
    elif isinstance(value, list):
        for one in value:
            yield from _named(one, names)


def _usage(document: Any) -> tuple[int, int] | None:
    found = document.get("usage") if isinstance(document, dict) else None
    if not isinstance(found, dict):
        return None
    asked = found.get("prompt_tokens", found.get("input_tokens"))
    told = found.get("completion_tokens", found.get("output_tokens", 0))
    return (asked, told or 0) if isinstance(asked, int) else None


def _tensors(route: str, document: Any, tail: bytes) -> dict[str, Array]:
    """The numbers of an answer: outputs of KServe v2 by name, vectors by place, or all other numbers as one tensor."""
    if isinstance(document, dict) and isinstance(document.get("outputs"), list):
        return dict(_outputs(document["outputs"], tail))
    vectors = dict(_vectors(document, ""))
    if vectors:
        return vectors
    if any(word in route for word in ("chat", "completions", "messages", "responses", "generate")):
        return {}
    numbers: list[float] = []
    _collect(_without_volatile(document), numbers.append)
    return {"numbers": np.array(numbers, np.float64)} if numbers else {}


def _outputs(outputs: Sequence[Any], tail: bytes) -> Iterator[tuple[str, Array]]:
    at = 0
    for one in outputs:
        name, datatype, shape = str(one["name"]), str(one["datatype"]), list(one["shape"])
        size = (one.get("parameters") or {}).get("binary_data_size")
        if size is None:
            array = from_json(name, datatype, shape, msgspec.json.encode(one["data"])).reshape(shape)
        else:
            array = from_bytes(name, datatype, shape, tail, at, int(size))
            at += int(size)
        yield name, widened(array) if datatype == "BF16" else array


def _vectors(value: Any, place: str) -> Iterator[tuple[str, Array]]:
    if isinstance(value, dict):
        for name in sorted(value):
            here = f"{place}.{name}".lstrip(".")
            if name == "embedding" and isinstance(value[name], str):
                yield here, np.frombuffer(base64.b64decode(value[name], validate=True), np.float32)
            else:
                yield from _vectors(value[name], here)
    elif isinstance(value, list):
        if len(value) > 1 and all(isinstance(one, float) for one in value):
            yield place or "vector", np.array(value, np.float32)
        else:
            for index, one in enumerate(value):
                yield from _vectors(one, f"{place}[{index}]")


def _collect(value: Any, take: Callable[[float], None]) -> None:
    if isinstance(value, dict):
        for name in sorted(value):
            _collect(value[name], take)
    elif isinstance(value, list):
        for one in value:
            _collect(one, take)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        take(float(value))


def _labels(document: Any, tensors: dict[str, Array]) -> tuple[str, ...]:
    if isinstance(document, dict) and isinstance(document.get("outputs"), list):
        named = [array for array in tensors.values() if array.dtype.kind in "OiubSU" and array.size <= _MAX_LABELS]
        if named:
            return tuple([_word(one) for array in named for one in array.ravel().tolist()])
        rows = [array for array in tensors.values() if array.ndim >= 2 and array.shape[-1] >= 2]
        return tuple([str(place) for array in rows[:1] for place in array.argmax(-1).ravel().tolist()])
    if isinstance(document, dict) and isinstance(document.get("results"), list):
        return tuple([str(one.get("index")) for one in document["results"][:1] if isinstance(one, dict)])
    return tuple(_chosen(document))


def _word(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _chosen(value: Any) -> Iterator[str]:
    """The classes that an answer names: the best of a list with scores, or the one beside its probabilities."""
    if isinstance(value, list):
        scored = [one for one in value if isinstance(one, dict) and {"label", "score"} <= one.keys()]
        if scored and len(scored) == len(value):
            yield str(max(scored, key=lambda one: one["score"])["label"])
        else:
            for one in value:
                yield from _chosen(one)
    elif isinstance(value, dict):
        if isinstance(value.get("label"), str) and "probs" in value:
            yield value["label"]
        elif value.get("type") == "choice" and "choice" in value:
            yield str(value["choice"])
        else:
            for name in ("data", "answers", "predictions"):
                yield from _chosen(value.get(name))
