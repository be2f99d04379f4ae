"""A worker's channel through a node: bytes from the worker's socket to the server's connection and back, unread.

The bytes of a rank on a node pass through the server likewise, to rank 0.

Whichever end is slow stops the reading of the other, so memory is bounded here too, and back-pressure reaches the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from inferd.nodes.dialling import CONNECT_S, NodeOptions, RefusedError, connect
from inferd.nodes.messages import Attach, Attached, Refused, framed, to_channel_decoder
from inferd.worker.messages import HEADER

_MAX_ANSWER_BYTES = 64 * 1024
_HIGH_WATER_BYTES = 4 * 1024 * 1024


class _Half(asyncio.Protocol):
    """One of two connections. What arrives before ``partner`` is set waits, as does what is written before there is a
    transport."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.partner: _Half | None = None
        self.is_closed = asyncio.Event()
        self.error: Exception | None = None
        self._arrived = bytearray()
        self._unsent = bytearray()

    def joined(self, partner: _Half) -> None:
        """From now on bytes go to the partner."""
        self.partner = partner
        if len(self._arrived) >= _HIGH_WATER_BYTES and self.transport is not None:
            with contextlib.suppress(RuntimeError):  # it is closing
                self.transport.resume_reading()
        arrived, self._arrived = bytes(self._arrived), bytearray()
        if arrived:
            partner.write(arrived)

    def write(self, data: bytes) -> None:
        if self.transport is None:
            self._unsent += data
        elif not self.transport.is_closing():
            self.transport.write(data)

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    def finish(self) -> None:
        """Close after what was written is sent."""
        if self.transport is not None:
            self.transport.close()

    def partner_closed(self) -> None:
        """The other connection ended."""
        raise NotImplementedError

    # -- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        if self._unsent:
            transport.write(bytes(self._unsent))
            self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        if self.partner is None:
            self._arrived += data
            if len(self._arrived) >= _HIGH_WATER_BYTES and self.transport is not None:
                with contextlib.suppress(RuntimeError):
                    self.transport.pause_reading()
        else:
            self.partner.write(data)

    def pause_writing(self) -> None:
        if self.partner is not None and self.partner.transport is not None:
            with contextlib.suppress(RuntimeError):  # it is closing
                self.partner.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.partner is not None and self.partner.transport is not None:
            with contextlib.suppress(RuntimeError):
                self.partner.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self.is_closed.set()
        if self.partner is not None:
            self.partner.partner_closed()


class Relay(_Half):
    """The worker's end on a node. On the server, each of the two ends between rank 0 and a rank on a node.

    ``first``: a frame that is sent before what the partner receives. ``on_closed`` is called when this end's connection
    is closed.
    """

    def __init__(self, first: bytes = b"") -> None:
        super().__init__()
        self._unsent += first
        self.on_closed: Callable[[Exception | None], None] = _ignore

    def close(self) -> None:
        self.abort()

    def partner_closed(self) -> None:
        """The other connection ended: the process at this one sees it when it has what was sent before, and leaves."""
        self.finish()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_closed(exc)


class ServerEnd(_Half):
    """The server's end, which begins with ``Attach`` and its answer."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key
        self._head = bytearray()
        self.answered = asyncio.Event()
        self.refusal: RefusedError | None = None

    def ask(self) -> None:
        """Say which worker's channel this is."""
        self.write(framed(Attach(self._key)))

    def data_received(self, data: bytes) -> None:
        if self.answered.is_set():
            super().data_received(data)
            return
        self._head += data
        if len(self._head) < HEADER.size:
            return
        (size,) = HEADER.unpack_from(self._head)
        if size > _MAX_ANSWER_BYTES:
            self.refusal = RefusedError("message", "the server's answer is too large")
            self.abort()
            return
        end = HEADER.size + size
        if len(self._head) < end:
            return
        match to_channel_decoder.decode(bytes(self._head[HEADER.size : end])):
            case [Attached()]:
                pass
            case [Refused(code, message), *_]:
                self.refusal = RefusedError(code, message)
        rest = bytes(self._head[end:])
        self.answered.set()
        if rest:
            super().data_received(rest)

    def partner_closed(self) -> None:
        """The worker's socket ended: what it sent last is sent first."""
        self.finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.answered.set()
        super().connection_lost(exc)

    async def flushed(self, seconds: float) -> None:
        """Wait until everything was written and the connection is closed, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.is_closed.wait(), seconds)


async def attach(options: NodeOptions, key: str, relay: Relay) -> ServerEnd:
    """Open a worker's channel to the server and join it with the worker's end. Raises OSError."""
    end = ServerEnd(key)
    try:
        await connect(options, lambda: end)
        end.ask()
        async with asyncio.timeout(CONNECT_S):
            await end.answered.wait()
    except RefusedError as error:
        raise ConnectionError(str(error)) from None
    except TimeoutError:
        end.abort()
        raise ConnectionError("the server did not answer") from None
    if end.refusal is not None or end.is_closed.is_set():
        end.abort()
        raise ConnectionError(str(end.refusal or "the server closed the worker's channel"))
    end.joined(relay)
    relay.joined(end)
    return end


def _ignore(error: Exception | None) -> None:
    """Until the process is there."""
