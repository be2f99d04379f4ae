"""``make bench``: what inferd reaches on this machine, with vLLM beside it where there is one.

    make bench                                                    inferd alone
    make bench ARGS='--vllm-env ~/vllm-env --repeat 3'            inferd and vLLM in turn
    make bench ARGS='--model DIR'                                 another checkpoint

The first time, a random checkpoint of Qwen3-0.6B's shape (1.2 GB) is written to build/bench; throughput does
not depend on the values of weights. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=HERE.parent / "build" / "bench" / "qwen3-0.6b-random")
    options, rest = parser.parse_known_args()  # the rest belongs to serve_bench
    if not (options.model / "config.json").exists():
        print(f"writing a random checkpoint to {options.model} (about a minute)", flush=True)
        options.model.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, HERE / "make_checkpoint.py", options.model], check=True)
    command = [sys.executable, HERE / "serve_bench.py", "--model", options.model, *rest]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
