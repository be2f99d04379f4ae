"""The protocol's file: compiled as it is committed, and the same on the wire as that of Triton's clients."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.gateway.grpc.messages import message_type, pool
from tritonclient.grpc import model_config_pb2, service_pb2  # type: ignore[import-untyped]

from inferd.errors import InvalidRequest
from inferd.gateway.grpc import reflection
from inferd.gateway.grpc.protocol import DESCRIPTORS, PACKAGE, protocol

ROOT = Path(__file__).resolve().parents[3]


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


# -- our messages beside protobuf's ----------------------------------------------------------------


@functools.cache
def filled(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """What JSON may have for a message: any of its fields, of a oneof at most one."""
    single = {
        field.name: values(field, depth) for field in descriptor.fields if depth < 4 or field.message_type is None
    }
    choices = [[field.name for field in one.fields if field.name in single] for one in descriptor.oneofs]

    def fit(found: dict[str, Any]) -> dict[str, Any]:
        for names in choices:
            for name in [name for name in names if name in found][1:]:
                del found[name]
        return found

    return st.fixed_dictionaries({}, optional=single).map(fit)


@functools.cache
def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        key, value = message.fields
        return st.dictionaries(one_value(key, depth), one_value(value, depth + 1), max_size=2)
    one = one_value(field, depth + 1)
    return st.lists(one, max_size=3) if field.is_repeated else one


def one_value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return filled(field.message_type, depth)
    if field.enum_type is not None:
        return st.sampled_from([value.name for value in field.enum_type.values])
    least, most = {
        FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
        FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    }.get(field.cpp_type, (0, 0))
    if most:
        return st.integers(least, most)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and field.type != FieldDescriptor.TYPE_BYTES:
        return st.text(max_size=4)
    return st.just("AP8=") if field.type == FieldDescriptor.TYPE_BYTES else st.floats(-8, 8, width=32)


NAMES = sorted(
    name
    for name in OURS
    if name.endswith(("Request", "Response")) and not name.startswith(("ModelInfer", "ModelStream"))
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_we_write_and_read_is_what_protobuf_writes_and_reads(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    answer = data.draw(filled(OURS[name]))
    message: Any = message_type(name)()
    json_format.ParseDict(answer, message)
    written = protocol().write(name, {**answer, "no_such_field": 1})
    assert message_type(name).FromString(written) == message
    theirs = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert plain(protocol().read(name, message.SerializeToString())) == plain(theirs)


def plain(value: Any) -> Any:
    """With every number as a number: JSON has large ones as texts."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, str) and re.fullmatch("-?[0-9]+", value):
        return int(value)
    return value


@given(st.sampled_from(NAMES), st.binary(max_size=20))
@example("ServerReadyRequest", bytes.fromhex("889590dc8800bca514"))
@example("ServerReadyRequest", bytes.fromhex("0b889590dc8800bc0c"))
@example("RepositoryModelLoadResponse", bytes.fromhex("0501010101"))
def test_what_protobuf_does_not_read_is_refused(name: str, body: bytes) -> None:
    try:
        message_type(name).FromString(body)
    except DecodeError:
        with pytest.raises(InvalidRequest):
            protocol().read(name, body)
    else:
        try:
            protocol().read(name, body)
        except InvalidRequest:
            # The library reads some messages with a field 0, which there is not. Its tags are the numbers below 8.
            assert any(byte < 8 for byte in body)


def test_a_text_of_zeros_is_no_default() -> None:
    message: Any = message_type("ModelConfigResponse")()
    message.config.name = "\0"
    message.config.parameters["\0"].string_value = "\0"
    answer = {"config": {"name": "\0", "parameters": {"\0": {"string_value": "\0"}}}}
    assert message_type("ModelConfigResponse").FromString(protocol().write("ModelConfigResponse", answer)) == message


def test_answers_are_as_rest_has_them() -> None:
    """Structs with the names of the protocol's file, or with those that JSON has for them."""
    written = protocol().write(
        "ModelMetadataResponse", msgspec.to_builtins({"name": "m", "versions": ("1", "2"), "x": 3})
    )
    message: Any = message_type("ModelMetadataResponse").FromString(written)
    assert (message.name, list(message.versions)) == ("m", ["1", "2"])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"file_containing_symbol": "inference.ModelInferRequest.InferInputTensor.shape"}, "inference.proto"),
        ({"file_containing_symbol": "inference.GRPCInferenceService.ModelInfer"}, "inference.proto"),
        ({"file_containing_symbol": "grpc.reflection.v1.ServerReflection"}, "grpc/reflection/v1/reflection.proto"),
        ({"file_by_filename": "grpc/health/v1/health.proto"}, "grpc/health/v1/health.proto"),
        ({"file_by_filename": "nothing.proto"}, None),
        ({"file_containing_symbol": "inference.Nothing"}, None),
        ({"all_extension_numbers_of_type": "inference.ModelInferRequest"}, None),
        ({}, None),
    ],
)
def test_reflection_tells_of_every_symbol(asked: dict[str, str], says: str | None) -> None:
    request: Any = reflection_pb2.ServerReflectionRequest(host="h", **asked)  # type: ignore[arg-type]
    told: Any = reflection_pb2.ServerReflectionResponse.FromString(
        reflection.answer(protocol(), request.SerializeToString())
    )
    assert (told.valid_host, told.original_request) == ("h", request)
    if says is None:
        assert told.error_response.error_code
    else:
        files = [pool().FindFileByName(says).serialized_pb]
        assert list(told.file_descriptor_response.file_descriptor_proto) == files


def test_the_grpc_server_imports_neither_grpcio_nor_protobuf() -> None:
    code = (
        "import sys, inferd.app.root, inferd.gateway.grpc.server, inferd.http.listener, inferd.cli.main, "
        "inferd.predict.codecs.v2_grpc, inferd.worker.main; "
        "print([name for name in sys.modules if name.split('.')[0] in ('grpc', 'google')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert told.stdout.strip() == "[]"


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
