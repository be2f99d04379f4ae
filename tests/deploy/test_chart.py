"""The Helm chart by its own texts: every pair of values, what the schema refuses, and the server's view of the result.

`chart.py` renders; that Helm renders the same is shown by `test_helm.py` (soak).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.deploy.chart import (
    CHART,
    Object,
    Template,
    Values,
    chart_file,
    default_values,
    merged,
    notes,
    render,
    rendered,
)
from tests.deploy.permutations import CHOICES, all_pairs, overrides_of, values_of

from inferd import __version__
from inferd.config import load_config
from inferd.http.listener import TIMEOUT_CHECK_S

SETS = all_pairs()
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
POSTGRES = {"state": {"urlSecret": {"name": "s"}}, "persistence": {"enabled": False}}


@functools.cache
def of_set(index: int) -> tuple[list[Object], set[tuple[str, ...]]]:
    """The objects of one of ``SETS``, and the values that its templates read."""
    return rendered(values_of(SETS[index]))


def problems(values: Values) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(values)]


def one(objects: list[Object], kind: str) -> Object:
    (found,) = [item for item in objects if item["kind"] == kind]
    return found


def pod(objects: list[Object]) -> Object:
    return dict(one(objects, "Deployment")["spec"]["template"]["spec"])


def test_every_pair_of_choices_is_there_once_at_least() -> None:
    assert len(SETS) < 60
    for name, options in CHOICES.items():
        for option in options:
            assert any(chosen[name] == option for chosen in SETS), (name, option)


@pytest.mark.parametrize("index", range(len(SETS)), ids=lambda index: ", ".join(SETS[index].values()))
def test_a_set_of_values_gives_objects_that_fit_each_other(index: int, tmp_path: Path) -> None:
    values = values_of(SETS[index])
    assert problems(values) == []
    objects, _ = of_set(index)
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    assert len(names) == len(objects)
    deployment = one(objects, "Deployment")
    template = deployment["spec"]["template"]
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert selector.items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    for service in (item for item in objects if item["kind"] == "Service"):
        assert service["spec"]["selector"] == selector
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for policy in (item for item in objects if item["kind"] in ("NetworkPolicy", "PodDisruptionBudget")):
        spec = policy["spec"]
        assert (spec.get("podSelector") or spec["selector"])["matchLabels"] == selector
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in template["spec"]["volumes"]
        if len(volume) > 1 and "persistentVolumeClaim" in volume
    }
    made = {name for kind, name in names if kind == "PersistentVolumeClaim"}
    assert claims == made or (not made and claims == {values["persistence"]["existingClaim"]})
    # What the pod is given is a configuration that the server accepts, with the ports of the container.
    file = tmp_path / "inferd.yaml"
    file.write_text(one(objects, "ConfigMap")["data"]["inferd.yaml"])
    env = {item["name"]: item["value"] for item in container["env"] if "value" in item and "TLS" not in item["name"]}
    config = load_config(file, env, {})
    known = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert known == {
        "http": config.server.port,
        **({"grpc": config.server.grpc_port} if config.server.grpc_port else {}),
    }
    assert config.state.data_dir == "/var/lib/inferd/state"
    assert ("replicas" in deployment["spec"]) == (values["autoscaling"]["mode"] == "none")
    is_several = deployment["spec"].get("replicas", 2) > 1
    assert deployment["spec"]["strategy"]["type"] == (
        "Recreate" if values["persistence"]["enabled"] else "RollingUpdate"
    )
    assert not (is_several and claims), "a volume of one machine holds up the second pod"
    for scaler in (item for item in objects if item["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")):
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "keys create" in notes(values)


def test_a_scaled_object_asks_for_a_model_that_is_scaled_at_an_address_of_all_pods() -> None:
    values = values_of({"gateways": "keda", "extras": "all"})
    objects = render(values)
    (trigger,) = one(objects, "ScaledObject")["spec"]["triggers"]
    metadata = trigger["metadata"]
    assert all(isinstance(value, str) for value in metadata.values()), "KEDA takes texts alone"
    host, _, port = metadata["scalerAddress"].partition(":")
    (headless,) = [item for item in objects if item["kind"] == "Service" and item["spec"].get("clusterIP") == "None"]
    assert host == f"{headless['metadata']['name']}.default.svc"
    assert int(port) == headless["spec"]["ports"][0]["port"]
    assert "scaling" in values["config"]["models"][metadata["model"]]
    (monitored,) = [
        item
        for item in render(merged(values, {"serviceMonitor": {"enabled": True}}))
        if item["kind"] == "ServiceMonitor"
    ]
    (expression,) = monitored["spec"]["selector"]["matchExpressions"]
    assert expression["key"] in headless["metadata"]["labels"], "each pod is scraped once"


@given(
    st.integers(0, 120),
    st.one_of(st.integers(0, 600), st.floats(0, 600)),
    st.one_of(st.integers(0, 7200), st.floats(0, 7200)),
)
def test_a_pod_is_never_killed_before_its_server_has_stopped(pre_stop: int, delay: float, grace: float) -> None:
    stop = {"preStopSeconds": pre_stop, "config": {"server": {"drain_delay_s": delay, "grace_s": grace}}}
    seconds = int(Template(merged(default_values(), stop)).text('{{ include "inferd.graceSeconds" . }}'))
    # Cancelled requests end within two seconds, and their last bytes and calls within three.
    assert seconds >= pre_stop + delay + max(1.0, grace) + 5.0
    assert seconds <= pre_stop + math.ceil(delay) + math.ceil(grace) + 15


def test_probes_ask_what_the_server_promises() -> None:
    spec = pod(render(default_values()))
    (container,) = spec["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {
        "startupProbe": "/health/live",
        "livenessProbe": "/health/live",
        "readinessProbe": "/health/ready",
    }
    # A connection beyond max_connections gets 503, also a probe's: the server has a minute until it counts as dead.
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
    # The drain must not end before a balancer has seen that the pod is not ready.
    readiness = container["readinessProbe"]
    server = default_values()["config"]["server"]
    assert server["drain_delay_s"] >= TIMEOUT_CHECK_S
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5
    assert readiness["periodSeconds"] <= 5
    encrypted = pod(render(values_of({"tls": "on"})))["containers"][0]
    assert {encrypted[name]["httpGet"]["scheme"] for name in paths} == {"HTTPS"}


def test_the_pod_runs_without_privileges_on_a_root_that_cannot_be_written() -> None:
    for index in range(len(SETS)):
        spec = pod(of_set(index)[0])
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] >= 10_000
        assert spec["automountServiceAccountToken"] is False
        context = spec["containers"][0]["securityContext"]
        assert context == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicaCount": 2}, ""),
        ({"replicaCount": 2, "persistence": {"enabled": False}}, ""),
        ({"replicaCount": 2, "state": {"urlSecret": {"name": "s"}}}, "False was expected"),
        ({"replicaCount": 2, "persistence": {"enabled": False}, "config": {"state": {"url": "sqlite:///x"}}}, ""),
        ({"autoscaling": {"mode": "hpa"}}, ""),
        ({**POSTGRES, "autoscaling": {"mode": "keda"}}, "should be non-empty"),
        ({**POSTGRES, "autoscaling": {"mode": "keda", "minReplicas": 0, "keda": {"model": "chat"}}}, "minimum of 1"),
        (
            {
                **POSTGRES,
                "autoscaling": {"mode": "keda", "keda": {"model": "chat"}},
                "config": {"server": {"grpc_port": None}},
            },
            "'grpc_port' is a required property",
        ),
        ({"autoscaling": {"mode": "cpu"}}, "is not one of"),
        ({"config": {"server": {"host": "127.0.0.1"}}}, "should not be valid"),
        ({"config": {"server": {"port": 80}}}, "minimum of 1024"),
        ({"config": {"server": {"grace_s": None}}}, "'grace_s' is a required property"),
        ({"config": {"state": {"data_dir": "/data"}}}, ""),
        ({"replicas": 2}, "'replicas' was unexpected"),
        ({"persistence": {"size": "20 GB"}}, "does not match"),
        ({"podLabels": {"a": 1}}, "is not of type 'string'"),
    ],
)
def test_the_schema_refuses_what_cannot_work(values: dict[str, Any], words: str) -> None:
    found = problems(merged(default_values(), values))
    assert found
    assert any(words in problem for problem in found), found


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


def test_every_value_is_used_by_a_template_and_has_a_place_in_the_schema() -> None:
    used: set[tuple[str, ...]] = set()
    for index in range(len(SETS)):
        used |= of_set(index)[1]
    values = set(leaves(default_values()))
    for path in values:
        assert any(path[: len(reader)] == reader for reader in used), f"no template reads {'.'.join(path)}"
    for reader in used:
        assert any(path[: len(reader)] == reader for path in values), f"values.yaml lacks {'.'.join(reader)}"
    schema = set(schema_paths(SCHEMA))
    for path in values - {path for path in values if path[0] == "config"}:
        assert any(path[: len(known)] == known for known in schema), f"the schema lacks {'.'.join(path)}"
    for known in schema - {("global",)}:
        if known[0] != "config":
            assert any(path[: len(known)] == known for path in values), f"values.yaml lacks {'.'.join(known)}"


def schema_paths(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if "properties" not in schema:
        yield path
        return
    for key, inner in schema["properties"].items():
        if isinstance(inner, Mapping):
            yield from schema_paths(inner, (*path, key))


def test_the_charts_version_is_the_servers() -> None:
    assert chart_file()["appVersion"] == __version__


def test_another_configuration_restarts_pods_only_where_that_is_wanted() -> None:
    changed = {"config": {"models": {"second": {"source": "demo"}}}}

    def template_of(values: dict[str, Any]) -> object:
        return one(render(merged(default_values(), values)), "Deployment")["spec"]["template"]

    assert template_of({}) == template_of(changed)
    restarting = {"restartOnConfigChange": True}
    assert template_of(restarting) != template_of({**restarting, **changed})


def test_a_users_file_of_values_is_what_is_merged() -> None:
    chosen = {"gateways": "three", "extras": "no budget"}
    assert overrides_of(chosen)["replicaCount"] == 3
    assert "requests" not in values_of(chosen)["resources"]
