"""A batch outlives its server and its workers: every request has one answer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import openai
from openai.types import Batch
from tests.gateway.jobs.serving_jobs import begin, ended, line, lines_of
from tests.server_process import running
from tests.tiers import THOROUGH

PATH = "/v1/completions"


def content_of(gate: Path) -> str:
    """Requests of which the first twenty are answered at once, and the others when the gate exists."""
    lines = []
    for number in range(40):
        text = f"hello {number}" if number < 20 else f"gate={gate}"
        lines.append(line(f"r{number}", PATH, prompt=text, max_tokens=4))
    return "\n".join(lines)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)


def until_answered(client: openai.OpenAI, batch: Batch, count: int) -> None:
    deadline = time.monotonic() + 120
    while (found := client.batches.retrieve(batch.id)).request_counts is None or found.request_counts.completed < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@THOROUGH
def test_a_batch_outlives_a_killed_server_and_a_killed_worker(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with running(data_dir=tmp_path / "data") as server, client_of(server.url) as client:
        batch = begin(client, content_of(gate), PATH)
        until_answered(client, batch, 20)
        server.process.kill()
        server.process.wait(timeout=60)
    with running(data_dir=tmp_path / "data") as server, client_of(server.url) as client:
        found = client.batches.retrieve(batch.id)
        assert (found.status, found.request_counts and found.request_counts.completed) == ("in_progress", 20)
        for worker in server.workers:
            os.kill(worker, signal.SIGKILL)
        gate.touch()
        found = ended(client, batch)
        assert found.status == "completed"
        assert found.request_counts == openai.types.BatchRequestCounts(completed=40, failed=0, total=40)
        results = lines_of(client, found.output_file_id)
        assert [one["custom_id"] for one in results] == [f"r{number}" for number in range(40)]
        assert {one["response"]["body"]["choices"][0]["text"] for one in results} == {"abcd"}
