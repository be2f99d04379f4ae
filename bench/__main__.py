"""``make bench``: what inferd reaches on this machine, and the classic claims against their baselines.

    make bench                                              the model server alone, then every claim
    make bench ARGS='server --repeat 3'                     the model server alone, as bench.llm_peers measures it
    make bench ARGS='claims continuous paged'               some claims (bench.claims)
    make bench ARGS='peers --peers vllm --vllm-env DIR'     beside other engines (bench.llm_peers)
    make bench ARGS='replay TRACE ...'                      real traffic through the scheduler (bench.prefix_replay)

The first time, a random checkpoint of Qwen3-0.6B's shape (1.2 GB) is written to build/bench; throughput does
not depend on the values of weights. Nothing else should run on the machine meanwhile. Results lie in build/bench.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "build" / "bench"
MODEL = FOLDER / "qwen3-0.6b-random"
WORDS = ("server", "claims", "peers", "replay")


def checkpoint() -> list[str]:
    """The flag that names the random checkpoint, which is written when it is not there."""
    if not (MODEL / "config.json").exists():
        print(f"writing a random checkpoint to {MODEL} (about a minute)", flush=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, HERE / "make_checkpoint.py", MODEL], check=True)
    return ["--model", str(MODEL)]


def command(word: str, rest: list[str]) -> list[str]:
    module = {"server": "llm_peers", "peers": "llm_peers", "claims": "claims", "replay": "prefix_replay"}[word]
    flags = ["--output", str(FOLDER / word)]  # what is said later wins
    if module == "llm_peers" and "--model" not in rest:
        flags += checkpoint()
    if word == "server":
        flags += ["--suites", "http", "--repeat", "1"]
    return [sys.executable, "-m", f"bench.{module}", *flags, *rest]


def main() -> int:
    words = sys.argv[1:]
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if words and words[0] not in WORDS:
        print(f"{words[0]!r} is none of {', '.join(WORDS)}.\n\n{__doc__}", file=sys.stderr)
        return 2
    plan = [(words[0], words[1:])] if words else [("server", []), ("claims", [])]
    codes = [subprocess.run(command(word, rest), check=False).returncode for word, rest in plan]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
