"""inferd and vLLM on the same machine in the same run: output tokens/s, time to ready, memory.

    python bench/make_checkpoint.py /tmp/qwen3-0.6b-random
    python bench/serve_bench.py --model /tmp/qwen3-0.6b-random --vllm-env ~/vllm-env --repeat 3

One server at a time, in turn, ``--repeat`` times each; the table shows medians and ratios inferd / vLLM. The load
generator is ``vllm bench serve`` where a vLLM environment is given (bench/peers/README.md tells how to make one),
else ``inferd bench``. Memory is the largest resident set of the server's process tree seen during the load (pages
shared by two processes count twice). Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

LOADS = ((1, 4), (8, 24), (32, 64))  # clients, requests
NAME = "m"


@dataclass(frozen=True, slots=True)
class Load:
    """One load on one server."""

    clients: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    tpot_p50_ms: float


@dataclass(slots=True)
class Run:
    """One start of one server, and what was measured until its stop."""

    server: str
    ready_s: float
    rss_ready_bytes: int
    rss_peak_bytes: int = 0
    tokenize_share: float | None = None  # of the requests' time; inferd only
    loads: list[Load] = field(default_factory=list)


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and all below it."""
    total = 0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


class PeakMemory(threading.Thread):
    """Watches a process tree until told to stop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.done = pid, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            self.peak = max(self.peak, tree_rss(self.pid))


def metric(url: str, name: str) -> float:
    """Sum of a metric's series."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@contextmanager
def serving(
    command: list[str], environment: dict[str, str], probe: str, log: Path, limit_s: float
) -> Iterator[tuple[int, float]]:
    """(process id, seconds until the probe said yes). The whole process group ends with the block."""
    with log.open("w") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=tempfile.gettempdir(),
        )
        try:
            while not answers(probe):
                if process.poll() is not None or time.perf_counter() - began > limit_s:
                    raise SystemExit(f"{' '.join(command)} did not become ready; its output is in {log}")
                time.sleep(0.02)
            yield process.pid, time.perf_counter() - began
        finally:
            for stop, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
                if process.poll() is None:
                    os.killpg(process.pid, stop)
                    try:
                        process.wait(patience)
                    except subprocess.TimeoutExpired:
                        continue


