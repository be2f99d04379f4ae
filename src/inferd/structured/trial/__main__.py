"""The process that waits for trials: ``python -m inferd.structured.trial --fd N``, started by the worker.

It reads the vocabulary once, and forks a process for each trial, which ends with it. The worker sends a socket for each
trial and reads the result from it; behind the result stands how the process of the trial ended. The trial ends early
when the worker closes the socket. This process ends when the worker's end of its own socket is closed.

A trial begins with the worker's share of contended cores, so that it is not held up on a busy machine. One that takes
longer goes on with the least share, and so does each trial of a tenant whose trials have taken much lately. Those are
stopped most of the time while the worker computes (``turns``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from inferd.machine.parent import die_with
from inferd.machine.slices import shorten_slices
from inferd.structured.trial.frames import TENANT_BYTES, read_frame, status_frame, write_frame
from inferd.structured.trial.task import Task, TrialVocabulary, do
from inferd.structured.trial.turns import Turns

OUT_OF_MEMORY: Final = 3
DEFECT: Final = 4
STACK_BYTES: Final = 2 << 20

_LEAST_NICE: Final = 19
_MOST_TENANTS: Final = 1000
_LOOK_S: Final = 0.01  # between two looks at how long a trial has run
_MOST_ASKED_S: Final = 0.3  # how long a trial asks the system for its share before it begins

_log = logging.getLogger("inferd.worker")


@dataclass(slots=True)
class Budget:
    """The processor time that trials of a tenant may take with the worker's share of contended cores."""

    left_s: float
    at: float  # the time for which this is known


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a trial, and of a tenant's budget."""

    most_s: float
    most_bytes: int
    most_saved_s: float
    refill: float  # of the budget, in a second


@dataclass(slots=True, eq=False)
class _Trial:
    """A forked process. ``ended`` is a pipe that it keeps open for as long as it lives."""

    pid: int
    channel: socket.socket
    ended: int
    budget: Budget
    used_s: float = 0.0  # of processor time, with the worker's share
    is_least: bool = False  # has the least share
    is_stopped: bool = False


