"""What a window of a stream costs its client: ``python -m bench.stream_windows``, or with the path of a model like Silero VAD.

Windows of 512 samples with 64 of context at 16 kHz, 32 ms of sound each, over WebSockets at 1 and at 16 streams: at the pace
of a microphone, and one after the other as fast as answers come. Tells milliseconds from a window's last sample to its
answer (p50, p95, highest), and how many windows that were in a second. Without a model, one is made: a recurrent layer whose
state goes from window to window. The client is ``websockets`` in this process, on this machine's own cores: its own work
is in the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import yaml
from onnx import TensorProto, helper, numpy_helper
from websockets.asyncio.client import ClientConnection, connect

SIZE, CONTEXT, RATE = 512, 64, 16_000
WINDOW_S = SIZE / RATE
WIDTH = 128
STREAMS = (1, 16)


def write_model(path: Path) -> None:
    """stateN = tanh(x W + state R), y = sigmoid(stateN V)."""
    random = np.random.default_rng(0)
    shapes = {"W": (SIZE + CONTEXT, WIDTH), "R": (WIDTH, WIDTH), "V": (WIDTH, 1)}
    weights = [
        numpy_helper.from_array((random.normal(size=shape) / shape[0] ** 0.5).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["heard"]),
        helper.make_node("MatMul", ["state", "R"], ["kept"]),
        helper.make_node("Add", ["heard", "kept"], ["both"]),
        helper.make_node("Tanh", ["both"], ["stateN"]),
        helper.make_node("MatMul", ["stateN", "V"], ["score"]),
        helper.make_node("Sigmoid", ["score"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["n", SIZE + CONTEXT]), value("state", TensorProto.FLOAT, ["n", WIDTH])]
    outputs = [value("y", TensorProto.FLOAT, ["n", 1]), value("stateN", TensorProto.FLOAT, ["n", WIDTH])]
    graph = helper.make_graph(nodes, "recurrent", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


async def listen(client: ClientConnection, until: float, *, is_paced: bool, offset_s: float) -> list[float]:
    """Seconds that each window's answer took."""
    loop = asyncio.get_running_loop()
    sound = struct.pack(f"<{SIZE}f", *[((at * 37) % 200 - 100) / 400 for at in range(SIZE)])
    took: list[float] = []
    due = loop.time() + offset_s
    while (now := loop.time()) < until:
        if is_paced:
            await asyncio.sleep(max(0.0, due - now))
            due += WINDOW_S
        begin = time.perf_counter()
        await client.send(sound)
        answer = await client.recv()
        took.append(time.perf_counter() - begin)
        if '"type":"window"' not in str(answer):
            raise SystemExit(f"The server answered {str(answer)[:300]}")
    return took


async def measure(url: str, num_streams: int, seconds: float, *, is_paced: bool) -> None:
    query = f"window={SIZE}&context={CONTEXT}&sample_rate={RATE}"
    clients = [await connect(f"{url}/v2/models/windows/stream?{query}", proxy=None) for _ in range(num_streams)]
    try:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*[listen(client, loop.time() + 0.3, is_paced=False, offset_s=0.0) for client in clients])
        until = loop.time() + seconds
        told = await asyncio.gather(
            *[
                listen(client, until, is_paced=is_paced, offset_s=WINDOW_S * place / num_streams)
                for place, client in enumerate(clients)
            ]
        )
    finally:
        for client in clients:
            await client.close()
    took = np.sort(np.concatenate([np.array(one) for one in told])) * 1000
    p50, p95 = np.percentile(took, [50, 95])
    pace = "microphones" if is_paced else "no pause"
    print(f"{num_streams:7d}  {pace:<12} {len(took) / seconds:9.0f} {p50:9.2f} {p95:9.2f} {took[-1]:9.2f}", flush=True)


async def measured(url: str, seconds: float) -> None:
    print(f"streams  pace         windows/s   p50 ms    p95 ms    max ms    ({WINDOW_S * 1000:.0f} ms of sound each)")
    for is_paced in (True, False):
        for num_streams in STREAMS:
            await measure(url, num_streams, seconds, is_paced=is_paced)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="an ONNX file that takes [n, 576] samples, a rate and a state")
    parser.add_argument("--state", default="stateN: state", help="its state's output and input (stateN: state)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each of the four measurements")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(asked.model).resolve() if asked.model else Path(folder) / "recurrent.onnx"
        if not asked.model:
            write_model(path)
        output, _, into = asked.state.partition(":")
        states = {"states": {output.strip(): into.strip()}}
        model = {"source": str(path), "sequence": states, "batching": {"max_batch_size": 16}}
        file = Path(folder) / "inferd.yaml"
        file.write_text(yaml.safe_dump({"server": {"port": 0, "reload": False}, "models": {"windows": model}}))
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "INFERD_STATE__DATA_DIR": str(Path(folder) / "state")},
        )
        try:
            assert process.stdout is not None
            ready = next((line for line in process.stdout if "is ready at" in line), "")
            found = re.search(r"http(://[^\s,]+)", ready)
            if found is None:
                raise SystemExit("The server did not start; try 'inferd serve' with the model alone.")
            asyncio.run(measured(f"ws{found[1]}", asked.seconds))
        finally:
            process.terminate()
            process.wait(timeout=20)


if __name__ == "__main__":
    main()
