"""A number of replicas that follows the load, in the configuration: what it means, and what contradicts it."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.autoscale.decide import spec_of
from inferd.config import load_config
from inferd.errors import ConfigError


def problem(**model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {"models": {"chat": {"source": "demo", **model}}})
    return caught.value.message


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"scaling": {"min": 3, "max": 2}}, "models.chat.scaling.min: 3 is above scaling.max = 2; lower it"),
        ({"scaling": {"max": 2}, "replicas": 2}, "models.chat.replicas: scaling is given as well; keep replicas"),
        ({"scaling": {"max": 2}, "load": "on_demand"}, "models.chat.load: on_demand begins without a replica"),
        ({"scaling": {"max": 2}, "idle_after_s": 9}, "models.chat.idle_after_s: it unloads the model"),
        ({"scaling": {"max": 2}, "sequence": {"states": {"a": "b"}}}, "a replica that leaves would lose them"),
        (
            {"scaling": {"max": 2, "spare": False, "spare_memory": True}},
            "spare_memory: it is memory of the spare process; set",
        ),
        ({"scaling": {"min": 0}}, "scaling.max"),
        ({"scaling": {"max": 65}}, "scaling.max"),
        ({"scaling": {"max": 2, "target": {"queue_ms": 0}}}, "scaling.target.queue_ms"),
        ({"scaling": {"max": 2, "target": {"duty": 1}}}, "scaling.target.duty"),
        ({"scaling": {"max": 2, "target": {"duty": 1e-320}}}, "scaling.target.duty: 1e-320 is not a number, at least"),
        ({"scaling": {"max": 2, "target": {"in_flight": 1e-320}}}, "scaling.target.in_flight: 1e-320 is not a number"),
        ({"scaling": {"max": 2, "target": {"in_flight": 10**400}}}, "is not a number, at least 0.01"),
        ({"scaling": {"max": 2, "target": {"cpu": 0.5}}}, "cpu"),
        ({"source": "openai:https://h/v1", "scaling": {"max": 2}}, "models.chat.scaling: it is for local replicas"),
    ],
)
def test_contradictions_are_named_with_the_remedy(model: dict[str, Any], sentence: str) -> None:
    assert sentence in problem(**model)


def test_what_the_settings_mean() -> None:
    text = {"source": "demo", "scaling": {"min": 0, "max": 4, "target": {"queue_ms": 300}}}
    model = load_config(None, {}, {"models": {"chat": text}}).models["chat"]
    assert (model.num_local, model.num_at_start, model.is_on_demand) == (4, 1, True)
    spec = spec_of(model)
    assert spec is not None
    assert (spec.least, spec.most, spec.queue_s, spec.idle_after_s) == (0, 4, 0.3, 300.0)
    one = load_config(None, {}, {"models": {"chat": {**text, "scaling": {"min": 2, "max": 4}}}}).models["chat"]
    assert (one.num_local, one.num_at_start, one.is_on_demand) == (4, 2, False)
    fixed = load_config(None, {}, {"models": {"chat": {"source": "demo", "replicas": 3}}}).models["chat"]
    assert (fixed.num_local, fixed.num_at_start, spec_of(fixed)) == (3, 3, None)


def test_memory_is_shared_out_for_the_most_replicas() -> None:
    with pytest.raises(ConfigError, match=r"4 times 1.00 GiB is more than server.memory_bytes"):
        load_config(
            None,
            {},
            {
                "server": {"memory_bytes": "2GiB"},
                "models": {"chat": {"source": "demo", "memory_bytes": "1GiB", "scaling": {"max": 4}}},
            },
        )
