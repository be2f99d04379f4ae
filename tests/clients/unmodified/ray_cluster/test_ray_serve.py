"""The example of docs/ray.md as it is run: a Ray Serve deployment relays to inferd, whole answers, streams and errors.

Run by ``make test-clients ARGS=ray_cluster``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tests.ports import free_port
from tests.server_process import running
from tests.worker.watching import until_now

pytest.importorskip("ray.serve", reason="Ray Serve is not installed; make test-clients ARGS=ray_cluster")

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "ray-serve"
RUN = """
import sys
import ray
from ray import serve
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
serve.start(http_options={"port": int(sys.argv[1])})
from inferd_on_serve import app
serve.run(app)
sys.stdin.read()
serve.shutdown()
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve's proxy in front of a server of the tiny model."""
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    file = folder / "inferd.yaml"
    file.write_text("server: {port: 0}\nmodels: {tiny: {source: tiny}}\n")
    with running(file=file, data_dir=folder) as server:
        environment = {
            **os.environ,
            "INFERD_URL": server.url,
            "PYTHONPATH": str(FOLDER),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with (folder / "log").open("wb") as log:
            serve = subprocess.Popen(
                [sys.executable, "-c", RUN, str(port)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        found = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"{found}/v1/models").status_code == 200
            except httpx.TransportError:
                return False

        try:
            until_now(answers, f"Serve relays: {(folder / 'log').read_text()}", 120)
            yield found
        finally:
            assert serve.stdin is not None
            serve.stdin.close()
            serve.wait(60)


def test_an_openai_client_gets_answers_streams_and_errors(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert client.completions.create(model="tiny", prompt="hello", max_tokens=4).choices[0].text == "abcd"
    stream = client.completions.create(model="tiny", prompt="hello", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abcd"
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="nothing", prompt="hello")
    assert "does not exist" in str(error.value)


def test_a_stream_arrives_as_it_is_made_and_ends_with_its_client(url: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = {"model": "tiny", "prompt": f"pace=0.01 end={gate}", "max_tokens": 100_000, "stream": True}

    def in_flight() -> float:
        page = httpx.get(f"{url}/metrics").text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("inferd_in_flight{"))

    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: "), "the last token is not made before the gate is there"
        until_now(lambda: in_flight() == 1, "it is in work", 30)
    until_now(lambda: in_flight() == 0, "the work of the client that left has ended", 30)
