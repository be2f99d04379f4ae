"""What ranks cost: ``python -m bench.ranks [--layers 28] [--rows 1 8] [--rounds 6] [--over memory|gloo]
[--quantization none|int8|int4] [--spin-us 200]``.

A model of Qwen3-0.6B's shape with random weights is divided between two processes of one thread each (``parallel:
{tensor: 2}``). Rounds of decoding steps alternate between ranks that add their partial sums and ranks that keep them,
with the same arithmetic. The difference of the medians, with the time to send the plan of a step, is what a step costs
more; it is compared with gloo's all-reduces of the same sizes, which two processes run with nothing else, and with the
same sums through shared memory, likewise alone. Integers (``--quantization``) are exchanged, not added: gloo's bare
all-gathers and the same parts through shared memory. ``--over gloo``: the ranks add over gloo. Then the resident memory
of each rank (proportional set size) is compared with its share of the weights and of the cache. Prints Markdown. The
bars are 1.3 and 0.4 GB; exit status 1 names what did not hold. Two cores and 4 GB are needed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, FileStore

from bench.report import markdown
from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculationConfig
from inferd.engine import load, runner
from inferd.engine.model.share import Share
from inferd.engine.native_decoder import native_decoder
from inferd.engine.ranks import collectives, lead, peers, rank
from inferd.engine.ranks.peers import GroupPeers, SharedStage, shared_memory
from inferd.native.compiled import kernels
from inferd.types import GenerateRequest, SamplingParams, TokenPrompt

MOST_RATIO: Final = 1.3
MOST_MORE_BYTES: Final = 0.4e9
PROMPT: Final = 16
SHAPE: Final = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
}
_KEEPS: Final = "INFERD_BENCH_KEEPS"  # --spin-us, and a file whose byte says whether ranks keep their partial sums


class SwitchedPeers(GroupPeers):
    """Peers that may keep what they would exchange."""

    keeps: mmap.mmap

    def sum(self, partial: Tensor) -> Tensor:
        return partial + partial if self.keeps[0] else super().sum(partial)

    def gather(self, part: Tensor) -> list[Tensor]:
        return [part] * self._share.tensor if self.keeps[0] else super().gather(part)

    def concat(self, part: Tensor) -> Tensor:
        return torch.cat([part] * self._share.tensor, dim=1) if self.keeps[0] else super().concat(part)

    def collect(self, part: Tensor) -> list[Tensor]:
        return [part] * self._share.tensor if self.keeps[0] else super().collect(part)


class SwitchedDecoder:
    """A rank's layers in one call of the kernels, which may meet themselves alone."""

    def __init__(self, decoder: Any, cache: Any, max_rows: int) -> None:
        group = decoder.peers
        self._joined = self._alone = native_decoder(decoder, cache, max_rows)
        if (meeting := group.meeting) is not None:
            memory = shared_memory(group._share)
            assert memory is not None
            group.meeting = kernels.Meeting(file=memory, offset=0, ranks=1, place=0, spin_s=0, timeout_s=1)
            self._alone = native_decoder(decoder, cache, max_rows)
            group.meeting = meeting
            os.close(memory)

    def forward(self, batch: Any, entering: Tensor | None = None) -> Tensor:
        used = self._alone if SwitchedPeers.keeps[0] else self._joined
        assert used is not None
        return used.forward(batch, entering)


def _switch(path: str, over: str, spin_us: float) -> None:
    """Have a rank look at the file, and add over gloo or through memory."""
    peers.SPIN_S = spin_us / 1e6  # type: ignore[misc]
    with open(path, "r+b") as file:
        SwitchedPeers.keeps = mmap.mmap(file.fileno(), 1)
    collectives.GroupPeers = SwitchedPeers  # type: ignore[misc]
    runner.native_decoder = SwitchedDecoder  # type: ignore[assignment]
    if over == "gloo":
        lead.shared_memory = lambda share: None


class Timed:
    """Seconds that rank 0 takes for the model's part of a step, and for sending its plan."""

    def __init__(self, runner: Any) -> None:
        self.step_s = self.plan_s = 0.0
        self._runner, ranks = runner, runner._ranks
        for name in ("plan", "plan_logits"):
            setattr(ranks, name, self._timing(getattr(ranks, name), "plan_s"))
        self.prepare = self._timing(runner.prepare, "step_s")
        self.compute = self._timing(runner.compute, "step_s")
        self.logits = self._timing(runner.logits, "step_s")

    def _timing(self, method: Any, field: str) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                setattr(self, field, getattr(self, field) + time.perf_counter() - began)

        return timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def started(engine: Any, rows: int) -> None:
    """Begin ``rows`` answers, whose prompts are computed when this returns."""
    sampling = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    for index in range(rows):
        prompt = TokenPrompt(token_ids=[3 + (7 * index + at) % 2000 for at in range(PROMPT)])
        request = GenerateRequest(
            id=f"{rows}-{index}", model="m", prompt=prompt, sampling=sampling, explicit=("max_tokens", "temperature")
        )
        engine.add(engine.prepare(request), time.monotonic())
    begun: set[str] = set()
    while len(begun) < rows:
        begun |= {output.request_id for output in engine.step(time.monotonic())[0] if output.deltas}


