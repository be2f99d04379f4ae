"""vLLM's load generator, kept: ``vllm bench serve`` again and again in one process, which imports it once.

    ENV/bin/python bench/llm_peers/generator.py

Runs in vLLM's environment. Each line of the input is a JSON list of the command's arguments; a line answers when it is done.
Everything that the command prints goes to the error output. Imports nothing of inferd's repository.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm.benchmarks.serve import add_cli_args  # type: ignore[import-not-found, unused-ignore]
    from vllm.benchmarks.serve import main as load
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found, unused-ignore]

    print("ready", file=answers)
    for line in sys.stdin:
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        load(parser.parse_args(json.loads(line)))
        print("done", file=answers)


if __name__ == "__main__":
    main()
