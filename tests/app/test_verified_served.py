"""A real server with models that verify, that do not, and that are loaded nevertheless: the others serve on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest
from onnx.external_data_helper import convert_model_to_external_data
from tests.app.test_replaced_files import answer_of, inferd, put
from tests.artefacts.signers import key, private_pem, public_pem
from tests.predict.live import serving
from tests.predict.small_onnx import identity as small_model
from tests.tiers import THOROUGH

from inferd.artefacts.manifest import manifest_of
from inferd.artefacts.signature import sign
from inferd.cli.main import main
from inferd.cli.running.control import find_server
from inferd.gateway.control import ModelReport, ServerReport

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
CODE = "import numpy as np\n\nclass Model:\n    def predict(self, x: np.ndarray) -> np.ndarray:\n        return x\n"


def folder_of(place: Path) -> Path:
    place.mkdir()
    proto = onnx.load(small_model(place / "model.onnx"))
    convert_model_to_external_data(proto, location="weights.bin", size_threshold=0)
    onnx.save(proto, place / "model.onnx")
    sign(place, private_pem(place.parent, key()))
    return place


def reports() -> dict[str, ModelReport]:
    status = find_server(None, None, None, None).get("/admin/status", ServerReport)
    return {model.name: model for model in status.models}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_does_not_verify_is_not_loaded_and_disturbs_no_other_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signature = {"public_key_file": str(public_pem(tmp_path, key()))}
    good, bad, warned = (folder_of(tmp_path / name) for name in ("good", "bad", "warned"))
    weights = bytearray((bad / "weights.bin").read_bytes())
    weights[-1] ^= 1
    (bad / "weights.bin").write_bytes(weights)
    (warned / "weights.bin").write_bytes(weights)
    code, marker = tmp_path / "code.py", tmp_path / "ran"
    code.write_text(CODE)
    pinned = manifest_of(code).tree_digest
    code.write_text(f"open({str(marker)!r}, 'w')\n{CODE}")
    models: dict[str, dict[str, object]] = {
        "good": {"source": str(good), "verify": {"signature": signature}},
        "bad": {"source": str(bad), "verify": {"signature": signature}},
        "warned": {"source": str(warned), "verify": {"mode": "warn", "signature": signature}},
        "code": {"source": f"{code}:Model", "allow_code": True, "verify": {"digest": pinned}},
        "plain": {"source": str(small_model(tmp_path / "plain.onnx"))},
    }
    with serving(tmp_path, models, auth="off") as server:
        answers = {name: httpx.post(f"{server.url}/v2/models/{name}/infer", json=BODY, timeout=60) for name in models}
        assert {name: answer.status_code for name, answer in answers.items()} == {
            "good": 200, "bad": 503, "warned": 200, "code": 503, "plain": 200,
        }  # fmt: skip
        assert not marker.exists()  # no line of it has run
        found = reports()
        assert found["good"].verified.startswith("signature by key ")
        assert found["warned"].verified.startswith("FAILED: weights.bin of ")
        assert (found["plain"].verified, found["bad"].state, found["code"].state) == ("", "failed", "failed")
        assert "weights.bin of " in found["bad"].replicas[0].detail
        assert "was signed" in found["bad"].replicas[0].detail
        assert "verify.digest" in found["code"].replicas[0].detail
        assert main(["status"]) == 1
        shown = " ".join(capsys.readouterr().out.split())
        assert "good: files verified: signature by key" in shown
        assert "warned: files verified: FAILED" in shown
        page = httpx.get(f"{server.url}/metrics").text
        told = {line.rpartition(" ")[0] for line in page.splitlines() if "replica_verification_info{" in line}
        assert told == {
            'inferd_replica_verification_info{model="good",replica="0",result="verified"}',
            'inferd_replica_verification_info{model="warned",replica="0",result="failed"}',
        }
        # Whatever happens to the source of a running model does not reach it; its bytes are in the server's own copy.
        for name in ("model.onnx", "weights.bin"):
            os.truncate(good / name, 0)
        again = httpx.post(f"{server.url}/v2/models/good/infer", json=BODY, timeout=60)
        assert again.json()["outputs"] == answers["good"].json()["outputs"]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    warning = next(line for line in lines if "although it does not verify" in line.get("message", ""))
    assert (warning["level"], warning["worker"]) == ("warning", "warned/0")


@THOROUGH
@pytest.mark.parametrize("server", [{}, {"memory_bytes": 120_000_000}], ids=["beside", "in turn"])
def test_files_that_do_not_verify_replace_nothing_that_serves(tmp_path: Path, server: dict[str, Any]) -> None:
    """With memory for two workers, and where the old one has to leave before the new one is loaded."""
    folder, private = tmp_path / "m", private_pem(tmp_path, key())
    folder.mkdir()
    put(folder / "model.onnx", 1)
    sign(folder, private)
    verify = {"signature": {"public_key_file": str(public_pem(tmp_path, key()))}}
    with serving(tmp_path, {"m": {"source": str(folder), "verify": verify}}, **server) as address:
        assert answer_of(address.url) == 1.0
        put(folder / "model.onnx", 2)
        code, said = inferd("reload")
        assert (code, "was signed" in said) == (1, True), said
        assert answer_of(address.url) == 1.0
        assert reports()["m"].state == "ready"
        sign(folder, private)
        code, said = inferd("reload")
        assert code == 0, said
        assert answer_of(address.url) == 2.0


def test_inferd_check_verifies_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key_file = public_pem(tmp_path, key())
    good, bad = folder_of(tmp_path / "good"), folder_of(tmp_path / "bad")
    (bad / "added").touch()
    signature = f"signature: {{public_key_file: {key_file}}}"
    file = tmp_path / "inferd.yaml"

    def checked(*models: str) -> tuple[int, str]:
        file.write_text("models:\n" + "".join(f"  {model}\n" for model in models))
        code = main(["check", str(file)])
        return code, " ".join("".join(capsys.readouterr()).split())

    fine = f"good: {{source: {good}, verify: {{{signature}}}}}"
    assert checked(fine)[0] == 0
    code, text = checked(fine, f"bad: {{source: {bad}, verify: {{{signature}}}}}")
    assert code == 1
    assert "models.bad.verify: " in text
    assert "holds added, which was not signed" in text
    code, text = checked(fine, f"bad: {{source: {bad}, verify: {{mode: warn, {signature}}}}}")
    assert code == 0
    assert "holds added, which was not signed" in text
    digest = manifest_of(good).digest
    code, text = checked(f"good: {{source: {good}, verify: {{digest: '{digest}'}}}}")
    assert code == 0
    assert "does not cover the names of files" in text
