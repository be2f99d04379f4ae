"""What the binding layer promises: which tensors it takes, and how a level is chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from inferd.native import compiled
from inferd.native.packed import PackedWeight

needs_kernels = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")


@needs_kernels
def test_the_best_level_is_in_use_and_generic_is_always_there() -> None:
    assert compiled.level() == compiled.levels()[0]
    assert compiled.levels()[-1] == "generic"


@needs_kernels
def test_an_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'sse9'"), compiled.using_level("sse9"):
        pass
    assert compiled.level() == compiled.levels()[0]


def test_turned_off_it_takes_nothing() -> None:
    x = torch.zeros(2, 2)
    assert compiled.takes(x) == compiled.BUILT
    with compiled.using_level("none"):
        assert not compiled.takes(x)
        assert compiled.level() == "none"
    assert compiled.takes(x) == compiled.BUILT


def test_it_takes_no_half_floats_and_nothing_that_wants_a_gradient() -> None:
    assert not compiled.takes(torch.zeros(2, dtype=torch.float16))
    assert not compiled.takes(torch.zeros(2, requires_grad=True))


def test_weights_of_an_odd_number_of_bf16_columns_are_left_to_torch() -> None:
    assert not PackedWeight.fits(torch.zeros((4, 3), dtype=torch.bfloat16))
    assert PackedWeight.fits(torch.zeros((4, 3))) == compiled.BUILT


@needs_kernels
def test_torch_and_the_kernels_share_one_openmp() -> None:
    """Two OpenMP runtimes would keep two teams of spinning threads on the same cores."""
    # In a process of its own: what other tests import into this one may bring a runtime along.
    script = "import inferd.native.compiled; print(open('/proc/self/maps').read())"
    maps = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    names = ("libgomp", "libiomp", "libomp")
    runtimes = {line.split()[-1] for line in maps.splitlines() if any(name in line for name in names)}
    assert len(runtimes) == 1
