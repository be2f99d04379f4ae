"""The text messages of a stream of windows: those of the client, and those of the server."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inferd.gateway.errors import ErrorDetail
from inferd.gateway.windows.options import WindowOptions


class ClientMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text message of the client. It has exactly one of the fields."""

    open: WindowOptions | None = None
    samples: Annotated[list[int | float] | None, Meta(description="Row by row, where a sample has channels.")] = None
    end: bool = False


class WindowAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="window"):
    """The answer to a window: samples ``begin`` to ``end`` of the stream."""

    window: int
    begin: int
    end: int
    begin_s: float | msgspec.UnsetType = msgspec.UNSET  # where the sample rate is known
    end_s: float | msgspec.UnsetType = msgspec.UNSET
    outputs: msgspec.Raw


class StreamError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """An error. With ``window`` only that window is lost; without it the stream is closed."""

    error: ErrorDetail
    window: int | msgspec.UnsetType = msgspec.UNSET
    retry_after_s: float | msgspec.UnsetType = msgspec.UNSET


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="open"):
    """The answer to ``open``, with the options in effect."""

    model: str
    version: str
    input: str
    datatype: str
    window: int
    hop: int
    context: int
    sample_rate: int | None
    is_stateful: bool


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="end"):
    """The answer to ``end``, after the answer to the last window."""

    windows: int
