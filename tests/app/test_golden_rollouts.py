"""The golden guard of a running server: a worse version is taken back before a client asks it, and nothing is billed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.test_replaced_files import inferd
from tests.app.test_rollouts_served import rollout_of, state_of, worse_digits
from tests.app.test_shadowed_rollouts import two_digits
from tests.predict.live import serving
from tests.worker.watching import until_now

datasets = pytest.importorskip("sklearn.datasets")


def golden_digits(path: Path, number: int) -> None:
    """The first digits with the labels that the bundled classifier gives them."""
    digits = datasets.load_digits()
    lines = []
    for index in range(number):
        tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": digits.data[index].tolist()}
        lines.append(
            {
                "path": "/v2/models/MODEL/infer",
                "name": f"digit {index}",
                "request": {"inputs": [tensor]},
                "equals": {
                    "outputs": [
                        {"name": "label", "datatype": "BYTES", "shape": [1], "data": [str(digits.target[index])]}
                    ]
                },
            }
        )
    path.write_text("\n".join([json.dumps(line) for line in lines]))


def test_a_worse_classifier_is_taken_back_by_the_golden_set_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    two_digits(tmp_path / "digits")
    worse_digits(tmp_path / "digits" / "2" / "model.onnx")
    golden = tmp_path / "golden.jsonl"
    golden_digits(golden, 40)
    rollout: dict[str, Any] = {
        "stable": 1,
        "new": 2,
        "steps": [{"weight": 0}, {"weight": 100}],
        "guards": {"errors": None, "golden": {"file": str(golden), "max_ratio": 2}},
        "start": "auto",
    }
    with (
        serving(tmp_path, {"digits": {"source": str(tmp_path / "digits"), "rollout": rollout}}) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        until_now(lambda: state_of("digits") == "rolled_back", "the golden set takes the version back")
        found = rollout_of("digits")
        assert found["progress"]["reason"].startswith("golden: ")
        assert found["golden"]["questions"] == 40
        assert found["golden"]["wrong"] > 1
        reading = found["readings"][0]
        assert reading["bad"][0] == 0, "the bundled classifier knows its digits"
        assert reading["units"][0] > 0
        code, shown = inferd("rollout", "status", "digits")
        assert code == 0
        assert "golden set of 40 at this server" in shown
        assert f"{found['golden']['last_wrong'][-1]['name']}: label" in shown
        page = client.get("/metrics").text.splitlines()
        asked = [line for line in page if line.startswith(("inferd_requests_total", "inferd_http_requests_total"))]
        asked = [line for line in asked if "infer" in line and "digits" in line]
        assert sum(float(line.rpartition(" ")[2]) for line in asked) == 0, "no client asked anything"
        code, shown = inferd("status", "--json")
        assert code == 0
        assert "(copies)" not in shown, "nothing is charged"


def test_a_broken_golden_set_is_refused_before_anything_starts(tmp_path: Path) -> None:
    two_digits(tmp_path / "digits")
    line = json.dumps({"path": "/v1/chat/completions", "request": {"messages": []}, "contains": "x"})
    (tmp_path / "golden.jsonl").write_text(f"{line}\n{line}\n")
    config = tmp_path / "inferd.yaml"
    guard = f"{{golden: {{file: {tmp_path}/golden.jsonl}}}}"
    config.write_text(
        f"state: {{data_dir: {tmp_path}/state}}\n"
        f"models: {{digits: {{source: {tmp_path}/digits, rollout: {{stable: 1, new: 2, guards: {guard}}}}}}}\n"
    )
    code, shown = inferd("check", str(config))
    assert code == 1
    assert "models.digits.rollout.guards.golden.file:" in shown
    assert "line 2: the request is that of line 1" in shown
    code, shown = inferd("serve", str(config))
    assert code != 0
    assert "line 2: the request is that of line 1" in shown
