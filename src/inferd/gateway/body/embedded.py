"""JSON in the texts of a request: the arguments of calls, a schema that is sent as a text."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest
from inferd.gateway.body.decode_cost import CHEAP_BYTES, MAX_DECODE_COST, decode_cost
from inferd.gateway.body.document import MAX_DEPTH, is_too_deep

JSON = dict[str, Any]

MAX_TEXT_BYTES: Final = 4 * 1024 * 1024
"""Of all texts of a request that are read as JSON."""


class EmbeddedJson:
    """Decodes the JSON in the texts of one request. All of them together may cost as much as one body may, because the
    cost of the body counts each of them as one text."""

    __slots__ = ("_cost", "_num_bytes")

    def __init__(self) -> None:
        self._num_bytes = 0
        self._cost = 0  # as ``decode_cost`` counts it; the first ``CHEAP_BYTES`` are not counted

    def value(self, text: str) -> Any:
        """The value. Raises ValueError, which says why there is none, and InvalidRequest where it costs too much."""
        if self._num_bytes + len(text) > MAX_TEXT_BYTES:
            raise _too_costly()
        data = text.encode("utf-8")
        self._num_bytes += len(data)
        if self._num_bytes > CHEAP_BYTES:
            self._cost += decode_cost(data, texts=False)  # their bytes have a limit of their own
        if self._num_bytes > MAX_TEXT_BYTES or self._cost > MAX_DECODE_COST:
            raise _too_costly()
        try:
            value = msgspec.json.decode(data)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if is_too_deep(value):
            raise ValueError(f"it has more than {MAX_DEPTH} levels of lists and objects within each other")
        return value

    def arguments(self, text: str) -> str | JSON:
        """A call's arguments as an object, which templates expect. Text that is not a JSON object stays unchanged."""
        try:
            value = self.value(text)
        except ValueError:
            return text
        return value if isinstance(value, dict) else text


def decoded_text(text: str) -> Any:
    """As ``EmbeddedJson.value``, of the only text that a request has."""
    return EmbeddedJson().value(text)


def _too_costly() -> InvalidRequest:
    return InvalidRequest(
        "The JSON in texts of the request (arguments of calls, schemas) is more than is read: "
        f"{bytes_text(MAX_TEXT_BYTES)}, and {MAX_DECODE_COST} numbers at most, of which a string counts as two, and an "
        "object, a list and a key as five each. Shorten it.",
        code="too_many_values",
    )
