"""Packages of npm that the console's tests use and the repository does not have, each checked by its hash."""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest


def fetch(name: str, integrity: str, folder: Path) -> Path:
    """Unpack a package, such as axe-core@4.14.1, below ``folder``. Skips the test where npm does not give it."""
    if shutil.which("npm") is None:
        pytest.skip(f"npm is not installed: {name} comes from it")
    folder.mkdir(parents=True)
    done = subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm did not give {name}: {done.stderr[:200]}")
    (tarball,) = folder.glob("*.tgz")
    content = tarball.read_bytes()
    assert "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode() == integrity, name
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"
