"""Whether Triton's kernels compute: on CUDA devices where Triton is installed, and in tests on the CPU.

The module is cheap to import. Triton itself takes half a second and is imported at the first launch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


class _Switch:
    __slots__ = ("on_cpu",)

    def __init__(self) -> None:
        self.on_cpu = False


_switch = _Switch()


@cache
def installed() -> bool:
    """Whether Triton can be imported; torch's CUDA builds include it."""
    return importlib.util.find_spec("triton") is not None


def takes(x: Tensor) -> bool:
    """Whether the kernels accept a tensor like this one."""
    return (x.is_cuda or (_switch.on_cpu and x.is_cpu)) and takes_device(x.device)


def takes_device(device: torch.device) -> bool:
    return installed() and (device.type == "cuda" or (_switch.on_cpu and device.type == "cpu"))


def is_interpreted() -> bool:
    """Whether the kernels are run by Triton's interpreter, on the CPU."""
    return _switch.on_cpu


@contextmanager
def on_cpu() -> Iterator[None]:
    """While the context is open the kernels accept CPU tensors too, in Triton's interpreter: slow, for tests.

    ``TRITON_INTERPRET=1`` has to be set before Triton is first imported.
    """
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Triton is imported"
    before, _switch.on_cpu = _switch.on_cpu, True
    try:
        yield
    finally:
        _switch.on_cpu = before