def ended(engine: Any, rows: int) -> None:
    for index in range(rows):
        engine.cancel(f"{rows}-{index}")
    while engine.due(time.monotonic()) is not None:
        engine.step(time.monotonic())


def steps(engine: Any, timed: Timed, count: int) -> list[tuple[float, float]]:
    """Seconds of the model's part of each step, and of them for its plan."""
    found = []
    for _ in range(count):
        timed.step_s = timed.plan_s = 0.0
        engine.step(time.monotonic())
        found.append((timed.step_s, timed.plan_s))
    return found


_BARE: Final = """
import sys
from bench.ranks import bare
bare(int(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
"""


def bare(place: int, store: str, quantization: str, memory: int, layers: int, rows: int, count: int) -> None:
    """Prints the median seconds of the exchanges of one step and of gathering its logits: over gloo, and through
    memory."""
    torch.set_num_threads(1)
    joined = GroupPeers(Share(place, 2, 1), FileStore(store, 2), None, 60.0)
    joined.join()
    group: Any = joined._stage._group  # type: ignore[attr-defined]
    shared = SharedStage(Share(place, 2, 1), memory, 60.0)
    hidden, vocab = SHAPE["hidden_size"], SHAPE["vocab_size"]
    embedded = torch.zeros(rows, hidden, dtype=torch.bfloat16)
    partial = torch.zeros(rows, hidden)
    widths = SHAPE["num_attention_heads"] * SHAPE["head_dim"], hidden, SHAPE["intermediate_size"], hidden
    parts = [torch.zeros(rows, width // 2, dtype=torch.bfloat16) for width in widths]
    logits = torch.zeros(rows, vocab // 2)
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        began = time.perf_counter()
        group.allreduce([embedded], AllreduceOptions()).wait()
        for _ in range(layers):
            if quantization == "none":
                for _ in range(2):
                    group.allreduce([partial], AllreduceOptions()).wait()
            else:
                for part in parts:
                    group.allgather([[torch.empty_like(part) for _ in range(2)]], [part]).wait()
        group.allgather([[torch.empty_like(logits) for _ in range(2)]], [logits]).wait()
        taken[0].append(time.perf_counter() - began)
    for _ in range(count):
        began = time.perf_counter()
        shared.sum(partial)
        for _ in range(layers):
            if quantization == "none":
                for _ in range(2):
                    shared.sum(partial)
            else:
                for part in parts:
                    shared.concat(part)
        shared.collect(logits)
        taken[1].append(time.perf_counter() - began)
    if place == 0:
        print(*map(statistics.median, taken))


def bare_s(quantization: str, layers: int, rows: int, count: int) -> tuple[float, float]:
    memory = shared_memory(Share(0, 2, 1))
    assert memory is not None
    with tempfile.TemporaryDirectory() as place:
        words = [
            sys.executable,
            "-c",
            _BARE,
            str(Path(place) / "store"),
            quantization,
            str(memory),
            str(layers),
            str(rows),
            str(count),
        ]
        other = subprocess.Popen([*words[:3], "1", *words[3:]], pass_fds=[memory])
        ran = subprocess.run(
            [*words[:3], "0", *words[3:]], pass_fds=[memory], capture_output=True, text=True, check=True
        )
        other.wait()
    os.close(memory)
    gloo_s, shared_s = map(float, ran.stdout.split())
    return gloo_s, shared_s


def pss_bytes(pid: int) -> int:
    """The memory of a process, with its part of what it shares with others."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])


@contextmanager
def divided(folder: Path, keeps: Path, over: str, quantization: str, spin_us: float) -> Iterator[Any]:
    """An engine of two ranks, whose peers look at ``keeps``."""
    os.environ[_KEEPS] = f"{spin_us}:{keeps}"
    _switch(str(keeps), over, spin_us)
    lead._COMMAND = (sys.executable, "-m", "bench.ranks", "rank")
    config = ModelConfig(
        source=str(folder),
        dtype="bfloat16",
        quantization=quantization,  # type: ignore[arg-type]
        threads=1,
        max_model_len=1024,
        parallel=ParallelConfig(tensor=2),
        kv_cache=KVCacheConfig(memory_bytes=200_000_000),
        scheduler=SchedulerConfig(max_num_seqs=16, prefix_caching=False),
        speculation=SpeculationConfig(method="none"),
    )
    engine = load.create_backend("m", config, lambda *_: None)
    try:
        yield engine
    finally:
        engine.close()


def added(
    engine: Any, keeps: mmap.mmap, quantization: str, layers: int, rows: int, rounds: int
) -> tuple[list[str], float]:
    timed = Timed(engine._runner)
    engine._runner = timed
    taken: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    bare_found = []
    for _ in range(rounds):
        started(engine, rows)
        for kept in (0, 1):
            keeps[0] = kept
            steps(engine, timed, 2)
            taken[kept] += steps(engine, timed, 30)
        time.sleep(0.5)  # until the other rank has computed all that it was sent
        keeps[0] = 0
        ended(engine, rows)
        bare_found.append(bare_s(quantization, layers, rows, 30))
    engine._runner = timed._runner
    summed, kept_s = (statistics.median(step for step, _ in taken[kept]) for kept in (0, 1))
    plan_s = statistics.median(plan for _, plan in taken[0])
    alone_s, shared_s = (statistics.median(found) for found in zip(*bare_found, strict=True))
    more_s = summed - kept_s + plan_s
    cells = [str(rows), *(f"{1000 * value:.2f}" for value in (summed, kept_s, plan_s, more_s, shared_s, alone_s))]
    return [*cells, f"{more_s / alone_s:.2f}"], more_s / alone_s


def memory(engine: Any) -> tuple[list[list[str]], float]:
    held = engine._runner
    pids = (os.getpid(), *held._ranks.pids)
    decoder = held.decoder
    whole = engine.info.memory.weights_bytes
    of_rank = (decoder.weights_bytes, whole - decoder.weights_bytes)
    rows, most = [], 0.0
    for number, (pid, weights) in enumerate(zip(pids, of_rank, strict=True)):
        cache = sum(arena.nbytes for arena in held.cache._arenas)
        resident = pss_bytes(pid)
        more = resident - weights - cache
        most = max(most, more)
        rows.append([str(number), *(f"{value / 1e9:.3f}" for value in (resident, weights, cache, more))])
    return rows, most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--over", choices=["memory", "gloo"], default="memory", help="how the ranks add")
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none", help="of the weights")
    parser.add_argument(
        "--spin-us", type=float, default=1e6 * peers.SPIN_S, help="for which a rank looks before it sleeps"
    )
    words = parser.parse_args()
    torch.set_num_threads(1)
    failed = []
    sizes = {**SHAPE, "num_hidden_layers": words.layers}
    with tempfile.TemporaryDirectory() as place:
        folder, switch = Path(place) / "model", Path(place) / "keeps"
        # In a process of its own, whose memory does not count.
        writes = f"from pathlib import Path; from bench.plan import write_checkpoint; write_checkpoint(Path({str(folder)!r}), {sizes})"
        subprocess.run([sys.executable, "-c", writes], check=True)
        switch.write_bytes(b"\0")
        with divided(folder, switch, words.over, words.quantization, words.spin_us) as engine:
            found = [
                added(engine, SwitchedPeers.keeps, words.quantization, words.layers, rows, words.rounds)
                for rows in words.rows
            ]
            resident, most = memory(engine)
    heads = [
        "rows",
        "step ms",
        "without exchanges ms",
        "plan ms",
        "added ms",
        "bare in memory ms",
        "bare over gloo ms",
        "ratio",
    ]
    print(markdown(heads, [cells for cells, _ in found]))
    print()
    print(markdown(["rank", "resident GB", "weights GB", "cache GB", "beside them GB"], resident))
    if (worst := max(ratio for _, ratio in found)) > MOST_RATIO:
        failed.append(f"a step takes {worst:.2f} times gloo's bare exchanges more; the bar is {MOST_RATIO}")
    if most > MOST_MORE_BYTES:
        failed.append(f"a rank holds {most / 1e9:.2f} GB beside its share; the bar is {MOST_MORE_BYTES / 1e9}")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        del sys.argv[1]
        spin_us, _, keeps = os.environ[_KEEPS].partition(":")
        _switch(keeps, "memory", float(spin_us))  # or over gloo, as rank 0 says
        rank.main()
    sys.exit(main())
