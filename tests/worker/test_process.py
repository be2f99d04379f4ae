"""A worker process from outside: whatever happens to it, its end is known."""

from __future__ import annotations

import asyncio
import errno
import os
import sys

import pytest

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
