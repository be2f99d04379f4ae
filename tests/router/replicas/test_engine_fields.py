"""A change of any setting that a worker is told when it loads starts another worker."""

from __future__ import annotations

import msgspec

from inferd.config import BatchingConfig, ModelConfig, ObjectivesConfig
from inferd.router.replicas.engine_fields import ENGINE_FIELDS, is_same_engine

# What the gateway's process alone acts on: a running worker need not know.
ABOVE_THE_WORKER = {
    "adapters",
    "adapter_roots",
    *(
        "breaker",
        "cache",
        "drain_s",
        "idle_after_s",
        "load",
        "memory_fraction",
        "placement",
        "queue",
        "region",
        "remote",
        "remotes",
        "replicas",
        "roles",
        "rollout",
        "scaling",
    ),
    *("resume_streams", "retry", "routing", "versions"),
}


def test_every_setting_is_the_workers_or_the_gateways() -> None:
    """A new one must be put on one side, or a reload would not bring it about."""
    of_workers = {name.partition(".")[0] for name in ENGINE_FIELDS}
    assert of_workers | ABOVE_THE_WORKER == set(ModelConfig.__struct_fields__)
    assert not of_workers & ABOVE_THE_WORKER


def test_other_batching_or_options_are_another_worker() -> None:
    model = ModelConfig(source="m.onnx")
    for change in ({"batching": BatchingConfig(max_batch_size=4)}, {"options": {"std": False}}, {"allow_pickle": True}):
        assert not is_same_engine(model, msgspec.structs.replace(model, **change))
    assert is_same_engine(model, msgspec.structs.replace(model, drain_s=1.0))


def test_an_objective_that_is_only_counted_replaces_no_worker() -> None:
    """The time per token steers the scheduler of the worker; the others are known to the gateway alone."""

    def model(**objectives: float) -> ModelConfig:
        return ModelConfig(source="demo", objectives=ObjectivesConfig(**objectives))

    assert is_same_engine(model(), model(availability=0.999, ttft_ms=500.0, total_ms=9000.0, tpot_fraction=0.5))
    assert not is_same_engine(model(), model(tpot_ms=50.0))
