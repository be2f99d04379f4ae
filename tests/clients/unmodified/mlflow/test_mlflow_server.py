"""A real ``mlflow server``: its models are served, its aliases followed by its own webhooks, and its refusals heard."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import onnx
import pytest
from tests.app.test_mlflow_served import Asking
from tests.app.test_registry_served import adding, answer
from tests.app.test_replaced_files import inferd
from tests.ports import free_port
from tests.predict.live import serving
from tests.worker.watching import until_now

mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed; make test-clients installs it")

SECRET = "the webhook's secret"


class Mlflow(NamedTuple):
    url: str
    process: subprocess.Popen[bytes]
    client: Any


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mlflow]:
    from cryptography.fernet import Fernet

    url = f"http://127.0.0.1:{(port := free_port())}"
    env = {
        **os.environ,
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": Fernet.generate_key().decode(),
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_CACHE_TTL": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    words = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/m.db",
        "--artifacts-destination",
        str(tmp_path / "artifacts"),
    ]
    command = [sys.executable, "-m", "mlflow", "server", *words, "--port", str(port), "--workers", "1"]
    with (tmp_path / "mlflow.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    try:
        until_now(lambda: _answers(url), (tmp_path / "mlflow.log").name, 120)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        mlflow.set_tracking_uri(url)
        mlflow.set_registry_uri(url)
        yield Mlflow(url, process, mlflow.MlflowClient(url, url))
    finally:
        _end(process)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server with its own children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def log_adder(tmp_path: Path, number: float) -> None:
    made = onnx.load(io.BytesIO(adding(tmp_path / f"made-{number}" / "model.onnx", number).read_bytes()))
    x = np.array([[1, 2]], np.float32)
    signature = mlflow.models.infer_signature({"x": x}, {"y": x})
    mlflow.onnx.log_model(
        made, name="adder", signature=signature, registered_model_name="adding", pip_requirements=["onnx"]
    )


@pytest.mark.timeout(900)
def test_models_are_served_and_an_alias_is_followed_without_a_failed_request(
    server: Mlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOOK", SECRET)
    monkeypatch.setenv("INFERD_MLFLOW__WEBHOOK_SECRET_ENV", "HOOK")
    monkeypatch.setenv("INFERD_MLFLOW__POLL_S", "86400")  # the webhook alone moves it
    rows, labels = load_iris(return_X_y=True, as_frame=True)
    iris = LogisticRegression(max_iter=500).fit(rows, labels)

    class Code(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            return model_input

    with mlflow.start_run() as run:
        log_adder(tmp_path, 1.0)
        log_adder(tmp_path, 2.0)
        signature = mlflow.models.infer_signature(rows, iris.predict(rows))
        logged = mlflow.sklearn.log_model(
            iris,
            name="iris",
            serialization_format="skops",
            signature=signature,
            registered_model_name="iris",
            pip_requirements=["scikit-learn"],
        )
        mlflow.pyfunc.log_model(
            name="code", python_model=Code(), registered_model_name="adding", pip_requirements=["mlflow"]
        )
    server.client.set_registered_model_alias("adding", "champion", "1")
    models = {
        "m": {"source": "mlflow:models:/adding@champion"},
        "iris": {"source": "mlflow:models:/iris/latest"},
        "logged": {"source": f"mlflow:models:/{logged.model_id}"},
        "of-run": {"source": f"mlflow:runs:/{run.info.run_id}/iris"},
    }
    log = tmp_path / "log"
    with (
        serving(tmp_path, models, reload=True) as here,
        httpx.Client(base_url=here.url, timeout=60) as client,
    ):
        tensor = {
            "name": "input-0",
            "datatype": "FP64",
            "shape": [3, 4],
            "data": rows.to_numpy()[::50].ravel().tolist(),
        }
        for name in ("iris", "logged", "of-run"):
            found = client.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]}).json()
            outputs = {one["name"]: one["data"] for one in found["outputs"]}
            assert outputs["label"] == iris.predict(rows[::50]).tolist()
        assert answer(client) == [2.0, 3.0]
        server.client.create_webhook(
            name="inferd",
            url=here.url + "/admin/mlflow/webhook",
            events=["model_version_alias.created", "model_version_alias.deleted"],
            secret=SECRET,
        )
        (hook,) = server.client.list_webhooks()
        tested = server.client.test_webhook(hook.webhook_id)
        assert (tested.success, tested.response_status) == (True, 202), tested
        asking = Asking(here.url)
        asking.start()
        try:
            server.client.set_registered_model_alias("adding", "champion", "2")
            until_now(lambda: answer(client) == [3.0, 4.0], "the webhook moved the alias", 120)
            server.client.set_registered_model_alias("adding", "champion", "3")
            until_now(lambda: "adding version 3 cannot be served" in log.read_text(), "code is refused", 120)
            assert answer(client) == [3.0, 4.0]
            server.client.set_registered_model_alias("adding", "champion", "1")
            until_now(lambda: answer(client) == [2.0, 3.0], "the way back", 120)
            _end(server.process)
            code, shown = inferd("reload")
            assert code == 0, shown
            assert "stays as it is served" in log.read_text()
            assert answer(client) == [2.0, 3.0]
        finally:
            asking.is_over = True
            asking.join()
        assert (asking.failures, asking.answers) == ([], {2.0, 3.0})
