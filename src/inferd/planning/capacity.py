"""What a model takes on devices, and how it is divided over them, by arithmetic. Knows no price and no time.

For each device of a replica that has ``tensor`` x ``pipeline`` of them:

    weights    the largest stage of the pipeline, divided by ``tensor``
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
from inferd.native.kv_sizes import kv_bytes_per_token
from inferd.planning.shape import Format, Shape, itemsize, parts
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


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How one replica is divided over devices."""

    tensor: int  # devices that share each layer
    pipeline: int  # groups of them that have different layers

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline

    @property
    def text(self) -> str:
        return "1" if self.devices == 1 else f"{self.devices} ({self.tensor} x {self.pipeline})"


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
    weights = -(-max(parts(shape, form).stages(layout.pipeline)) // layout.tensor)
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


def layouts(shape: Shape, device: Device, most: int) -> Iterator[Layout]:
    """The layouts that are possible, those of few devices first: each device more costs messages between them.

    Numbers of devices are powers of two, as machines have them. Layers are divided among the devices of one machine as
    far as heads and inner sizes allow it, and the rest is a pipeline.
    """
    dims = shape.dims
    count = 1
    while count <= min(most, MOST_DEVICES):
        tensor = max(
            (
                width
                for width in _powers(min(count, device.group if device.link_gb_s else 1))
                if dims.num_heads % width == 0 and dims.intermediate_size % width == 0
            ),
            default=1,
        )
        if count // tensor <= dims.num_layers:
            yield Layout(tensor=tensor, pipeline=count // tensor)
        count *= 2


def smallest(shape: Shape, form: Format, load: Load, offer: Offer) -> tuple[Layout, Need] | None:
    """The layout of the fewest devices that hold the load; None where none of the possible ones does."""
    device, most = offer.device, MOST_DEVICES if offer.count is None else offer.count
    for layout in layouts(shape, device, most):
        found = need(shape, form, load, layout, on_cpu=device.vendor == "cpu")
        if found.total_bytes <= device.memory_bytes:
            return layout, found
    return None


def _powers(most: int) -> Iterator[int]:
    width = 1
    while width <= most:
        yield width
        width *= 2
