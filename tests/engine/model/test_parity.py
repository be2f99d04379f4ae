"""Every family computes what transformers computes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("inferd_test_families", Path(__file__).with_name("families.py"))
assert _spec is not None
assert _spec.loader is not None
families = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = families
_spec.loader.exec_module(families)


@pytest.mark.parametrize("name", list(families.FAMILIES))
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    errors = families.largest_error(name, tmp_path)
    assert max(errors.values()) < 1e-4, errors
