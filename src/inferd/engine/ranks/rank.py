"""A rank other than 0: ``python -m inferd.engine.ranks.rank --fd N --parent PID``, started by rank 0.

It loads its share of the model, receives the plan of each step and computes its part of it. It ends with rank 0: the
system kills it when rank 0 dies, and it leaves when the connection is closed. It kills a rank 0 that a signal has
stopped, because the replica would hang.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from inferd.config import ModelConfig
from inferd.engine.model.llama import LlamaDecoder
from inferd.engine.model.load import digest_of_files, load_model
from inferd.engine.model.share import Share
from inferd.engine.ranks.messages import (
    Begin,
    Failed,
    Joined,
    Loaded,
    LogitsPlan,
    Serve,
    StepPlan,
    TakeAdapter,
    from_lead,
    send,
)
from inferd.engine.ranks.peers import GlooPeers
from inferd.engine.ranks.watch import LOOK_S, Stopped
from inferd.engine.runner import Runner
from inferd.errors import ModelLoadError
from inferd.machine.parent import die_with
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.low_rank import AdapterRows, LoadedAdapter, LowRank, low_rank

EXIT_DONE = 0
EXIT_ORPHANED = 2
EXIT_LOAD_FAILED = 3

_CPU = torch.device("cpu")


def load_share(folder: Path, config: ModelConfig, share: Share, store: Store) -> tuple[LlamaDecoder, GlooPeers]:
    """This rank's part of the model, and its way to the others, which it has not joined. Raises ModelLoadError."""
    peers = GlooPeers(share, store, config.hang_timeout_s)
    decoder = load_model(
        folder,
        dtype=config.dtype,
        device=_CPU,
        num_positions=config.max_model_len,
        rope_factors=config.rope_factors,
        quantization=config.quantization,
        share=share,
        peers=peers,
    )
    assert isinstance(decoder, LlamaDecoder), "check_layout() was not asked"
    return decoder, peers


def cache_of(decoder: LlamaDecoder, config: ModelConfig, num_blocks: int) -> KVCache:
    """The KV cache of this rank's heads and layers."""
    part = decoder.part
    return KVCache(
        num_layers=part.num_layers,
        num_blocks=num_blocks,
        block_size=config.kv_cache.block_size,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.head_dim,
        dtype=decoder.dtype,
        device=_CPU,
        in_bytes=config.kv_cache.dtype == "int8",
    )


def batch_of(plan: StepPlan, adapters: Mapping[int, LoadedAdapter]) -> FlatBatch:
    """The arrays of a step, as rank 0 has them."""
    by_row = torch.from_numpy(np.frombuffer(plan.by_row, dtype=np.int64).reshape(3, -1).copy())
    by_sequence = torch.from_numpy(np.frombuffer(plan.by_sequence, dtype=np.int32).copy())
    count = plan.num_sequences
    return FlatBatch(
        token_ids=by_row[0],
        positions=by_row[1],
        query_start=by_sequence[: count + 1],
        seq_len=by_sequence[count + 1 :],
        block_table=torch.from_numpy(np.frombuffer(plan.table, dtype=np.int32).reshape(count, -1).copy()),
        slots=by_row[2],
        num_sequences=count,
        output_rows=None
        if plan.wanted is None
        else torch.from_numpy(np.frombuffer(plan.wanted, dtype=np.int64).copy()),
        adapters=None
        if not plan.adapters
        else AdapterRows(
            [adapters[number] for number in plan.adapters],
            torch.from_numpy(np.frombuffer(plan.adapter_of, dtype=np.int32).copy()),
        ),
    )


def adapter_of(message: TakeAdapter, decoder: LlamaDecoder) -> LoadedAdapter:
    """This rank's part of an adapter, in the layout that the kernels take."""
    parts: dict[tuple[int, int], list[LowRank]] = {}
    for part in message.parts:
        a = torch.frombuffer(bytearray(part.a), dtype=decoder.dtype).view(part.rank, -1)
        b = torch.frombuffer(bytearray(part.b), dtype=decoder.dtype).view(-1, part.rank)
        parts.setdefault((part.layer, part.product), []).append(low_rank(a, b, part.first, part.scale))
    return LoadedAdapter(message.name, message.identity, decoder.part.num_layers, parts)


def hidden_of(plan: LogitsPlan, decoder: LlamaDecoder) -> Tensor:
    """[R, hidden] in the model's number format."""
    return torch.frombuffer(bytearray(plan.hidden), dtype=decoder.dtype).view(-1, decoder.config.hidden_size)


def follow(connection: Connection, runner: Runner, decoder: LlamaDecoder, adapters: dict[int, LoadedAdapter]) -> None:
    """Compute this rank's part of each plan, until rank 0 closes the connection."""
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
                    runner.compute(batch_of(plan, adapters))
                case LogitsPlan():
                    decoder.logits(hidden_of(plan, decoder))
                case TakeAdapter():
                    adapters[plan.number] = adapter_of(plan, decoder)
                case _:
                    raise TypeError(f"{type(plan).__name__} is no plan")


def serve(connection: Connection) -> int:
    """Load what the first message says and follow the plans behind it; the exit code."""
    begin = from_lead(connection)
    assert isinstance(begin, Begin)
    config, parallel = begin.config, begin.config.parallel
    torch.set_num_threads(begin.num_threads)
    share = Share(begin.rank, parallel.tensor, parallel.pipeline)
    folder = Path(begin.folder)
    try:
        decoder, peers = load_share(folder, config, share, FileStore(begin.store, share.count))
        digest = digest_of_files(folder)
    except ModelLoadError as error:
        send(connection, Failed(error.message, error.param))
        return EXIT_LOAD_FAILED
    send(connection, Loaded(digest, decoder.weights_bytes, decoder.num_parameters))
    adapters: dict[int, LoadedAdapter] = {}
    while isinstance(started := from_lead(connection), TakeAdapter):  # those of the configuration
        adapters[started.number] = adapter_of(started, decoder)
    assert isinstance(started, Serve)
    cache = cache_of(decoder, config, started.num_blocks)
    runner = Runner(decoder, cache, started.attention, _CPU, config.scheduler.max_num_batched_tokens)
    peers.join()
    send(connection, Joined())
    follow(connection, runner, decoder, adapters)
    return EXIT_DONE


def _watch(parent: int) -> None:
    """Kill a parent that a signal has stopped; this process then dies with it."""
    stopped = Stopped(parent)
    while True:
        time.sleep(LOOK_S)
        if stopped.is_lost():
            print(f"rank 0 (process {parent}) is stopped; its replica ends", file=sys.stderr, flush=True)
            os.kill(parent, signal.SIGKILL)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="inferd.engine.ranks.rank", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="this end of the connection to rank 0")
    parser.add_argument("--parent", type=int, required=True, help="the process id of rank 0")
    options = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    code = EXIT_ORPHANED
    if die_with(options.parent):
        os.set_inheritable(options.fd, False)
        threading.Thread(target=_watch, args=(options.parent,), name="inferd-watch", daemon=True).start()
        try:
            code = serve(Connection(options.fd))
        except (EOFError, ConnectionError):  # rank 0 has ended
            code = EXIT_ORPHANED
    os._exit(code)  # without waiting for the teardown of the libraries


if __name__ == "__main__":
    main()
