"""Helm itself renders, checks and refuses as the tests' renderer does, and Kubernetes' schemas take every object.

Soak tests: both tools are large, and are installed under build/ the first time. What cannot be had is skipped.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.chart import CHART, ROOT, Object, default_values, merged, render
from tests.deploy.permutations import all_pairs, overrides_of
from tests.deploy.recording_api import Recorder, recording
from tests.deploy.test_kustomize import EQUALS, FOLDER

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

VERSIONS = ("1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
SETS = all_pairs()
CUSTOM = {"ScaledObject", "ServiceMonitor"}
"""Kinds that are not Kubernetes' own, so that its schemas do not have them."""

REFUSED: list[dict[str, Any]] = [
    {"replicaCount": 2},
    {"autoscaling": {"mode": "hpa"}},
    {"autoscaling": {"mode": "cpu"}},
    {"replicas": 2},
    {"config": {"server": {"host": "127.0.0.1"}}},
]


def newer_python() -> str:
    """A Python that Helm's library can be installed for."""
    for name in ("python3.12", "python3.13", "python3.14", "python3"):
        found = shutil.which(name)
        check = [found or name, "-c", "import sys, venv; sys.exit(sys.version_info < (3, 12))"]
        if found is not None and subprocess.run(check, capture_output=True, timeout=60, check=False).returncode == 0:
            return found
    pytest.skip("no Python of 3.12 or newer is installed; INFERD_HELM_PYTHON names one with helm-sdkpy")


@functools.cache
def environment(name: str, package: str, *, is_newer: bool = False) -> Path:
    """The Python of an environment with a package."""
    folder = ROOT / "build" / "deploy" / name
    interpreter = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        found = newer_python() if is_newer else sys.executable
        for words in ([found, "-m", "venv", str(folder)], [str(interpreter), "-m", "pip", "install", "-q", package]):
            done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode:
                pytest.skip(f"{package} could not be had: {done.stderr[-300:]}")
        (folder / "complete").touch()
    return interpreter


class Helm:
    """Installs the chart with values; what it created, or its error."""

    def __init__(self, recorder: Recorder, process: subprocess.Popen[str]) -> None:
        self._recorder = recorder
        self._process = process
        self.lint = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process with Helm has ended"
        return json.loads(line)

    def install(self, values: dict[str, Any]) -> tuple[list[Object], str | None]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()
        error = self._answer()["error"]
        return self._recorder.taken(), error


@pytest.fixture(scope="module")
def helm() -> Iterator[Helm]:
    python = os.environ.get("INFERD_HELM_PYTHON") or str(environment("helm", "helm-sdkpy==0.1.32", is_newer=True))
    with recording() as recorder:
        words = [python, str(Path(__file__).with_name("helm_install.py")), str(CHART), recorder.url]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Helm(recorder, process)
            finally:
                process.kill()
        assert recorder.unknown == []


def normal(objects: list[Object]) -> dict[str, Object]:
    """Objects by kind and name, without what Helm adds, and with files of ConfigMaps as their content."""
    found = {}
    for one in json.loads(json.dumps(objects)):
        metadata = one["metadata"]
        metadata.pop("namespace", None)
        annotations = {
            name: value
            for name, value in (metadata.pop("annotations", None) or {}).items()
            if not name.startswith("meta.helm.sh/")
        }
        metadata["annotations"] = annotations
        # Two renderers write the same YAML differently, so a digest of it differs.
        pods = one.get("spec", {}).get("template", {}).get("metadata", {}).get("annotations", {})
        if "checksum/config" in pods:
            pods["checksum/config"] = "a digest"
        if one["kind"] == "ConfigMap":
            one["data"] = {name: yaml.safe_load(text) for name, text in one["data"].items()}
        found[f"{one['kind']} {metadata['name']}"] = one
    return found


def test_helm_has_no_warning_about_the_chart(helm: Helm) -> None:
    assert helm.lint["TotalChartsLinted"] == 1
    assert not helm.lint["Errors"]
    # 1 is information: the chart has no icon. 2 is a warning, 3 an error.
    assert [message for message in helm.lint["Messages"] if message["Severity"] > 1] == []


@pytest.mark.parametrize("index", range(len(SETS)), ids=lambda index: ", ".join(SETS[index].values()))
def test_helm_creates_what_the_tests_renderer_gives(helm: Helm, index: int) -> None:
    overrides = overrides_of(SETS[index])
    created, error = helm.install(overrides)
    assert error is None
    assert normal(created) == normal(render(merged(default_values(), overrides)))


@pytest.mark.parametrize("values", REFUSED, ids=json.dumps)
def test_helm_refuses_what_the_schema_refuses_and_creates_nothing(helm: Helm, values: dict[str, Any]) -> None:
    created, error = helm.install(values)
    assert error is not None
    assert "schema" in error
    assert created == []


def documents() -> dict[str, list[Object]]:
    """Every set of values as the renderer gives it, and every kustomization."""
    found = {
        f"values-{index}": render(merged(default_values(), overrides_of(chosen))) for index, chosen in enumerate(SETS)
    }
    if shutil.which("kubectl") is not None:
        for folder in EQUALS:
            words = ["kubectl", "kustomize", str(FOLDER / folder)]
            text = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
            found[folder.replace("/", "-")] = [one for one in yaml.safe_load_all(text) if one]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_schemas_take_every_object(version: str, tmp_path: Path) -> None:
    python = os.environ.get("INFERD_KUBERNETES_VALIDATE_PYTHON") or str(
        environment("validate", "kubernetes-validate==1.37.0")
    )
    files, seen = [], set()
    for name, objects in documents().items():
        own = [one for one in objects if one["kind"] not in CUSTOM]
        seen |= {one["kind"] for one in own}
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump_all(own))
        files.append(str(file))
    assert {"Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget"} <= seen
    words = [python, "-m", "kubernetes_validate", "-k", version, "--strict", "--quiet", *files]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(Path(files[0]).read_text().replace("terminationGracePeriodSeconds", "terminationGraceSeconds"))
    done = subprocess.run([*words[:6], str(wrong)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode != 0, "the check notices a field that there is not"
