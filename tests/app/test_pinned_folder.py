"""The folder of kept files: one for each process, and none when the process is gone, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inferd.app.pinned_folder import pinned_folder


def test_it_goes_with_its_process_and_a_killed_ones_with_the_next(tmp_path: Path) -> None:
    below = tmp_path / "data" / "kept"
    script = (
        "import os, signal; from pathlib import Path; from inferd.app.pinned_folder import pinned_folder\n"
        f"with pinned_folder(Path({str(below)!r})) as folder:\n"
        "    (folder / 'file').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == -signal.SIGKILL
    (left,) = below.iterdir()
    with pinned_folder(below) as first:
        assert not left.exists()
        assert first is not None
        (first / "file").touch()
        with pinned_folder(below) as second:
            assert second is not None
            assert (first / "file").exists()
            assert {first, second} == set(below.iterdir())
        assert list(below.iterdir()) == [first]
    assert not list(below.iterdir())


def test_a_place_that_cannot_be_written_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with pinned_folder(tmp_path / "file" / "kept") as folder:
        assert folder is None
    assert "no files of models are pinned there" in caplog.text
    assert os.listdir(tmp_path) == ["file"]
