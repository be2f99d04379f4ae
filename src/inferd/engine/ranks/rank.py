"""A rank other than 0: ``python -m inferd.engine.ranks.rank``, started by rank 0 or, on another machine, by a node.

It loads its share of the model, receives the plan of each step and computes its part of it. It ends with its parent:
the system kills it when that dies, and it leaves when the connection is closed. It kills a rank 0 of its machine that a
signal has stopped, because the replica would hang. On another machine it reports its work to rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import Source
from inferd.config import ModelConfig
from inferd.config.units import bytes_text
from inferd.engine.cuda.fit import part_bytes, refuse_on
from inferd.engine.cuda.load import device_load
from inferd.engine.cuda.load import free_bytes as free_device_bytes
from inferd.engine.model.cuts import Peers
from inferd.engine.model.divided import DividedDecoder
from inferd.engine.model.load import digest_of_files, load_model
from inferd.engine.model.share import Share
from inferd.engine.ranks.collectives import CollectivePeers, peers_of
from inferd.engine.ranks.messages import (
    Begin,
    Failed,
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
    from_lead,
    send,
)
from inferd.engine.ranks.peers import GroupPeers
from inferd.engine.ranks.post import Line, Post, PostPeers, most_sent_bytes, report_work
from inferd.engine.ranks.watch import EXIT_RANK_LOST, LOOK_S, Stopped
from inferd.engine.runner import Runner
from inferd.errors import ModelLoadError
from inferd.machine.memory import available_bytes, rss_bytes
from inferd.machine.parent import die_with
from inferd.machine.placement import num_threads
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.low_rank import AdapterRows, LoadedAdapter, LowRank, low_rank
from inferd.registry.source import check_folder, resolve

EXIT_DONE = 0
EXIT_ORPHANED = 2
EXIT_LOAD_FAILED = 3
EXIT_DEFECT = 1

_CPU = torch.device("cpu")


def load_share(
    folder: Path, config: ModelConfig, share: Share, store: Store, memory: int | None, device: torch.device = _CPU
) -> tuple[DividedDecoder, GroupPeers | CollectivePeers]:
    """This rank's part of the model, and its way to the others, which it has not joined. Raises ModelLoadError.

    ``store``, ``memory``: see ``peers_of``.
    """
    peers = peers_of(share, store, memory, device, config.hang_timeout_s)
    return load_part(folder, config, share, peers, device), peers


def load_part(
    folder: Path, config: ModelConfig, share: Share, peers: Peers, device: torch.device = _CPU
) -> DividedDecoder:
    """This rank's part of the model. Raises ModelLoadError."""
    decoder = load_model(
        folder,
        dtype=config.dtype,
        device=device,
        num_positions=config.max_model_len,
        rope_factors=config.rope_factors,
        quantization=config.quantization,
        share=share,
        peers=peers,
    )
    assert isinstance(decoder, DividedDecoder)
    return decoder


def refuse_more_than_is_free(folder: Path, config: ModelConfig, share: Share, free_bytes: int) -> None:
    """Raises ModelLoadError, before weights are read, where this rank's part of them takes more than ``free_bytes``."""
    need = part_bytes(folder, config, on_cpu=True)(share)
    if need > free_bytes:
        raise ModelLoadError(
            f"its part of the weights takes {bytes_text(need)}, and its machine has {bytes_text(max(0, free_bytes))} "
            "for it. Spread the model over more machines (parallel), or let the node give more memory (inferd node "
            "--memory).",
            param="parallel",
        )


def cache_of(decoder: DividedDecoder, config: ModelConfig, num_blocks: int, *, in_rows: bool = False) -> KVCache:
    """The KV cache of this rank's heads and layers. ``in_rows``: in the layout of Triton's kernels."""
    part = decoder.part
    return KVCache(
        num_layers=part.num_layers,
        num_blocks=num_blocks,
        block_size=config.kv_cache.block_size,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.head_dim,
        dtype=decoder.dtype,
        device=decoder.device,
        in_bytes=config.kv_cache.dtype == "int8",
        in_rows=in_rows,
    )


def batch_of(plan: StepPlan, runner: Runner, adapters: Mapping[int, LoadedAdapter]) -> FlatBatch:
    """The arrays of a step, as rank 0 has them."""
    batch = runner.batch(
        np.frombuffer(plan.by_row, dtype=np.int64).reshape(3, -1).copy(),
        np.frombuffer(plan.by_sequence, dtype=np.int32).copy(),
        np.frombuffer(plan.table, dtype=np.int32).reshape(plan.num_sequences, -1).copy(),
        has_adapters=bool(plan.adapters),
    )
    if plan.wanted is not None:
        batch.output_rows = runner.tensor(np.frombuffer(plan.wanted, dtype=np.int64).copy())
    if plan.adapters:
        batch.adapters = AdapterRows(
            [adapters[number] for number in plan.adapters],
            torch.from_numpy(np.frombuffer(plan.adapter_of, dtype=np.int32).copy()),
        )
    batch.cuts = plan.cuts
    return batch


