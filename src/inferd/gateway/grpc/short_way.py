"""The short way of ModelInfer, for a usual request to a worker that has room for it (``inferd.router.errand``).

Whatever is not as usual is left to the ordinary way, before anything has happened, or is turned into what the ordinary
way would have made of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from inferd import clock
from inferd.errors import InferdError, QuotaExceeded
from inferd.events import HttpServed
from inferd.gateway.generation import note_end
from inferd.gateway.grpc.calls import SERVICE, Calls, Context, Ended, Serving
from inferd.gateway.grpc.envelope import read_envelope
from inferd.gateway.grpc.inference import DIALECT, only_answer
from inferd.gateway.http import Call, fresh_id
from inferd.gateway.predictions import BYTES_PER_TOKEN
from inferd.gateway.server import hear_ends
from inferd.router.errand import Errand
from inferd.router.replica import line_of
from inferd.tenancy.principal import Permit, Principal
from inferd.types import End, Prediction, PredictRequest

if TYPE_CHECKING:
    from inferd.router.stream import Stream

METHOD: Final = "ModelInfer"
_ROUTE: Final = f"/{SERVICE}/{METHOD}"
_SPECIAL: Final = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "batching"})
_USUAL: Final = frozenset({"user-agent", "content-length"})  # metadata that say nothing of how a request is served


class GrpcErrand(Errand):
    """A prediction on the short way, and who waits for it."""

    __slots__ = (
        "answered",
        "end",
        "model",
        "num_bytes",
        "permit",
        "prediction",
        "principal",
        "refusal",
        "started_at",
        "stream",
        "unique",
    )

    def __init__(self, model: str, principal: Principal, num_bytes: int, now: float) -> None:
        self.unique = fresh_id()
        self.model = model
        self.principal = principal
        self.num_bytes = num_bytes
        self.started_at = now
        self.permit: Permit | None = None
        self.prediction: Prediction | None = None
        self.end: End | None = None
        self.refusal: InferdError | None = None  # it was not even sent
        self.stream: Stream | None = None  # where it goes the ordinary way
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deliver(self, prediction: Prediction, end: End) -> None:
        self.prediction, self.end = prediction, end
        self._wake()

    def taken_over(self, stream: Stream) -> None:
        self.stream = stream
        self._wake()

    async def refused(self) -> bytes:
        assert self.refusal is not None, "it was sent"
        raise self.refusal

    def _wake(self) -> None:
        if not self.answered.done():
            self.answered.set_result(None)


class ShortWay:
    """Takes what it can."""

    def __init__(self, calls: Calls, ordinary: Serving) -> None:
        self._calls = calls
        self._ordinary_way = ordinary

    async def serve(self, body: bytes, context: Context) -> bytes:
        errand = self._depart(body, context)
        if errand is None:
            return await self._ordinary_way(body, context)
        if errand.refusal is not None:
            ended = await self._calls.ended(self._as_call(errand, context), errand.refused())
            del body, errand
            return await ended.tell(context)
        try:
            await errand.answered
        except asyncio.CancelledError:
            await self._left(errand, context)
            raise
        prediction, end, permit = errand.prediction, errand.end, errand.permit
        assert permit is not None, "it was admitted"
        if prediction is None or end is None:
            ended = await self._ordinary(errand, context)
            del body, errand
            return await ended.tell(context)
        permit.settle(end.usage, "done")
        principal = errand.principal
        self._calls.room.emit(
            HttpServed(
                request_id=errand.unique,
                method="POST",
                route=_ROUTE,
                status=200,
                duration_s=clock.now() - errand.started_at,
                request_bytes=errand.num_bytes,
                response_bytes=len(prediction.body),
                model=errand.model,
                tenant=principal.tenant,
                key_id=principal.key_id,
                outcome="done",
                usage=end.usage,
                timings=end.timings,
            )
        )
        trailers = [("x-request-id", errand.unique)]
        for name, value in permit.headers():
            trailers.append((name.decode("ascii"), value.decode("latin-1")))
        context.set_trailing_metadata(tuple(trailers))
        return prediction.body

    def _depart(self, body: bytes, context: Context) -> GrpcErrand | None:
        """Send it; None: it is the ordinary way's, and nothing has happened."""
        room = self._calls.room
        left = context.time_remaining()
        if left is not None and left <= 0:
            return None
        token = None
        for name, value in context.invocation_metadata() or ():
            if name == "authorization" and token is None and isinstance(value, str) and value[:7] == "Bearer ":
                token = value[7:].strip()
            elif name not in _USUAL:
                return None
        try:
            envelope = read_envelope(body)
            principal = room.door.authenticate(token)
        except InferdError:
            return None
        model = envelope.model
        config = room.config.models.get(model)
        if config is None or (envelope.version and envelope.version != config.version):
            return None
        if envelope.parameters and not _SPECIAL.isdisjoint(envelope.parameters):
            return None
        if principal.region or not principal.may("infer") or not principal.may_use(model):
            return None
        priority = max(principal.default_priority, principal.priority)
        line = line_of(priority)
        now = clock.now()
        desk = room.router.find_desk(model, line, now)
        if desk is None:
            return None
        errand = GrpcErrand(model, principal, len(body), now)
        request = PredictRequest(
            id="predict-" + errand.unique,
            model=model,
            priority=priority,
            deadline_s=left,
            tenant=principal.tenant,
            weight=principal.weight,
            num_tokens=max(1, len(body) // BYTES_PER_TOKEN),
            num_bytes=len(body),
            arrived_at=now,
            dialect=DIALECT,
            body=body,
            version=envelope.version,
        )
        try:
            errand.permit = room.door.admit(principal, errand.unique, model, prompt_tokens=0, max_tokens=0)
        except QuotaExceeded as error:
            errand.refusal = error
        else:
            errand.depart(desk, request, line, now)
        return errand

    # -- the ordinary way -------------------------------------------------------------------

    async def _ordinary(self, errand: GrpcErrand, context: Context) -> Ended:
        """The worker failed, or answers in parts: ``errand.stream`` says what happens."""
        call, stream = self._as_call(errand, context), errand.stream
        assert stream is not None, "it was taken over"
        call.streams.append(stream)
        return await self._calls.ended(call, only_answer(call, errand.model, stream))

    async def _left(self, errand: GrpcErrand, context: Context) -> None:
        """The client is gone: so is the request; its end says what it cost."""
        call = self._as_call(errand, context)
        call.gone = True
        try:
            if errand.end is not None:
                note_end(call, errand.end)
                return
            if errand.stream is None:
                errand.convert()
            assert errand.stream is not None, "it was taken over"
            call.streams.append(errand.stream)
            await hear_ends(call)
        finally:
            self._calls.close(call)

    def _as_call(self, errand: GrpcErrand, context: Context) -> Call:
        call = self._calls.begin(METHOD, context, errand.num_bytes)
        call.started_at = errand.started_at
        call.unique = call.request_id = errand.unique
        call.principal = errand.principal
        call.permit = errand.permit
        call.model = errand.model
        return call
