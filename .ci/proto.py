"""Compile the gRPC protocols' files to the descriptors that the server reads: .ci/proto.py

Those of health checks and reflection, which the server describes and answers as well, come from gRPC's own packages. A
test holds the committed descriptors against a fresh compilation.
"""

from __future__ import annotations

import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "src" / "inferd" / "gateway" / "grpc"
SOURCES = ("inference.proto", "externalscaler.proto")


def compile_proto(target: Path) -> int:
    code: int = protoc.main(["protoc", f"--proto_path={FOLDER}", f"--descriptor_set_out={target}", *SOURCES])
    if code:
        return code
    found = FileDescriptorSet.FromString(target.read_bytes())
    health, alpha, version_1 = (
        FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for module in (health_pb2, reflection_pb2, reflection_pb2)
    )
    for file in (health, alpha, _renamed(version_1)):
        file.name = file.name.replace("grpc_", "grpc/")  # as everybody calls them but their Python packages
        found.file.add().CopyFrom(file)
    target.write_bytes(found.SerializeToString(deterministic=True))
    return 0


def _renamed(file: FileDescriptorProto) -> FileDescriptorProto:
    """Reflection's version 1 is v1alpha under another name."""
    file.name = file.name.replace("v1alpha", "v1")
    file.package = file.package.replace("v1alpha", "v1")
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    return file


if __name__ == "__main__":
    sys.exit(compile_proto(FOLDER / "descriptors.binpb"))
