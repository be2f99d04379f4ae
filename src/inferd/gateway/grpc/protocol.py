"""The protocol's messages for the calls that are not predictions: the same answers as over REST, in protobuf.

What the descriptors (inference.binpb, made by .ci/proto.py) say is read into a pool of its own, so that a program
may use this package beside another one that brings the same messages.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from inferd.errors import InvalidRequest

DESCRIPTORS: Final = Path(__file__).with_name("inference.binpb")
PACKAGE: Final = "inference"


@functools.cache
def pool() -> DescriptorPool:
    """The protocol, and what reflection tells of besides: health, and itself."""
    made = DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        made.Add(file)
    for module in (health_pb2, reflection_pb2):
        made.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return made


@functools.cache
def message_type(name: str) -> type[Message]:
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


def read(name: str, body: bytes) -> dict[str, object]:
    """A message's fields as JSON has them, those that were left out with their defaults. Raises InvalidRequest."""
    try:
        message = message_type(name).FromString(body)
    except DecodeError:
        raise InvalidRequest(
            f"The request is no protobuf message of the type {PACKAGE}.{name}; send one.", code="invalid_protobuf"
        ) from None
    fields: dict[str, object] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def write(name: str, answer: msgspec.Struct | Mapping[str, object]) -> bytes:
    """A message's bytes from what REST would say; what the protocol has no field for is left out."""
    message = message_type(name)()
    json_format.ParseDict(msgspec.to_builtins(answer), message, ignore_unknown_fields=True)
    return message.SerializeToString()
