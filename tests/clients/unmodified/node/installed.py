"""Which packages from npm are installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

NODE_MODULES = Path(os.environ.get("INFERD_TEST_NODE_MODULES", "node_modules-not-named"))


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a test where Node or one of the packages is not installed."""
    missing = [package for package in packages if not (NODE_MODULES / package / "package.json").is_file()]
    if shutil.which("node") is None:
        missing.append("node")
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}; see make test-clients")
