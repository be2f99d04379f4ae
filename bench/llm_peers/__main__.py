"""inferd and its peers on the same machine in the same run: ``python -m bench.llm_peers``.

    python -m bench.llm_peers --peers vllm,llama-server,openvino,llama.cpp,transformers --formats bf16,int8,int4 --repeat 3 \\
        --vllm-env ~/peers/vllm --openvino-env ~/peers/openvino --llama-cpp ~/peers/llama.cpp/build/bin --gguf ~/peers/gguf

Through HTTP: inferd, vllm and llama-server under the same load generator (``vllm bench serve`` where --vllm-env is given, else
``inferd bench``): 128 random tokens in, 64 out, at 1, 8 and 32 clients. In process: inferd (``LLM.generate``), openvino, llama.cpp,
transformers (and vllm, named vllm-in-process) on equal waves, with prefill, decode and decode at 4,096 tokens of context. One engine at a time,
in turn, ``--repeat`` times each; before each round the machine's own limits. Last in a round, inferd's starts by themselves: the first one,
and the second one, which finds its quantised weights kept. bench/peers/README.md tells how the peers are made.

Writes DIR/peers.json, peers.md, bandwidth.svg and roofline.svg after every measurement, so a run that is stopped has its report;
``--resume`` goes on from there. Nothing else should run on the machine meanwhile. Ends with 1 where inferd itself failed in something.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.llm_peers import inprocess, servers, starts
from bench.llm_peers.loads import Load, VllmLoad, own_load
from bench.llm_peers.process import PeerFailed
from bench.llm_peers.servers import Places
from bench.llm_peers.table import (
    FORMATS,
    OURS,
    Limits,
    Run,
    Shape,
    bandwidth_picture,
    gathered,
    roofline_picture,
    tables,
)

HTTP_PEERS = ("vllm", "llama-server")
IN_PROCESS_PEERS = ("openvino", "llama.cpp", "transformers", "vllm-in-process")
SUITES = ("http", "in-process", "start")
LOADS = "1:4,8:24,32:64"
# Seconds of one measurement, before this run has its own: two cores of a 2026 server, a model of 0.6B.
EXPECTED_S = {
    ("http", OURS): 60.0,
    ("http", "llama-server"): 115.0,
    ("http", "vllm"): 120.0,
    ("in process", OURS): 70.0,
    ("in process", "openvino"): 50.0,
    ("in process", "llama.cpp"): 70.0,
    ("in process", "transformers"): 90.0,
    ("in process", "vllm"): 150.0,
    ("start", OURS): 25.0,
}


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to measure, once in each round."""

    suite: str  # as in Run
    form: str
    engine: str

    def __str__(self) -> str:
        return f"{self.suite}, {self.form}, {self.engine}"

    def of(self, runs: Sequence[Run]) -> list[Run]:
        return [run for run in runs if (run.suite, run.form, run.engine) == (self.suite, self.form, self.engine)]

    def expected_s(self, runs: Sequence[Run]) -> float:
        """As long as its last time."""
        took = [run.took_s for run in self.of(runs) if run.took_s]
        return took[-1] if took else EXPECTED_S[self.suite, self.engine]


