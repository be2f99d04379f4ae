"""What a relay needs to know of a configuration."""

from __future__ import annotations

from inferd.config import Config, ModelConfig, RemoteConfig
from inferd.gateway.openai.relay_fields import remote_models

URL = "http://127.0.0.1:9/v1"


def test_only_models_without_any_replica_here_are_relayed() -> None:
    config = Config(
        models={
            "far": ModelConfig(source=f"openai:{URL}"),
            "here": ModelConfig(source="x"),
            "both": ModelConfig(source="x", remotes=(RemoteConfig(url=URL),)),
        }
    )
    assert remote_models(config) == {"far"}
