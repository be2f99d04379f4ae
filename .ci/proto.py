"""Compile the gRPC protocol's file to the descriptors that the server reads: .ci/proto.py

A test holds the committed descriptors against a fresh compilation.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "inferd" / "gateway" / "grpc" / "inference.proto"


def compile_proto(target: Path) -> int:
    folder = str(SOURCE.parent)
    code: int = protoc.main(["protoc", f"--proto_path={folder}", f"--descriptor_set_out={target}", SOURCE.name])
    return code


if __name__ == "__main__":
    sys.exit(compile_proto(SOURCE.with_suffix(".binpb")))
