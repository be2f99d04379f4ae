"""A worker process from outside: whatever happens to it, its end is known."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server_process import running
from tests.worker.watching import TINY_WORKER, is_running, until_now

from inferd.config import ModelConfig
from inferd.worker import main
from inferd.worker.channel import Frames
from inferd.worker.messages import FromWorker, Load, Ready, Stop, encode_frame, from_worker_decoder
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
        assert process.reason.startswith("its channel broke: ")
        with pytest.raises(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)

    asyncio.run(run())


def test_a_worker_whose_server_was_killed_ends_even_where_it_cannot_see_that(tmp_path: Path) -> None:
    with running(data_dir=tmp_path) as server:
        (worker,) = server.workers
        os.kill(worker, signal.SIGSTOP)
        server.signal(signal.SIGKILL)
        until_now(lambda: not is_running(worker), "the stopped worker was killed")


class Alone:
    """A worker process without a supervisor: the test has the other end of its channel."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        words = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--name", "tiny/0"]
        self.process = subprocess.Popen(
            [*TINY_WORKER, *words], pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()

    def ends(self) -> int:
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self.ours.close()

    def ready(self, source: str = "tiny") -> Alone:
        self.ours.sendall(encode_frame([Load("tiny", ModelConfig(source=source))]))
        frames: Frames[FromWorker] = Frames(from_worker_decoder)
        while not any(isinstance(said, Ready) for frame in frames.feed(self.ours.recv(65536)) for said in frame):
            pass
        return self


def test_a_workers_exit_status_says_why_it_ended() -> None:
    stopped = Alone().ready()
    stopped.ours.sendall(encode_frame([Stop()]))
    assert stopped.ends() == main.EXIT_DONE
    for left in (Alone(), Alone().ready()):
        left.ours.close()
        assert left.ends() == main.EXIT_ORPHANED
    broken = Alone().ready()
    broken.ours.sendall(b"\x01\x00\x00\x00\xff")
    assert broken.ends() not in (main.EXIT_DONE, main.EXIT_LOAD_FAILED)
    failing = Alone()
    failing.ours.sendall(encode_frame([Load("tiny", ModelConfig(source="missing"))]))
    assert failing.ends() == main.EXIT_LOAD_FAILED
