"""KEDA's external scaler: how much load a model has here, or how many replicas it needs, for a scaler of Kubernetes.

Knows KEDA's four methods and the report of the autoscaler, and decides nothing. A value that is not known is an error
or the last one that was, and never 0: KEDA and the autoscaler of Kubernetes keep the number of pods after an error.
KEDA sends no metadata of gRPC, so a key may also be in the trigger's own metadata (``keyFromEnv``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from inferd.autoscale.controller import ScalingReport
from inferd.errors import InferdError, InvalidRequest, Unavailable
from inferd.gateway.admin.endpoints import control_of
from inferd.gateway.admission import MAX_TOKEN_CHARS, allowed, find_model, token_of
from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import shown
from inferd.gateway.grpc.calls import FEW_BYTES, Calls, Endpoint, UnaryEndpoint
from inferd.gateway.grpc.protocol import Value, protocol
from inferd.gateway.grpc.rpc import RpcClosed, StreamRpc

PACKAGE: Final = "externalscaler"
SERVICE_NAME: Final = f"{PACKAGE}.ExternalScaler"

ACTIVE_S: Final = 30.0
"""A model is active for so long after its last request: KEDA asks every 30 seconds, and a request may end between."""

MAX_TARGET: Final = 1e9
"""Largest target of a trigger, in requests or replicas."""

MAX_AGE_S: Final = 120.0
"""An older value is an error."""

MetricName = Literal["load", "waiting", "replicas"]
_METRICS: Final[tuple[MetricName, ...]] = ("load", "waiting", "replicas")
_KEYS: Final = ("key", "keyFromEnv")
_AGE: Final = b"x-inferd-age"


class Question(NamedTuple):
    """What a trigger asks for."""

    model: str
    metric: MetricName
    target: float  # of the metric, for each pod

    @property
    def name(self) -> str:
        """The metric's name for KEDA, which adds the number of the trigger."""
        return f"inferd-{self.metric}"


class Known(NamedTuple):
    """A value, and the seconds since it was observed."""

    value: float
    age_s: float


def value_of(report: ScalingReport, metric: MetricName) -> Known:
    """The value of a metric. Raises Unavailable where it is not known."""
    found: float | None
    if metric == "load":
        found, age_s = report.load, report.load_age_s
    elif metric == "waiting":
        found, age_s = float(report.waiting), report.age_s
    else:
        # What fits on this machine now is no limit here: machines are what the scaler adds.
        most = max((need.replicas for need in report.needs), default=0)
        found, age_s = float(min(report.max, max(report.desired, most, report.min))), report.age_s
    if found is None or age_s is None:
        raise Unavailable(
            f"The load of the model {report.model!r} has not been observed for long enough here; ask again in 10 s.",
            retry_after_s=10.0,
        )
    if age_s > MAX_AGE_S:
        raise Unavailable(
            f"The load of the model {report.model!r} was last observed {age_s:.0f} s ago; ask another server.",
            retry_after_s=10.0,
        )
    return Known(found, age_s)


def is_active(report: ScalingReport, metric: MetricName) -> bool:
    """Whether at least one pod is needed. Raises Unavailable where it is not known."""
    value_of(report, "waiting")  # requests that were seen long ago say nothing
    if report.waiting + report.in_flight > 0 or report.idle_s < ACTIVE_S:
        return True
    return value_of(report, metric).value > 0


def read_question(context: Context, call: Call, reference: Mapping[str, Value]) -> tuple[Question, ScalingReport]:
    """The question of a ScaledObjectRef and the report that answers it, for a key with the scope ``metrics``.

    Raises Unauthenticated, Forbidden, InvalidRequest, ModelNotFound, and Unavailable while the server stops: its load
    falls to 0, and says nothing of the others.
    """
    given = reference["scalerMetadata"]
    assert isinstance(given, Mapping), "it is a map"
    metadata = {str(name): str(value) for name, value in given.items()}
    call.principal = allowed(context.door.authenticate(_token(call, metadata)), "metrics")
    if context.router.draining:
        raise Unavailable("This server is shutting down; ask another one.")
    name = metadata.get("model", "")
    if not name:
        raise _invalid("model", "is missing; name a model of this server")
    metric = next((known for known in _METRICS if known == metadata.get("metric", "load")), None)
    if metric is None:
        raise _invalid("metric", f"is {shown(metadata['metric'])}; it is one of {', '.join(_METRICS)}")
    model = find_model(context, call, name).name
    call.model = model
    report = control_of(context).scaling.report(model)
    return Question(model, metric, _target(context, model, metric, metadata.get("target"))), report


