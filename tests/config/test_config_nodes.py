"""Nodes in the configuration: where they join, which models may run there, and what contradicts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferd.config import Config, load_config
from inferd.errors import ConfigError


def problem(nodes: dict[str, Any], **model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {"nodes": nodes, "models": {"chat": {"source": "demo", **model}}})
    return caught.value.message


@pytest.mark.parametrize(
    ("nodes", "model", "sentence"),
    [
        ({}, {"placement": {"nodes": "only"}}, "models.chat.placement: its replicas run on nodes alone"),
        ({}, {"placement": {"labels": {"zone": "a"}}}, "set nodes.listen to HOST:PORT, or leave this out"),
        ({}, {"placement": {"nodes": "local", "labels": {"zone": "a"}}}, "placement.labels: only nodes have labels"),
        ({}, {"placement": {"nodes": "remote"}}, "placement.nodes"),
        ({}, {"placement": {"nodes": "ray"}}, "placement.nodes: ray, and no cluster is named; set nodes.ray to auto"),
        ({"ray": "auto"}, {"placement": {"cores": 2}}, "placement.cores: only a Ray cluster reserves cores"),
        ({"ray": ""}, {}, "nodes.ray"),
        ({"listen": 8001}, {}, "nodes.listen: 8001 is not HOST:PORT such as 0.0.0.0:8001."),
        ({"listen": ":99999"}, {}, "nodes.listen: 99999 is no port; take one of at most 65535"),
        ({"listen": f"{'a' * 64}:1"}, {}, "is no name of a host; write one, or its address."),
        ({}, {"placement": {"labels": ["a"]}}, "placement.labels: ['a'] is not names, each with a value."),
        ({}, {"source": "openai:https://h/v1", "placement": {"nodes": "only"}}, "it is for local replicas"),
        (
            {},
            {"parallel": {"pipeline": 2, "machines": 2}},
            "parallel.machines: ranks on other machines run on nodes, and none can join; set nodes.listen",
        ),
        (
            {"listen": "h:1"},
            {"parallel": {"pipeline": 3, "machines": 2}},
            "parallel.machines: 2, but 3 ranks do not divide by it; take another number of machines, or of stages",
        ),
        (
            {"listen": "h:1"},
            {"parallel": {"pipeline": 2, "machines": 2}, "placement": {"nodes": "only"}},
            "placement.nodes: only, but a replica on several machines begins on this one; leave it out",
        ),
        (
            {"listen": "h:1"},
            {"parallel": {"pipeline": 2, "machines": 2}, "scaling": {"max": 2}},
            "scaling: replicas on several machines do not follow the load yet; set replicas",
        ),
        (
            {"listen": "h:1"},
            {"parallel": {"pipeline": 2, "machines": 2}, "verify": {"mode": "warn"}},
            "verify: files on other machines are not verified yet; leave verify or machines out",
        ),
        ({"listen": "8001"}, {}, "nodes.listen"),
        ({"listen": "host:port"}, {}, "nodes.listen"),
        ({"listen": "h:1", "key": "key.pem"}, {}, "nodes.certificate: missing; name the certificate"),
        ({"listen": "h:1", "token_expires_s": 0}, {}, "nodes.token_expires_s"),
        ({"listen": "h:1", "token_file": "gone"}, {}, "nodes.token_file: the file 'gone' cannot be read (No such file"),
        ({}, {"placement": "ray"}, "placement.nodes: ray, and no cluster is named; set nodes.ray to auto"),
        ({}, {"placement": "rays"}, "placement.nodes: 'rays' is not one of any, local, only, ray; did you mean ray?"),
        ({}, {"placement": 3}, "placement: 3 is not a section"),
        ({}, {"scaling": "ray"}, "scaling: 'ray' is not a section"),
    ],
)
def test_contradictions_are_named_with_the_remedy(nodes: dict[str, Any], model: dict[str, Any], sentence: str) -> None:
    assert sentence in problem(nodes, **model)


@pytest.mark.parametrize("listen", ["0.0.0.0:8001", "[::]:0", ":8001", "gateway.example.com:8001"])
def test_addresses_and_placements_that_are_accepted(listen: str) -> None:
    placement = {"nodes": "only", "labels": {"zone": "a"}}
    settings = {"nodes": {"listen": listen}, "models": {"chat": {"source": "demo", "placement": placement}}}
    assert load_config(None, {}, settings).models["chat"].placement.labels == {"zone": "a"}


@pytest.mark.parametrize("nodes", ["any", "local", "only", "ray"])
def test_a_word_in_place_of_a_placement_is_where_replicas_run(nodes: str) -> None:
    def loaded(placement: object) -> Config:
        model = {"source": "demo", "placement": placement}
        return load_config(None, {}, {"nodes": {"listen": ":8001", "ray": "auto"}, "models": {"chat": model}})

    assert loaded(nodes) == loaded({"nodes": nodes})
    assert loaded(nodes).models["chat"].placement.nodes == nodes


@pytest.mark.parametrize(
    ("file", "environment"),
    [
        ("ray", {"PLACEMENT__CORES": "2"}),
        ("{cores: 2}", {"PLACEMENT": "ray"}),
        ("{nodes: local, cores: 2}", {"PLACEMENT__NODES": "ray"}),
    ],
)
def test_a_placement_of_the_file_and_one_of_the_environment_are_merged(
    tmp_path: Path, file: str, environment: dict[str, str]
) -> None:
    path = tmp_path / "inferd.yaml"
    path.write_text(f"nodes: {{ray: auto}}\nmodels: {{chat: {{source: demo, placement: {file}}}}}\n")
    variables = {f"INFERD_MODELS__CHAT__{name}": value for name, value in environment.items()}
    placement = load_config(path, variables, {}).models["chat"].placement
    assert (placement.nodes, placement.cores) == ("ray", 2)
