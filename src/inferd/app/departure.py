"""Whether the server was told to leave, by signals or by the operator: in good order, or at once.

Knows signals and the event loop, and not what leaving takes.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable

_log = logging.getLogger("inferd.app")


class Departure:
    """Whether the server was told to leave, by a signal or by a command on the control socket."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self._at_once = asyncio.Event()
        self._num_interrupts = 0
        self._handled: list[signal.Signals] = []

    def handle_signals(self) -> None:
        """Handle signals from now on. Only a main thread may; in another thread nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                loop.add_signal_handler(number, self._on_signal, number)
                self._handled.append(number)

    def release_signals(self) -> None:
        """Stop handling signals. A process that is leaving ignores them: another Ctrl-C has nothing to end."""
        loop = asyncio.get_running_loop()
        for number in self._handled:
            loop.remove_signal_handler(number)
            if self.leave.is_set():
                signal.signal(number, signal.SIG_IGN)

    def request(self, reason: str) -> None:
        """Leave in good order. Another request changes nothing."""
        if not self.leave.is_set():
            _log.warning(
                "%s: the server finishes the requests in flight and ends (Ctrl-C again ends it at once)", reason
            )
        self.leave.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                self._at_once.set()
        self.request(number.name)

    async def wait_unless_interrupted(self, waiting: Awaitable[object]) -> None:
        """Wait, but at most until a second Ctrl-C."""
        task, at_once = asyncio.ensure_future(waiting), asyncio.ensure_future(self._at_once.wait())
        await asyncio.wait((task, at_once), return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
