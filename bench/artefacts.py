"""Verification of an artefact while it is copied, beside ``sha256sum``: ``python -m bench.artefacts``.

    python -m bench.artefacts --size 1000000000 --folder /tmp

Writes one file of so many bytes, and one folder of the same size in eight files, reads both once so that they are in the
page cache, and then takes turns: ``sha256sum`` and ``openssl dgst`` of the file, verification without a copy
(``manifest_of``), and the copy that a worker makes of a model (``copy_verified``). Prints a table of GB/s and of the ratio to ``sha256sum`` within the
same turn. Exit status 1 where the median ratio of the copy of one file is below 80 %.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from inferd.artefacts.copying import copy_verified
from inferd.artefacts.manifest import manifest_of

PROMISED: Final = 0.8
_PARTS: Final = 8
_BLOCK: Final = os.urandom(1 << 20)


def _write(path: Path, size: int) -> None:
    with path.open("wb") as file:
        left = size
        while left > 0:
            left -= file.write(_BLOCK[: min(left, len(_BLOCK))])


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _sha256sum(*paths: Path) -> None:
    subprocess.run(["sha256sum", *map(str, paths)], check=True, stdout=subprocess.DEVNULL)


def _openssl(path: Path) -> None:
    """Where coreutils are built without OpenSSL, ``sha256sum`` does not use the processor's own instructions."""
    subprocess.run(["openssl", "dgst", "-sha256", str(path)], check=True, stdout=subprocess.DEVNULL)


def _copied(sources: dict[str, Path], target: Path) -> float:
    """Seconds of the copy alone; it is removed outside of them."""
    seconds = _timed(lambda: copy_verified(sources, target))
    shutil.rmtree(target)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1_000_000_000, help="bytes of the artefact")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files and the copies are written")
    options = parser.parse_args(argv)
    rows: dict[str, list[tuple[float, float]]] = {}  # work -> (GB/s, ratio to sha256sum) of each turn
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        file, parts = folder / "weights.bin", folder / "parts"
        parts.mkdir()
        _write(file, options.size)
        for number in range(_PARTS):
            _write(parts / f"{number}.bin", options.size // _PARTS)
        sources = {path.name: path for path in parts.iterdir()}
        works: dict[str, Callable[[], float]] = {
            "sha256sum": lambda: _timed(lambda: _sha256sum(file)),
            "openssl dgst -sha256": lambda: _timed(lambda: _openssl(file)),
            "verify one file": lambda: _timed(lambda: manifest_of(file)),
            "copy one file and verify it": lambda: _copied({"weights.bin": file}, folder / "copy"),
            f"verify a folder of {_PARTS} files": lambda: _timed(lambda: manifest_of(parts)),
            f"copy a folder of {_PARTS} files and verify it": lambda: _copied(sources, folder / "copy"),
        }
        _sha256sum(file, *sources.values())  # into the page cache
        for _ in range(options.turns):
            seconds = {work: run() for work, run in works.items()}
            for work, spent in seconds.items():
                rows.setdefault(work, []).append((options.size / spent / 1e9, seconds["sha256sum"] / spent))
    print(f"{options.size:,} bytes in {folder.parent}, {os.cpu_count()} cores, {options.turns} turns, medians\n")
    print("| work | GB/s | of sha256sum | lowest |\n| --- | --- | --- | --- |")
    for work, turns in rows.items():
        speed, ratio = (statistics.median(one[at] for one in turns) for at in (0, 1))
        print(f"| {work} | {speed:.2f} | {ratio:.0%} | {min(one[1] for one in turns):.0%} |")
    found = statistics.median(ratio for _, ratio in rows["copy one file and verify it"])
    if found < PROMISED:
        print(f"\nThe copy of one file had {found:.0%} of sha256sum's speed; promised are {PROMISED:.0%}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
