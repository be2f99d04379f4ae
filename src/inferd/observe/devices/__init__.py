"""The devices of this machine: how busy, warm and full they are, what they draw, and the models that use it.

``reading.py`` says what a device tells. Each source of readings is one file: ``nvml.py``, ``rapl.py``, ``sensors.py``,
``host.py`` and, for tests and demonstrations, ``simulated.py``. ``feed.py`` reads a source in a thread of its own,
so that a driver that hangs stops nothing else. ``energy.py`` attributes energy and time to models and tenants.
``devices.py`` wires them, and ``series.py`` shows them as metrics. What a device does not tell has no series.
"""

from __future__ import annotations

from inferd.observe.devices.devices import Devices
from inferd.observe.devices.reading import Reading

__all__ = ["Devices", "Reading"]
