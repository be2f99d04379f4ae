"""Memory for weights is in the machine before it is asked for, and what was not used of it goes back."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
from tests.worker.watching import until_now

from inferd.machine.weight_memory import WeightMemory

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not Path("/proc/self/smaps").exists(),
    reason="the system has no large pages, or does not tell what is resident",
)
MB = 1 << 20
LARGE = 2 * MB


def resident(memory: mmap.mmap) -> int:
    """Bytes in the machine of the mapping that holds this memory."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if not word.endswith(":"):
            first, last = (int(part, 16) for part in word.split("-"))
            is_inside = first <= address < last
        elif is_inside and word == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


def test_each_large_page_is_touched_and_the_unused_ones_are_returned() -> None:
    size = 64 * MB
    reserved = WeightMemory(size)
    until_now(lambda: reserved.spare_bytes == size, "every page is touched")
    place = reserved.reserve(100)
    assert place is not None
    memory, begin = place
    assert begin == 0
    assert reserved.spare_bytes == size - 100
    touched = resident(memory)
    assert touched >= size // LARGE * mmap.PAGESIZE, "at least one small page of each large one"
    reserved.close()
    assert 0 < resident(memory) <= touched // 16


def test_a_part_is_aligned_and_no_larger_than_what_is_left() -> None:
    reserved = WeightMemory(1000)
    places = [reserved.reserve(size) for size in (1, 64, 65, 700, 40, 1)]
    assert [place and place[1] for place in places] == [0, 64, 128, 256, 960, None]
    reserved.close()
    assert WeightMemory(0).reserve(1) is None
