"""A recording through a voice detector, window by window: whichever way a client streams, its publisher's numbers."""

from __future__ import annotations

import asyncio
import json
import queue
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton  # type: ignore[import-untyped]
from tests.predict.live import Address, serving
from websockets.asyncio.client import connect

from inferd.predict.contract import Array

pytestmark = pytest.mark.shared
WINDOWS, SIZE, CONTEXT = 60, 512, 64


class Recording(NamedTuple):
    """The first windows of one: 16 bit samples at 16 kHz, and the probabilities of speech in them."""

    sound: Array
    golden: Sequence[float]


@pytest.fixture(scope="module")
def recordings(shared_data: Path) -> list[Recording]:
    folder = shared_data / "onnx-models" / "silero-vad"
    found = []
    for case in json.loads((folder / "golden_probs.json").read_text())["cases"]:
        with wave.open(str(folder / case["file"])) as file:
            sound = np.frombuffer(file.readframes(WINDOWS * SIZE), np.int16)
        found.append(Recording(sound, case["probs"][:WINDOWS]))
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Iterator[Address]:
    source = shared_data / "onnx-models" / "silero-vad" / "silero_vad.onnx"
    model = {"source": str(source), "sequence": {"states": {"stateN": "state"}}}
    with serving(tmp_path_factory.mktemp("vad"), {"vad": model}, grpc_port=0) as address:
        yield address


def windows(sound: Array) -> list[Array]:
    """As a client has to cut them that does not let the server do it."""
    scaled = np.concatenate([np.zeros(CONTEXT, np.float32), sound.astype(np.float32) / 32768])
    return [scaled[None, at * SIZE : at * SIZE + CONTEXT + SIZE] for at in range(WINDOWS)]


def check(found: list[list[float]], recordings: list[Recording]) -> None:
    for one, recording in zip(found, recordings, strict=True):
        np.testing.assert_allclose(one, recording.golden, atol=2e-4)


def test_sequences_over_rest(served: Address, recordings: list[Recording]) -> None:
    found: list[list[float]] = [[] for _ in recordings]
    cut = [windows(recording.sound) for recording in recordings]
    with httpx.Client(base_url=served.url) as client:
        for at in range(WINDOWS):  # both at once, taking turns
            for place, one in enumerate(cut):
                body = {
                    "parameters": {
                        "sequence_id": f"recording-{place}",
                        "sequence_start": at == 0,
                        "sequence_end": at == WINDOWS - 1,
                    },
                    "inputs": [
                        {"name": "input", "shape": [1, 576], "datatype": "FP32", "data": one[at].ravel().tolist()},
                        {"name": "sr", "shape": [], "datatype": "INT64", "data": [16000]},
                    ],
                }
                reply = client.post("/v2/models/vad/infer", json=body)
                assert reply.status_code == 200, reply.text
                (output,) = reply.json()["outputs"]
                found[place].append(output["data"][0])
    check(found, recordings)


def test_one_stream_of_tritons_client(served: Address, recordings: list[Recording]) -> None:
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    found: list[list[float]] = [[] for _ in recordings]
    cut = [windows(recording.sound) for recording in recordings]
    with triton.InferenceServerClient(served.grpc) as client:
        client.start_stream(lambda result, error: heard.put((result, error)))
        for at in range(WINDOWS):
            for place, one in enumerate(cut):
                sound, rate = triton.InferInput("input", [1, 576], "FP32"), triton.InferInput("sr", [], "INT64")
                sound.set_data_from_numpy(np.ascontiguousarray(one[at]))
                rate.set_data_from_numpy(np.array(16000, np.int64))
                client.async_stream_infer(
                    "vad",
                    [sound, rate],
                    request_id=str(place),
                    sequence_id=place + 1,
                    sequence_start=at == 0,
                    sequence_end=at == WINDOWS - 1,
                )
        for _ in range(WINDOWS * len(cut)):
            result, error = heard.get(timeout=20)
            assert error is None, error
            found[int(result.get_response().id)].append(float(result.as_numpy("output").ravel()[0]))
        client.stop_stream()
    check(found, recordings)


@pytest.mark.parametrize("datatype", ["FP32", "INT16"])
def test_a_websocket_that_sends_sound_as_it_comes(served: Address, recordings: list[Recording], datatype: str) -> None:
    """Messages of any length; the server cuts, carries over the context and keeps the state."""
    url = f"ws{served.url.removeprefix('http')}/v2/models/vad/stream"
    query = f"window={SIZE}&context={CONTEXT}&sample_rate=16000&datatype={datatype}"

    async def listen(recording: Recording) -> list[float]:
        sound = recording.sound if datatype == "INT16" else recording.sound.astype(np.float32) / 32768
        pieces = np.array_split(sound, 23)
        found = []
        async with asyncio.timeout(30), connect(f"{url}?{query}", proxy=None) as client:

            async def say() -> None:
                for piece in pieces:
                    await client.send(piece.tobytes())

            saying = asyncio.create_task(say())
            for at in range(WINDOWS):
                answer = json.loads(await client.recv())
                assert (answer["window"], answer["end_s"]) == (at, round((at + 1) * 0.032, 6)), answer
                found.append(answer["outputs"][0]["data"][0])
            await saying
        return found

    async def main() -> list[list[float]]:
        return list(await asyncio.gather(*[listen(recording) for recording in recordings]))

    check(asyncio.run(main()), recordings)
