"""Shadow steps of a running server: requests are copied to the new version, and clients notice nothing of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.test_replaced_files import inferd, put
from tests.app.test_rollouts_served import failing, rollout_of, state_of, worse_digits
from tests.predict.live import serving
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

from inferd import models

datasets = pytest.importorskip("sklearn.datasets")


def two_digits(folder: Path) -> None:
    """Two versions of the bundled classifier of digits that are the same."""
    for number in (1, 2):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "model.onnx").write_bytes((models.path("demo-digits") / "model.onnx").read_bytes())


def asking(client: httpx.Client, index: int) -> httpx.Response:
    digits = datasets.load_digits()
    pixels = digits.data[index % len(digits.data)]
    tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": pixels.tolist()}
    answer = client.post("/v2/models/digits/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    return answer


def compared(name: str) -> int:
    copies = rollout_of(name)["copies"]
    return sum(copies.get(result, 0) for result in ("equal", "differs", "failed"))


@THOROUGH
def test_a_worse_classifier_is_taken_back_before_it_answers_any_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    two_digits(tmp_path / "digits")
    worse_digits(tmp_path / "digits" / "2" / "model.onnx")
    rollout = {
        "stable": 1,
        "new": 2,
        "steps": [{"shadow": 100, "for_s": 3600}, {"weight": 100}],
        "guards": {"errors": {}, "differs": {"max_fraction": 0.02, "absolute": 1}},
        "start": "auto",
    }
    with (
        serving(tmp_path, {"digits": {"source": str(tmp_path / "digits"), "rollout": rollout}}) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        until_now(lambda: state_of("digits") == "running", "the rollout is running")
        versions: Counter[str] = Counter()
        index = 0
        while state_of("digits") == "running":
            for _ in range(10):
                versions[asking(client, index).json()["model_version"]] += 1
                index += 1
            assert index < 3000
        assert state_of("digits") == "rolled_back"
        assert set(versions) == {"1"}, "no answer is the new version's"
        found = rollout_of("digits")
        assert found["progress"]["reason"].startswith("differs: ")
        assert found["progress"]["shadow"] == 0.0
        differing = found["differing"]
        assert {one["part"] for one in differing} <= {"label", "probabilities"}
        assert found["copies"]["differs"] >= len(differing) > 1

        code, shown = inferd("rollout", "status", "digits")
        assert code == 0
        assert "steps: 0 % and copies of 100 %, 100 %" in shown
        assert f"{found['copies']['differs']} different" in shown
        assert f"{differing[-1]['request_id']}: differs in {differing[-1]['part']}" in shown
        page = client.get("/metrics").text.splitlines()
        assert f'inferd_rollout_copies_total{{model="digits",result="differs"}} {found["copies"]["differs"]}' in page
        asked = [line for line in page if line.startswith("inferd_requests_total") and 'model="digits@2"' in line]
        assert sum(float(line.rpartition(" ")[2]) for line in asked) == 0, "no client asked the new version"
        before = compared("digits")
        for _ in range(20):
            asking(client, index)
        assert compared("digits") == before, "after the rollback nothing is copied"


def test_a_version_with_equal_answers_passes_the_shadow_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    two_digits(tmp_path / "digits")
    rollout = {
        "stable": 1,
        "new": 2,
        "steps": [{"shadow": 100}, {"weight": 100}],
        "guards": {"differs": {"max_fraction": 0.2}},
        "start": "auto",
    }
    with (
        serving(tmp_path, {"digits": {"source": str(tmp_path / "digits"), "rollout": rollout}}) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        until_now(lambda: state_of("digits") == "inconclusive", "the rollout waits for evidence")
        index = 0
        while state_of("digits") == "inconclusive":
            for _ in range(10):
                asking(client, index)
                index += 1
            assert index < 3000, rollout_of("digits")
        until_now(lambda: state_of("digits") == "promoted", "the rollout is promoted")
        found = rollout_of("digits")
        assert "differs" not in found["copies"]
        assert asking(client, 0).json()["model_version"] == "2"


def test_a_version_that_fails_is_taken_back_and_no_client_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    for number in (1, 2):
        (tmp_path / "m" / str(number)).mkdir(parents=True)
    put(tmp_path / "m" / "1" / "model.onnx", 0)
    failing(tmp_path / "m" / "2" / "model.onnx")
    rollout = {
        "stable": 1,
        "new": 2,
        "steps": [{"shadow": 100, "for_s": 3600}, {"weight": 100}],
        "guards": {"differs": {}},
        "start": "auto",
    }
    with (
        serving(tmp_path, {"m": {"source": str(tmp_path / "m"), "rollout": rollout}}) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        until_now(lambda: state_of("m") == "running", "the rollout is running")
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [9, 0]}
        asked = 0
        while state_of("m") == "running":
            answer = client.post("/v2/models/m/infer", json={"inputs": [tensor]})
            assert (answer.status_code, answer.json()["model_version"]) == (200, "1"), answer.text
            asked += 1
            assert asked < 1000
        assert state_of("m") == "rolled_back"
        found = rollout_of("m")
        assert found["copies"]["failed"] > 1
        assert found["differing"][0]["part"] == ""


@THOROUGH
def test_texts_are_drawn_with_the_seed_of_the_answer_so_equal_versions_give_equal_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    source = str(models.path("demo"))
    rollout: dict[str, Any] = {
        "stable": 1,
        "new": 2,
        "steps": [{"shadow": 100, "for_s": 3600}, {"weight": 100}],
        "guards": {"differs": {}},
        "start": "auto",
    }
    settings: dict[str, dict[str, Any]] = {
        "chat": {"source": source, "version": "1", "rollout": rollout},
        "chat@2": {"source": source, "version": "2"},
    }
    with (
        serving(tmp_path, settings) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        until_now(lambda: state_of("chat") == "running", "the rollout is running")

        def ask(**fields: Any) -> str:
            body = {"model": "chat", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, **fields}
            if not fields.get("stream"):
                return str(client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"])
            with client.stream("POST", "/v1/completions", json=body) as answer:
                events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

        texts = set()
        for number in range(6):
            texts.add(ask(stream=number % 2 == 0))
            until_now(lambda number=number: compared("chat") == number + 1, "the copy is compared")  # type: ignore[misc]
        assert len(texts) > 1, "the answers are drawn by chance"
        assert rollout_of("chat")["copies"] == {"equal": 6}
        ask(n=2)
        until_now(lambda: rollout_of("chat")["copies"].get("random") == 1, "it has no single seed")
        ask(n=2, seed=7)
        until_now(lambda: compared("chat") == 7, "it has the seed of the client")
        assert rollout_of("chat")["copies"] == {"equal": 7, "random": 1}
