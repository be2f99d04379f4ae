"""Fetch the console's libraries from npm as their README says, and check every hash.

The tables of ``src/inferd/console/assets/vendor/README.md`` are the only list. The tarball must have the integrity of
the first table; its files are written as they are.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

VENDOR = Path(__file__).resolve().parent.parent / "src/inferd/console/assets/vendor"


class Package(NamedTuple):
    name: str
    version: str
    licence: str
    integrity: str


class File(NamedTuple):
    name: str
    package: str
    path: str
    integrity: str


def tables(readme: str) -> tuple[list[Package], list[File]]:
    """The packages and the files that the README names."""
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in readme.splitlines() if "| sha512-" in line
    ]
    # A row of a package has its version in the second cell; a row of a file has the name of a package there.
    packages = [Package(*row) for row in rows if re.fullmatch(r"[0-9.]+", row[1])]
    return packages, [File(*row) for row in rows if not re.fullmatch(r"[0-9.]+", row[1])]


def integrity(content: bytes) -> str:
    """The SHA-512 of a content, as npm writes it."""
    return "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()


def main() -> int:
    packages, files = tables((VENDOR / "README.md").read_text(encoding="utf-8"))
    failures = 0
    for package in packages:
        with tempfile.TemporaryDirectory() as folder:
            name = f"{package.name}@{package.version}"
            subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            (tarball,) = Path(folder).glob("*.tgz")
            if integrity(tarball.read_bytes()) != package.integrity:
                print(f"{name}: the tarball has {integrity(tarball.read_bytes())}; the README has another integrity.")
                failures += 1
                continue
            with tarfile.open(tarball) as archive:
                for file in (file for file in files if file.package == package.name):
                    member = archive.extractfile(f"package/{file.path}")
                    assert member is not None, file
                    content = member.read()
                    (VENDOR / file.name).write_bytes(content)
                    if integrity(content) != file.integrity:
                        print(f"{file.name}: the file has {integrity(content)}; write it into the README.")
                        failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
