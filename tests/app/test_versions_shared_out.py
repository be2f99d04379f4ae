"""Two versions of a model behind one name: which request gets which, the names of each, and what is counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from tests.app.test_replaced_files import BODY, inferd, put_versions
from tests.predict.live import serving

tritonclient = pytest.importorskip("tritonclient.grpc")


def test_requests_are_shared_out_by_weight_and_stay_with_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    put_versions(tmp_path, 3, 4)
    versions = {"policy": "all", "aliases": {"stable": 3}, "weights": {3: 75, 4: 25}}
    with (
        serving(tmp_path, {"m": {"source": str(tmp_path / "m"), "versions": versions}}, grpc_port=0) as server,
        httpx.Client(base_url=server.url) as client,
    ):

        def said(path: str, **headers: str) -> str:
            answer = client.post(f"/v2/models/{path}/infer", json=BODY, headers=headers)
            assert answer.status_code == 200, answer.text
            document = answer.json()
            assert [float(document["model_version"])] * 2 == document["outputs"][0]["data"]
            return str(document["model_version"])

        # 200 requests with nothing in common, on one kept connection.
        counted = Counter(said("m") for _ in range(200))
        assert 120 <= counted["3"] <= 180, "within four standard deviations of 150"

        def metric(model: str) -> float:
            page = httpx.get(server.url + "/metrics").text.splitlines()
            lines = [line for line in page if line.startswith("inferd_requests_total{") and f'model="{model}"' in line]
            return sum(float(line.rpartition(" ")[2]) for line in lines)

        assert (metric("m@3"), metric("m")) == (counted["3"], counted["4"]), "each version has its own numbers"

        seen = {session: said("m", **{"x-session-id": session}) for session in map(str, range(12))}
        assert set(seen.values()) == {"3", "4"}
        for session, version in seen.items():
            assert said("m", **{"x-inferd-session": session}) == version
        grpc = tritonclient.InferenceServerClient(server.grpc)
        given = tritonclient.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.zeros((1, 2), np.float32))
        for session, version in list(seen.items())[:6]:
            answer = grpc.infer("m", [given], headers={"x-session-id": session})
            assert answer.get_response().model_version == version
        grpc.close()
        rows = client.post("/v1/models/m:predict", json={"instances": [[0, 0]]}, headers={"x-session-id": "5"})
        assert rows.json() == {"predictions": [[float(seen["5"])] * 2]}

        # A request that names a version gets it.
        for path, version in {
            "m@stable": "3",
            "m/versions/stable": "3",
            "m@3": "3",
            "m@4": "4",
            "m/versions/4": "4",
        }.items():
            assert {said(path) for _ in range(8)} == {version}, path
        assert client.get("/v1/models/m@stable").json()["id"] == "m@3"
        assert client.post("/v2/models/m@beta/infer", json=BODY).status_code == 404

        code, shown = inferd("status")
        assert (code, "version 3, @stable, 75 % of requests" in " ".join(shown.split())) == (0, True), shown

        # A change of weights takes nothing away and delays no request.
        file = tmp_path / "inferd.yaml"
        config = yaml.safe_load(file.read_text())
        config["models"]["m"]["versions"]["weights"] = {3: 0, 4: 100}
        file.write_text(yaml.safe_dump(config))
        code, shown = inferd("reload")
        assert (code, "m: versions changed" in shown, "replica" in shown) == (0, True, False), shown
        assert {said("m", **{"x-session-id": session}) for session in seen} == {"4"}


def test_a_version_that_cannot_be_loaded_gets_no_requests_until_its_file_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    put_versions(tmp_path, 3, 4)
    newest = tmp_path / "m" / "4" / "model.onnx"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-20])
    versions = {"policy": "all", "weights": {3: 50, 4: 50}}
    with (
        serving(tmp_path, {"m": {"source": str(tmp_path / "m"), "versions": versions}}) as server,
        httpx.Client(base_url=server.url) as client,
    ):

        def said() -> set[str]:
            return {client.post("/v2/models/m/infer", json=BODY).json()["model_version"] for _ in range(30)}

        assert said() == {"3"}
        newest.write_bytes(whole)
        assert inferd("models", "load", "m")[0] == 0
        assert said() == {"3", "4"}
