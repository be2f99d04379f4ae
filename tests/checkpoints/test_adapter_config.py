"""An adapter's configuration: which modules it changes, with which rank and factor. Its rules are those of peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferd.checkpoints.adapter import _Config
from inferd.errors import ModelLoadError

PATHS = ("layers.0.q_proj", "layers.0.o_proj", "layers.1.q_proj", "layers.1.o_proj")


def config(folder: Path, **fields: Any) -> _Config:
    written = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "o_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return _Config(folder)


@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({}, PATHS),
        ({"target_modules": ["o_proj"]}, PATHS[1::2]),
        ({"target_modules": ["proj"]}, ()),  # a name is whole
        ({"target_modules": r".*\.1\.q_proj"}, PATHS[2:3]),
        ({"target_modules": r"q_proj"}, ()),  # an expression is of the whole path
        ({"target_modules": "all-linear"}, PATHS),
        ({"target_modules": "All-Linear", "exclude_modules": r".*\.0\..*"}, PATHS[2:]),
        ({"exclude_modules": ["q_proj"]}, PATHS[1::2]),
        ({"exclude_modules": ["0.q_proj", "layers.1.o_proj"]}, PATHS[1:3]),
        ({"exclude_modules": []}, PATHS),
    ],
)
def test_a_module_is_changed_where_it_is_named_and_not_excluded(
    fields: dict[str, Any], targets: tuple[str, ...], tmp_path: Path
) -> None:
    found = config(tmp_path, **fields)
    assert tuple(path for path in PATHS if found.targets(path)) == targets


def test_a_listed_module_must_have_matrices(tmp_path: Path) -> None:
    found = config(tmp_path, target_modules=["layers.0.q_proj", "v_proj"])
    found.check_targets({"layers.7.q_proj", "layers.0.v_proj"})
    with pytest.raises(ModelLoadError, match="names 'v_proj', but"):
        found.check_targets({"layers.0.q_proj"})
    config(tmp_path, target_modules=".*v_proj").check_targets(set())


@pytest.mark.parametrize(
    ("fields", "ranks", "scales"),
    [
        ({}, [4, 4], [2.0, 2.0]),  # alpha is 8 where nothing says otherwise
        ({"lora_alpha": 2}, [4, 4], [0.5, 0.5]),
        ({"use_rslora": True}, [4, 4], [4.0, 4.0]),
        ({"rank_pattern": {"q_proj": 16}, "alpha_pattern": {"1.o_proj": 3}}, [16, 4], [0.5, 2.0]),
        ({"rank_pattern": {"q_proj": 16}, "use_rslora": True}, [16, 4], [2.0, 4.0]),
        ({"alpha_pattern": {"0.q_proj": 1, ".*": 4}}, [4, 4], [0.25, 1.0]),  # the first that matches
    ],
)
def test_a_module_has_the_rank_and_the_factor_of_the_first_pattern_that_matches(
    fields: dict[str, Any], ranks: list[int], scales: list[float], tmp_path: Path
) -> None:
    found = config(tmp_path, **fields)
    assert [found.rank(path) for path in PATHS[:2]] == ranks
    assert [found.scale(path) for path in PATHS[:2]] == scales
