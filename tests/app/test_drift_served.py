"""Drift of a running server: other requests and other answers are found, by command, API, metric and log, and a restart
goes on with the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.test_replaced_files import inferd
from tests.predict.live import serving
from tests.worker.watching import until_now

from inferd import models

datasets = pytest.importorskip("sklearn.datasets")

DRIFT = {"enabled": True, "first": 1000, "window": 100, "false_alarm_days": 0.001}


def shown() -> dict[str, Any]:
    code, printed = inferd("drift", "show", "digits", "--json")
    assert code == 0, printed
    return dict(json.loads(printed))


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
