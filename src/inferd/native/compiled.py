"""The compiled kernels: whether they were built, the instruction set they use, and the tensors they accept.

Other modules pass tensors to ``kernels`` as addresses, once ``takes`` (device, number format) and their own conditions
(layout) hold. The torch forms define what is computed and are the oracles of the tests. Where the extension module was
not built, ``takes`` is never true and the torch forms compute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch  # before the kernels, which then share its OpenMP threads
from torch import Tensor

if TYPE_CHECKING:
    from inferd import _kernels

    kernels, BUILT = _kernels, True
else:
    try:
        from inferd import _kernels

        kernels, BUILT = _kernels, True
    except ImportError:
        kernels, BUILT = None, False


def _of_file() -> str:
    """The size and the time of the extension module's file, as it was when this process loaded it."""
    if not BUILT:
        return ""
    status = os.stat(kernels.__file__)
    return f"{status.st_size}.{status.st_mtime_ns}"


FILE: Final = _of_file()
"""Tells the kernels of this process from those that another process loads later."""

CODES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {"": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}


class _Switch:
    """Whether the kernels are used; only ``using_level("none")`` turns them off."""

    __slots__ = ("on",)

    def __init__(self, on: bool) -> None:
        self.on = on


_switch = _Switch(BUILT)


def takes(x: Tensor) -> bool:
    """Whether the kernels accept a tensor like this one: on the CPU, float32 or bfloat16, no gradient needed."""
    return _switch.on and x.is_cpu and x.dtype in CODES and not x.requires_grad


def takes_dtype(dtype: torch.dtype) -> bool:
    return _switch.on and dtype in CODES


def is_on() -> bool:
    return _switch.on


def level() -> str:
    """The instruction set in use (``avx512bf16``, ``avx512``, ``avx2``, ``generic``), or ``none``."""
    return kernels.level() if _switch.on else "none"


def levels() -> list[str]:
    return kernels.levels() if BUILT else []


@contextmanager
def using_level(name: str) -> Iterator[None]:
    """Compute with one of ``kernels.levels()``, or with torch for ``none``; for tests and measurements."""
    if name == "none":
        was_on, _switch.on = _switch.on, False
        try:
            yield
        finally:
            _switch.on = was_on
        return
    before = kernels.level()
    kernels.use_level(name)
    try:
        yield
    finally:
        kernels.use_level(before)


def has_int8() -> bool:
    """Whether the kernels in use multiply bytes in one instruction (AVX-512 VNNI); all others do it in several."""
    return level() == "avx512bf16"


def prefer_large_pages(memory: Tensor) -> None:
    """Ask for large pages before memory of the CPU is first written to."""
    if _switch.on and memory.is_cpu:
        kernels.prefer_large_pages(memory.data_ptr(), memory.nbytes)


def touch_pages(memory: Tensor) -> bool:
    """Have the system find and clear the memory's pages now; written data stays. False where this is not possible."""
    return _switch.on and memory.is_cpu and kernels.touch_pages(memory.data_ptr(), memory.nbytes)
