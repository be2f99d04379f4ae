"""ModelInfer beside what grpcio's asyncio server does when it does nothing: ``python -m bench.grpc_floor``.

A 64 -> 32 -> 10 perceptron over gRPC and over REST with binary tensors, at 64 clients that have one request each, and a server of
grpcio alone that answers the same bytes at once. h2load (nghttp2) writes the load for all three, on this machine's own
cores: compare the lines of one run, never those of two. Also told: the processor's time per request, which other programs
disturb less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import onnx
import psutil
import uvloop
from onnx import TensorProto, helper, numpy_helper

METHOD = "/inference.GRPCInferenceService/ModelInfer"
ROW = struct.pack("<64f", *[number / 64 for number in range(64)])


def write_model(path: Path) -> None:
    random = np.random.default_rng(0)
    weights, nodes, before = [], [], "x"
    for layer, (rows, columns) in enumerate(((64, 32), (32, 10))):
        weights.append(numpy_helper.from_array(random.normal(size=(rows, columns)).astype(np.float32), f"w{layer}"))
        after = "y" if layer else "h"
        nodes.append(helper.make_node("MatMul", [before, f"w{layer}"], [after]))
        if not layer:
            nodes.append(helper.make_node("Relu", ["h"], ["r"]))
        before = "r"
    row = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 64])]
    answer = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 10])]
    graph = helper.make_graph(nodes, "perceptron", row, answer, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, str(path))


def grpc_request() -> bytes:
    """A ModelInferRequest behind gRPC's five bytes."""
    tensor = b"\x0a\x01x\x12\x04FP32\x1a\x02\x01\x40"
    message = b"\x0a\x03mlp\x2a" + bytes((len(tensor),)) + tensor + b"\x3a\x80\x02" + ROW
    return b"\0" + struct.pack(">I", len(message)) + message


def rest_request() -> tuple[bytes, int]:
    """A body with one binary tensor, and the length of its JSON."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "parameters": {"binary_data_size": len(ROW)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + ROW, len(head)


# -- the servers ---------------------------------------------------------------------------------


class _Bare(grpc.GenericRpcHandler):
    """Answers what inferd answers, without looking."""

    def __init__(self) -> None:
        tensor = b"\x0a\x01y\x12\x04FP32\x1a\x02\x01\x0a"
        self._answer = b"\x0a\x03mlp\x12\x011\x2a" + bytes((len(tensor),)) + tensor + b"\x32\x28" + bytes(40)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(self._infer)

    async def _infer(self, body: bytes, context: object) -> bytes:
        return self._answer


async def serve_bare() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Bare(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


@contextlib.contextmanager
def process(*command: str, ready: str, env: dict[str, str]) -> Iterator[tuple[psutil.Process, list[str]]]:
    """A server, and what its first matching line told."""
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    assert started.stdout is not None
    try:
        found = next((re.findall(ready, line) for line in started.stdout if re.search(ready, line)), None)
        if found is None:
            raise SystemExit(f"{' '.join(command)} did not start")
        yield psutil.Process(started.pid), found
    finally:
        started.terminate()
        started.wait()


# -- the measurement -----------------------------------------------------------------------------


def measure(name: str, server: psutil.Process, url: str, seconds: int, *arguments: str) -> None:
    load = ["h2load", "-c", "64", "-m", "1", "-t", "1", "-D", str(seconds), *arguments, url]
    subprocess.run([*load[:8], "1", *load[9:]], check=True, capture_output=True)  # a second to warm up
    before = spent(server)
    told = subprocess.run(load, check=True, capture_output=True, text=True).stdout
    used = [after - was for after, was in zip(spent(server), before, strict=True)]
    done = int(re.findall(r"(\d+) succeeded", told)[0])
    each = ", ".join(
        f"{what} {1e6 * time / done:.0f} us" for what, time in zip(("server", "worker"), used, strict=False)
    )
    print(f"{name:<24}{done / seconds:>9.0f} requests/s   processor per request: {each}", flush=True)


def spent(server: psutil.Process) -> list[float]:
    """Seconds of the processor, of the server and of each process it started."""
    return [sum(one.cpu_times()[:2]) for one in (server, *server.children())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        uvloop.run(serve_bare())
        return
    if shutil.which("h2load") is None:
        raise SystemExit("h2load is not installed; it comes with nghttp2 (Debian: apt-get install nghttp2-client).")
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        write_model(where / "mlp.onnx")
        (where / "grpc").write_bytes(grpc_request())
        rest, head = rest_request()
        (where / "rest").write_bytes(rest)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "INFERD_STATE__DATA_DIR": str(where / "state")}
        over_grpc = (
            "-p",
            "h2c",
            "-d",
            str(where / "grpc"),
            "-H",
            "content-type: application/grpc",
            "-H",
            "te: trailers",
        )
        over_rest = (
            *("--h1", "-d", str(where / "rest"), "-H", "content-type: application/octet-stream"),
            *("-H", f"inference-header-content-length: {head}"),
        )
        with process(sys.executable, "-m", "bench.grpc_floor", "--bare", ready=r"^\d+$", env=env) as (bare, [port]):
            measure("grpcio alone", bare, f"http://127.0.0.1:{port}{METHOD}", given.seconds, *over_grpc)
        flags = ("--name", "mlp", "--port", "0", "--grpc-port", "0", "--no-access-log")
        command = (sys.executable, "-m", "inferd", "serve", str(where / "mlp.onnx"), *flags)
        with process(*command, ready=r"at (\S+?),? ", env=env) as (server, [http, address]):
            measure("inferd, gRPC", server, f"http://{address}{METHOD}", given.seconds, *over_grpc)
            measure("inferd, REST, binary", server, f"{http}/v2/models/mlp/infer", given.seconds, *over_rest)


if __name__ == "__main__":
    main()
