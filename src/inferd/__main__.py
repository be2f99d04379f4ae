"""``python -m inferd``: the command line."""

from __future__ import annotations

import sys

from inferd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
