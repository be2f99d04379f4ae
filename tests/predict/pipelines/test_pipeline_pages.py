"""Every line of docs/pipelines.md is one that the server takes, and no operation is missing there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from inferd.config import StepConfig, load_config
from inferd.predict.pipelines.wiring import check_steps
from inferd.predict.steps.registry import OPERATIONS, operation
from inferd.registry.triton_config import TritonModel

DOCS = Path(__file__).resolve().parents[3] / "docs"
BLOCKS = [
    yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", (DOCS / "pipelines.md").read_text(), re.DOTALL)
]


def steps() -> list[dict[str, Any]]:
    return [step for block in BLOCKS if isinstance(block, list) for step in block]


def test_every_operation_is_on_the_page_with_options_that_it_has() -> None:
    for step in steps():
        made = msgspec.convert(step, StepConfig)
        assert made.op is not None
        operation(made.op, made.options)
    assert {step["op"] for step in steps()} == set(OPERATIONS)


def test_every_configuration_on_the_page_is_one(tmp_path: Path) -> None:
    configurations = [block for block in BLOCKS if isinstance(block, dict)]
    assert len(configurations) == 4
    for number, block in enumerate(configurations):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(block))
        for name, model in load_config(file, {}, {}).models.items():
            without_files = msgspec.structs.replace(model.pipeline, models={})
            check_steps(name, msgspec.structs.replace(model, pipeline=without_files))


def test_the_fields_of_a_repository_on_its_page_are_known() -> None:
    page = (DOCS / "model-repositories.md").read_text()
    named = {word for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)}
    for field in TritonModel.__struct_fields__:
        if field not in ("name", "model_transaction_policy"):
            assert field in named, field
