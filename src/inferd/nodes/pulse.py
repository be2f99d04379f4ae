"""Whether the other end of a connection is alive: a judgement by two signals, as values.

One signal is the other process: it sends a beat every fifth of a second. The other is the kernel of its machine, which
acknowledges what this end sends. A process that gets no processor sends no beat, and its kernel acknowledges all the
same: it is late, not gone. A machine that lost its power or its network does neither. A process that is killed needs no
judgement, as its kernel closes the connection.

Time passes in steps of at most ``MAX_STEP_S``, so a pause of this process itself counts against no one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from typing import Final, Literal

Verdict = Literal["alive", "late", "gone"]

BEAT_S: Final = 0.2
SILENT_S: Final = 0.6
"""Seconds without a beat, and without an acknowledgement, after which a machine is gone."""

STUCK_S: Final = 15.0
"""Seconds without a beat after which a process that its kernel still answers for is gone too."""

UNKNOWN_S: Final = 3.0
"""Seconds without a beat after which a machine is gone where the system does not report acknowledgements."""

MAX_STEP_S: Final = 2 * BEAT_S

_LAST_ACK_MS: Final = 56  # where the structure tcp_info of Linux has tcpi_last_ack_recv
_BYTES: Final = 120  # and tcpi_bytes_acked, tcpi_bytes_received


def judge(silent_s: float, unacknowledged_s: float | None) -> Verdict:
    """The state of the other end. ``silent_s``: seconds since its last beat. ``unacknowledged_s``: seconds since its
    kernel acknowledged something; None: not known."""
    if silent_s < SILENT_S:
        return "alive"
    if silent_s >= STUCK_S:
        return "gone"
    if unacknowledged_s is None:
        return "gone" if silent_s >= UNKNOWN_S else "late"
    return "gone" if unacknowledged_s >= SILENT_S else "late"


class Pulse:
    """What is known of the other end's beats. ``now``: seconds of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self.silent_s = 0.0

    def beat(self) -> None:
        """The other end sent a beat."""
        self.silent_s = 0.0

    def look(self, now: float, unacknowledged_s: float | None) -> Verdict:
        """The judgement at this time. Called every ``BEAT_S`` seconds or so."""
        self.silent_s += min(now - self._looked_at, MAX_STEP_S)
        self._looked_at = now
        return judge(self.silent_s, unacknowledged_s)


class Acknowledgements:
    """What the kernel knows of a TCP connection. Holds a descriptor of its own until ``close``."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))

    def read(self) -> tuple[float | None, int, int]:
        """Seconds since the other kernel acknowledged something, bytes that it acknowledged, and bytes that came from
        there. None and 0 where the system does not report them."""
        if sys.platform != "linux":
            return None, 0, 0
        with contextlib.suppress(OSError):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            if len(info) >= _BYTES + 16:
                (milliseconds,) = struct.unpack_from("=I", info, _LAST_ACK_MS)
                sent, received = struct.unpack_from("=QQ", info, _BYTES)
                return milliseconds / 1000.0, sent, received
        return None, 0, 0

    def close(self) -> None:
        self._socket.close()
