"""A worker process from outside: whatever happens to it, its end is known."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.server_process import running
from tests.worker.watching import is_running, until_now

from inferd.worker.process import WorkerProcess

FOREVER = (sys.executable, "-c", "import threading; threading.Event().wait()")


def test_one_that_cannot_be_listened_to_is_ended_and_its_end_is_told() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def refused(*arguments: object, **settings: object) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "create_unix_connection", refused)
            process = WorkerProcess(FOREVER, "one", os.environ, lambda messages: None, lambda: None)
            async with asyncio.timeout(20):
                assert await process.gone < 0
        assert process.channel_error is not None
        with pytest.raises(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)

    asyncio.run(run())


def test_a_worker_whose_server_was_killed_ends_even_where_it_cannot_see_that(tmp_path: Path) -> None:
    with running(data_dir=tmp_path) as server:
        (worker,) = server.workers
        os.kill(worker, signal.SIGSTOP)
        server.signal(signal.SIGKILL)
        until_now(lambda: not is_running(worker), "the stopped worker was killed")
