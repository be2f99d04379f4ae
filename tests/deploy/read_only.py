"""A command run as the chart's pod runs it: as user 10001, on a root that cannot be written, with three folders that can.

Uses mount namespaces of Linux and needs root. Nothing outside the namespace changes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

USER = 10001
HIDDEN = ("/root", "/tmp", "/home")
"""Folders that other users cannot read, or that the pod has empty ones of."""

_NEEDED = ("unshare", "mount", "setpriv")


def why_not() -> str:
    """Why commands cannot be run like this here; empty: they can."""
    if os.geteuid() != 0:
        return "mount namespaces need root"
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=30, check=False)
    return "" if done.returncode == 0 else "mount namespaces are not allowed here"


def script(command: Sequence[str], readable: Sequence[Path], config: Path, environment: Mapping[str, str]) -> list[str]:
    """The words that run a command. ``readable``: what it reads below folders that are hidden. ``config``: the folder
    that is mounted at /etc/inferd. /var/lib/inferd and /tmp can be written."""
    held = [(f"/mnt/{index}", path) for index, path in enumerate(readable)]
    lines = [
        "set -eu",
        "mount --make-rprivate /",
        "mount -t tmpfs tmpfs /mnt",
        "mkdir /mnt/config",
        f"mount --bind {shlex.quote(str(config))} /mnt/config",
        *(f"mkdir {place}; mount --bind {shlex.quote(str(path))} {place}" for place, path in held),
        *(f"mount -t tmpfs -o mode=1777 tmpfs {folder}" for folder in HIDDEN),
        *(
            f"mkdir -p {shlex.quote(str(path))}; mount --bind {place} {shlex.quote(str(path))}"
            for place, path in held
            if str(path).startswith(tuple(f"{folder}/" for folder in HIDDEN))
        ),
        # /etc and /var/lib of the machine have no such folders, and must get none.
        "mount -t tmpfs tmpfs /srv",
        "mkdir /srv/etc /srv/lib",
        "mount --bind /mnt/config /srv/etc",
        f"mount -t tmpfs -o mode=0770,gid={USER} tmpfs /srv/lib",
        "mount -o remount,bind,ro /",
        "mount -o remount,bind,ro /srv/etc",
        "mount -o remount,ro /srv",
        "mount -o remount,ro /mnt",
        "cd /",
        f"exec setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs --bounding-set=-all -- env -i "
        + " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())
        + f" {shlex.join(command)}",
    ]
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines)]
