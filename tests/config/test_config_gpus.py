"""Ranks on GPUs in the configuration: models whose ranks would have the same ones."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.config import load_config
from inferd.errors import ConfigError

TWO = {"parallel": {"tensor": 2}}
SIZED = {"kv_cache": {"memory_bytes": 1 << 30}}


def load(first: dict[str, Any], second: dict[str, Any]) -> None:
    load_config(None, {}, {"models": {"one": {"source": "demo", **first}, "two": {"source": "demo", **second}}})


@pytest.mark.parametrize(
    ("first", "second", "shared", "free"),
    [
        ({"device": "cuda"}, {"device": "cuda"}, "cuda:0, cuda:1", 2),
        ({"device": "cuda:1"}, {"device": "cuda:2", **SIZED}, "cuda:2", 3),
        ({"device": "cuda", "replicas": 2}, {"device": "cuda:3"}, "cuda:3", 4),
        ({"device": "cuda", "roles": {"prefill": 1, "decode": 1}}, {"device": "cuda:2"}, "cuda:2, cuda:3", 4),
    ],
)
def test_two_groups_on_one_gpu_are_refused(
    first: dict[str, Any], second: dict[str, Any], shared: str, free: int
) -> None:
    with pytest.raises(ConfigError) as refused:
        load({**TWO, **first}, {**TWO, **second})
    assert refused.value.message.startswith("models.two.device: cuda")
    assert f"but ranks of one have {shared} too; set it to cuda:{free}, or" in refused.value.message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({**TWO, "device": "cuda"}, {**TWO, "device": "cuda:2"}),
        ({**TWO, "device": "cuda", **SIZED}, {**TWO, "device": "cuda", **SIZED}),
        ({**TWO, "device": "cuda"}, {"device": "cuda"}),  # one process shares a GPU, as it always did
        ({**TWO, "device": "cuda"}, {**TWO, "device": "cpu"}),
        ({**TWO, "device": "cuda"}, {**TWO, "device": "cuda", "load": "on_demand"}),
    ],
)
def test_groups_that_are_apart_or_share_on_purpose_are_not(first: dict[str, Any], second: dict[str, Any]) -> None:
    load(first, second)


@pytest.mark.parametrize("nodes", ["any", "only"])
def test_groups_may_be_on_different_nodes(nodes: str) -> None:
    group = {"source": "demo", "device": "cuda", "placement": {"nodes": nodes}, **TWO}
    load_config(None, {}, {"nodes": {"listen": "h:1"}, "models": {"one": group, "two": group}})
