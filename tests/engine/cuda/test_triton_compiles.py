"""The kernels compile for GPUs, down to their machine code, on a machine that has none: what the interpreter takes, Triton's
compiler may refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers import THOROUGH

pytest.importorskip("triton", reason="Triton has no package for this machine")

ROOT = Path(__file__).resolve().parents[3]


@THOROUGH  # that Triton takes them at all: tests/engine/cuda/test_decoders_in_triton.py interprets them
@pytest.mark.timeout(600)
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """In a process of its own: here Triton interprets."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-m", "bench.gpu.compile", "--capability", "90", "--few"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for kernel in ("attend", "combine", "norm", "gate", "turn_and_write", "product"):
        assert any(f"shared  {kernel} " in line for line in lines), f"{kernel} was not compiled"
    assert all("     0 B spilled" in line for line in lines), done.stdout
