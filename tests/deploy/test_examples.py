"""The examples of deploy/: objects that fit the chart, arguments that the server takes, queries of metrics there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.chart import ROOT, Object, default_values, render
from tests.observe.promql import problems

from inferd import __version__
from inferd.cli.node import command as node_command
from inferd.cli.serve import command as serve
from inferd.nodes.dialling import DEFAULT_PORT

FOLDER = ROOT / "deploy" / "examples"


def objects(name: str) -> dict[str, Object]:
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_an_example_is_yaml_that_begins_with_what_it_is(file: Path) -> None:
    assert file.read_text().startswith("# ")
    assert list(yaml.safe_load_all(file.read_text()))


def test_the_pool_selects_the_pods_of_the_chart_at_their_port() -> None:
    pool = objects("inferencepool")["InferencePool"]
    (deployment,) = [one for one in render(default_values()) if one["kind"] == "Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [default_values()["config"]["server"]["port"]]
    route = objects("inferencepool")["HTTPRoute"]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


def test_the_runtimes_arguments_are_flags_of_the_server(tmp_path: Path) -> None:
    runtime = objects("servingruntime")["ServingRuntime"]
    (container,) = runtime["spec"]["containers"]
    name, source, *flags = container["args"]
    assert (name, source) == ("serve", "/mnt/models")
    flags = [flag.replace("{{.Name}}", "digits") for flag in flags]
    context = serve.make_context("serve", [str(tmp_path), *flags])
    assert context.params["name"] == "digits"
    assert container["ports"][0]["containerPort"] == container["readinessProbe"]["httpGet"]["port"]
    assert container["image"].endswith(f":{__version__}")
    service = objects("servingruntime")["InferenceService"]
    drain = next(float(flag.partition("=")[2]) for flag in flags if flag.startswith("--drain-delay"))
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] == drain + 30 + 15
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]


def test_the_pods_of_the_set_are_a_server_and_nodes_of_it() -> None:
    made = objects("leaderworkerset")
    group = made["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    (server,), (node,) = leader["spec"]["containers"], worker["spec"]["containers"]
    files = {"/etc/inferd-nodes/nodes.pem", "/etc/inferd-nodes/token"}
    assert {one["value"] for one in server["env"] if one["name"].startswith("INFERD_NODES__")} == files
    size = str(group["size"])
    name, source, *flags = [one.replace("$(LWS_GROUP_SIZE)", size) for one in server["args"]]
    assert (name, source) == ("serve", "/models/chat")
    given = serve.make_context("serve", ["/", *flags]).params
    assert given["parallel__pipeline"] == given["parallel__machines"] == group["size"]
    name, *flags = [one.replace("/etc/inferd-nodes/token", "/dev/null") for one in node["args"]]
    assert name == "node"
    taken = node_command.make_context("node", list(flags), resilient_parsing=True).params
    assert taken["join"] is None, "the set's variable names it"
    assert f":{DEFAULT_PORT}" in next(one for one in server["args"] if one.startswith("--nodes-listen"))
    assert leader["spec"]["terminationGracePeriodSeconds"] == given["drain_delay_s"] + 30 + 15
    assert worker["spec"]["terminationGracePeriodSeconds"] > taken["drain_s"]
    for container in (server, node):
        assert container["image"].endswith(f":{__version__}")
    selector = made["Service"]["spec"]["selector"].items()
    assert selector <= leader["metadata"]["labels"].items()
    assert not selector <= worker["metadata"]["labels"].items()


def test_the_scaled_object_is_as_the_charts() -> None:
    scaled = objects("scaledobject")["ScaledObject"]
    (trigger,) = scaled["spec"]["triggers"]
    metadata: dict[str, Any] = trigger["metadata"]
    assert all(isinstance(value, str) for value in metadata.values())
    assert scaled["spec"]["minReplicaCount"] >= 1
    assert trigger["authenticationRef"]["name"] == objects("scaledobject")["TriggerAuthentication"]["metadata"]["name"]


def test_the_adapters_query_names_metrics_that_there_are() -> None:
    (values,) = yaml.safe_load_all((FOLDER / "prometheus-adapter.yaml").read_text())
    (rule,) = values["rules"]["custom"]
    query = rule["metricsQuery"].replace("<<.LabelMatchers>>", "").replace("<<.GroupBy>>", "instance")
    assert list(problems(query)) == []
    (metric,) = [one["pods"]["metric"]["name"] for one in default_values()["autoscaling"]["hpa"]["metrics"]]
    assert rule["name"]["as"] == metric
