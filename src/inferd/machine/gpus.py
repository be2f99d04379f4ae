"""The GPUs of this machine, as far as NVIDIA's driver shows them. No library of theirs is loaded."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Final

from inferd.machine.torch_build import cuda_build_bytes

_DRIVER: Final = Path("/proc/driver/nvidia/gpus")


def num_gpus() -> int:
    """GPUs that NVIDIA's driver shows."""
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0


def num_visible_gpus() -> int:
    """GPUs that NVIDIA's driver shows and that ``CUDA_VISIBLE_DEVICES`` leaves to this process."""
    return visible(os.environ.get("CUDA_VISIBLE_DEVICES"), num_gpus())


def visible(setting: str | None, present: int) -> int:
    """How many of ``present`` GPUs a value of ``CUDA_VISIBLE_DEVICES`` leaves; None: it is not set.

    CUDA ignores what stands behind the first number that names no GPU. A name (GPU-...) counts as one that is there.
    """
    if setting is None:
        return present
    listed = [entry.strip() for entry in setting.split(",")]
    there = itertools.takewhile(lambda one: one and (not one.lstrip("-").isdigit() or 0 <= int(one) < present), listed)
    return min(present, len(list(there)))


def may_compute_on_gpu(device: str) -> bool:
    """Whether a model with this setting ``device`` may be computed on a GPU here: auto takes one where there is one and
    a build of torch for it."""
    return device.startswith("cuda") or (device == "auto" and num_gpus() > 0 and cuda_build_bytes() > 0)
