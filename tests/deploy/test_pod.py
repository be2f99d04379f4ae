"""A server as the chart's pod starts it: closed until there is a key, probed, asked by KEDA, and following a ConfigMap."""

from __future__ import annotations

import contextlib
import io
import signal
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from tests.deploy.chart import render
from tests.deploy.permutations import values_of
from tests.gateway.grpc.keda import Keda
from tests.server_process import Server
from tests.tiers import THOROUGH
from tests.worker.watching import until_now

from inferd.app.change import refuse_empty, refuse_restarts
from inferd.cli.main import main
from inferd.config import load_config
from inferd.errors import ConfigError


class ConfigMap:
    """A folder as the kubelet writes it: inferd.yaml links to ..data/inferd.yaml, and ..data to the current content."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder = folder
        self.path = folder / "inferd.yaml"
        self._number = 0
        folder.mkdir()
        self.swap(text)
        self.path.symlink_to("..data/inferd.yaml")

    def swap(self, text: str) -> None:
        self._number += 1
        content = self.folder / f"..{self._number}"
        content.mkdir()
        (content / "inferd.yaml").write_text(text)
        (self.folder / "..data_tmp").symlink_to(content.name)
        (self.folder / "..data_tmp").replace(self.folder / "..data")


def config_of_the_chart() -> dict[str, Any]:
    """What the pods of the chart with KEDA get, with a model and ports for a test."""
    (made,) = [item for item in render(values_of({"gateways": "keda"})) if item["kind"] == "ConfigMap"]
    config: dict[str, Any] = yaml.safe_load(made["data"]["inferd.yaml"])
    assert config["server"]["auth"] == "required"
    config["server"] |= {"host": "127.0.0.1", "port": 0, "grpc_port": 0, "drain_delay_s": 0.0}
    config["models"]["chat"]["source"] = "tiny"
    return config


def make_key() -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
        assert main(["keys", "create", "--tenant", "ops", "--scopes", "metrics,models,infer"]) == 0
    return shown.getvalue().strip()


@THOROUGH
def test_a_pod_of_the_chart_is_probed_opened_scaled_and_keeps_serving_over_a_half_written_configmap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "data"))
    config = config_of_the_chart()
    configmap = ConfigMap(tmp_path / "etc", yaml.safe_dump(config))
    server = Server(file=configmap.path, data_dir=tmp_path / "data").await_ready()
    try:
        assert server.process.stdout is not None
        scaler = server.process.stdout.readline().strip().rpartition("/")[2]
        assert (server.status("/health/live"), server.status("/health/ready")) == (200, 200), "probes need no key"
        assert server.status("/v1/models") == 401, "there is no key yet"
        key = make_key()
        header = {"authorization": f"Bearer {key}"}
        with (
            httpx.Client(base_url=server.url, headers=header, timeout=20) as models,
            grpc.insecure_channel(scaler) as channel,
        ):
            until_now(lambda: models.get("/v1/models").status_code == 200, "the key is known", 20)
            keda = Keda(channel, model="chat", metric="waiting", target="4", keyFromEnv=key)
            assert keda.spec().targetSizeFloat == 4.0

            def is_observed() -> bool:
                try:
                    return keda.is_active() in (True, False)
                except grpc.RpcError:
                    return False

            until_now(is_observed, "the model was looked at once", 20)
            assert keda.ask()[::2] == ("inferd-waiting", 0.0)

            whole = yaml.safe_dump({**config, "models": {**config["models"], "second": {"source": "tiny"}}})
            half = whole[: whole.index("source: tiny", whole.index("second")) + 4]  # "second: {sour"

            def reloaded() -> dict[str, Any]:
                metrics = models.get("/metrics").text
                found = [line for line in metrics.splitlines() if line.startswith("inferd_config_reloads_total")]
                return {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in found}

            before = reloaded()
            configmap.swap(half)
            until_now(lambda: reloaded() != before, "the half was refused", 30)
            assert "inferd_config_last_reload_successful 0" in models.get("/metrics").text
            assert [one["id"] for one in models.get("/v1/models").json()["data"]] == ["chat"]
            asked = {"model": "chat", "prompt": "a", "max_tokens": 2}
            assert models.post("/v1/completions", json=asked).status_code == 200
            assert keda.ask().metric == "inferd-waiting"
            configmap.swap(whole)
            until_now(lambda: len(models.get("/v1/models").json()["data"]) == 2, "the whole was adopted", 30)
        server.signal(signal.SIGTERM)
        code, errors = server.end(60)
        assert code == 0, errors
    finally:
        server.process.kill()
        server.process.communicate()


def test_the_charts_configuration_is_refused_or_the_same_wherever_it_is_cut(tmp_path: Path) -> None:
    """Its last section is ``server``, of which the address cannot change; so no beginning of it is taken for another
    configuration."""
    (made,) = [item for item in render(values_of({"gateways": "keda"})) if item["kind"] == "ConfigMap"]
    text = made["data"]["inferd.yaml"].rstrip()
    path = tmp_path / "inferd.yaml"
    path.write_text(text)
    served = load_config(path, {}, {})
    num_refused = 0
    for end in range(0, len(text), 3):
        path.write_text(text[:end])
        try:
            cut = load_config(path, {}, {})
            refuse_empty(cut)
            refuse_restarts(served, cut)
        except ConfigError:
            num_refused += 1
            continue
        assert cut == served, text[:end]
    assert num_refused > 40
