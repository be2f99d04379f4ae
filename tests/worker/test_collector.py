"""Python's garbage collector sleeps while a worker loads, and not a moment longer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from inferd.config import ModelConfig
from inferd.types import TextPrompt
from inferd.worker.channel import Frames
from inferd.worker.messages import FromWorker, Load, Ready, Stop, Tokenize, Tokenized, encode_frame, from_worker_decoder

_WORKER = """
import gc, runpy, sys
from inferd.worker import main as module
from tests.worker.tiny_backend import TinyBackend

class Told(TinyBackend):
    def __init__(self, name, config):
        super().__init__(name, config)
        self.loading = gc.isenabled()
    def tokenize(self, prompt, want_strings=False, tenant=""):
        return [int(self.loading), int(gc.isenabled()), int(gc.get_freeze_count() > 1000)], None

module.main.__defaults__ = (None, lambda name, config, *_: Told(name, config))
runpy.run_module("inferd.worker", run_name="__main__")
"""


def test_it_is_off_while_the_model_loads_and_on_when_it_serves() -> None:
    ours, theirs = socket.socketpair()
    arguments = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--name", "m/0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen([sys.executable, "-c", _WORKER, *arguments], pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    ours.settimeout(60)
    frames: Frames[FromWorker] = Frames(from_worker_decoder)

    def until(kind: type) -> FromWorker:
        while True:
            for messages in frames.feed(ours.recv(65536)):
                for message in messages:
                    if isinstance(message, kind):
                        return message

    try:
        ours.sendall(encode_frame([Load("m", ModelConfig(source="m"))]))
        until(Ready)
        ours.sendall(encode_frame([Tokenize(1, TextPrompt(text=""))]))
        told = until(Tokenized)
        assert isinstance(told, Tokenized)
        assert told.token_ids == [0, 1, 1]
        ours.sendall(encode_frame([Stop()]))
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
        ours.close()
