"""Predictions of a real model that keeps its answers, and tables: over one kept connection, as a client sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.app.test_replaced_files import BODY, put
from tests.predict.live import serving


def test_a_kept_answer_is_found_on_any_connection_and_in_any_form(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    put(file, 1)
    models: dict[str, dict[str, Any]] = {
        "m": {"source": str(file), "cache": {"enabled": True}},
        "other": {"source": str(file)},
    }
    with serving(tmp_path, models) as server, httpx.Client(base_url=server.url) as client:
        looked = [client.post("/v2/models/m/infer", json=BODY).headers["x-inferd-cache"] for _ in range(4)]
        assert looked == ["miss", "hit", "hit", "hit"]
        binary = {**BODY, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
        for expected in ("miss", "hit"):
            answer = client.post("/v2/models/m/infer", json=binary)
            assert answer.headers["x-inferd-cache"] == expected
            head = int(answer.headers["inference-header-content-length"])
            assert np.frombuffer(answer.content[head:], np.float32).tolist() == [1, 1]
        assert "x-inferd-cache" not in client.post("/v2/models/other/infer", json=BODY).headers

        repeated = [
            client.post("/v2/models/other/infer", json=binary, headers={"idempotency-key": "k"}) for _ in range(2)
        ]
        assert repeated[0].content == repeated[1].content
        assert repeated[1].headers["idempotent-replayed"] == "true"
        assert (
            repeated[1].headers["inference-header-content-length"]
            == repeated[0].headers["inference-header-content-length"]
        )

        aim = {"x-amzn-sagemaker-target-model": "other"}
        for content, kind in (("a,b\n0,1\n2,3\n", "text/csv; charset=utf-8"), ("0,1\n2,3\n", "text/csv;header=absent")):
            table = client.post("/invocations", content=content, headers={"content-type": kind, **aim})
            assert (table.status_code, table.json()) == (200, {"predictions": [[1, 2], [3, 4]]})
        wrong = client.post("/invocations", content="a,b\n0\n", headers={"content-type": "text/csv", **aim})
        assert (wrong.status_code, "Line 2 of the table" in wrong.json()["message"]) == (400, True)
        short = client.post("/v2/models/other/infer", json=binary, headers={"inference-header-content-length": "9999"})
        assert (short.status_code, "is 9999, and the body has" in short.json()["error"]) == (400, True), short.text
        plain = client.post("/invocations", content="a", headers={"content-type": "text/plain", **aim})
        assert (plain.status_code, "a table as text/csv" in plain.text) == (415, True)
        for path, said in (("/invocations", "charset"), ("/v2/models/other/infer", "taken by POST /invocations")):
            kind = "text/csv; charset=utf-16"
            refused = client.post(path, content="a", headers={"content-type": kind, **aim})
            assert (refused.status_code, said in refused.text) == (415, True), refused.text
