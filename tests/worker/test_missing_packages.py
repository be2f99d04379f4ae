"""What a worker says where a package that its model needs is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers import THOROUGH, sample

LOAD = """
import sys
sys.modules[{package!r}] = None
from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.worker.main import create_backend
try:
    create_backend("m", ModelConfig(source={source!r}), lambda *told: None)
except ModelLoadError as error:
    print(error.message)
"""


@THOROUGH
@pytest.mark.parametrize("package", sample(["torch", "tokenizers"], "tokenizers"))
def test_the_line_that_installs_it_is_told(tmp_path: Path, package: str) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    for source in (str(tmp_path), "demo"):
        code = LOAD.format(package=package, source=source)
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert f"needs the package {package}, which is not installed; pip install 'inferd[llm]'." in told
