"""``python -m inferd.worker``: a worker process, for the supervisor to start."""

from __future__ import annotations

import gc

# What is made while a worker loads stays: looking through all of it again and again is a sixth of the time until it is
# ready. ``inferd.worker.main`` turns the collector on again.
gc.disable()

from inferd.worker.main import main  # noqa: E402

if __name__ == "__main__":
    main()
