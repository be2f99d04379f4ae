"""Measure gateways in front of one fast upstream: ``python -m bench.gateway``.

    python -m bench.gateway                                      inferd alone
    python -m bench.gateway --gateways inferd,nginx,haproxy      and programs of the system
    python -m bench.gateway --gateways inferd,vllm-router,litellm --peer-env DIR
                                                                  and Python ones of another environment

Each gateway in turn has the first core for itself; the upstream and the load generator (both in
``traffic.cpp``, compiled here) share the second. CPU is what the kernel charged to the gateway's processes. Every figure
of a run comes from the same minutes on the same machine: compare within a run, not between runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

UPSTREAM_PORT = 9100
GATEWAY_PORT = 9200
GATEWAY_CORE, TRAFFIC_CORE = "0", "1"
MODEL = "m"
CHUNKS_PER_S = 50
STREAMS = 256
CONNECTIONS = 64
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Figures:
    """One gateway's results; times in the units of their names."""

    name: str
    start_s: float = 0.0
    memory_mb: float = 0.0
    requests_per_s: float = 0.0
    cpu_us_per_request: float = 0.0
    request_p50_ms: float = 0.0
    request_p99_ms: float = 0.0
    added_p50_ms: float = 0.0
    chunks_per_s: float = 0.0
    cpu_us_per_chunk: float = 0.0
    chunk_p50_ms: float = 0.0
    chunk_p99_ms: float = 0.0
    errors: int = 0
    runs: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Gateway:
    """How a gateway is started in front of the upstream."""

    name: str
    command: list[str]
    files: dict[str, str]
    ready_path: str = "/v1/models"


def gateways(folder: Path, env: Path | None) -> dict[str, Gateway]:
    upstream = f"127.0.0.1:{UPSTREAM_PORT}"

    def peer(program: str) -> str:
        return str(env / "bin" / program) if env is not None else program

    nginx = f"""daemon off; worker_processes 1; error_log /dev/null; pid {folder}/nginx.pid;
events {{ worker_connections 4096; }}
http {{
  access_log {folder}/access.log; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream u {{ server {upstream}; keepalive 512; }}
  server {{
    listen 127.0.0.1:{GATEWAY_PORT} backlog=4096; keepalive_requests 1000000000;
    location / {{ proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""
    haproxy = f"""global
  nbthread 1
  maxconn 8192
defaults
  mode http
  option http-no-delay
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend f
  bind 127.0.0.1:{GATEWAY_PORT}
  default_backend b
backend b
  http-reuse always
  server u {upstream} maxconn 4096
"""
    inferd = f"""server: {{port: {GATEWAY_PORT}}}
models: {{{MODEL}: {{source: "openai:http://{upstream}/v1", remote: {{max_in_flight: 1024}}}}}}
"""
    litellm = f"""model_list:
  - model_name: {MODEL}
    litellm_params: {{model: openai/{MODEL}, api_base: "http://{upstream}/v1", api_key: none}}
