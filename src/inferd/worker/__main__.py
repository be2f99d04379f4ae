"""``python -m inferd.worker``: a worker process, for the supervisor to start."""

from __future__ import annotations

from inferd.worker.main import main

if __name__ == "__main__":
    main()