def machine_limits(threads: int) -> Limits:
    command = [sys.executable, "-m", "bench.llm_peers.limits", "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Limits(**json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.llm_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder, see bench/make_checkpoint.py")
    parser.add_argument("--peers", default="", help=f"with commas, of {', '.join((*HTTP_PEERS, *IN_PROCESS_PEERS))}")
    parser.add_argument("--formats", default="bf16", help="with commas, of bf16, int8, int4")
    parser.add_argument("--suites", default=",".join(SUITES), help="with commas")
    parser.add_argument(
        "--loads", default=LOADS, help="clients:requests with commas, through HTTP (default: %(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--vllm-env", type=Path, help="virtual environment with vLLM; also the load generator")
    parser.add_argument("--openvino-env", type=Path, help="virtual environment with openvino-genai")
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama-server and llama-batched-bench")
    parser.add_argument("--gguf", type=Path, help="folder with m-bf16.gguf, m-f16.gguf, m-q8_0.gguf, m-q4_0.gguf")
    parser.add_argument("--vllm-checkpoint", action="append", default=[], help="FORMAT=DIR, for formats but bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-long", action="store_true", help="leave out 4,096 tokens of context")
    parser.add_argument("--quick", action="store_true", help="a few requests, to see that everything works")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--inferd-args", default="", help="further flags of inferd serve, in one string")
    parser.add_argument("--output", type=Path, default=Path("peers"), help="folder that is written to")
    parser.add_argument("--resume", action="store_true", help="keep what DIR/peers.json has and measure the rest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stopped measurement stops its server
    peers = [peer for peer in options.peers.split(",") if peer]
    formats = options.formats.split(",")
    unknown = [p for p in peers if p not in HTTP_PEERS + IN_PROCESS_PEERS] + [f for f in formats if f not in FORMATS]
    unknown += [suite for suite in options.suites.split(",") if suite not in SUITES]
    if unknown:
        parser.error(f"neither a peer nor a format nor a suite: {', '.join(unknown)}")
    places = Places(
        model=options.model.expanduser().absolute(),
        vllm=_absolute(options.vllm_env),
        openvino=_absolute(options.openvino_env),
        llama_cpp=_absolute(options.llama_cpp),
        gguf=_absolute(options.gguf),
        vllm_checkpoints=tuple(
            (form, Path(path)) for form, _, path in (c.partition("=") for c in options.vllm_checkpoint)
        ),
        inferd_args=tuple(options.inferd_args.split()),
        threads=options.threads,
        quick=options.quick,
    )
    plan = planned(formats, options.suites.split(","), peers)
    options.output.mkdir(parents=True, exist_ok=True)
    report = Report(options.output, Shape.of(json.loads((places.model / "config.json").read_text())))
    if options.resume:
        report.read()
    folder = Path(tempfile.mkdtemp(prefix="inferd-peers-"))
    say(f"logs: {folder}")
    with ExitStack() as stack:
        load: Load = own_load
        if places.vllm is not None and any(item.suite == "http" for item in plan):
            load = stack.enter_context(VllmLoad(places.vllm, places.model, folder))
            load.warm()
        loads = servers.QUICK_LOADS if places.quick else loads_of(options.loads)
        hosts = stack.enter_context(servers.Servers(places, options.port, folder, load, loads))

        def measure(item: Item, number: int) -> Run | str:
            if item.suite == "http":
                return hosts.measure(item.engine, item.form, is_last=number + 1 == options.repeat)
            if item.suite == "start":
                return starts.measure(item.form, places, options.port + 99, folder)
            # A long prompt takes llama.cpp most of a minute and is no goal beside peers: theirs are measured once.
            is_long = not (options.no_long or options.quick) and (item.engine == OURS or number == 0)
            return inprocess.measure(item.engine, item.form, places, long=is_long)

        for number in range(options.repeat):
            if len(report.limits) <= number:
                report.limits.append(machine_limits(options.threads))
                say(f"round {number + 1}: {asdict(report.limits[-1])}")
            for i, item in enumerate(plan):
                if len(item.of(report.runs)) > number:
                    continue
                say(forecast(plan, i, number, options.repeat, report.runs) + f"; now {item}")
                began = time.perf_counter()
                try:
                    run = measure(item, number)
                except (PeerFailed, OSError, ValueError, KeyError) as failure:  # the others' hour is not lost for one
                    run = f"{failure!r}" if not isinstance(failure, PeerFailed) else str(failure)
                    report.failed |= {item}
                if isinstance(run, str):
                    say(f"  left out: {run}")
                    report.left_out[str(item)] = run
                    continue
                report.left_out.pop(str(item), None)
                run = replace(run, took_s=time.perf_counter() - began)
                say(f"  {run.took_s:.0f} s: " + told(run))
                report.add(run)
    print(report.write())
    if any(item.engine == OURS for item in report.failed):
        sys.exit(1)


class Report:
    """What was measured, and its files, which are written anew with each measurement."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.limits: list[Limits] = []
        self.runs: list[Run] = []
        self.left_out: dict[str, str] = {}
        self.failed: set[Item] = set()
        self._folder, self._shape = folder, shape
        self._kept = folder / "peers.json"

    def read(self) -> None:
        """What an earlier run has kept, if there was one."""
        if self._kept.exists():
            data = json.loads(self._kept.read_text())
            self.limits = [Limits(**one) for one in data["limits"]]
            self.runs = [Run(**one) for one in data["runs"]]

    def add(self, run: Run) -> None:
        self.runs.append(run)
        data = {"limits": [asdict(one) for one in self.limits], "runs": [asdict(one) for one in self.runs]}
        self._kept.write_text(json.dumps(data, indent=1))
        self.write()

    def write(self) -> str:
        """The tables, which peers.md has."""
        text = tables(self.runs, self.limits, self._shape, self.left_out)
        (self._folder / "peers.md").write_text(text)
        found = gathered(self.runs)
        if any("decode, tokens/s" in figures for figures in found.values()):
            (self._folder / "bandwidth.svg").write_text(bandwidth_picture(found, self.limits, self._shape))
            (self._folder / "roofline.svg").write_text(roofline_picture(found, self.limits, self._shape))
        return text


def planned(formats: Sequence[str], suites: Sequence[str], peers: Sequence[str]) -> list[Item]:
    """A round, in its order."""
    plan = []
    for suite, inside in (("http", HTTP_PEERS), ("in-process", IN_PROCESS_PEERS), ("start", ())):
        if suite in suites:
            engines = [OURS, *(peer.removesuffix("-in-process") for peer in peers if peer in inside)]
            plan += [Item(suite.replace("-", " "), form, engine) for form in formats for engine in engines]
    return plan


def forecast(plan: Sequence[Item], at: int, number: int, repeat: int, runs: Sequence[Run]) -> str:
    """Where the run is, and about how long the rest of each suite will take."""
    left: dict[str, float] = {}
    for i, item in enumerate(plan):
        rounds = repeat - number - (1 if i < at else 0)
        left[item.suite] = left.get(item.suite, 0.0) + rounds * item.expected_s(runs)
    parts = ", ".join(f"{suite} {seconds / 60:.0f}" for suite, seconds in left.items())
    return f"[{time.strftime('%H:%M:%S')}] round {number + 1} of {repeat}, about {sum(left.values()) / 60:.0f} min left ({parts})"


def told(run: Run) -> str:
    """The figures that say at once whether something is wrong."""
    return ", ".join(
        f"{name} {value:.1f}" for name, value in run.figures.items() if "tokens/s" in name or "start" in name
    )


def loads_of(text: str) -> list[tuple[int, int]]:
    """'8:24' is 24 requests by 8 clients."""
    return [(int(clients), int(requests)) for clients, _, requests in (part.partition(":") for part in text.split(","))]


def _absolute(path: Path | None) -> Path | None:
    return path.expanduser().absolute() if path else None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
