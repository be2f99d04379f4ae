"""What a loaded model tells of its own sampling."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.clients.scripted_model import write_scripted_model

from inferd.config import ModelConfig
from inferd.engine.load import create_backend


@pytest.mark.parametrize(("is_used", "told"), [(True, (0.6, 0.9)), (False, (1.0, 1.0))])
def test_a_model_tells_the_sampling_of_its_checkpoint(tmp_path: Path, is_used: bool, told: tuple[float, float]) -> None:
    write_scripted_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}', encoding="utf-8")
    config = ModelConfig(source=str(tmp_path), threads=1, use_generation_config=is_used)
    engine = create_backend("m", config, lambda *_: None)
    try:
        assert (engine.info.temperature, engine.info.top_p) == told
    finally:
        engine.close()
