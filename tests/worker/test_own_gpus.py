"""Which GPUs the ranks of a replica have, as its worker says to what loads it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from inferd.config import ModelConfig, ParallelConfig
from inferd.worker.channel import Frames
from inferd.worker.messages import FromWorker, Load, LoadFailed, encode_frame, from_worker_decoder

_WORKER = """
import runpy
from inferd.errors import ModelLoadError
from inferd.machine import gpus
from inferd.worker import main as module

def refuse(name, config, *_):
    raise ModelLoadError(f"would load to {config.device}")

gpus.num_gpus = lambda: 4
module.main.__defaults__ = (None, refuse)
runpy.run_module("inferd.worker", run_name="__main__")
"""


def test_the_ranks_of_a_replica_get_the_gpus_behind_those_of_the_one_before() -> None:
    ours, theirs = socket.socketpair()
    arguments = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--name", "m/1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    worker = subprocess.Popen([sys.executable, "-c", _WORKER, *arguments], pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    frames: Frames[FromWorker] = Frames(from_worker_decoder)
    with ours:
        ours.settimeout(60)
        try:
            model = ModelConfig(source="m", device="cuda", parallel=ParallelConfig(tensor=2))
            ours.sendall(encode_frame([Load("m", model, replica=1)]))
            while not (
                failed := [
                    message
                    for messages in frames.feed(ours.recv(65536))
                    for message in messages
                    if isinstance(message, LoadFailed)
                ]
            ):
                pass
            assert failed[0].failure.message == "would load to cuda:2"
        finally:
            worker.kill()
            worker.wait()