def vllm_load(environment: Path, url: str, model: Path, clients: int, requests: int) -> Load:
    with tempfile.TemporaryDirectory() as folder:
        lengths = ["--random-input-len", "128", "--random-output-len", "64"]
        command = [
            *(str(environment / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", url),
            *(
                "--endpoint",
                "/v1/completions",
                "--model",
                NAME,
                "--tokenizer",
                str(model),
                "--dataset-name",
                "random",
                *lengths,
            ),
            *("--num-prompts", str(requests), "--max-concurrency", str(clients), "--ignore-eos"),
            *("--seed", str(7 + clients)),  # other prompts for each load: no prefix is met again
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99"),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        done = subprocess.run(
            command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != requests:
        raise SystemExit(f"vllm bench serve: {result['completed']} of {requests} requests were answered")
    return Load(clients, result["output_throughput"], result["median_ttft_ms"], result["median_tpot_ms"])


def own_load(url: str, clients: int, requests: int) -> Load:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "inferd", "bench", "--url", url, "--model", NAME, "--concurrency", str(clients)),
            *("--requests", str(requests), "--warmup", "0", "--seed", str(7 + clients), "--output", f"{folder}/result"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"inferd bench failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        run = json.loads((Path(folder) / "result.json").read_text())["runs"][0]
    return Load(clients, run["output_tokens_per_s"], run["ttft"]["p50"] * 1e3, run["tpot"]["p50"] * 1e3)


def measure(server: str, model: Path, vllm_env: Path | None, port: int, extra: list[str], folder: Path) -> Run:
    url = f"http://127.0.0.1:{port}"
    limits = ["--max-model-len", "4096", "--max-num-seqs", "64"]
    if server == "inferd":
        command = [
            sys.executable,
            "-m",
            "inferd",
            "serve",
            str(model),
            "--port",
            str(port),
            "--name",
            NAME,
            *limits,
            *extra,
        ]
        environment, probe = {}, f"{url}/health/ready"
    else:
        assert vllm_env is not None
        command = [
            str(vllm_env / "bin" / "vllm"),
            "serve",
            str(model),
            "--port",
            str(port),
            "--served-model-name",
            NAME,
            *limits,
        ]
        cores = f"0-{(os.cpu_count() or 1) - 1}"
        environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}
        probe = f"{url}/health"
    with serving(command, environment, probe, folder / f"{server}.log", limit_s=600) as (pid, ready_s):
        run = Run(server, ready_s, tree_rss(pid))
        memory = PeakMemory(pid)
        memory.start()
        for clients, requests in LOADS:
            load = (
                vllm_load(vllm_env, url, model, clients, requests)
                if vllm_env is not None
                else own_load(url, clients, requests)
            )
            run.loads.append(load)
            print(f"  {server}: {clients} clients: {load.output_tokens_per_s:.1f} output tokens/s", flush=True)
        memory.done.set()
        memory.join()
        if server == "inferd":
            spent = metric(url, "inferd_tokenize_seconds_total")
            run.tokenize_share = spent / metric(url, "inferd_request_latency_seconds_sum")
            print(f"  inferd: tokenizing took {run.tokenize_share:.2%} of the requests' time", flush=True)
        run.rss_peak_bytes = max(memory.peak, tree_rss(pid))
    return run


def figures(runs: list[Run]) -> dict[str, float]:
    """Medians over the runs of one server, by the name of the row."""
    table = {
        "ready, s": statistics.median(r.ready_s for r in runs),
        "memory when ready, GB": statistics.median(r.rss_ready_bytes for r in runs) / 1e9,
        "memory at most, GB": statistics.median(r.rss_peak_bytes for r in runs) / 1e9,
    }
    for i, (clients, _) in enumerate(LOADS):
        table[f"{clients} clients: output tokens/s"] = statistics.median(r.loads[i].output_tokens_per_s for r in runs)
        table[f"{clients} clients: TTFT p50, ms"] = statistics.median(r.loads[i].ttft_p50_ms for r in runs)
        table[f"{clients} clients: TPOT p50, ms"] = statistics.median(r.loads[i].tpot_p50_ms for r in runs)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder, see bench/make_checkpoint.py")
    parser.add_argument(
        "--vllm-env", type=Path, help="virtual environment with vLLM; without it inferd is measured alone"
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs of each server, in turn")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--json", type=Path, help="where every figure of every run is written")
    parser.add_argument("--inferd-args", default="", help="further flags of inferd serve, in one string")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stopped measurement stops its server
    vllm_env = options.vllm_env.expanduser().absolute() if options.vllm_env else None
    servers = ["inferd", "vllm"] if vllm_env else ["inferd"]
    runs: dict[str, list[Run]] = {server: [] for server in servers}
    folder = Path(tempfile.mkdtemp(prefix="inferd-bench-"))
    for number in range(options.repeat):
        for server in servers:
            print(f"run {number + 1} of {options.repeat}: {server}", flush=True)
            runs[server].append(
                measure(server, options.model.absolute(), vllm_env, options.port, options.inferd_args.split(), folder)
            )
    tables = {server: figures(of_server) for server, of_server in runs.items()}
    if options.json:
        options.json.write_text(
            json.dumps(
                {"medians": tables, "runs": {s: [asdict(r) for r in of_server] for s, of_server in runs.items()}},
                indent=1,
            )
        )
    print("\n| | " + " | ".join(servers) + (" | ratio |" if vllm_env else " |"))
    print("| --- " * (len(servers) + 1 + bool(vllm_env)) + "|")
    for row in tables["inferd"]:
        cells = [f"{tables[server][row]:.2f}" for server in servers]
        if vllm_env:
            cells.append(f"{tables['inferd'][row] / tables['vllm'][row]:.2f}")
        print(f"| {row} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
