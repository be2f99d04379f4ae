"""Messages with their length before them, over a socket."""

from __future__ import annotations

import socket
import struct
from typing import Final

_STATUS: Final = struct.Struct("<Bi")
_MARK: Final = 0xFF  # a byte that no JSON text has
TENANT_BYTES: Final = 16  # a tenant's digest, with which a trial is asked for
_LENGTH: Final = struct.Struct("<Q")


def write_frame(channel: socket.socket, data: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(data)))
    channel.sendall(data)


def read_frame(channel: socket.socket) -> bytes:
    """Raises EOFError where the other end is closed before the message ends."""
    (size,) = _LENGTH.unpack(read_exactly(channel, _LENGTH.size))
    return read_exactly(channel, size)


def read_exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    at = 0
    while at < size:
        count = channel.recv_into(memoryview(data)[at:])
        if not count:
            raise EOFError("The other end of the socket was closed.")
        at += count
    return bytes(data)


def status_frame(status: int) -> bytes:
    """How a process ended: its exit status, or the signal that ended it, negative."""
    return _STATUS.pack(_MARK, status)


def split_status(data: bytes) -> tuple[bytes, int | None]:
    """Everything that was read from a trial: its JSON text, and how its process ended. ``None``: it is not told."""
    if len(data) < _STATUS.size:
        return b"", None
    mark, status = _STATUS.unpack(data[-_STATUS.size :])
    return data[_LENGTH.size : -_STATUS.size], status if mark == _MARK else None
