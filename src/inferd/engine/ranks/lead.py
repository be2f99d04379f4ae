"""Rank 0's hold of the other ranks: it starts them, sends them the plan of each step, and ends with any of them.

It starts those of its machine. The server starts those on other machines and joins each to a socket here.

A group of ranks lives and dies as one. A rank that dies, hangs or is stopped by a signal leaves the others in the
middle of a sum, so rank 0 ends its process, the system ends the other ranks, and the supervisor starts the replica
anew.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import Source
from inferd.config import ModelConfig
from inferd.engine.cuda.load import device_of
from inferd.engine.model.cuts import AdapterPiece
from inferd.engine.model.share import Share
from inferd.engine.ranks.collectives import CollectivePeers, peers_of
from inferd.engine.ranks.cut import cuts
from inferd.engine.ranks.messages import (
    AdapterPart,
    Begin,
    Failed,
    FromRank,
    GiveBlocks,
    GivenBlocks,
    Loaded,
    LogitsPlan,
    Meet,
    Met,
    Ready,
    Serve,
    StepPlan,
    TakeAdapter,
    TakeBlocks,
    Wire,
    build,
    encoded,
    from_rank,
    send,
)
from inferd.engine.ranks.peers import GroupPeers, shared_memory
from inferd.engine.ranks.post import Line, Post, PostPeers, most_sent_bytes
from inferd.engine.ranks.watch import EXIT_RANK_LOST, LOOK_S, RANK_COMMAND, Report, Stillness, Stopped
from inferd.errors import ModelLoadError
from inferd.native.attention import FlatBatch
from inferd.native.low_rank import LoadedAdapter
from inferd.native.paged_attention import AttentionKind

_COMMAND: tuple[str, ...] = RANK_COMMAND
_CPU = torch.device("cpu")
LEAVE_S = 5.0  # for ranks whose connection was closed

TakeParts = Callable[[list[list[bytes]]], None]
"""Is called with the contents of blocks, by rank (1, 2, ...) and block."""

_log = logging.getLogger("inferd.engine")


def _end_process() -> None:
    for handler in logging.getLogger().handlers:
        handler.close()  # the lines that wait are written
    os._exit(EXIT_RANK_LOST)


def _bytes(tensor: Tensor) -> bytes:
    if not tensor.numel():  # from numpy it has a stride of 0, and cannot be viewed as bytes
        return b""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


class Lead:
    """The other ranks of a replica, for rank 0. Used from the thread that computes, and by threads that watch and
    that read the contents of blocks."""

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        num_threads: int,
        end: Callable[[], None] = _end_process,
        far: str = "",
        leaving: Callable[[str], None] = lambda why: None,
        device: torch.device = _CPU,
    ) -> None:
        """Start the ranks, which begin to load. ``num_threads``: of each; ``end``: ends this process; ``far``: the
        folder with the sockets of the ranks on other machines, by their numbers; empty: there are none; ``leaving``:
        tells the server why the process is about to end, without a full stop; ``device``: of this rank."""
        parallel = config.parallel
        if parallel.machines > 1 and not far:
            raise ModelLoadError(
                f"parallel.machines is {parallel.machines}, but only a server with nodes starts ranks on other "
                "machines. Leave machines out, or serve the model with inferd serve and nodes.listen.",
                param="parallel",
            )
        self.share = Share(0, parallel.tensor, parallel.pipeline)
        self._num_machines = parallel.machines
        self._end, self._leaving, self._timeout_s = end, leaving, config.hang_timeout_s
        self._is_leaving = threading.Event()
        self._losing = threading.Lock()
        self._has_loaded = threading.Event()
        self._waits_for: int | None = None  # the rank, while the model loads
        self.parts: list[Ready] = []  # what the ranks 1, 2, ... have of the KV cache
        # What is called with the parts of blocks that ranks were asked for, in order; False: they were asked for none.
        self._asked: queue.SimpleQueue[tuple[bool, TakeParts] | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None  # of these parts, from the first on
        self._problems: dict[int, str] = {}  # of ranks, while they load: why they were killed, or end
        # Readable by this user alone; within ``far`` it is removed also where this process is killed.
        self.folder = Path(tempfile.mkdtemp(prefix="inferd-ranks-", dir=far or None))
        store = str(self.folder / "store")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Wire] = []
        self._post = Post(0, self.share.count, self._line_ended) if far else None
        if self._post is not None:
            self._post.most_bytes = most_sent_bytes(config, read_config(Source(folder / "config.json")))
        # Of one message to all ranks: between the parts of another, the ranks would wait for each other.
        self._telling = threading.Lock()
        self._adapters: WeakKeyDictionary[LoadedAdapter, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()  # numbers of adapters that were unloaded
        memory: int | None = None
        self._device = device
        self.peers: GroupPeers | CollectivePeers | PostPeers
        try:
            if self._post is None:
                memory = shared_memory(self.share) if device.type == "cpu" else None
                found = FileStore(store, self.share.count)
                self.peers = peers_of(self.share, found, memory, device, config.hang_timeout_s)
            else:
                self.peers = PostPeers(self.share, self._post)
            for rank in range(1, self.share.count):
                wire = self._start(rank, memory) if rank < parallel.per_machine else self._reach(rank, far)
                self._connections.append(wire)
                wire.send_bytes(build().encode())
                send(wire, Begin(config, str(folder), rank, store, memory, num_threads, str(device_of(device, rank))))
        except (OSError, RuntimeError) as error:
            self.close()
            raise ModelLoadError(f"The ranks of the model could not be started: {error}.", param="parallel") from error
        finally:
            if memory is not None:
                os.close(memory)
        if self.share.tensor > 1:
            way = "over gloo" if memory is None else "in memory that they share"
            way = way if device.type == "cpu" else "over NCCL"
            way = way if self._post is None else "through rank 0's connections"
            _log.info("%d ranks of each stage add their parts of a layer %s.", self.share.tensor, way)
        if device.type == "cuda":
            _log.info("Each rank has a CUDA device, from %s on. CUDA graphs are off with ranks.", device)
        threading.Thread(target=self._guard, args=(self._watch_loading,), name="inferd-ranks-load", daemon=True).start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks 1, 2, ..."""
        return tuple(process.pid for process in self._processes)

    def _start(self, rank: int, memory: int | None) -> Wire:
        """Start a rank on this machine."""
        ours, theirs = socket.socketpair()
        line = [] if self._post is None else ["--line", str(rank), str(self.share.count)]
        try:
            process = subprocess.Popen(
                [*_COMMAND, "--fd", str(theirs.fileno()), "--parent", str(os.getpid()), *line],
                pass_fds=[theirs.fileno(), *([] if memory is None else [memory])],
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._processes.append(process)
        return Connection(ours.detach()) if self._post is None else self._line(ours, rank)

    def _reach(self, rank: int, far: str) -> Line:
        """The connection to a rank on another machine, which is started when its node has the model's files."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"{far}/{rank}")
        except OSError:
            connection.close()
            raise
        return self._line(connection, rank)

    def _line(self, connection: socket.socket, rank: int) -> Line:
        assert self._post is not None
        line = Line(connection, rank)
        self._post.add(line)
        return line

    def _line_ended(self, rank: int, why: str) -> None:
        """The connection to a rank ended. While the model loads, the thread that loads it notices that itself."""
        if self._has_loaded.is_set():
            self._lose(why or f"the connection to rank {rank} ended")
        elif why:
            self._problems.setdefault(rank, why)

    def _is_far(self, rank: int) -> bool:
        return rank > len(self._processes)

    def _first_problem(self) -> tuple[int, str] | None:
        """The rank and the sentence of what went wrong first while the model loaded: the rest may follow from it."""
        return next(iter(list(self._problems.items())), None)

    # -- loading ----------------------------------------------------------------------------

    def loaded(self, digest: bytes) -> tuple[int, int]:
        """Wait until every rank has its share: bytes of their weights, and parameters of the stages behind this one.

        ``digest``: of the checkpoint's files as this rank read them. Raises ModelLoadError.
        """
        weights_bytes = parameters = 0
        for rank in range(1, self.share.count):
            match answer := self._answer(rank):
                case Failed(message, param):
                    raise ModelLoadError(f"rank {rank}: {message}", param=param)
                case Loaded():
                    if answer.digest != digest:
                        raise ModelLoadError("The checkpoint's files changed while ranks read them; load it again.")
                    weights_bytes += answer.weights_bytes
                    parameters += answer.num_parameters if rank % self.share.tensor == 0 else 0
        return weights_bytes, parameters

    def _answer(self, rank: int) -> FromRank:
        """What a rank answers. Raises ModelLoadError where it is lost."""
        with self._waiting_for(rank):
            return from_rank(self._connections[rank - 1])

    @contextmanager
    def _waiting_for(self, rank: int) -> Iterator[None]:
        """While the model loads, a rank that does not go on is lost. Raises ModelLoadError in place of the broken
        connection."""
        self._waits_for = rank
        try:
            yield
        except (EOFError, OSError) as error:
            if self._has_loaded.is_set():
                raise
            lost, problem = self._first_problem() or (rank, "")
            if self._is_far(lost):  # the server knows why, and whether to start the replica anew
                self._lose(problem or f"rank {lost} was lost on its machine while it was loading")
                raise
            if not problem:
                status = self._processes[lost - 1].wait()
                ended = f"ended (exit status {status}; with -9 the system may have lacked memory)"
                problem = f"{self._named(lost)} {ended}"
            raise ModelLoadError(
                f"{problem[0].upper()}{problem[1:]} while the model was loading. The log has what its ranks wrote.",
                param="parallel",
            ) from error
        finally:
            self._waits_for = None

    def _named(self, rank: int) -> str:
        return f"rank {rank} of the model (process {self._processes[rank - 1].pid})"

    def _watch_loading(self) -> None:
        """Until the group has loaded: kill a rank that is stopped, or hangs while it is waited for, so that the
        connection to it breaks."""
        looks = round(self._timeout_s / LOOK_S)
        seen = [(process, Stopped(process.pid), Stillness([process.pid], looks)) for process in self._processes]
        far = [(rank, Stillness([], looks, [reports])) for rank, reports in self._far_reports()]
        while not self._has_loaded.wait(LOOK_S):
            for rank, still in far:
                if still.is_lost(rank if self._waits_for == rank else None):
                    self._lose(f"rank {rank} has not worked for {self._timeout_s:g} s (hang_timeout_s)")
            for rank, (process, stopped, still) in enumerate(seen, 1):
                if stopped.is_lost():
                    self._problems.setdefault(rank, f"{self._named(rank)} was stopped by a signal")
                elif still.is_lost(rank if self._waits_for == rank else None):
                    hangs = f"has not worked for {self._timeout_s:g} s (hang_timeout_s)"
                    self._problems.setdefault(rank, f"{self._named(rank)} {hangs}")
                if rank in self._problems:
                    process.kill()

    def meet(self, attention: AttentionKind, free_bytes: Callable[[], int]) -> int:
        """Meet the ranks; from here on the group lives and dies as one. Bytes that the KV caches of all ranks may take,
        as the memory of every rank allows. ``free_bytes``: gives them by the memory of this one."""
        for rank, connection in enumerate(self._connections, 1):
            with self._waiting_for(rank):
                self._tell(encoded(Meet(attention)), [connection])
        self._has_loaded.set()
        threading.Thread(target=self.watch, name="inferd-ranks", daemon=True).start()
        with self.together():
            self.peers.join()
            found = [free_bytes() * self._num_machines]  # each machine has an equal part
            for answer in map(from_rank, self._connections):
                assert isinstance(answer, Met)
                found += [] if answer.free_bytes is None else [answer.free_bytes]
        if self._device.type == "cpu":  # threads of NCCL look at the file as long as there are groups
            shutil.rmtree(self.folder)  # every rank has met the others
        return min(found)

    def begin(self, num_blocks: int) -> None:
        """Have the ranks make their KV caches."""
        with self.together():
            self._tell(encoded(Serve(num_blocks)), self._connections)
            for answer in map(from_rank, self._connections):
                assert isinstance(answer, Ready)
                self.parts.append(answer)

    @property
    def keep_rows(self) -> bool:
        """Whether all other ranks say ``Runner.keeps_rows``."""
        return bool(self.parts) and all(part.keeps_rows for part in self.parts)

    # -- steps ------------------------------------------------------------------------------

    def cuts(self, num_rows: int) -> list[int]:
        """Where a step is cut into micro-batches for the stages."""
        return cuts(num_rows, self.share.pipeline) if self.peers.cuts_steps else []

    def plan(
        self,
        copies: list[tuple[int, int]],
        by_row: np.ndarray,
        by_sequence: np.ndarray,
        table: np.ndarray,
        batch: FlatBatch,
    ) -> None:
        """Have every rank compute its part of the step. The arrays are those of ``Runner.batch``; ``batch`` has the
        rest."""
        wanted, adapters = batch.output_rows, batch.adapters
        plan = StepPlan(
            [self._forgotten.popleft() for _ in range(len(self._forgotten))],
            copies,
            len(table),
            by_row.tobytes(),
            by_sequence.tobytes(),
            table.tobytes(),
            None if wanted is None else _bytes(wanted),
            [] if adapters is None else [self._adapters[adapter] for adapter in adapters.adapters],
            b"" if adapters is None else adapters.of.numpy().tobytes(),
            list(batch.cuts),
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
            with self._waiting_for(rank):
                self._tell(encoded(TakeAdapter(number, adapter.name, adapter.identity, parts)), [connection])
        self._adapters[adapter] = number
        weakref.finalize(adapter, self._forgotten.append, number)

    # -- blocks -----------------------------------------------------------------------------

    def read_blocks(self, blocks: list[int], then: TakeParts) -> None:
        """Call ``then``, in a thread, with the contents that the blocks have between the last step and the next one.
        No step waits for it: a rank sends its part when it has computed the last one."""
        with self.together():
            self._tell(encoded(GiveBlocks(blocks)), self._connections)
        self._ask(is_awaited=True, then=then)

    def after_reads(self, then: Callable[[], None]) -> None:
        """Call ``then``, in a thread, after the contents of all reads so far."""
        self._ask(is_awaited=False, then=lambda parts: then())

    def write_blocks(self, blocks: list[int], parts: list[list[bytes]]) -> None:
        """Have every rank write its part of blocks before the next step. ``parts``: the contents, by rank and block."""
        with self.together():
            for connection, contents in zip(self._connections, parts, strict=True):
                self._tell(encoded(TakeBlocks(blocks, contents)), [connection])

    def _ask(self, *, is_awaited: bool, then: TakeParts) -> None:
        self._asked.put((is_awaited, then))
        if self._reader is None:
            arguments = (self._read_parts, "reading blocks of its ranks failed")
            self._reader = threading.Thread(target=self._guard, args=arguments, name="inferd-ranks-blocks", daemon=True)
            self._reader.start()

    def _read_parts(self) -> None:
        """Read the parts of blocks that ranks were asked for, which every rank sends in the order of the questions."""
        while (asked := self._asked.get()) is not None:
            is_awaited, then = asked
            parts: list[list[bytes]] = []
            for rank, connection in enumerate(self._connections if is_awaited else [], 1):
                try:
                    given = from_rank(connection)
                except (EOFError, OSError):
                    self._lose(self._ended_rank() or f"the connection to rank {rank} ended")
                    return
                assert isinstance(given, GivenBlocks)
                parts.append(given.contents)
            then(parts)

    def _tell(self, message: bytes, to: list[Wire]) -> None:
        with self._telling:
            for connection in to:
                connection.send_bytes(message)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A failure within ends the group: the ranks no longer agree on what is computed next."""
        try:
            yield
        except Exception as error:
            why = "rank 0 failed in a step"
            if self._post is None:
                why = self._ended_rank() or why
            elif isinstance(error, EOFError | OSError):
                # A connection ended. The thread that reads it has told why, unless the model was loading until then.
                _, why = self._first_problem() or (0, str(error))
            self._lose(why, error)
            raise

    # -- the end ----------------------------------------------------------------------------

    def _ended_rank(self) -> str:
        """The rank that has ended, where a connection to one broke; empty: none has."""
        time.sleep(LOOK_S)  # the system closes the connections of a process before it tells its end
        return next((why for why in map(self._end_of, range(1, self.share.count)) if why), "")

    def _end_of(self, rank: int) -> str:
        """How a rank of this machine ended; empty: it has not."""
        process = self._processes[rank - 1]
        status = process.poll()
        return "" if status is None else f"rank {rank} (process {process.pid}) ended with status {status}"

    def watch(self) -> None:
        """Until the group is closed, or a rank is lost."""
        self._guard(self._look_at_ranks)

    def _guard(self, run: Callable[[], None], failed: str = "the watch of its ranks failed") -> None:
        """A thread of the group's. Without its watch, a lost rank would hold up the group for ever."""
        try:
            run()
        except Exception as error:
            self._lose(failed, error)

    def _look_at_ranks(self) -> None:
        stopped = [Stopped(process.pid) for process in self._processes]
        stillness = Stillness(self.pids, far=[reports for _, reports in self._far_reports()])
        while not self._is_leaving.wait(LOOK_S):
            for rank, (process, look) in enumerate(zip(self._processes, stopped, strict=True), 1):
                if why := self._end_of(rank):
                    self._lose(why)
                elif look.is_lost():
                    self._lose(f"rank {rank} (process {process.pid}) is stopped")
            if stillness.is_lost(self._waits_in()):
                self._lose("no rank works on the step that rank 0 waits for: one hangs, or a connection is cut")

    def _far_reports(self) -> list[tuple[int, Callable[[], Report]]]:
        """Of each rank on another machine, what gives its last report."""
        lines = [] if self._post is None else [line for rank, line in self._post.lines.items() if self._is_far(rank)]
        return [(line.other, lambda line=line: line.report) for line in lines]  # type: ignore[misc]

    def _waits_in(self) -> Hashable | None:
        """What tells the meeting that this rank waits in from others, and from itself with more of a tensor."""
        if self._post is None or self._post.waits_in is None:
            return self.peers.waits_in
        return self._post.waits_in, self._post.num_reads

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
                shutil.rmtree(self.folder, ignore_errors=True)
                self._leaving(why)
            finally:  # whatever fails above, a group without one of its ranks must not stay
                self._end()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._is_leaving.set()
        self._has_loaded.set()
        self._asked.put(None)
        if self._reader is not None:
            self._reader.join(LEAVE_S)  # a rank would not notice that a connection is closed which a thread still reads
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
