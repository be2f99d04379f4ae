"""The scheduler's time slices of a thread."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading

import pytest

from inferd.machine.slices import SHORTEST_NS, shorten_slices

_GET = {"x86_64": 315, "aarch64": 275}
_FIELDS = struct.Struct("=IIQiIQQQ")


def attributes() -> tuple[int, int, int]:
    """Policy, nice value and slice of the calling thread, as the system tells them."""
    told = ctypes.create_string_buffer(_FIELDS.size)
    assert ctypes.CDLL(None).syscall(_GET[platform.machine()], 0, told, _FIELDS.size, 0) == 0
    _, policy, _, nice, _, slice_ns, *_ = _FIELDS.unpack(told.raw)
    return policy, nice, slice_ns


def in_thread(seen: list[tuple[int, int, int]]) -> None:
    seen.append(attributes())
    if not shorten_slices():
        return
    seen.append(attributes())
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, min(os.getpriority(os.PRIO_PROCESS, own) + 1, 19))
    if sys.platform == "linux":
        os.sched_setscheduler(own, os.SCHED_IDLE, os.sched_param(0))
    seen.append(attributes())
    assert shorten_slices()
    seen.append(attributes())


@pytest.mark.skipif(platform.machine() not in _GET or sys.platform != "linux", reason="a system call of Linux")
def test_short_slices_are_those_of_one_thread_and_outlive_a_change_of_its_share() -> None:
    seen: list[tuple[int, int, int]] = []
    others = attributes()
    thread = threading.Thread(target=in_thread, args=(seen,))
    thread.start()
    thread.join()
    if len(seen) == 1:
        pytest.skip("the system refuses to change a thread's slices")
    (_, nice, slice_ns), short, idle, again = seen
    assert again == idle, "the smallest share is not made larger"
    if sys.platform == "linux":
        assert [short[0], idle[0]] == [os.SCHED_BATCH, os.SCHED_IDLE]
    assert [short[1], idle[1]] == [nice, min(nice + 1, 19)]
    if slice_ns:  # else Linux before 6.12, which has one slice for all threads
        assert slice_ns > SHORTEST_NS
        assert short[2] == idle[2] == SHORTEST_NS
    assert attributes() == others
