"""The direct path of ModelInfer, for requests to a worker with room (``inferd.router.direct_prediction``).

A request that needs more is left to the general path before it has any effect, or is converted into the objects of the
general path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferd import clock
from inferd.errors import InferdError, QuotaExceeded
from inferd.events import HttpServed
from inferd.gateway.call import Call, fresh_id
from inferd.gateway.grpc.calls import SERVICE, Calls, time_left
from inferd.gateway.grpc.envelope import Envelope, Envelopes
from inferd.gateway.grpc.inference import DIALECT, model_infer, only_answer
from inferd.gateway.grpc.rpc import Rpc, UnaryRpc
from inferd.gateway.grpc.wire import trailers_block
from inferd.gateway.predictions import BYTES_PER_TOKEN
from inferd.router.direct_prediction import DirectPrediction
from inferd.tenancy.principal import Permit, Principal
from inferd.types import End, Prediction, PredictRequest, class_index

if TYPE_CHECKING:
    from inferd.router.stream import Stream

METHOD: Final = "ModelInfer"
_ROUTE: Final = f"/{SERVICE}/{METHOD}"
_SPECIAL: Final = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "batching"})
_REQUEST_ID: Final = b"\x00\x0cx-request-id\x18"  # and its 24 bytes: a header as HPACK writes it


class RpcPrediction(DirectPrediction):
    """A prediction on the direct path, and the gRPC call that waits for it."""

    __slots__ = ("method", "model", "num_bytes", "permit", "principal", "rpc", "started_at", "unique")

    def __init__(
        self, method: DirectInfer, rpc: UnaryRpc, model: str, principal: Principal, num_bytes: int, now: float
    ) -> None:
        self.method = method
        self.rpc = rpc
        self.unique = fresh_id()
        self.model = model
        self.principal = principal
        self.num_bytes = num_bytes
        self.started_at = now
        self.permit: Permit | None = None

    def deliver(self, prediction: Prediction, end: End) -> None:
        permit, principal, body = self.permit, self.principal, prediction.body
        assert permit is not None, "it was admitted"
        limits = permit.headers()
        trailers = _REQUEST_ID + self.unique.encode("ascii")
        self.rpc.finish(body, trailers + trailers_block(limits) if limits else trailers)
        permit.settle(end.usage, "done")
        self.method.calls.context.emit(
            HttpServed(
                request_id=self.unique,
                method="POST",
                route=_ROUTE,
                status=200,
                duration_s=clock.now() - self.started_at,
                request_bytes=self.num_bytes,
                response_bytes=len(body),
                model=self.model,
                tenant=principal.tenant,
                key_id=principal.key_id,
                outcome="done",
                usage=end.usage,
                timings=end.timings,
            )
        )

    def flush(self) -> None:
        """No effect: the connection writes the answers of one turn of the event loop together."""

    def converted(self, stream: Stream) -> None:
        self.method.go_on(self, stream)

    def cancel(self) -> None:
        """The client has cancelled: the general path cancels the request and settles its cost."""
        self.convert()


class DirectInfer:
    """The method ModelInfer: requests are sent on the direct path where possible, else on the general path."""

    name: Final = METHOD
    scope: Final = "infer"
    max_bytes: Final = None

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._envelopes = Envelopes()

    def take(self, rpc: UnaryRpc, body: bytes) -> None:
        try:
            envelope = self._envelopes.read(body)
        except InferdError as error:
            rpc.connection.charge(self._envelopes.cost)
            self.calls.refuse(self.calls.begin(METHOD, rpc, len(body)), rpc, error)
            return
        rpc.connection.charge(self._envelopes.cost)
        if not self._send(rpc, body, envelope):

            async def answer(call: Call) -> bytes:
                return await model_infer(self.calls.context, call, envelope, body, time_left(rpc))

            self.calls.start(METHOD, rpc, len(body), answer)

    def take_compressed(self, rpc: UnaryRpc, body: bytes) -> None:
        self.calls.start_compressed(self, rpc, body)

    def _send(self, rpc: UnaryRpc, body: bytes, envelope: Envelope) -> bool:
        """Send a request on the direct path; False: the general path has to serve it, and there was no effect."""
        head = rpc.head
        if not head.is_usual:
            return False
        remaining_s = rpc.time_left()
        if remaining_s is not None and remaining_s <= 0:
            return False
        context, principal = self.calls.context, rpc.principal
        model = envelope.model
        config = context.config.models.get(model)
        if config is None or config.cache.enabled or (envelope.version and envelope.version != config.version):
            return False
        if envelope.parameters and not _SPECIAL.isdisjoint(envelope.parameters):
            return False
        if principal.region or not principal.may_use(model):
            return False
        priority = max(principal.default_priority, principal.priority)
        class_number = class_index(priority)
        now = clock.now()
        slot = context.router.find_prediction_slot(model, class_number, now)
        if slot is None:
            return False
        pending = RpcPrediction(self, rpc, model, principal, len(body), now)
        request = PredictRequest(
            id="predict-" + pending.unique,
            model=model,
            priority=priority,
            deadline_s=remaining_s,
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
            pending.permit = context.door.admit(principal, pending.unique, model, prompt_tokens=0, max_tokens=0)
        except QuotaExceeded as error:
            self.calls.credit_refusal(rpc)
            self.calls.refuse(self._as_call(pending), rpc, error)
        else:
            rpc.owner = pending
            pending.send(slot, request, class_number, now)
        return True

    # -- the general path -------------------------------------------------------------------

    def go_on(self, pending: RpcPrediction, stream: Stream) -> None:
        """Continue on the general path: the worker failed or answers in parts, or the client has cancelled."""
        rpc = pending.rpc
        call = self._as_call(pending)
        call.streams.append(stream)
        if rpc.is_ended:
            self.calls.spawn(rpc, self.calls.close_abandoned(call, rpc), call)
        else:
            self.calls.spawn(rpc, self._ordinary(call, pending.model, stream, rpc), call)

    async def _ordinary(self, call: Call, model: str, stream: Stream, rpc: Rpc) -> None:
        (await self.calls.run(call, rpc, only_answer(call, model, stream))).send(rpc)

    def _as_call(self, pending: RpcPrediction) -> Call:
        call = self.calls.begin(METHOD, pending.rpc, pending.num_bytes)
        call.started_at = pending.started_at
        call.unique = call.request_id = pending.unique
        call.principal = pending.principal
        call.permit = pending.permit
        call.model = pending.model
        return call
