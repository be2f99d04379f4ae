"""All devices of the machine: their feeds, and the account of energy that the feeds write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from inferd import clock
from inferd.config import Config, DevicesConfig
from inferd.observe.devices.energy import Energy
from inferd.observe.devices.feed import LIMIT_S, Feed, Find
from inferd.observe.devices.host import find_processor
from inferd.observe.devices.rapl import find_rapl
from inferd.observe.devices.reading import Reading, Source
from inferd.observe.devices.sensors import find_sensors
from inferd.observe.devices.simulated import Simulated, script_of

STOP_LIMIT_S: Final = 0.5
"""The time for which a stop waits for readings that are under way, all sources together."""


def _find_nvml() -> Source | None:
    from inferd.observe.devices.nvml import find_nvml  # ctypes, which the start of a server does not wait for

    return find_nvml()


SOURCES: Final[Mapping[str, Find]] = {
    "nvml": _find_nvml,
    "rapl": find_rapl,
    "sensors": find_sensors,
    "processor": find_processor,
}


class Devices:
    """The devices that ``config`` asks for. Raises ConfigError where its file of simulated devices is none."""

    def __init__(
        self,
        config: DevicesConfig = DevicesConfig(),
        *,
        sources: Mapping[str, Find] = SOURCES,
        now: Callable[[], float] = clock.now,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.config = config
        self.energy = Energy()
        self._models: dict[str, str] = {}
        if config.simulated is not None:
            file = Path(config.simulated)
            script_of(file)
            sources = {"simulated": lambda: Simulated(file)}
        self._feeds = [
            Feed(
                name,
                find,
                interval_s=config.interval_s,
                now=now,
                on_reading=self.energy.metered,
                limit_s=limit_s,
            )
            for name, find in (sources.items() if config.enabled else ())
        ]

    def configure(self, config: Config) -> None:
        """The models that are served, and the prices."""
        self.config = config.devices
        self._models = {name: model.device for name, model in config.models.items() if model.num_local}
        self._place_models()

    def start(self) -> None:
        for feed in self._feeds:
            feed.start()

    def stop(self) -> None:
        """End the threads. Idempotent; waits for a driver that hangs for a bounded time."""
        for feed in self._feeds:
            feed.stop()
        deadline = clock.now() + STOP_LIMIT_S
        for feed in self._feeds:
            feed.join(max(0.0, deadline - clock.now()))

    def current(self) -> list[Reading]:
        """The devices whose last reading is not too old."""
        return [reading for feed in self._feeds for reading in feed.current()]

    def refresh(self) -> list[Reading]:
        """``current``, and the models on the devices that are there."""
        readings = self.current()
        self._place_models()
        return readings

    def of_model(self, model: str) -> Reading | None:
        """The device that a model computes on; where several belong to its place, the first. From any thread."""
        place = self.energy.place_of(model)
        return next((one for one in self.current() if place and one.place == place), None)

    def failures(self) -> dict[str, int]:
        """Readings that failed or took too long, by source; a source that is not here has none."""
        return {feed.name: feed.failures for feed in self._feeds if not feed.is_absent}

    def _place_models(self) -> None:
        """A model on ``auto`` computes on the first GPU where there is one, as its worker decides."""
        has_gpu = any(reading.place == "cuda:0" for reading in self.current())
        auto = "cuda:0" if has_gpu else "cpu"
        words = {"auto": auto, "cuda": "cuda:0"}
        self.energy.configure({name: words.get(device, device) for name, device in self._models.items()})
