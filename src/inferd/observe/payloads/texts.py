"""Which texts of a dialect's bodies and answers a record of payloads may have. Each route has its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec

REPEATED: Final = frozenset(("logprobs", "prompt_logprobs", "top_logprobs", "tokens", "token_ids", "bytes"))
"""Fields that repeat a text in pieces, in which nothing can be recognised."""

_MAX_DEPTH: Final = 12

_GENERATED: Final = frozenset(("content", "reasoning_content", "text", "arguments"))
"""Fields of whole answers with texts of a model."""

_WRAPPERS: Final = frozenset(("delta", "message", "content_block", "item"))
"""Fields of events around a part of an answer, which are not named in its place."""


class Texts(Protocol):
    """Finds the texts of a call's body and of its answer. Called by the thread that writes the records."""

    @property
    def left_out(self) -> frozenset[str]:
        """Fields that a record never has."""

    @property
    def generated(self) -> frozenset[str]:
        """Fields with texts of an answer that may end anywhere."""

    def of_request(self, body: bytes) -> Any:
        """A JSON value; None: there are none, or none can be recognised for certain."""

    def of_answer(self, parts: Sequence[bytes], *, is_streamed: bool) -> Any:
        """A JSON value; None, as above. ``parts``: those that were sent."""


class JsonTexts:
    """The texts of bodies that are JSON, and of answers that are JSON or server-sent events with JSON in them."""

    def __init__(
        self,
        *joined: str,
        whole: tuple[str, ...] = (),
        index: tuple[str, ...] = ("index",),
        opaque: tuple[str, ...] = (),
    ) -> None:
        """``joined``: fields of events whose texts are pieces of longer ones. They are joined, so that what is split
        between two pieces is recognised. ``whole``: fields of events whose text is complete, such as the name of a tool
        that is called; of several the last one counts. ``index``: the fields that tell which of several texts an event
        continues. ``opaque``: fields with texts in a form in which nothing can be recognised; they are left out."""
        self._joined = frozenset(joined)
        self._whole = frozenset(whole)
        self._index = index
        self.left_out = REPEATED.union(opaque)
        self.generated = self._joined | _GENERATED

    def of_request(self, body: bytes) -> Any:
        return _json(body)

    def of_answer(self, parts: Sequence[bytes], *, is_streamed: bool) -> Any:
        answer = b"".join(parts)
        if not is_streamed:
            return _json(answer)
        texts: dict[str, list[str]] = {}
        for event in self._events(answer):
            self._collect(_json(event), "", texts, 0)
        return {place: "".join(pieces) for place, pieces in texts.items()}

    def _events(self, answer: bytes) -> Iterable[bytes]:
        """The JSON texts of a streamed answer."""
        return [_data_of(event) for event in answer.replace(b"\r\n", b"\n").split(b"\n\n")]

    def _collect(self, value: Any, place: str, texts: dict[str, list[str]], depth: int) -> None:
        if depth > _MAX_DEPTH:
            return
        if isinstance(value, dict):
            numbers = [value[name] for name in self._index if isinstance(value.get(name), int)]
            here = place + "".join([f"[{number}]" for number in numbers])
            for key, below in value.items():
                if key in self._joined and isinstance(below, str):
                    if below:
                        texts.setdefault(f"{here}.{key}".lstrip("."), []).append(below)
                elif key in self._whole and isinstance(below, str):
                    if below:
                        texts[f"{here}.{key}".lstrip(".")] = [below]
                elif key == "error":
                    if below is not None:
                        texts.setdefault("error", []).append(str(below))
                elif key not in self.left_out:
                    self._collect(below, here if key in _WRAPPERS else f"{here}.{key}", texts, depth + 1)
        elif isinstance(value, list):
            for one in value:
                self._collect(one, place, texts, depth + 1)


class JsonLines(JsonTexts):
    """Answers that are JSON, or streams with a JSON text in each line."""

    def _events(self, answer: bytes) -> Iterable[bytes]:
        return answer.splitlines()


class JsonAnswers(JsonTexts):
    """Answers in JSON, such as classes. The texts that they are about are not kept."""

    def of_request(self, body: bytes) -> Any:
        return None


def _data_of(event: bytes) -> bytes:
    """The data of a server-sent event. Empty: it has none."""
    return b"\n".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])


def _json(data: bytes) -> Any:
    """None: it is no JSON, so nothing in it can be recognised for certain."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