class _Waiting:
    """Belongs to one thread, as a process must that forks."""

    def __init__(self, control: socket.socket, vocabulary: TrialVocabulary, limits: Limits) -> None:
        self._control = control
        self._worker = os.getppid()
        self._vocabulary = vocabulary
        self._limits = limits
        self._trials: dict[int, _Trial] = {}  # by both of their descriptors
        self._budgets: dict[bytes, Budget] = {}  # by tenant
        self._turns: Turns[_Trial] = Turns()  # of those with the least share
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Until the worker closes its end."""
        while True:
            for descriptor, event in self._poll.poll(self._wait_ms()):
                trial = self._trials.get(descriptor)
                if descriptor == self._control.fileno():
                    if not self._accept():
                        for one in set(self._trials.values()):
                            os.kill(one.pid, signal.SIGKILL)
                        return
                elif trial is not None and descriptor == trial.ended:
                    self._finish(trial)
                elif trial is not None and event:
                    os.kill(trial.pid, signal.SIGKILL)  # the worker does not wait for it
                    self._poll.unregister(descriptor)
            for trial in set(self._trials.values()):
                if not trial.is_least:
                    self._charge(trial)
            self._change_turns()

    def _wait_ms(self) -> float | None:
        """How long to wait for an event; None: until there is one."""
        is_urgent = any(not trial.is_least for trial in self._trials.values())
        waits_s = [_LOOK_S] if is_urgent else []
        if self._turns.until is not None:
            waits_s.append(max(0.0, self._turns.until - time.monotonic()))
        return min(waits_s) * 1000 if waits_s else None

    def _change_turns(self) -> None:
        """Stop the trials that have to wait while the worker computes, and let others go on."""
        now = time.monotonic()
        if self._turns.until is None or now < self._turns.until:
            return
        running = self._turns.running(now, _processor_s(self._worker))
        for trial in self._turns.all():
            if trial.is_stopped == (trial in running):
                trial.is_stopped = not trial.is_stopped
                os.kill(trial.pid, signal.SIGSTOP if trial.is_stopped else signal.SIGCONT)

    def _charge(self, trial: _Trial) -> None:
        """Take what the trial has used from its tenant's budget, and give it the least share where that is used up."""
        self._settle(trial)
        if trial.budget.left_s <= 0:
            trial.is_least = _give_least_share(trial.pid)
            if trial.is_least:
                self._turns.add(id(trial.budget), trial)

    def _settle(self, trial: _Trial) -> None:
        used_s = _processor_s(trial.pid)
        trial.budget.left_s -= max(0.0, used_s - trial.used_s)
        trial.used_s = used_s

    def _budget(self, tenant: bytes) -> Budget:
        now = time.monotonic()
        if tenant not in self._budgets and len(self._budgets) >= _MOST_TENANTS:
            del self._budgets[next(iter(self._budgets))]
        most_s = self._limits.most_saved_s
        budget = self._budgets.pop(tenant, None) or Budget(most_s, now)
        self._budgets[tenant] = budget  # the one that has waited longest is in front
        budget.left_s = min(most_s, budget.left_s + (now - budget.at) * self._limits.refill)
        budget.at = now
        return budget

    def _accept(self) -> bool:
        """Fork the process of a new trial. False: the worker is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, TENANT_BYTES, 1)
        except OSError:
            return False
        if not data:
            return False
        channel = socket.socket(fileno=descriptors[0])
        budget = self._budget(data)
        ended, kept_open = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(ended)
            self._control.close()
            for descriptor in self._trials:
                os.close(descriptor)
            _try(channel, self._vocabulary, self._limits, parent, is_least=budget.left_s <= 0)
        os.close(kept_open)
        trial = _Trial(pid, channel, ended, budget, is_least=budget.left_s <= 0)
        self._trials[ended] = self._trials[channel.fileno()] = trial
        if trial.is_least:
            self._turns.add(id(budget), trial)
        self._poll.register(ended, select.POLLIN)
        self._poll.register(channel, 0)  # tells when the other end was closed
        return True

    def _finish(self, trial: _Trial) -> None:
        if not trial.is_least:
            self._settle(trial)  # before its process is reaped
        self._turns.remove(id(trial.budget), trial)
        _, status = os.waitpid(trial.pid, 0)
        with contextlib.suppress(KeyError):  # its end was told before
            self._poll.unregister(trial.channel)
        self._poll.unregister(trial.ended)
        del self._trials[trial.ended], self._trials[trial.channel.fileno()]
        with contextlib.suppress(OSError), trial.channel:  # the worker may have closed its end
            trial.channel.sendall(status_frame(os.waitstatus_to_exitcode(status)))
        os.close(trial.ended)


def _try(
    channel: socket.socket, vocabulary: TrialVocabulary, limits: Limits, parent: int, *, is_least: bool
) -> NoReturn:
    """The life of a trial's process."""
    code = DEFECT
    try:
        die_with(parent)
        shorten_slices()  # the step loop and the gateway wait for a core only briefly, whatever share the trial has
        # Where Linux groups processes by session (autogroup), its share counts against other groups. Last, because it
        # is what ``_give_least_share`` waits for: a policy that was set earlier would be lost.
        os.setsid()
        until = time.monotonic() + _MOST_ASKED_S
        while is_least and not _give_least_share(os.getpid()) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        # The system ends the process, whatever it computes.
        signal.setitimer(signal.ITIMER_PROF, limits.most_s)
        # What fits into this stack fits into that of the worker's threads, which no signal would end alone.
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        held = _address_space_bytes()
        if held is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (held + limits.most_bytes, hard))
        task = msgspec.json.decode(read_frame(channel), type=Task)
        write_frame(channel, msgspec.json.encode(do(task, vocabulary)))
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except (OSError, EOFError):
        code = 0  # the worker has closed its end
    except BaseException:
        _log.exception("a trial of the form of an answer failed")
    finally:
        sys.stderr.flush()
        os._exit(code)


def _give_least_share(pid: int) -> bool:
    """Leave the process the time that hardly any other one wants. False: the system wants to be asked again later."""
    try:
        if os.getsid(pid) != pid:
            return False  # it is still of this process's group
        if sys.platform == "linux":
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, _LEAST_NICE)
    except ProcessLookupError:
        return True
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(_LEAST_NICE))
    except BlockingIOError:  # too many changes at once
        return False
    except OSError:  # another system, or one without groups
        return True
    return True


def _processor_s(pid: int) -> float:
    """The processor time of another process; none where the system does not tell."""
    try:
        return time.clock_gettime((~pid << 3) | 2) if sys.platform == "linux" else 0.0  # clock_getcpuclockid(3)
    except OSError:
        return 0.0


def _address_space_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(prog="inferd.structured.trial", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="this end of the socket")
    parser.add_argument("--most-seconds", type=float, required=True, help="processor time of a trial")
    parser.add_argument("--most-bytes", type=int, required=True, help="memory that a trial may take")
    parser.add_argument("--most-saved", type=float, required=True, help="seconds of a tenant's budget")
    parser.add_argument("--refill", type=float, required=True, help="seconds of the budget that come back in a second")
    options = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with the worker
    os.set_inheritable(options.fd, False)
    control = socket.socket(fileno=options.fd)
    try:
        vocabulary = msgspec.msgpack.decode(read_frame(control), type=TrialVocabulary)
    except (OSError, EOFError):
        return
    _ = vocabulary.tokens
    gc.collect()
    gc.freeze()  # the collector of a trial would copy the memory that it shares with this process
    limits = Limits(options.most_seconds, options.most_bytes, options.most_saved, options.refill)
    _Waiting(control, vocabulary, limits).run()


if __name__ == "__main__":
    main()
