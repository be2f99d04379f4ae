"""Print how far each model family's logits are from transformers', on tiny random float32 checkpoints.

    python bench/model_parity.py

One line per family and variant: the largest absolute difference of logits in a whole prefill, in decoding token
by token, in a ragged batch of chunks, and after a cached prefix. Needs ``transformers`` (in the ``dev`` extra).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

FAMILIES = Path(__file__).resolve().parents[1] / "tests" / "engine" / "model" / "families.py"
LIMIT = 1e-4


def main() -> int:
    spec = importlib.util.spec_from_file_location("families", FAMILIES)
    assert spec is not None
    assert spec.loader is not None
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    families = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(families)
    worst = 0.0
    print(f"{'family':<20} {'architecture':<22} {'largest error':>14}   where")
    for name, (_, architecture, _) in families.FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            errors: dict[str, float] = families.largest_error(name, Path(folder))
        where = max(errors, key=lambda check: errors[check])
        worst = max(worst, errors[where])
        print(f"{name:<20} {architecture:<22} {errors[where]:>14.2e}   {where}", flush=True)
    print(f"worst {worst:.2e}, limit {LIMIT:.0e}")
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
