"""The protocol's file: compiled as it is committed, and the same on the wire as that of Triton's clients."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2  # type: ignore[import-untyped]

from tests.gateway.grpc_messages import pool
from inferd.gateway.grpc.protocol import DESCRIPTORS, PACKAGE

ROOT = Path(__file__).resolve().parents[2]


def test_the_descriptors_are_those_of_the_file(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("compile_proto", ROOT / ".ci" / "proto.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.compile_proto(tmp_path / "fresh") == 0
    assert (tmp_path / "fresh").read_bytes() == DESCRIPTORS.read_bytes(), "run .ci/proto.py"


THEIRS: dict[str, Descriptor] = {
    **service_pb2.DESCRIPTOR.message_types_by_name,
    **model_config_pb2.DESCRIPTOR.message_types_by_name,
}
OURS: Mapping[str, Descriptor] = pool().FindFileByName("inference.proto").message_types_by_name


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_message_is_the_same_for_tritons_clients(name: str) -> None:
    compare(OURS[name], THEIRS[name])


def compare(ours: Descriptor, theirs: Descriptor) -> None:
    known = theirs.fields_by_name
    for field in ours.fields:
        assert form(field) == form(known[field.name]), f"{ours.full_name}.{field.name}"
    for nested in ours.nested_types:
        compare(nested, theirs.nested_types_by_name[nested.name])


def form(field: FieldDescriptor) -> tuple[object, ...]:
    """What of a field is seen on the wire."""
    values = None if field.enum_type is None else [(value.name, value.number) for value in field.enum_type.values]
    kind = field.message_type.full_name if field.message_type is not None else None
    return field.number, field.type, field.is_repeated, kind, values


def test_every_call_is_the_same_for_tritons_clients() -> None:
    [ours] = pool().FindFileByName("inference.proto").services_by_name.values()
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert ours.full_name == theirs.full_name == f"{PACKAGE}.GRPCInferenceService"
    for method in ours.methods:
        other = theirs.methods_by_name[method.name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert method.client_streaming == other.client_streaming
        assert method.server_streaming == other.server_streaming


def test_who_serves_no_grpc_imports_none() -> None:
    """Neither the application nor the gateway's other doors."""
    code = (
        "import sys, inferd.app.root, inferd.gateway.server, inferd.gateway.listener, inferd.cli.main, "
        "inferd.predict.codecs.v2_grpc, inferd.worker.main; "
        "print([name for name in sys.modules if name.split('.')[0] in ('grpc', 'google')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert told.stdout.strip() == "[]"


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
