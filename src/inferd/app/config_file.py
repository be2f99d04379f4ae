"""A file that people, editors and orchestrators change: when it has changed, and is whole again.

Knows how files are replaced: in place, by renaming another one over them, by swapping a symbolic link
somewhere on the way (Kubernetes' ConfigMaps). Does not know what is in them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path

Version = tuple[int, int, int, int]


def version(path: Path) -> Version | None:
    """What tells one content from the next, through every link; None while the file is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def is_being_written(path: Path) -> bool:
    """Whether some process has the file open for writing now; False where the system cannot tell.

    Asks the kernel for a read lease, which it grants only while nobody writes, and gives it back.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A writer who comes in this moment must not send us SIGIO, which would end the process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:  # another user's file, or a file system without leases
        return False
    finally:
        os.close(descriptor)
    return False
