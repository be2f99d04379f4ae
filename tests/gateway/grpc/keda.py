"""A client of KEDA's external scalers, generated from the contract, that asks in KEDA's order."""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_tools import protoc  # type: ignore[import-untyped]

PROTO = Path(__file__).with_name("keda.proto")


@functools.cache
def generated() -> tuple[Any, Any]:
    """The modules of messages and of calls."""
    folder = tempfile.mkdtemp(prefix="inferd-keda-")
    arguments = [f"--proto_path={PROTO.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}", PROTO.name]
    assert protoc.main(["protoc", *arguments]) == 0
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("keda_pb2"), importlib.import_module("keda_pb2_grpc")
    finally:
        sys.path.remove(folder)


class Answers(NamedTuple):
    """What KEDA has after one round: the metric's name, the target of a pod, the value, and whether pods are needed."""

    metric: str
    target: float
    value: float
    is_active: bool


class Keda:
    """One trigger. A key is in its metadata, as KEDA sends none beside the messages."""

    def __init__(self, channel: grpc.Channel, **metadata: str) -> None:
        self.messages, calls = generated()
        self.calls = calls.ExternalScalerStub(channel)
        told = {"scalerAddress": "inferd:8001", **metadata}
        self.reference = self.messages.ScaledObjectRef(name="inferd", namespace="models", scalerMetadata=told)

    def spec(self) -> Any:
        (spec,) = self.calls.GetMetricSpec(self.reference, timeout=20).metricSpecs
        return spec

    def value_call(self, metric: str) -> tuple[Any, dict[str, str]]:
        """The value, and the trailing metadata beside it."""
        request = self.messages.GetMetricsRequest(scaledObjectRef=self.reference, metricName=metric)
        answer, call = self.calls.GetMetrics.with_call(request, timeout=20)
        (value,) = answer.metricValues
        return value, dict(call.trailing_metadata())

    def is_active(self) -> bool:
        return bool(self.calls.IsActive(self.reference, timeout=20).result)

    def ask(self) -> Answers:
        """A round as KEDA's operator makes it: the target for the autoscaler, then value and activity."""
        spec = self.spec()
        value, _ = self.value_call(spec.metricName)
        assert value.metricName == spec.metricName
        # KEDA takes the number with a fraction where it is above 0, and the whole one otherwise.
        target = spec.targetSizeFloat if spec.targetSizeFloat > 0 else spec.targetSize
        found = value.metricValueFloat if value.metricValueFloat > 0 else value.metricValue
        return Answers(spec.metricName, target, found, self.is_active())
