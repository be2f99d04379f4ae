"""Other servers around the same ONNX file: how each is written, started and asked."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Write = Callable[[Path, Path], Path]
Command = Callable[[str, Path, int, int], list[str]]


@dataclass(frozen=True)
class Peer:
    name: str
    write: Write  # its files into a folder, for a model
    command: Command  # python of its environment, what ``write`` gave, HTTP and gRPC port
    ready_path: str
    path: str = "/v2/models/mlp/infer"
    has_grpc: bool = False
    is_kserve: bool = True


_RUN = """
import numpy as np
import onnxruntime as ort
options = ort.SessionOptions()
SESSION = ort.InferenceSession({model!r}, options, providers=["CPUExecutionProvider"])

def compute(x):
    return SESSION.run(None, {{"x": x}})[0]
"""

_V2 = """
import json

def read(body, head):
    if head < 0:
        tensor = json.loads(body)["inputs"][0]
        return np.asarray(tensor["data"], np.float32).reshape(tensor["shape"]), False
    tensor = json.loads(body[:head])["inputs"][0]
    return np.frombuffer(body, np.float32, offset=head).reshape(tensor["shape"]), True

def answer(y):
    return {"model_name": "m", "outputs": [{"name": "y", "datatype": "FP32", "shape": list(y.shape), "data": y.ravel().tolist()}]}
"""

_FASTAPI = (
    _RUN
    + _V2.replace("{", "{{").replace("}", "}}")
    + """
from fastapi import FastAPI, Request
from fastapi.responses import Response

app = FastAPI()

@app.get("/ready")
def ready():
    return {{}}

@app.post("/v2/models/{{name}}/infer")
async def infer(name: str, request: Request):
    body = await request.body()
    x, is_binary = read(body, int(request.headers.get("inference-header-content-length", -1)))
    y = compute(x)
    if is_binary:
        return Response(y.tobytes(), media_type="application/octet-stream")
    return answer(y)
"""
)

_LITSERVE = (
    _RUN
    + """
import sys
import litserve as ls

class API(ls.LitAPI):
    def setup(self, device):
        pass
    def decode_request(self, request):
        tensor = request["inputs"][0]
        return np.asarray(tensor["data"], np.float32).reshape(tensor["shape"])[0]
    def batch(self, inputs):
        return np.stack(inputs)
    def predict(self, x):
        return compute(x)
    def unbatch(self, output):
        return list(output)
    def encode_response(self, y):
        return {{"outputs": [{{"name": "y", "shape": [1, len(y)], "datatype": "FP32", "data": y.tolist()}}]}}

if __name__ == "__main__":
    api = API(max_batch_size=64, batch_timeout=0.002, api_path="/v2/models/mlp/infer")
    ls.LitServer(api, accelerator="cpu").run(port=int(sys.argv[1]), generate_client_file=False, log_level="error")
"""
)

_TRITON = (
    _RUN
    + """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        y = compute(np.concatenate(arrays))
        answers, at = [], 0
        for array in arrays:
            part = y[at : at + len(array)]
            at += len(array)
            answers.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", part)]))
        return answers
"""
)

_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 64
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {size} ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""


def _script(text: str) -> Write:
    def write(folder: Path, model: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "app.py"
        file.write_text(textwrap.dedent(text).format(model=str(model)))
        return file

    return write


def _repository(folder: Path, model: Path) -> Path:
    version = folder / model.stem / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(_TRITON.format(model=str(model)))
    dims, size = ("64", 10) if model.stem == "mlp" else ("3, 224, 224", 1000)
    (version.parent / "config.pbtxt").write_text(_CONFIG.format(name=model.stem, dims=dims, size=size))
    return folder


def _triton(python: str, files: Path, http: int, grpc: int) -> list[str]:
    """tritonserver as the wheel nvidia-pytriton carries it, with its python backend."""
    site = next(Path(python).parent.parent.glob("lib/python*/site-packages/pytriton"))
    server = site / "tritonserver"
    stubs = server / "python_backend_stubs" / site.parts[-3].removeprefix("python")
    for stub in stubs.glob("*stub*"):  # the backend looks for its helper beside itself
        if not (server / "backends" / "python" / stub.name).exists():
            shutil.copy(stub, server / "backends" / "python")
    return [
        *("env", f"LD_LIBRARY_PATH={site.parent / 'nvidia_pytriton.libs'}"),
        f"PATH={Path(python).parent}:{os.environ['PATH']}",
        *(str(server / "bin" / "tritonserver"), "--model-repository", str(files)),
        *("--backend-directory", str(server / "backends"), "--http-port", str(http), "--grpc-port", str(grpc)),
        *("--allow-metrics", "false", "--log-info", "false"),
    ]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("triton", _repository, _triton, "/v2/health/ready", has_grpc=True),
        Peer(
            "fastapi",
            _script(_FASTAPI),
            lambda python, file, http, grpc: [
                *(python, "-m", "uvicorn", "--app-dir", str(file.parent), "app:app", "--port", str(http)),
                *("--log-level", "error"),
            ],
            "/ready",
        ),
        Peer(
            "litserve",
            _script(_LITSERVE),
            lambda python, file, http, grpc: [python, str(file), str(http)],
            "/health",
            is_kserve=False,
        ),
    )
}
