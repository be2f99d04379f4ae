"""A whole run of a batch as a process, which tests kill: upload, batch, answers, results. Started again, it goes on.

python whole_run.py FOLDER LINES
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.jobs.job_site import TENANT, Echo, Site, lines

from inferd.errors import StateUnavailable, StoredNotFound
from inferd.jobs import run as run_module
from inferd.jobs.batch import Batch
from inferd.jobs.folder import Disk
from inferd.jobs.runner import Runner
from inferd.jobs.store import JobStore

NAME = "batch_1"


def take_small_steps() -> None:
    """A few lines make several commits."""
    run_module.MAX_AHEAD = 4  # type: ignore[misc]
    run_module._GROUP = 3  # type: ignore[misc]
    run_module.COMMIT_S = 0.0  # type: ignore[misc]
    run_module.TICK_S = 0.002  # type: ignore[misc]
    run_module.LOOK_S = 0.01  # type: ignore[misc]
    run_module.PAUSE_S = 0.01  # type: ignore[misc]


async def seen(store: JobStore) -> Batch:
    """The batch, once the database tells it."""
    while True:
        try:
            return await store.batch(TENANT, NAME)
        except StateUnavailable:  # while the disk fails
            await asyncio.sleep(0.01)


async def whole_run(folder: Path, count: int) -> Batch:
    """Make the batch where there is none, and work on it to its end."""
    site = Site(folder, f"sqlite://{folder}/state.db")
    async with site.server(disk=Disk()) as server:
        try:
            await server.store.batch(TENANT, NAME)
        except StoredNotFound:
            await site.add(server, lines(count, fails=4), NAME)
        runner = Runner(server.store, Echo(), lambda: False, max_line_bytes=10_000)
        keeping = asyncio.create_task(runner.keep())
        while not (found := await seen(server.store)).has_ended:
            await asyncio.sleep(0.01)
        keeping.cancel()
        return found


if __name__ == "__main__":
    take_small_steps()
    asyncio.run(whole_run(Path(sys.argv[1]), int(sys.argv[2])))
