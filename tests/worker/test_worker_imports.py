"""What a worker process imports before it knows its model: its memory is every small model's memory."""

from __future__ import annotations

import subprocess
import sys

_NOT_NEEDED = ("asyncio", "ssl", "torch", "numpy", "uvloop")


def test_a_worker_starts_without_what_only_gateways_and_some_models_need() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import sys, inferd.worker.main; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not set(_NOT_NEEDED) & set(told.stdout.split())


def test_a_model_that_is_no_archive_is_recognised_without_reading_archives() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import sys, inferd.cli.serve, inferd.predict.ceiling; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"zipfile", "lzma", "inferd.checkpoints.decoder_config"} & set(told.stdout.split())
