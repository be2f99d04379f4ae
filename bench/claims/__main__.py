"""The classic claims of inference servers, reproduced: ``python -m bench.claims [NAME ...]``.

    python -m bench.claims                                 all of them, less than a minute each
    python -m bench.claims continuous paged --full         two of them, longer (all: ten minutes)
    python -m bench.claims prefix --model DIR              on another model than the bundled one

Each is measured against its baseline in the same run: the same engine with the feature off, or driven as servers without it
are. Writes DIR/NAME.json, .md and .svg, and exit status 1 when a claim did not hold.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from bench.claims.claim import NotYetError, Scale

CLAIMS = ("continuous", "paged", "prefix", "quantisation", "speculation", "window")


def bar(share: float, seconds: float, what: str) -> str:
    """A line that says how far it is, where the time went and what comes."""
    filled = round(share * 20)
    return f"[{'#' * filled}{'.' * (20 - filled)}] {share:4.0%} {seconds:4.0f} s  {what}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLAIMS)}; all when none is given")
    parser.add_argument("--model", default="demo", help="a checkpoint folder or demo")
    parser.add_argument("--text", type=Path, help="a text for perplexity; the bundled one otherwise")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="more requests and rounds")
    parser.add_argument("--output", type=Path, default=Path("claims"), help="folder that is written to")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CLAIMS]
    if unknown:
        parser.error(f"no such claim: {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    names, all_held, started = options.names or CLAIMS, True, time.perf_counter()
    for number, name in enumerate(names):

        def show(share: float, what: str, number: int = number, name: str = name) -> None:
            print(bar((number + share) / len(names), time.perf_counter() - started, f"{name}: {what}"), file=sys.stderr)

        scale = Scale(options.full, options.model, options.threads, options.text, show)
        scale.say(0, 1, "starting")
        began = time.perf_counter()
        try:
            claim = importlib.import_module(f"bench.claims.{name}").measure(scale)
        except NotYetError as missing:
            print(f"{name}: left out, {missing}\n", flush=True)
            continue
        claim.write(options.output)
        all_held &= all(held for held, _ in claim.verdicts)
        print(f"{claim.text()}\n({time.perf_counter() - began:.0f} s)\n", flush=True)
    return 0 if all_held else 1


if __name__ == "__main__":
    sys.exit(main())
