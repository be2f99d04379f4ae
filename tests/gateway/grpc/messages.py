"""The protocol's messages as protobuf's own classes: what clients write and read, and the oracle of the server's."""

from __future__ import annotations

import functools
from typing import Any

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


def asking(*values: float, model: str = "twice", name: str = "x", **fields: Any) -> Any:
    """A ModelInferRequest with one tensor of two columns."""
    values = values or (1.0, 2.0)
    parameters = fields.pop("parameters", {})
    message: Any = message_type("ModelInferRequest")(model_name=model, **fields)
    tensor = message.inputs.add(name=name, datatype="FP32", shape=[len(values) // 2, 2])
    tensor.contents.fp32_contents.extend(values)
    return with_parameters(message, parameters)


def with_parameters(message: Any, parameters: dict[str, Any]) -> Any:
    for key, value in parameters.items():
        choice = message.parameters[key]
        if isinstance(value, bool):
            choice.bool_param = value
        elif isinstance(value, int):
            choice.int64_param = value
        elif isinstance(value, float):
            choice.double_param = value
        else:
            choice.string_param = value
    return message
