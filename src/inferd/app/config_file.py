"""A configuration file on disk: whether it has changed, and whether it is complete again.

Knows how files are replaced: by writing in place, by renaming another file over them, or by swapping a symbolic link in
the path (Kubernetes' ConfigMaps). Does not know their contents.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import sys
from pathlib import Path

Version = tuple[int, int, int, int]

REPOSITORY_DEPTH = 3


def version(path: Path) -> Version | None:
    """The identity of a file's content, through every link; None while the file does not exist.

    A folder's is that of its files and folders down to those of a model repository: model/version/file.
    """
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            return _folder_version(path, found)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _folder_version(path: Path, folder: os.stat_result) -> Version:
    count, newest, front = 0, folder.st_mtime_ns, [path]
    for _ in range(REPOSITORY_DEPTH):
        below: list[Path] = []
        for parent in front:
            for entry in os.scandir(parent):
                found = entry.stat()
                count, newest = count + 1, max(newest, found.st_mtime_ns)
                if entry.is_dir():
                    below.append(Path(entry.path))
        front = below
    return folder.st_dev, folder.st_ino, count, newest


def is_being_written(path: Path) -> bool:
    """Whether some process has the file open for writing now; False where the system cannot tell.

    Asks the kernel for a read lease, which it grants only while no process writes, and gives it back.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A writer that opens the file in this moment must not send us SIGIO, which would end the process.
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
