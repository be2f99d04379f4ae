"""The GPUs of this machine, as far as NVIDIA's driver shows them. No library of theirs is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from inferd.machine.torch_build import cuda_build_bytes

_DRIVER: Final = Path("/proc/driver/nvidia/gpus")


def num_gpus() -> int:
    """GPUs that NVIDIA's driver shows."""
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0


def may_compute_on_gpu(device: str) -> bool:
    """Whether a model with this setting ``device`` may be computed on a GPU here: auto takes one where there is one and
    a build of torch for it."""
    return device.startswith("cuda") or (device == "auto" and num_gpus() > 0 and cuda_build_bytes() > 0)