"""
    listed = [
        Gateway(
            "inferd",
            [sys.executable, "-m", "inferd", "serve", str(folder / "inferd.yaml")],
            {"inferd.yaml": inferd},
            "/health/ready",
        ),
        Gateway("nginx", ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)], {"nginx.conf": nginx}),
        Gateway("haproxy", ["haproxy", "-f", str(folder / "haproxy.cfg")], {"haproxy.cfg": haproxy}),
        *(
            Gateway(
                f"{family}-router",
                [
                    *(peer("python"), "-m", f"{family}_router.launch_router", "--worker-urls", f"http://{upstream}"),
                    *("--host", "127.0.0.1", "--port", str(GATEWAY_PORT), "--policy", "round_robin"),
                ],
                {},
            )
            for family in ("vllm", "sglang")
        ),
        Gateway(
            "litellm",
            [
                *(
                    "env",
                    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY=true",
                    "LITELLM_LOCAL_MODEL_COST_MAP=True",
                ),
                peer("litellm"),
                "--config",
                str(folder / "litellm.yaml"),
                "--host",
                "127.0.0.1",
                "--port",
                str(GATEWAY_PORT),
            ],
            {"litellm.yaml": litellm},
            "/health/liveliness",
        ),
    ]
    return {gateway.name: gateway for gateway in listed}


def build(folder: Path) -> Path:
    program = folder / "traffic"
    source = Path(__file__).with_name("traffic.cpp")
    subprocess.run([os.environ.get("CXX", "g++"), "-O2", "-std=c++17", "-o", program, source], check=True)
    return program


def bodies(folder: Path) -> tuple[Path, Path]:
    """A chat request of 2 KB, collected and streamed."""
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "word " * 380}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 500, "temperature": 0.7}
    unary, stream = folder / "unary.json", folder / "stream.json"
    unary.write_text(json.dumps(body, separators=(",", ":")))
    stream.write_text(json.dumps({**body, "stream": True}, separators=(",", ":")))
    return unary, stream


@contextlib.contextmanager
def running(command: list[str], core: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(["taskset", "-c", core, *command], stdout=file, stderr=file, start_new_session=True)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in task.read_text().split()]
    return found


def cpu_s(pid: int) -> float:
    ticks = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def memory_mb(pid: int) -> float:
    total = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1])
    return total / 1024


def wait_ready(port: int, path: str, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                if answer.status == 200:
                    return
        except urllib.error.HTTPError as error:
            if error.code in (401, 404):  # it answers, only not this
                return
        except (OSError, TimeoutError):
            pass
        time.sleep(0.005)
    raise SystemExit(f"{process.args!r} did not become ready; its log is kept with --keep.")


def load(
    traffic: Path, port: int, body: Path, connections: int, seconds: float, *, stream: bool = False
) -> dict[str, float]:
    words = ["--port", str(port), "--body", str(body), "--connections", str(connections), "--seconds", str(seconds)]
    if stream:
        words.append("--stream")
    done = subprocess.run(
        ["taskset", "-c", TRAFFIC_CORE, traffic, "load", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measure(gateway: Gateway, folder: Path, traffic: Path, seconds: float, direct_p50_ms: float) -> Figures:
    for name, text in gateway.files.items():
        (folder / name).write_text(text)
    unary, stream = bodies(folder)
    figures = Figures(gateway.name)
    began = time.monotonic()
    with running(gateway.command, GATEWAY_CORE, folder / f"{gateway.name}.log") as process:
        wait_ready(GATEWAY_PORT, gateway.ready_path, process)
        figures.start_s = time.monotonic() - began
        load(traffic, GATEWAY_PORT, unary, CONNECTIONS, 1.0)  # connections are made, code is warm
        single = load(traffic, GATEWAY_PORT, unary, 1, min(seconds, 3.0))
        figures.added_p50_ms = single["p50_ms"] - direct_p50_ms
        before = cpu_s(process.pid)
        many = load(traffic, GATEWAY_PORT, unary, CONNECTIONS, seconds)
        spent = cpu_s(process.pid) - before
        figures.requests_per_s = many["answers"] / many["seconds"]
        figures.cpu_us_per_request = spent / max(1, many["answers"]) * 1e6
        figures.request_p50_ms, figures.request_p99_ms = many["p50_ms"], many["p99_ms"]
        before = cpu_s(process.pid)
        streams = load(traffic, GATEWAY_PORT, stream, STREAMS, seconds, stream=True)
        spent = cpu_s(process.pid) - before
        figures.chunks_per_s = streams["samples"] / streams["seconds"]
        figures.cpu_us_per_chunk = spent / max(1, streams["samples"]) * 1e6
        figures.chunk_p50_ms, figures.chunk_p99_ms = streams["p50_ms"], streams["p99_ms"]
        figures.memory_mb = memory_mb(process.pid)
        figures.errors = int(single["errors"] + many["errors"] + streams["errors"])
        figures.runs = [single, many, streams]
    return figures


def free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise SystemExit(f"Port {port} is in use; stop the other program.") from None


COLUMNS = (
    ("requests_per_s", "requests/s", "{:,.0f}"),
    ("cpu_us_per_request", "CPU us/request", "{:.0f}"),
    ("cpu_us_per_chunk", "CPU us/chunk", "{:.0f}"),
    ("chunks_per_s", "chunks/s", "{:,.0f}"),
    ("chunk_p50_ms", "chunk delay p50 ms", "{:.1f}"),
    ("chunk_p99_ms", "p99 ms", "{:.1f}"),
    ("added_p50_ms", "added p50 ms", "{:.2f}"),
    ("start_s", "start s", "{:.2f}"),
    ("memory_mb", "memory MB", "{:.0f}"),
    ("errors", "errors", "{:d}"),
)


def table(results: list[Figures]) -> str:
    lines = ["| gateway | " + " | ".join(title for _, title, _ in COLUMNS) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for figures in results:
        cells = [form.format(getattr(figures, name)) for name, _, form in COLUMNS]
        lines.append(f"| {figures.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def medians(runs: list[Figures]) -> Figures:
    merged = Figures(runs[0].name, runs=[run for figures in runs for run in figures.runs])
    for name, _, _ in COLUMNS:
        values = [getattr(figures, name) for figures in runs]
        setattr(merged, name, sum(values) if name == "errors" else statistics.median(values))
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", default="inferd", help="comma-separated: " + ", ".join(gateways(Path(), None)))
    parser.add_argument("--peer-env", type=Path, help="virtual environment that has the Python peers")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--repeat", type=int, default=1, help="rounds over all gateways; medians are shown")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--keep", type=Path, help="keep configurations and logs in this folder")
    options = parser.parse_args()
    if (os.cpu_count() or 1) < 2 or shutil.which("taskset") is None:
        raise SystemExit("This needs Linux, two cores and taskset.")
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        traffic = build(folder)
        unary, _ = bodies(folder)
        known = gateways(folder, options.peer_env)
        chosen = options.gateways.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise SystemExit(f"Unknown: {', '.join(unknown)}; there are {', '.join(known)}.")
        free(UPSTREAM_PORT)
        free(GATEWAY_PORT)
        upstream = [
            str(traffic),
            "upstream",
            "--port",
            str(UPSTREAM_PORT),
            "--interval-us",
            str(1_000_000 // CHUNKS_PER_S),
        ]
        rounds: dict[str, list[Figures]] = {name: [] for name in chosen}
        with running(upstream, TRAFFIC_CORE, folder / "upstream.log") as process:
            wait_ready(UPSTREAM_PORT, "/v1/models", process)
            for _ in range(options.repeat):
                direct = load(traffic, UPSTREAM_PORT, unary, 1, 2.0)["p50_ms"]
                for name in chosen:
                    print(f"measuring {name} ...", file=sys.stderr, flush=True)
                    rounds[name].append(measure(known[name], folder, traffic, options.seconds, direct))
        results = [medians(runs) for runs in rounds.values()]
        print(table(results))
        if options.json:
            options.json.write_text(json.dumps([asdict(figures) for figures in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
