"""The texts of responses that records of payloads may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from inferd.observe.payloads.texts import JsonTexts

_FIRST: Final = (b"event: response.queued", b"event: response.created", b"event: response.in_progress")
_LAST: Final = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")


class _Output(msgspec.Struct, frozen=True):
    output: Any = None


class _End(msgspec.Struct, frozen=True):
    response: _Output


_decoder: Final = msgspec.json.Decoder(_End)


class _ResponseTexts(JsonTexts):
    """The last event of a stream repeats all texts of the events before it, so it stands for them. The first events
    repeat fields of the request."""

    def of_answer(self, parts: Sequence[bytes], *, is_streamed: bool) -> Any:
        if is_streamed:
            events = b"".join(parts).split(b"\n\n")
            for event in reversed(events):
                name, _, data = event.partition(b"\ndata: ")
                if name in _LAST:
                    try:
                        return {"output": _decoder.decode(data).response.output}
                    except (ValueError, RecursionError):
                        return None
            parts = [event + b"\n\n" for event in events if not event.startswith(_FIRST)]
        return super().of_answer(parts, is_streamed=is_streamed)


TEXTS: Final = _ResponseTexts("delta", whole=("name",), index=("output_index",), opaque=("encrypted_content",))
"""``encrypted_content`` has the text of reasoning, encoded."""
