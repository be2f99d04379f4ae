"""Enters what the requests of tenants used of devices into the usage ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from inferd import clock
from inferd.observe.devices.energy import Energy
from inferd.tenancy.usage import Entry

ENTER_S: Final = 5.0
"""Between two times that it is entered."""


class DeviceUsage:
    """``count``: counts the events that wait. ``record``: writes into the journal of usage."""

    def __init__(self, energy: Energy, count: Callable[[], object], record: Callable[[Entry], None]) -> None:
        self._energy = energy
        self._count = count
        self._record = record

    async def run(self) -> None:
        while True:
            await asyncio.sleep(ENTER_S)
            self.enter()

    def enter(self) -> None:
        """What was used since the last time. The key of a request is not known here, only its tenant."""
        self._count()
        at = clock.wall()
        for (tenant, model), use in self._energy.take_owed().items():
            self._record(Entry(at, tenant, "", model, 0, 0, 0, use.device_s, use.energy_j))
