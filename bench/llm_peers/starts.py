"""Time to ready of ``inferd serve``, by itself: not behind another server's end, and from a warm page cache.

The first start of a format quantises the weights and keeps them; the second one finds what was kept. Both have a cache folder
of their own, and before each the machine is left alone until it has nothing to do.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil  # type: ignore[import-untyped]

from bench.llm_peers.process import PeerFailed, serving
from bench.llm_peers.servers import Places, start_of
from bench.llm_peers.table import OURS, Run

QUIET_PERCENT = 5.0  # of all processors
PATIENCE_S = 60.0


def quiet() -> bool:
    """Wait until the processors have had nothing to do for two seconds in a row, a minute at most; whether they had."""
    until = time.monotonic() + PATIENCE_S
    calm = 0
    while calm < 2 and time.monotonic() < until:
        calm = calm + 1 if psutil.cpu_percent(interval=1.0) <= QUIET_PERCENT else 0
    return calm == 2


def warm_pages(model: Path) -> None:
    """Read the checkpoint's files, so that they lie in the page cache."""
    for path in sorted(model.iterdir()):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(16 * 2**20):
                    pass


def kept_within(folder: Path, limit_s: float) -> None:
    """Wait until the quantised weights have been written, which ends after the server is ready."""
    until = time.monotonic() + limit_s
    while not any(folder.glob("inferd/quantized/*.safetensors")):
        if time.monotonic() > until:
            raise PeerFailed(f"inferd kept no quantised weights below {folder} within {limit_s:.0f} s")
        time.sleep(0.1)


def measure(form: str, places: Places, port: int, folder: Path) -> Run | str:
    """A first and a second start."""
    start = start_of(OURS, form, places, port)
    if isinstance(start, str):
        return start
    url = f"http://127.0.0.1:{port}"
    figures = {}
    with TemporaryDirectory(dir=folder) as cache:
        environment = {**start.environment, "XDG_CACHE_HOME": cache}
        for which in ("first", "second"):
            warm_pages(places.model)
            figures[f"busy before the {which} start"] = float(not quiet())
            log = folder / f"start-{form}.log"
            with serving(start.command, environment, url + start.probe, log, 600) as (_, ready_s):
                figures[f"{which} start, s"] = ready_s
                if form != "bf16":
                    kept_within(Path(cache), 120)
    return Run("start", OURS, form, figures)
