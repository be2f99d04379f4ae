"""ModelStreamInfer: many concurrent requests on one stream, each with a call of its own.

Answers are sent as they come. Requests of one sequence are computed one after the other, so their answers are in order.
A request's error is sent in its answer, and the stream goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Final

from inferd.errors import InferdError
from inferd.gateway.admission import authenticate
from inferd.gateway.grpc.calls import Calls, capture, log_defect, note_abandoned, note_outcome, time_left
from inferd.gateway.grpc.envelope import Envelope, read_envelope
from inferd.gateway.grpc.rpc import RpcClosed, StreamRpc
from inferd.gateway.grpc.statuses import Status, details_of
from inferd.gateway.grpc.stream_answers import answers
from inferd.gateway.operations import PREDICT
from inferd.protowire import sized

METHOD: Final = "ModelStreamInfer"
MAX_IN_FLIGHT: Final = 256  # requests of one stream; more are read when some are answered


class Streams:
    """The method ModelStreamInfer, and its open streams."""

    name: Final = METHOD
    scope: Final = "infer"
    operation: Final = PREDICT
    max_bytes: Final = None

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._open: set[_InferStream] = set()
        self._is_stopping = False

    def begin(self, rpc: StreamRpc) -> None:
        if self._calls.has_room(rpc):
            self._calls.spawn(rpc, self._serve(rpc))

    def stop(self) -> None:
        """Read no more requests; each stream ends when its requests are answered."""
        self._is_stopping = True
        for stream in tuple(self._open):
            stream.stop()

    async def _serve(self, rpc: StreamRpc) -> None:
        stream = _InferStream(self, self._calls, rpc)
        self._open.add(stream)
        try:
            if self._is_stopping:
                stream.stop()
            await stream.serve()
        finally:
            self._open.discard(stream)


class _InferStream:
    def __init__(self, method: Streams, calls: Calls, rpc: StreamRpc) -> None:
        self._method = method
        self._calls = calls
        self._rpc = rpc
        self._context = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._writing = asyncio.Lock()  # one answer at a time
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_of: dict[str, asyncio.Task[None]] = {}  # the last task of each sequence with requests in flight
        self._reading: asyncio.Task[None] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True
        if self._reading is not None:
            self._reading.cancel()

    async def serve(self) -> None:
        """Serve the stream until all its requests are answered, or the client disconnects."""
        try:
            await self._work()
        except RpcClosed:
            return
        finally:
            if self._reading is not None:
                self._reading.cancel()
            for task in tuple(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(tuple(self._tasks))
        if self._is_stopped:
            self._rpc.fail(Status.UNAVAILABLE, "The server is shutting down; open a stream to another one.")
        else:
            self._rpc.close()

    async def _work(self) -> None:
        if not self._is_stopped:
            self._reading = asyncio.create_task(self._read())
            await asyncio.wait((self._reading,))
            if not self._reading.cancelled():
                self._reading.result()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def _read(self) -> None:
        while True:
            await self._context.acquire()
            body = await self._rpc.read()
            if body is None:
                return
            envelope, failure = None, None
            try:
                envelope = read_envelope(body)
            except InferdError as error:
                failure = error
            sequence = str(envelope.parameters.get("sequence_id") or "") if envelope is not None else ""
            before = self._last_of.get(sequence) if sequence else None
            task = asyncio.create_task(self._answer(body, envelope, failure, before))
            self._tasks.add(task)
            task.add_done_callback(self._done)
            if sequence:
                self._last_of[sequence] = task
                task.add_done_callback(functools.partial(self._forget, sequence))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._context.release()

    def _forget(self, sequence: str, task: asyncio.Task[None]) -> None:
        if self._last_of.get(sequence) is task:
            del self._last_of[sequence]

    async def _answer(
        self, body: bytes, envelope: Envelope | None, failure: InferdError | None, before: asyncio.Task[None] | None
    ) -> None:
        """Serve one request to its end. Raises CancelledError alone, when the stream ends; errors become answers."""
        call = self._calls.begin(self._method, self._rpc, len(body))
        call.stream = True
        try:
            try:
                context = self._calls.context
                if before is not None:
                    await asyncio.wait((before,))
                authenticate(context, call, "infer")
                capture(context, call, body)
                if envelope is not None:
                    async with contextlib.aclosing(
                        answers(context, call, envelope, body, time_left(self._rpc))
                    ) as found:
                        async for answer in found:
                            call.blocked_s += await self._write(sized(2, answer))
                            call.response_bytes += len(answer)
                            if call.capture is not None:
                                call.capture.add(answer)
            except InferdError as error:
                failure = error
            except Exception:
                # The request boundary: a defect ends this request, and no other.
                failure = log_defect(call)
            note_outcome(call, failure, 0)
            if failure is not None:
                request_id = sized(3, envelope.id.encode()) if envelope is not None and envelope.id else b""
                await self._write(sized(1, details_of(failure).encode()) + sized(2, request_id))
        except asyncio.CancelledError:
            note_abandoned(call, self._rpc)
            raise
        finally:
            self._calls.close(call)

    async def _write(self, message: bytes) -> float:
        """Send one answer; waits while the client does not read, and returns for how long. Cancels the task when the
        call has ended."""
        async with self._writing:
            try:
                return await self._rpc.write(message)
            except RpcClosed:
                raise asyncio.CancelledError from None
