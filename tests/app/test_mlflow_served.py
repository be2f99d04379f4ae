"""A running server whose model comes from an MLflow server: it follows the alias by signed webhooks, refuses forged
ones, and serves on while the MLflow server gives it nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.app.test_registry_served import adding, answer
from tests.app.test_replaced_files import inferd
from tests.predict.live import serving
from tests.registry.mlflow_stand_in import StandIn, logged, standing_in
from tests.worker.watching import until_now

SECRET = "a secret of the webhook"


def webhook(client: httpx.Client, name: str, *, secret: str = SECRET, at: float | None = None) -> httpx.Response:
    """A message as MLflow sends it."""
    body = json.dumps({"entity": "model_version_alias", "action": "created", "data": {"alias": "champion"}}).encode()
    timestamp = str(int(time.time() if at is None else at))
    signed = f"{name}.{timestamp}.".encode() + body
    signature = base64.b64encode(hmac.new(secret.encode(), signed, hashlib.sha256).digest()).decode()
    headers = {
        "Content-Type": "application/json",
        "X-MLflow-Delivery-Id": name,
        "X-MLflow-Timestamp": timestamp,
        "X-MLflow-Signature": f"v1,{signature}",
    }
    return client.post("/admin/mlflow/webhook", content=body, headers=headers)


class Asking(threading.Thread):
    """A client that asks without a pause."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.is_over = False
        self.failures: list[str] = []
        self.answers: set[float] = set()
        self._url = url

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self.is_over:
                try:
                    self.answers.add(answer(client)[0])
                except (AssertionError, httpx.HTTPError) as error:
                    self.failures.append(repr(error))


def adder(tmp_path: Path, mlflow: StandIn, number: int) -> None:
    file = adding(tmp_path / f"made-{number}" / "model.onnx", float(number)).read_bytes()
    mlflow.add("adding", number, logged("onnx", {"model.onnx": file}, data="model.onnx"))


def test_an_alias_is_followed_by_webhooks_without_a_failed_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOOK", SECRET)
    log = tmp_path / "log"
    with standing_in() as mlflow:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.url)
        monkeypatch.setenv("INFERD_MLFLOW__POLL_S", "86400")  # the webhooks alone move it
        monkeypatch.setenv("INFERD_MLFLOW__WEBHOOK_SECRET_ENV", "HOOK")
        adder(tmp_path, mlflow, 1)
        adder(tmp_path, mlflow, 2)
        mlflow.add("adding", 3, logged("spam", {"x": b""}))
        mlflow.aliases["adding", "champion"] = "1"
        source = "mlflow:models:/adding@champion"
        with (
            serving(tmp_path, {"m": {"source": source}}, reload=True) as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):
            assert answer(client) == [2.0, 3.0]
            asking = Asking(server.url)
            asking.start()
            try:
                mlflow.aliases["adding", "champion"] = "2"
                asked = len(mlflow.asked)
                for forged in (
                    webhook(client, "d-0", secret="another"),
                    webhook(client, "d-0", at=time.time() - 1000),
                    client.post("/admin/mlflow/webhook", json={}),
                ):
                    assert (forged.status_code, forged.json()["error"]["type"]) == (401, "authentication_error")
                assert len(mlflow.asked) == asked, "nothing was looked at"
                accepted = webhook(client, "d-1")
                assert (accepted.status_code, accepted.json()) == (202, {"event": "model_version_alias.created"})
                until_now(lambda: answer(client) == [3.0, 4.0], "the new version serves", 60)
                assert webhook(client, "d-1").json()["error"]["code"] == "webhook_replayed"
                # A version that is refused, and a server that is gone: version 2 serves on.
                mlflow.aliases["adding", "champion"] = "3"
                assert webhook(client, "d-2").status_code == 202
                until_now(lambda: "adding version 3 cannot be served" in log.read_text(), "it was refused", 60)
                assert answer(client) == [3.0, 4.0]
                mlflow.aliases["adding", "champion"] = "2"
                mlflow.status = 503
                code, shown = inferd("reload")
                assert code == 0, shown
                # A thread of its own writes the log.
                until_now(lambda: "stays as it is served" in log.read_text(), "it is told why", 30)
                assert answer(client) == [3.0, 4.0]
            finally:
                asking.is_over = True
                asking.join()
            assert (asking.failures, asking.answers) == ([], {2.0, 3.0})
            assert SECRET not in log.read_text()
