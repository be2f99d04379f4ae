"""``python -m inferd.worker``: a worker process, for the supervisor to start."""

from __future__ import annotations

import gc

# Objects made while a worker loads stay alive: examining them again and again takes a sixth of the loading time.
# ``inferd.worker.main`` turns the collector on again.
gc.disable()

from inferd.worker.main import main  # noqa: E402

if __name__ == "__main__":
    main()
