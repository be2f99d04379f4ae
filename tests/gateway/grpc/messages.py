"""The protocol's messages as protobuf's own classes: what clients write and read, and the oracle of the server's."""

from __future__ import annotations

import functools

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message

from inferd.gateway.grpc.protocol import DESCRIPTORS, PACKAGE


@functools.cache
def pool() -> DescriptorPool:
    """A pool of its own: Triton's clients bring the same messages."""
    made = DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        made.Add(file)
    return made


@functools.cache
def message_type(name: str) -> type[Message]:
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))
