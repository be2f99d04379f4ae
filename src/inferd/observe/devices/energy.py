"""The energy and the time of devices, attributed to models and tenants.

The energy that a device used between two readings is divided by the time that models computed on it: the seconds of
their steps. What remains is idle: the time without a step, at the power that the device drew when no model computed.
Models that computed in the same span get parts in proportion to their seconds. A span without the end of a step, while
requests are at a replica, is joined to the next one, because a step is known when it ends.

The part of a model is divided among its tenants in proportion to the tokens that were computed for their requests, or
to their number for models without tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from inferd.observe.devices.reading import Reading

_IDLE_MEMORY_S: Final = 60.0  # idle time whose mean power counts as the idle power
MAX_TENANTS: Final = 1000
OTHER: Final = "other"
"""The tenants beyond the limit, together."""


@dataclass(slots=True)
class Use:
    """What a model or a tenant has used since the server started."""

    device_s: float = 0.0
    energy_j: float | None = None  # None: no device told
    tokens: int = 0
    requests: int = 0


@dataclass(slots=True)
class _Meter:
    """What was seen of one device."""

    energy_j: float
    at: float
    busy_s: dict[str, float]
    place: str
    pending_j: float = 0.0
    pending_s: float = 0.0
    idle_w: float = 0.0
    idle_s: float = 0.0  # over which that is the mean
    idle_j: float = 0.0
    total_j: float = 0.0


@dataclass(slots=True)
class _Account:
    """One model's. The loop writes the first four, and the threads of feeds the energy."""

    device_s: float = 0.0
    tokens: int = 0
    requests: int = 0
    in_flight: int = 0
    energy_j: float | None = None
    shared_s: float = 0.0  # of the device time and the energy: divided among tenants
    shared_j: float = 0.0
    weights: dict[str, int] = field(default_factory=dict)  # of tenants, since they were last divided


class Energy:
    """The account of all models. Methods of the event loop add; ``metered`` is called by the threads of feeds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accounts: dict[str, _Account] = {}
        self._places: dict[str, str] = {}
        self._meters: dict[str, _Meter] = {}
        self._tenants: dict[str, Use] = {}
        self._owed: dict[tuple[str, str], Use] = {}  # by tenant and model

    def configure(self, places: Mapping[str, str]) -> None:
        """``places``: the device of each model. Idempotent; models that are gone keep their sums."""
        self._places = dict(places)

    def place_of(self, model: str) -> str:
        """Empty: the model computes on no device here."""
        return self._places.get(model, "")

    # -- the event loop ---------------------------------------------------------------------

    def stepped(self, model: str, seconds: float, tokens: int) -> None:
        """A replica of the model has computed a step."""
        account = self._accounts.get(model) or self._account(model)
        account.device_s += seconds
        account.tokens += tokens

    def set_in_flight(self, model: str, count: int) -> None:
        """So many requests are at replicas of the model."""
        (self._accounts.get(model) or self._account(model)).in_flight = count

    def ended(self, model: str, weights: Mapping[str, int], count: int) -> None:
        """Requests of the model have ended; ``weights``: the tokens of each tenant."""
        account = self._account(model)
        account.requests += count
        for tenant, weight in weights.items():
            account.weights[tenant] = account.weights.get(tenant, 0) + weight

    def models(self) -> dict[str, Use]:
        """What each model has used."""
        with self._lock:
            return {
                name: Use(a.device_s, a.energy_j, a.tokens, a.requests) for name, a in sorted(self._accounts.items())
            }

    def tenants(self) -> dict[str, Use]:
        """What each tenant has used, of all models."""
        self._divide_all()
        return dict(sorted(self._tenants.items()))

    def take_owed(self) -> dict[tuple[str, str], Use]:
        """What each tenant has used of each model since the last call."""
        self._divide_all()
        owed, self._owed = self._owed, {}
        return owed

    def idle_j(self) -> dict[str, float]:
        """The energy that each device used while no model computed on it."""
        with self._lock:
            return {device: meter.idle_j for device, meter in sorted(self._meters.items()) if meter.place}

    def total_j(self) -> dict[str, float]:
        """The energy that each device has used since it was first read."""
        with self._lock:
            return {device: meter.total_j for device, meter in sorted(self._meters.items())}

    def _divide_all(self) -> None:
        for model, account in self._accounts.items():
            self._divide(model, account)

    def _divide(self, model: str, account: _Account) -> None:
        whole = sum(account.weights.values())
        if not whole:
            return
        with self._lock:
            energy_j = account.energy_j
        seconds, account.shared_s = account.device_s - account.shared_s, account.device_s
        joules = None if energy_j is None else energy_j - account.shared_j
        account.shared_j = energy_j or 0.0
        for tenant, weight in account.weights.items():
            name = tenant if tenant in self._tenants or len(self._tenants) < MAX_TENANTS else OTHER
            shown = self._tenants.setdefault(name, Use())
            owed = self._owed.setdefault((name, model), Use())
            for use in (shown, owed):
                use.device_s += seconds * weight / whole
                use.tokens += weight
                if joules is not None:
                    use.energy_j = (use.energy_j or 0.0) + joules * weight / whole
        account.weights = {}

    def _account(self, model: str) -> _Account:
        return self._accounts.setdefault(model, _Account())

    # -- the threads of feeds ---------------------------------------------------------------

    def metered(self, reading: Reading) -> None:
        """A device was read: attribute its energy since the last time."""
        if reading.energy_j is None:
            return
        with self._lock:
            meter = self._meters.get(reading.device)
            # A copy, because the loop may add a model meanwhile.
            accounts = [(name, account) for name, account in list(self._accounts.items()) if self._is_on(name, reading)]
            busy_s = {name: account.device_s for name, account in accounts}
            if meter is None:
                self._meters[reading.device] = _Meter(reading.energy_j, reading.at, busy_s, reading.place)
                return
            used = reading.energy_j - meter.energy_j
            used = used if used >= 0 else reading.energy_j
            meter.pending_j += used
            meter.total_j += used
            meter.pending_s += reading.at - meter.at
            meter.energy_j, meter.at, meter.place = reading.energy_j, reading.at, reading.place
            gained = {name: seconds - meter.busy_s.get(name, 0.0) for name, seconds in busy_s.items()}
            busy = sum(gained.values())
            if not busy and any(account.in_flight for _, account in accounts):
                return
            meter.busy_s = busy_s
            self._attribute(meter, {name: seconds / busy for name, seconds in gained.items() if seconds}, busy)

    def _attribute(self, meter: _Meter, shares: Mapping[str, float], busy_s: float) -> None:
        joules, seconds = meter.pending_j, meter.pending_s
        meter.pending_j = meter.pending_s = 0.0
        if seconds <= 0:
            return
        if not shares:
            meter.idle_s = min(meter.idle_s + seconds, max(seconds, _IDLE_MEMORY_S))
            meter.idle_w += (joules / seconds - meter.idle_w) * seconds / meter.idle_s
            meter.idle_j += joules
            return
        idle_s = max(seconds - busy_s, 0.0)
        watts = joules / seconds
        # A device that draws less than when it was idle last has become more frugal.
        idle_j = idle_s * (min(meter.idle_w, watts) if meter.idle_s else watts)
        meter.idle_j += idle_j
        for name, share in shares.items():
            account = self._accounts[name]
            account.energy_j = (account.energy_j or 0.0) + (joules - idle_j) * share

    def _is_on(self, model: str, reading: Reading) -> bool:
        return bool(reading.place) and self._places.get(model) == reading.place