def adapter_of(message: TakeAdapter, decoder: DividedDecoder) -> LoadedAdapter:
    """This rank's part of an adapter, in the layout that the kernels take."""
    parts: dict[tuple[int, int], list[LowRank]] = {}
    for part in message.parts:
        a = torch.frombuffer(bytearray(part.a), dtype=decoder.dtype).view(part.rank, -1).to(decoder.device)
        b = torch.frombuffer(bytearray(part.b), dtype=decoder.dtype).view(-1, part.rank).to(decoder.device)
        parts.setdefault((part.layer, part.product), []).append(low_rank(a, b, part.first, part.scale))
    return LoadedAdapter(message.name, message.identity, decoder.part.num_layers, parts)


def hidden_of(plan: LogitsPlan, decoder: DividedDecoder) -> Tensor:
    """[R, hidden] in the model's number format."""
    hidden = torch.frombuffer(bytearray(plan.hidden), dtype=decoder.dtype)
    return hidden.view(-1, decoder.config.hidden_size).to(decoder.device)


def follow(connection: Wire, runner: Runner, decoder: DividedDecoder, adapters: dict[int, LoadedAdapter]) -> None:
    """Compute this rank's part of each plan, and give and take its part of blocks, until rank 0 closes the connection.
    Raises OSError where rank 0 has ended."""
    with torch.inference_mode():
        while True:
            try:
                plan = from_lead(connection)
            except EOFError:
                return
            match plan:
                case StepPlan():
                    for number in plan.forgotten:
                        del adapters[number]
                    runner.cache.copy_blocks(plan.copies)
                    runner.compute(batch_of(plan, runner, adapters))
                case LogitsPlan():
                    decoder.logits(hidden_of(plan, decoder))
                case TakeAdapter():
                    adapters[plan.number] = adapter_of(plan, decoder)
                case GiveBlocks(blocks):
                    send(connection, GivenBlocks(runner.cache.read_blocks(blocks)))
                case TakeBlocks(blocks, contents):
                    runner.cache.write_blocks(blocks, contents)
                case _:
                    raise TypeError(f"{type(plan).__name__} is no plan")


