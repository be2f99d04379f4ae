"""inferd and its peers on the same machine in the same run: ``python -m bench.llm_peers``.

    python -m bench.llm_peers --peers vllm,llama-server,openvino,llama.cpp,transformers --formats bf16,int8,int4 --repeat 3 \\
        --vllm-env ~/peers/vllm --openvino-env ~/peers/openvino --llama-cpp ~/peers/llama.cpp/build/bin --gguf ~/peers/gguf

Through HTTP: inferd, vllm and llama-server under the same load generator (``vllm bench serve`` where --vllm-env is given, else
``inferd bench``): 128 random tokens in, 64 out, at 1, 8 and 32 clients. In process: inferd (``LLM.generate``), openvino, llama.cpp,
transformers (and vllm, named vllm-in-process) on equal waves, with prefill, decode and decode at 4,096 tokens of context. One engine at a time,
in turn, ``--repeat`` times each; before each round the machine's own limits. bench/peers/README.md tells how the peers are made.

Writes DIR/peers.json after every measurement (``--resume`` goes on from there), then peers.md, bandwidth.svg and roofline.svg.
Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.llm_peers import inprocess, servers
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


def machine_limits(threads: int) -> Limits:
    command = [sys.executable, "-m", "bench.llm_peers.limits", "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Limits(**json.loads(done.stdout))


def supports(form: str) -> bool:
    """Whether this inferd computes in the format."""
    from inferd.config import ModelConfig

    return form == "bf16" or "quantization" in ModelConfig.__struct_fields__


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.llm_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder, see bench/make_checkpoint.py")
    parser.add_argument("--peers", default="", help=f"with commas, of {', '.join((*HTTP_PEERS, *IN_PROCESS_PEERS))}")
    parser.add_argument("--formats", default="bf16", help="with commas, of bf16, int8, int4")
    parser.add_argument("--suites", default="http,in-process", help="with commas")
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
    if unknown:
        parser.error(f"neither a peer nor a format: {', '.join(unknown)}")
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
    plan = []
    for form in formats:
        if not supports(form):
            say(f"inferd has no {form} weights yet: left out.")
        ours = [OURS] if supports(form) else []
        if "http" in options.suites.split(","):
            plan += [("http", form, engine) for engine in [*ours, *(p for p in peers if p in HTTP_PEERS)]]
        if "in-process" in options.suites.split(","):
            inside = [*ours, *(p for p in peers if p in IN_PROCESS_PEERS)]
            plan += [("in process", form, engine.removesuffix("-in-process")) for engine in inside]
    options.output.mkdir(parents=True, exist_ok=True)
    kept = options.output / "peers.json"
    limits, runs = _read(kept) if options.resume and kept.exists() else ([], [])
    shape = Shape.of(json.loads((places.model / "config.json").read_text()))
    folder = Path(tempfile.mkdtemp(prefix="inferd-peers-"))
    for number in range(options.repeat):
        if len(limits) <= number:
            limits.append(machine_limits(options.threads))
            say(f"round {number + 1}: {asdict(limits[-1])}")
        for suite, form, engine in plan:
            if sum((run.suite, run.form, run.engine) == (suite, form, engine) for run in runs) > number:
                continue
            say(f"round {number + 1} of {options.repeat}: {suite}, {form}, {engine}")
            try:
                run = _measure(suite, form, engine, places, options, folder)
            except PeerFailed as failure:  # hours of measurements are not lost for one; --resume tries it again
                if engine == OURS:
                    raise SystemExit(str(failure)) from failure
                run = str(failure)
            if isinstance(run, str):
                say(f"  left out: {run}")
                continue
            runs.append(run)
            say("  " + ", ".join(f"{name} {value:.1f}" for name, value in run.figures.items() if "tokens/s" in name))
            kept.write_text(
                json.dumps({"limits": [asdict(x) for x in limits], "runs": [asdict(x) for x in runs]}, indent=1)
            )
    text = tables(runs, limits, shape)
    (options.output / "peers.md").write_text(text)
    found = gathered(runs)
    if any("decode, tokens/s" in figures for figures in found.values()):
        (options.output / "bandwidth.svg").write_text(bandwidth_picture(found, limits, shape))
        (options.output / "roofline.svg").write_text(roofline_picture(found, limits, shape))
    print(text)


def _measure(
    suite: str, form: str, engine: str, places: Places, options: argparse.Namespace, folder: Path
) -> Run | str:
    if suite == "in process":
        return inprocess.measure(engine, form, places, long=not (options.no_long or options.quick))
    start = servers.start_of(engine, form, places, options.port)
    return start if isinstance(start, str) else servers.measure(engine, form, start, places, options.port, folder)


def _read(path: Path) -> tuple[list[Limits], list[Run]]:
    data = json.loads(path.read_text())
    return [Limits(**one) for one in data["limits"]], [Run(**one) for one in data["runs"]]


def _absolute(path: Path | None) -> Path | None:
    return path.expanduser().absolute() if path else None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
