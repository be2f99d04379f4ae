"""Memory of a process and of the machine, by what the kernel says."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferd.machine import memory
from inferd.machine.memory import available_bytes, rss_bytes

MB = 1 << 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is told by /proc")
def test_memory_that_was_written_is_resident_and_that_of_a_process_which_is_gone_is_none() -> None:
    before = rss_bytes()
    with mmap.mmap(-1, 256 * MB) as taken:  # pages of its own: an allocator may give memory that is resident already
        for at in range(0, len(taken), mmap.PAGESIZE):
            taken[at] = 1
        assert 200 * MB < rss_bytes(os.getpid()) - before < 400 * MB
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert rss_bytes(gone.pid) == 0


@pytest.mark.parametrize(
    ("limit", "used", "wanted"), [("max", 0, 3000), (2 * MB, MB, 1024), (9 * MB, MB, 3000), (MB, 2 * MB, 0)]
)
def test_what_may_still_be_taken_is_the_kernels_estimate_or_less_by_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | str, used: int, wanted: int
) -> None:
    """``wanted`` in KiB."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 3000 kB\nBuffers: 5 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(memory, "groups_around", lambda: [tmp_path])
    assert available_bytes() == wanted * 1024


def test_without_the_kernels_estimate_free_pages_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amounts = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 50}
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / "none")
    monkeypatch.setattr(memory, "groups_around", list)
    monkeypatch.setattr(os, "sysconf", amounts.__getitem__)
    assert available_bytes() == 4096 * 50
