"""A change of any setting that a worker is told when it loads starts another worker."""

from __future__ import annotations

import msgspec

from inferd.config import BatchingConfig, ModelConfig
from inferd.router.replicas.engine_fields import ENGINE_FIELDS, is_same_engine

# What the gateway's process alone acts on: a running worker need not know.
ABOVE_THE_WORKER = {
    *(
        "breaker",
        "cache",
        "drain_s",
        "idle_after_s",
        "load",
        "memory_fraction",
        "queue",
        "region",
        "remote",
        "remotes",
        "replicas",
    ),
    *("resume_streams", "retry", "routing", "versions"),
}


def test_every_setting_is_the_workers_or_the_gateways() -> None:
    """A new one must be put on one side, or a reload would not bring it about."""
    assert set(ENGINE_FIELDS) | ABOVE_THE_WORKER == set(ModelConfig.__struct_fields__)
    assert not set(ENGINE_FIELDS) & ABOVE_THE_WORKER


def test_other_batching_or_options_are_another_worker() -> None:
    model = ModelConfig(source="m.onnx")
    for change in ({"batching": BatchingConfig(max_batch_size=4)}, {"options": {"std": False}}, {"allow_pickle": True}):
        assert not is_same_engine(model, msgspec.structs.replace(model, **change))
    assert is_same_engine(model, msgspec.structs.replace(model, drain_s=1.0))
