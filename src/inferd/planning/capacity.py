"""What a model takes on devices, and how it is divided over them, by arithmetic. Knows no price and no time.

For each device of a replica that has ``tensor`` x ``pipeline`` of them:

    weights    the largest part of a rank (``engine.model.share``)
    KV cache   requests x tokens x bytes per token of its layers and its key heads
    headroom   30 % of its weights, or the activations of the largest step (and the process, on a processor) where they
               are more

The bytes are those that loading takes: weights by ``checkpoints.footprint``, the cache by ``native.kv_sizes``,
activations by ``engine.memory``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from inferd.config import ModelConfig, SchedulerConfig
from inferd.engine.memory import headroom_bytes, runtime_bytes
from inferd.engine.model.layouts import Layout, choose, layouts
from inferd.native.kv_sizes import kv_bytes_per_token
from inferd.planning.shape import Format, Shape, fullest_bytes, itemsize
from inferd.planning.tables import Device, Offer

HEADROOM: Final = 0.3
"""Of the weights: for activations, workspaces of kernels, fragmentation and the runtime of the device."""

WARNING: Final = 0.85
"""Of a device's memory: above it a burst of requests may fail."""

MOST_DEVICES: Final = 32
"""Of one replica."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that a replica serves at the same time. Lengths in tokens."""

    requests: Annotated[int, Meta(ge=1)] = 32
    tokens: Annotated[int, Meta(ge=1)] = 2048  # of one request at its end: prompt and answer
    answer: Annotated[int, Meta(ge=1)] = 512  # of them, generated
    kv: Literal["auto", "int8"] = "auto"  # numbers of the KV cache


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the fullest device of a replica. Bytes."""

    weights_bytes: int
    kv_bytes: int  # of all requests
    kv_bytes_per_request: int
    activation_bytes: int
    headroom_bytes: int  # with the activations

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.headroom_bytes

    def requests_within(self, memory_bytes: int) -> int:
        """Requests whose caches fit into a device beside the weights and the headroom."""
        return max(0, memory_bytes - self.weights_bytes - self.headroom_bytes) // self.kv_bytes_per_request


def need(shape: Shape, form: Format, load: Load, layout: Layout, *, on_cpu: bool) -> Need:
    """The memory that each device of a replica must have."""
    dims, size = shape.dims, itemsize(form)
    weights = fullest_bytes(shape, form, layout)
    per_token = kv_bytes_per_token(
        num_layers=-(-dims.num_layers // layout.pipeline),
        num_kv_heads=-(-dims.num_kv_heads // layout.tensor),
        head_dim=dims.head_dim,
        itemsize=size,
        dtype=load.kv,
    )
    config = ModelConfig(
        source=shape.name, max_model_len=load.tokens, scheduler=SchedulerConfig(max_num_seqs=min(load.requests, 4096))
    )
    activations = headroom_bytes(config, dims, itemsize=size) - runtime_bytes()
    own = activations + (runtime_bytes() if on_cpu else 0)
    return Need(
        weights_bytes=weights,
        kv_bytes=load.requests * load.tokens * per_token,
        kv_bytes_per_request=load.tokens * per_token,
        activation_bytes=activations,
        headroom_bytes=max(round(HEADROOM * weights), own),
    )


def possible(shape: Shape, offer: Offer) -> Iterator[Layout]:
    """The layouts that are possible, in the order of preference. Devices that are bought come in powers of two."""
    most = MOST_DEVICES if offer.count is None else min(offer.count, MOST_DEVICES)
    counts = [2**power for power in range(most.bit_length())] if offer.count is None else range(1, most + 1)
    return layouts(shape.dims, counts, _linked(offer.device))


def smallest(shape: Shape, form: Format, load: Load, offer: Offer) -> tuple[Layout, Need] | None:
    """The layout of the fewest devices that hold the load; None where none of the possible ones does."""
    device = offer.device
    on_cpu = device.vendor == "cpu"

    def needs(layout: Layout) -> list[int]:
        return [need(shape, form, load, layout, on_cpu=on_cpu).total_bytes] * layout.pipeline

    rooms = [device.memory_bytes] * MOST_DEVICES
    found = choose(possible(shape, offer), needs, rooms, _linked(device))
    return None if found is None else (found.layout, need(shape, form, load, found.layout, on_cpu=on_cpu))


def _linked(device: Device) -> int:
    return device.group if device.link_gb_s else 1
