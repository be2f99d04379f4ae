"""The classic claims of inference servers, reproduced: ``python -m bench.claims [NAME ...]``.

    python -m bench.claims                                 all of them, less than two minutes each
    python -m bench.claims continuous paged --full         two of them, longer
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
    scale = Scale(full=options.full, model=options.model, threads=options.threads, text=options.text)
    options.output.mkdir(parents=True, exist_ok=True)
    all_held = True
    for name in options.names or CLAIMS:
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
