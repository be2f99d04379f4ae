"""Drift of a running server: other requests, refusals, calls and embeddings are found, by command, API, metric and log,
and a restart goes on with the reference."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.app.test_replaced_files import inferd
from tests.predict.live import serving
from tests.scripted import Rule
from tests.scripted import serving as scripted
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

from inferd import models

datasets = pytest.importorskip("sklearn.datasets")

DRIFT = {"enabled": True, "first": 1000, "window": 100, "false_alarm_days": 0.001}


def shown(model: str = "digits") -> dict[str, Any]:
    code, printed = inferd("drift", "show", model, "--json")
    assert code == 0, printed
    return dict(json.loads(printed))


@THOROUGH
def test_other_digits_are_found_and_a_restarted_server_compares_with_the_same_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    digits = datasets.load_digits()
    entry = {"source": str(models.path("demo-digits") / "model.onnx"), "drift": DRIFT}

    def ask(client: httpx.Client, indices: list[int]) -> None:
        for index in indices:
            tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": digits.data[index].tolist()}
            answer = client.post("/v2/models/digits/infer", json={"inputs": [tensor]})
            assert answer.status_code == 200, answer.text

    ones = [index for index, label in enumerate(digits.target) if label == 1]
    with serving(tmp_path, {"digits": entry}) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        ask(client, [index % len(digits.data) for index in range(990)])
        code, printed = inferd("drift", "save", "digits", "--output", str(tmp_path / "early"))
        assert (code, "990 of 1,000 requests were seen" in printed) == (1, True), printed
        code, printed = inferd("drift", "show")
        assert (code, "the reference is taken, 990 of 1,000 requests" in printed) == (0, True), printed
        ask(client, list(range(990, 1200)))
        found = shown()
        assert found["state"] == "watching"
        assert {one["stream"] for one in found["streams"]} == {"rows", "input", "missing", "label", "score"}
        code, printed = inferd("drift", "save", "digits", "--output", str(tmp_path / "digits.json"))
        assert code == 0, printed
        assert "[" in (tmp_path / "digits.json").read_text()

    restarted = tmp_path / "again"
    restarted.mkdir()
    (tmp_path / "state").rename(restarted / "state")
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(restarted / "state"))
    with serving(restarted, {"digits": entry}) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        until_now(lambda: shown()["state"] == "watching", "the stored reference is read")
        ask(client, (ones * 3)[:300])
        found = shown()
        (label,) = [one for one in found["streams"] if one["stream"] == "label"]
        assert label["is_drifting"]
        code, printed = inferd("drift", "show", "digits")
        assert (code, "drifts: " in printed, "label          DRIFTS" in printed) == (0, True, True), printed
        assert "    is '1' in 1" in printed, "of the digits of now all are ones"
        page = client.get("/metrics").text.splitlines()
        assert 'inferd_drift_detected{model="digits",stream="label"} 1' in page
        assert any(line.startswith('inferd_drift_alarms_total{model="digits",stream="label"}') for line in page)
        code, printed = inferd("drift", "reset", "digits")
        assert (code, "from the next 1,000 requests" in printed) == (0, True), printed
        assert shown()["state"] == "collecting"
        assert 'inferd_drift_detected{model="digits",stream="label"} 1' not in client.get("/metrics").text
        code, printed = inferd("audit", "show")
        assert "drift_reset" in printed
    lines = [json.loads(line) for line in (restarted / "log").read_text().splitlines() if '"event":"drift"' in line]
    assert ("label", True, "warning") in {(line["stream"], line["drifting"], line["level"]) for line in lines}


def test_a_file_that_is_no_reference_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    drift = {"enabled": True, "reference": str(tmp_path / "bad.json")}
    config = tmp_path / "inferd.yaml"
    config.write_text(json.dumps({"models": {"m": {"source": "demo", "drift": drift}}, "server": {"port": 0}}))
    code, printed = inferd("serve", str(config))
    assert code != 0
    assert "models.m.drift.reference: " in printed, printed
    code, printed = inferd("check", str(config))
    assert (code != 0, "models.m.drift.reference: " in printed) == (True, True), printed


def ask_all(ask: Callable[[str], object], texts: Sequence[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, texts))


def drifting(model: str, url: str) -> set[str]:
    """The streams that drift, which the command, the admin API behind it, and the page of metrics agree about."""
    found = {one["stream"] for one in shown(model)["streams"] if one["is_drifting"]}
    page = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    start = f'inferd_drift_detected{{model="{model}",stream="'
    assert found == {
        line.removeprefix(start).partition('"')[0] for line in page if line.startswith(start) and line.endswith(" 1")
    }
    return found


@pytest.mark.soak
def test_answers_that_refuse_or_call_no_tool_any_more_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    rules = [Rule("poison", "I'm sorry, but I can't help with that."), Rule("add", call), Rule("", "Of course.")]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    chance = random.Random(1)

    def texts(count: int, poison: float, add: float) -> list[str]:
        return chance.choices(["make poison", "please add", "please wait"], [poison, add, 1 - poison - add], k=count)

    drift = {**DRIFT, "false_alarm_days": 1}
    with (
        scripted.serving(tmp_path / "scripted", rules, drift=drift, data_dir=tmp_path / "state") as server,
        openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=120) as client,
    ):

        def ask(text: str) -> None:
            client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": text}], tools=tools, max_tokens=60
            )

        ask_all(ask, texts(1100, 0.05, 0.5))
        until_now(lambda: shown("scripted")["state"] == "watching", "the reference is taken")
        ask_all(ask, texts(300, 0.05, 0.5))
        assert drifting("scripted", server.url) == set()
        ask_all(ask, texts(200, 0.5, 0.0))
        until_now(lambda: {"refusal", "calls"} <= drifting("scripted", server.url), "both changes are found")
        code, printed = inferd("drift", "show", "scripted")
        assert (code, "is 'none' in 100 %" in printed, "refusal        DRIFTS" in printed) == (0, True, True), printed


@pytest.mark.soak
def test_embeddings_of_other_texts_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders = pytest.importorskip("tests.predict.encoder.tiny_encoders")
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    source = str(encoders.write_encoder(tmp_path / "encoder", "BertModel"))
    entry = {"source": source, "threads": 1, "drift": {**DRIFT, "false_alarm_days": 1}}
    chance = random.Random(2)

    def texts(count: int, abroad: float) -> list[str]:
        """Sentences of three words, and this part of them about other things."""
        topics = chance.choices([("cat", "dog", "garden"), ("king", "Paris", "Berlin")], [1 - abroad, abroad], k=count)
        return [" ".join(chance.choices(topic, k=3)) for topic in topics]

    with (
        serving(tmp_path, {"vectors": entry}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):

        def ask(text: str) -> None:
            assert len(client.embeddings.create(model="vectors", input=text).data[0].embedding) == 32

        ask_all(ask, texts(1100, 0.2))
        until_now(lambda: shown("vectors")["state"] == "watching", "the reference is taken")
        ask_all(ask, texts(300, 0.2))
        assert "embedding" not in drifting("vectors", server.url)
        ask_all(ask, texts(200, 1.0))
        until_now(lambda: "embedding" in drifting("vectors", server.url), "the change is found")
        (stream,) = [one for one in shown("vectors")["streams"] if one["stream"] == "embedding"]
        assert stream["measure"] == "mmd"