class Elsewhere(NamedTuple):
    """What a rank on another machine than rank 0 is told by its node. ``ranks``: how many of its group are there."""

    source: str  # of the model, as that machine has it
    memory_bytes: int  # that the node gives
    threads: int = 0  # 0: by the cores of that machine

    def given_bytes(self, ranks: int) -> int:
        """What is left of this rank's equal part of the memory that the node gives."""
        return self.memory_bytes // ranks - rss_bytes(os.getpid())

    def free_bytes(self, ranks: int) -> int:
        """Memory that the ranks may still take together; the last one that has loaded says what is true of all."""
        return ranks * min(self.given_bytes(ranks), available_bytes() // ranks)

    def num_threads(self, ranks: int) -> int:
        """Compute threads of this rank."""
        return self.threads or num_threads(ranks)


def refuse(connection: Wire, failed: Failed, elsewhere: Elsewhere | None) -> int:
    """Tell rank 0 why this rank is not part of the group; the exit code.

    A rank on a node stays until rank 0 has ended: the server ends a group with the first rank that does, and rank 0
    reads the answer only when it has its own weights.
    """
    send(connection, failed)
    if elsewhere is not None:
        with contextlib.suppress(EOFError):
            while True:
                connection.recv_bytes()
    return EXIT_LOAD_FAILED


def serve(connection: Wire, post: Post | None, elsewhere: Elsewhere | None) -> int:
    """Load what the first message says and follow the plans behind it; the exit code.

    ``post``: the way to the other ranks where some are on another machine; None: all are on this one. ``elsewhere``:
    set where rank 0 is on another one. Raises EOFError, OSError where rank 0 has ended.
    """
    expected = connection.recv_bytes().decode()
    if build() != expected:
        remedy = (
            "inferd's files were replaced. Restart the server."
            if elsewhere is None
            else "install the same inferd on its machine, for the same kind of processor."
        )
        failed = Failed(f"it would run {build()}, but rank 0 runs {expected}: {remedy}", None)
        return refuse(connection, failed, elsewhere)
    begin = from_lead(connection)
    assert isinstance(begin, Begin)
    config, parallel = begin.config, begin.config.parallel
    share = Share(begin.rank, parallel.tensor, parallel.pipeline)
    ranks = parallel.per_machine
    torch.set_num_threads(begin.num_threads if elsewhere is None else elsewhere.num_threads(ranks))
    device = torch.device(begin.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what names no device must take no memory of rank 0's
    peers: PostPeers | GroupPeers | CollectivePeers
    try:
        folder = Path(begin.folder) if elsewhere is None else check_folder(resolve(elsewhere.source, _unreported))
        if elsewhere is not None:
            refuse_more_than_is_free(folder, config, share, min(elsewhere.given_bytes(ranks), available_bytes()))
        if device.type == "cuda":
            refuse_on(device, folder, config, share)
        if post is None:
            store = FileStore(begin.store, share.count)
            decoder, peers = load_share(folder, config, share, store, begin.memory, device)
        else:
            post.most_bytes = most_sent_bytes(config, read_config(Source(folder / "config.json")))
            peers = PostPeers(share, post)
            decoder = load_part(folder, config, share, peers)
        digest = digest_of_files(folder)
    except ModelLoadError as error:
        return refuse(connection, Failed(error.message, error.param), elsewhere)
    finally:
        if begin.memory is not None:
            os.close(begin.memory)  # it is mapped
    send(connection, Loaded(digest, decoder.weights_bytes, decoder.num_parameters))
    adapters: dict[int, LoadedAdapter] = {}
    while isinstance(meet := from_lead(connection), TakeAdapter):  # those of the configuration
        adapters[meet.number] = adapter_of(meet, decoder)
    assert isinstance(meet, Meet)
    peers.join()
    gpu, free_bytes = device_load(config, decoder, meet.attention), None
    if gpu is not None or device.type == "cuda":
        free_bytes = free_device_bytes(decoder, gpu)
    elif elsewhere is not None:
        free_bytes = elsewhere.free_bytes(ranks) * parallel.machines
    send(connection, Met(free_bytes))
    started = from_lead(connection)
    assert isinstance(started, Serve)
    cache = cache_of(decoder, config, started.num_blocks, in_rows=gpu is not None)
    on_device = None if gpu is None else gpu.steps(cache, 0)
    runner = Runner(decoder, cache, meet.attention, device, config.scheduler.max_num_batched_tokens, on_device)
    send(connection, Ready(runner.keeps_rows, cache.layout, cache.block_bytes))
    follow(connection, runner, decoder, adapters)
    return EXIT_DONE


def exit_code(connection: Wire, post: Post | None, elsewhere: Elsewhere | None) -> int:
    """Serve until rank 0 has ended, or this rank has ended the connections; the status of this process then."""
    try:
        code = serve(connection, post, elsewhere)
    except (EOFError, ConnectionError):
        code = EXIT_ORPHANED
    return EXIT_RANK_LOST if post is not None and post.problem else code


def _watch(parent: int) -> None:
    """Kill a parent that a signal has stopped; this process then dies with it."""
    stopped = Stopped(parent)
    while True:
        time.sleep(LOOK_S)
        if stopped.is_lost():
            print(f"rank 0 (process {parent}) is stopped; its replica ends", file=sys.stderr, flush=True)
            os.kill(parent, signal.SIGKILL)


def _unreported(phase: str, done: int, total: int) -> None:
    """Progress of files that come from a hub, which the log of the node tells."""


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell what no part of the program has caught, and end. The teardown of the libraries might wait for ranks that
    wait for this one."""
    traceback.print_exception(kind, error, trace)
    os._exit(EXIT_DEFECT)


def main() -> NoReturn:
    sys.excepthook = _end
    parser = argparse.ArgumentParser(prog="inferd.engine.ranks.rank", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="this end of the connection to rank 0")
    parser.add_argument("--parent", type=int, required=True, help="the process id of rank 0, or of the node")
    parser.add_argument("--name", help="the replica, shown in process lists")
    parser.add_argument("--line", type=int, nargs=2, help="its number, and that of all ranks; some are elsewhere")
    parser.add_argument("--source", help="the model on this machine; rank 0 is on another one")
    parser.add_argument("--memory", type=int, default=0, help="bytes that the node gives")
    parser.add_argument("--threads", type=int, default=0, help="to compute with, of a rank with --source")
    options = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    code = EXIT_ORPHANED
    if die_with(options.parent):
        os.set_inheritable(options.fd, False)
        elsewhere = None
        if options.source is not None:
            elsewhere = Elsewhere(options.source, options.memory, options.threads)
        connection: Wire
        if options.line is None:
            post, connection = None, Connection(options.fd)
        else:
            post, connection = Post(*options.line), (line := Line(socket.socket(fileno=options.fd), 0))
            post.add(line)
            if elsewhere is not None:
                threading.Thread(target=report_work, args=(line,), name="inferd-report", daemon=True).start()
        if elsewhere is None:
            threading.Thread(target=_watch, args=(options.parent,), name="inferd-watch", daemon=True).start()
        code = exit_code(connection, post, elsewhere)
    os._exit(code)  # without waiting for the teardown of the libraries


if __name__ == "__main__":
    main()
