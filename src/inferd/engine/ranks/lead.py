"""Rank 0's hold of the other ranks: it starts them, sends them the plan of each step, and ends with any of them.

A group of ranks lives and dies as one. A rank that dies, hangs or is stopped by a signal leaves the others in the
middle of a sum, so rank 0 ends its process, the system ends the other ranks, and the supervisor starts the replica
anew.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from inferd.config import ModelConfig
from inferd.engine.model.cuts import AdapterPiece
from inferd.engine.model.share import Share
from inferd.engine.ranks.messages import (
    AdapterPart,
    Begin,
    Failed,
    Loaded,
    LogitsPlan,
    Serve,
    StepPlan,
    TakeAdapter,
    encoded,
    from_rank,
    send,
)
from inferd.engine.ranks.peers import GlooPeers
from inferd.engine.ranks.watch import LOOK_S, Stillness, Stopped
from inferd.errors import ModelLoadError
from inferd.native.attention import FlatBatch
from inferd.native.low_rank import LoadedAdapter
from inferd.native.paged_attention import AttentionKind

EXIT_RANK_LOST = 6
# -P: a rank started in a model's folder must not import what lies there.
_COMMAND = (sys.executable, "-P", "-m", "inferd.engine.ranks.rank")
LEAVE_S = 5.0  # for ranks whose connection was closed

_log = logging.getLogger("inferd.engine")


def _end_process() -> None:
    for handler in logging.getLogger().handlers:
        handler.close()  # the lines that wait are written
    os._exit(EXIT_RANK_LOST)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Lead:
    """The other ranks of a replica, for rank 0. Used from the thread that computes, and by a thread that watches."""

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        num_threads: int,
        end: Callable[[], None] = _end_process,
    ) -> None:
        """Start the ranks, which begin to load. ``num_threads``: of each; ``end``: ends this process."""
        self.share = Share(0, config.parallel.tensor, config.parallel.pipeline)
        self._end = end
        self._is_leaving = threading.Event()
        self._losing = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="inferd-ranks-"))  # readable by this user alone
        store = str(self._folder / "store")
        self.peers = GlooPeers(self.share, FileStore(store, self.share.count), config.hang_timeout_s)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        # Of one message to all ranks: between the parts of another, the ranks would wait for each other.
        self._telling = threading.Lock()
        self._adapters: WeakKeyDictionary[LoadedAdapter, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()  # numbers of adapters that were unloaded
        try:
            for rank in range(1, self.share.count):
                self._start()
                begin = Begin(config, str(folder), rank, store, num_threads)
                send(self._connections[-1], begin)
        except OSError as error:
            self.close()
            raise ModelLoadError(f"The ranks of the model could not be started: {error}.", param="parallel") from error

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks 1, 2, ..."""
        return tuple(process.pid for process in self._processes)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [*_COMMAND, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))

    # -- loading ----------------------------------------------------------------------------

    def loaded(self, digest: bytes) -> tuple[int, int]:
        """Wait until every rank has its share: bytes of their weights, and parameters of the stages behind this one.

        ``digest``: of the checkpoint's files as this rank read them. Raises ModelLoadError.
        """
        weights_bytes = parameters = 0
        for rank, connection in enumerate(self._connections, 1):
            try:
                answer = from_rank(connection)
            except (EOFError, ConnectionError):
                status = self._processes[rank - 1].wait()
                raise ModelLoadError(
                    f"Rank {rank} of the model ended while it was loading (exit status {status}); with -9 the system "
                    "may have lacked memory. The log has what it wrote.",
                    param="parallel",
                ) from None
            match answer:
                case Failed(message, param):
                    raise ModelLoadError(f"rank {rank}: {message}", param=param)
                case Loaded():
                    if answer.digest != digest:
                        raise ModelLoadError("The checkpoint's files changed while ranks read them; load it again.")
                    weights_bytes += answer.weights_bytes
                    parameters += answer.num_parameters if rank % self.share.tensor == 0 else 0
        return weights_bytes, parameters

    def begin(self, num_blocks: int, attention: AttentionKind) -> None:
        """Have the ranks make their KV caches, and meet them; from here on the group lives and dies as one."""
        self._tell(encoded(Serve(num_blocks, attention)), self._connections)
        threading.Thread(target=self.watch, name="inferd-ranks", daemon=True).start()
        with self.together():
            self.peers.join()
            for connection in self._connections:
                from_rank(connection)
        shutil.rmtree(self._folder)  # every rank has met the others

    # -- steps ------------------------------------------------------------------------------

    def plan(self, copies: list[tuple[int, int]], batch: FlatBatch) -> None:
        """Have every rank compute its part of the step."""
        by_row = torch.stack((batch.token_ids, batch.positions, batch.slots))
        wanted, adapters = batch.output_rows, batch.adapters
        plan = StepPlan(
            [self._forgotten.popleft() for _ in range(len(self._forgotten))],
            copies,
            batch.num_sequences,
            by_row.numpy().tobytes(),
            torch.cat((batch.query_start, batch.seq_len)).numpy().tobytes(),
            batch.block_table.numpy().tobytes(),
            None if wanted is None else wanted.numpy().tobytes(),
            [] if adapters is None else [self._adapters[adapter] for adapter in adapters.adapters],
            b"" if adapters is None else adapters.of.numpy().tobytes(),
        )
        self._tell(encoded(plan), self._connections)

    def plan_logits(self, hidden: Tensor) -> None:
        """Have the ranks of the first stage compute their part of the logits of ``hidden`` [R, H]."""
        of_stage = self._connections[: self.share.tensor - 1]
        if of_stage:
            plan = LogitsPlan(_bytes(hidden))
            self._tell(encoded(plan), of_stage)

    def give(self, adapter: LoadedAdapter, pieces: Callable[[Share], Iterable[AdapterPiece]]) -> None:
        """Give every rank its part of an adapter. Called from the thread that loads adapters."""
        number = next(self._numbers)
        for rank, connection in enumerate(self._connections, 1):
            share = Share(rank, self.share.tensor, self.share.pipeline)
            parts = [
                AdapterPart(
                    piece.layer,
                    piece.product,
                    piece.first,
                    len(piece.a),
                    piece.scale,
                    _bytes(piece.a),
                    _bytes(piece.b),
                )
                for piece in pieces(share)
            ]
            self._tell(encoded(TakeAdapter(number, adapter.name, adapter.identity, parts)), [connection])
        self._adapters[adapter] = number
        weakref.finalize(adapter, self._forgotten.append, number)

    def _tell(self, message: bytes, to: list[Connection]) -> None:
        with self._telling:
            for connection in to:
                connection.send_bytes(message)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A failure within ends the group: the ranks no longer agree on what is computed next."""
        try:
            yield
        except Exception as error:
            self._lose("rank 0 failed in a step", error)
            raise

    # -- the end ----------------------------------------------------------------------------

    def watch(self) -> None:
        """Until the group is closed, or a rank is lost."""
        stopped = [Stopped(process.pid) for process in self._processes]
        stillness = Stillness(self.pids)
        while not self._is_leaving.wait(LOOK_S):
            for rank, (process, look) in enumerate(zip(self._processes, stopped, strict=True), 1):
                status = process.poll()
                if status is not None:
                    self._lose(f"rank {rank} (process {process.pid}) ended with status {status}")
                elif look.is_lost():
                    self._lose(f"rank {rank} (process {process.pid}) is stopped")
            if stillness.is_lost(self.peers.waits_in):
                self._lose("no rank works on the step that rank 0 waits for: one hangs, or a connection is cut")

    def _lose(self, why: str, error: Exception | None = None) -> None:
        # A second thread that sees the loss waits for the end: an error that it raised would be an answer to requests,
        # which another replica, or this one when it is back, can still serve.
        with self._losing:
            if self._is_leaving.is_set():
                return
            self._is_leaving.set()
            try:
                _log.critical("%s; the replica ends with all its ranks", why, exc_info=error)
                self._kill()
                shutil.rmtree(self._folder, ignore_errors=True)
            finally:  # whatever fails above, a group without one of its ranks must not stay
                self._end()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._is_leaving.set()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