def _target(context: Context, model: str, metric: MetricName, given: str | None) -> float:
    """The metric's value for each pod, as the trigger has it or the model's settings."""
    if given is not None:
        try:
            target = float(given)
        except ValueError:
            target = math.nan
        if not 0 < target <= MAX_TARGET:
            raise _invalid("target", f"is {shown(given)}; it is a number above 0, and {MAX_TARGET:,.0f} at most")
        return target
    if metric == "replicas":
        return 1.0
    config = context.config.models.get(model)
    if metric == "load" and config is not None and config.scaling is not None:
        in_flight = config.scaling.target.in_flight
        if in_flight is not None:
            return in_flight * config.scaling.max
    raise _invalid("target", f"is missing; set how many requests ({metric}) there may be for each pod")


def _token(call: Call, metadata: Mapping[str, str]) -> str | None:
    token = token_of(call)
    if token is not None:
        return token
    found = next((metadata[key] for key in _KEYS if metadata.get(key)), None)
    return found if found is None or len(found) <= MAX_TOKEN_CHARS else ""


def _invalid(field: str, sentence: str) -> InvalidRequest:
    return InvalidRequest(f"The trigger's metadata.{field} {sentence}.", param=f"scalerMetadata.{field}")


async def _metric_spec(context: Context, call: Call, body: bytes, remaining_s: float | None) -> bytes:
    question, _ = read_question(context, call, protocol().read("ScaledObjectRef", body, PACKAGE))
    size = {
        "metricName": question.name,
        "targetSize": math.ceil(question.target),
        "targetSizeFloat": question.target,
    }
    return protocol().write("GetMetricSpecResponse", {"metricSpecs": [size]}, PACKAGE)


async def _metrics(context: Context, call: Call, body: bytes, remaining_s: float | None) -> Response:
    request = protocol().read("GetMetricsRequest", body, PACKAGE)
    reference = request.get("scaledObjectRef")
    if not isinstance(reference, Mapping):
        raise InvalidRequest(
            "The request has no scaledObjectRef; send the one of the trigger.", param="scaledObjectRef"
        )
    question, report = read_question(context, call, reference)
    if request["metricName"] != question.name:
        raise InvalidRequest(
            f"The metric {shown(request['metricName'])} is not that of the trigger, {question.name!r}; ask for what "
            "GetMetricSpec names.",
            param="metricName",
        )
    known = value_of(report, question.metric)
    value = {
        "metricName": question.name,
        "metricValue": math.ceil(known.value),
        "metricValueFloat": known.value,
    }
    content = protocol().write("GetMetricsResponse", {"metricValues": [value]}, PACKAGE)
    return Response(200, content, headers=((_AGE, b"%.1f" % known.age_s),))


async def _active(context: Context, call: Call, body: bytes, remaining_s: float | None) -> bytes:
    return _activity(context, call, protocol().read("ScaledObjectRef", body, PACKAGE))


def _activity(context: Context, call: Call, reference: Mapping[str, Value]) -> bytes:
    question, report = read_question(context, call, reference)
    return protocol().write("IsActiveResponse", {"result": is_active(report, question.metric)}, PACKAGE)


def scaler_methods(calls: Calls) -> dict[str, UnaryEndpoint]:
    """The methods of one answer by their names. Each checks the key itself, which may be in its message."""
    served: dict[str, Endpoint] = {"IsActive": _active, "GetMetricSpec": _metric_spec, "GetMetrics": _metrics}
    return {name: UnaryEndpoint(calls, name, "public", FEW_BYTES, method) for name, method in served.items()}


class ActivityStreams:
    """The method StreamIsActive: one answer at once, and one with every change."""

    name: Final = "StreamIsActive"
    scope: Final = "public"
    operation: Final = None
    max_bytes: Final = FEW_BYTES

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._looked = asyncio.Event()
        self._is_stopping = False

    def begin(self, rpc: StreamRpc) -> None:
        if self._calls.has_room(rpc):
            self._calls.spawn(rpc, self._serve(rpc))

    def look(self) -> None:
        """Have every stream look at its model once."""
        self._looked.set()
        self._looked = asyncio.Event()

    def stop(self) -> None:
        """End the streams: KEDA opens others, at another server."""
        self._is_stopping = True
        self.look()

    async def _serve(self, rpc: StreamRpc) -> None:
        call = self._calls.begin(self, rpc, 0)
        try:
            body = await rpc.read()
            reference = protocol().read("ScaledObjectRef", body or b"", PACKAGE)
            told: bytes | None = None
            while True:
                if self._is_stopping:
                    raise Unavailable("The server is shutting down; open a stream to another one.")
                answer = _activity(self._calls.context, call, reference)
                if answer != told:
                    told = answer
                    await rpc.write(answer)
                await self._looked.wait()
        except InferdError as error:
            call.refuse(error)
        except RpcClosed:
            return
        finally:
            if not call.is_closed:
                call.note_abandoned()
