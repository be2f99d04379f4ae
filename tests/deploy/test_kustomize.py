"""The kustomizations give what the chart gives for the same choices."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.chart import ROOT, Object, default_values, merged, render
from tests.deploy.permutations import CHOICES

from inferd.config import load_config

FOLDER = ROOT / "deploy" / "kustomize"
MONITORED: dict[str, Any] = {
    "serviceMonitor": {"enabled": True, "keySecret": {"name": "inferd-metrics"}},
    "networkPolicy": {
        "enabled": True,
        "from": [
            {"podSelector": {}},
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
        ],
    },
}
GPU: dict[str, Any] = {
    "resources": {
        "requests": {"cpu": "4", "memory": "16Gi"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "1"},
    },
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}
SEVERAL: dict[str, Any] = {"state": {"urlSecret": {"name": "inferd-state"}}, "persistence": {"enabled": False}}
METRICS_KEY = {
    "name": "INFERD_METRICS_KEY",
    "valueFrom": {"secretKeyRef": {"name": "inferd-metrics", "key": "key"}},
}
EQUALS: dict[str, dict[str, Any]] = {
    "base": {},
    "overlays/several": {**SEVERAL, "replicaCount": 2},
    "overlays/hpa": {**SEVERAL, "autoscaling": {"mode": "hpa"}},
    "overlays/keda": {
        **SEVERAL,
        "config": CHOICES["gateways"]["keda"]["config"],
        "extraEnv": [METRICS_KEY],
        "autoscaling": {"mode": "keda", "keda": {"model": "chat"}},
    },
    "overlays/gpu": GPU,
    "overlays/monitored": MONITORED,
}


@functools.cache
def kubectl(folder: str) -> list[Object]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def normal(objects: list[Object]) -> dict[str, str]:
    """Objects by kind and name. Labels and annotations of objects are the tools' own, and a file in a ConfigMap is its
    content."""
    found = {}
    for one in objects:
        metadata = one["metadata"]
        labels = metadata.pop("labels", {})
        metadata["scaler"] = labels.get("inferd.dev/scaler")
        metadata.pop("annotations", None)
        if one["kind"] == "ConfigMap":
            one["data"] = {name: yaml.safe_load(text) for name, text in one["data"].items()}
        if one["kind"] == "Deployment":
            one["spec"]["template"]["spec"]["containers"][0]["env"].sort(key=lambda item: item["name"])
        found[f"{one['kind']} {metadata['name']}"] = json.dumps(one, sort_keys=True, indent=1)
    return found


@pytest.mark.parametrize("folder", sorted(EQUALS))
def test_a_kustomization_gives_what_the_chart_gives(folder: str) -> None:
    ours = normal(yaml.safe_load(json.dumps(kubectl(folder))))
    charts = normal(render(merged(default_values(), EQUALS[folder])))
    assert ours == charts


def test_every_kustomization_is_compared() -> None:
    found = {str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("kustomization.yaml")}
    assert found == set(EQUALS)


def test_the_base_is_the_charts_without_any_tool() -> None:
    kustomization = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())
    objects = [yaml.safe_load((FOLDER / "base" / name).read_text()) for name in kustomization["resources"]]
    (generator,) = kustomization["configMapGenerator"]
    data = {name: (FOLDER / "base" / name).read_text() for name in generator["files"]}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}
    assert normal([*objects, config]) == normal(render(default_values()))


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("inferd.yaml")), ids=lambda file: file.parent.name)
def test_a_configuration_is_one_that_the_server_accepts(file: Path) -> None:
    config = load_config(file, {}, {})
    assert config.server.grpc_port == 8001


def test_every_file_is_read_by_a_kustomization() -> None:
    for folder in FOLDER.rglob("kustomization.yaml"):
        text = folder.read_text()
        for file in folder.parent.glob("*.yaml"):
            named = re.search(rf"\b{re.escape(file.name)}\b", text)
            assert named or file == folder, f"{file} is in no kustomization"
