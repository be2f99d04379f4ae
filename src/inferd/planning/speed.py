"""How fast a replica generates, by the roofline of its devices (Williams et al. 2009). Knows no price.

A step of decoding reads every weight once and the keys and values of every request, and multiplies each weight once per
request. Reading and arithmetic go on together as far as the device's kernels overlap them (``native.overlap``):

    step = both(weights / bandwidth, 2 x parameters x requests / operations)
         + (caches + activations + logits) / bandwidth
         + kernels x kernel + messages + host

``kernel`` is the time of a kernel's start and end, in which nothing is computed; a small model waits for little else.
``host`` is the time in which the engine schedules a step, prepares it and hands its tokens on. On the cores of a
processor reading and arithmetic overlap in part (Treibig & Hager 2010, "Introducing a performance model for
bandwidth-limited loop kernels"; measured by ``native.roofline``). ``python -m bench.plan`` compares the sum with steps.

A prompt is limited by arithmetic. Requests run in waves in this estimate: prompts one after another, then their
answers together. Dividing layers divides reading and arithmetic. A pipeline divides them too when it is full, which
needs as many groups of requests as it has stages.
"""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.engine.model.layouts import Layout
from inferd.native.kv_sizes import kv_bytes_per_token
from inferd.native.overlap import both
from inferd.planning.capacity import Load
from inferd.planning.shape import Format, Shape, divides_by_outputs, itemsize, layer_products, parts
from inferd.planning.tables import GB, Device

MESSAGE_S: Final = 10e-6
"""Seconds that a message between two devices of a machine takes beside its bytes; an assumption for GPUs."""

KERNELS: Final = 10
"""Of a layer on a GPU (``engine.cuda``): four products, three of attention, two norms and a gate."""

HOST_S: Final = 200e-6
"""Seconds of a step of one core: of 10 layers of 64 columns, without the layers. The weights of a larger model replace
the engine's data in the caches, and it is up to 500."""

HOST_REQUEST_S: Final = 20e-6
"""Likewise, more for each request of a step."""

BETWEEN_MACHINES_GB_S: Final = 50.0
"""Bytes per second of a stage's rows to the next machine: InfiniBand NDR, 400 Gbit/s."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate. Seconds, and tokens of answers."""

    step_s: float  # from a token to the next, of one request among the load's
    step_alone_s: float  # likewise, of a request alone
    first_token_s: float  # of a request's prompt, alone
    tokens_per_s: float  # of all requests, prompts included

    @property
    def tokens_per_s_alone(self) -> float:
        """Of one request without others, once its prompt is computed."""
        return 1.0 / self.step_alone_s


def speed(shape: Shape, form: Format, load: Load, layout: Layout, device: Device) -> Speed:
    """The speed of a replica whose requests have, in the mean of their answers, half of the answer behind them."""
    prompt = max(1, load.tokens - load.answer)
    middle = prompt + load.answer / 2
    step = step_seconds(shape, form, load.requests, middle, layout, device, kv=load.kv)
    first = prompt_seconds(shape, form, prompt, layout, device)
    wave = load.requests * first + load.answer * step
    return Speed(
        step_s=step,
        step_alone_s=step_seconds(shape, form, 1, middle, layout, device, kv=load.kv),
        first_token_s=first,
        tokens_per_s=load.requests * load.answer / wave,
    )


def step_seconds(
    shape: Shape, form: Format, requests: int, context: float, layout: Layout, device: Device, *, kv: str = "auto"
) -> float:
    """Seconds from a token to the next while ``requests`` of ``context`` tokens each are decoded together."""
    rows = -(-requests // layout.pipeline)  # of one group in the pipeline
    reading = weights_read(shape, form, rows) / layout.tensor / device.stream(form)
    arithmetic = 2.0 * active_parameters(shape) * rows / layout.tensor / device.operations(form)
    cache = requests * context * _cache_bytes(shape, form, kv) / layout.pipeline
    heads = min(layout.tensor, shape.dims.num_kv_heads)  # with fewer key heads than devices, some are there twice
    caches = cache / heads / device.cache_stream
    return (
        both(reading, arithmetic, device.overlap(form))
        + caches
        + activations_seconds(shape, form, requests, layout, device)
        + logits_seconds(shape, requests, device)
        + kernels_seconds(shape, device)
        + messages(shape, rows, form, layout, device)
        + HOST_S
        + HOST_REQUEST_S * requests
    )


def prompt_seconds(shape: Shape, form: Format, tokens: int, layout: Layout, device: Device) -> float:
    """Seconds until a prompt's keys, values and first token are there. A pipeline does not shorten one prompt."""
    dims = shape.dims
    products = 2.0 * active_parameters(shape) * tokens
    attention = 2.0 * dims.num_layers * dims.num_heads * dims.head_dim * tokens * tokens  # half of all pairs, twice
    arithmetic = products / layout.tensor / device.operations(form)
    reading = weights_read(shape, form, tokens) / layout.tensor / device.stream(form)
    return (
        both(reading, arithmetic, device.overlap(form))
        + attention / layout.tensor / device.operations("fp32" if form == "fp32" else "fp16")  # never in integers
        + activations_seconds(shape, form, tokens, layout, device)
        + logits_seconds(shape, 1, device)
        + kernels_seconds(shape, device)
        + messages(shape, tokens, form, layout, device)
        + HOST_S
        + HOST_REQUEST_S
    )


def activations_seconds(shape: Shape, form: Format, rows: int, layout: Layout, device: Device) -> float:
    """Seconds in which the inputs and outputs of the products of ``rows`` are written and read."""
    values = shape.dims.num_layers * sum(out + size for out, size in layer_products(shape.dims))
    return 2.0 * rows * values * itemsize(form) / layout.tensor / device.stream("fp16")


def logits_seconds(shape: Shape, rows: int, device: Device) -> float:
    """Seconds in which the logits of ``rows`` are written and read for a choice: float32, one for each token."""
    return 2.0 * 4.0 * rows * shape.dims.vocab_size / device.stream("fp32")


def kernels_seconds(shape: Shape, device: Device) -> float:
    """Seconds of the starts of a step's kernels. Stages of a pipeline start theirs one after another."""
    return KERNELS * shape.dims.num_layers * device.kernel_us * 1e-6


def messages(shape: Shape, rows: int, form: Format, layout: Layout, device: Device) -> float:
    """Seconds of the messages of a step: two sums over the devices of a layer, or inputs and outputs of two products
    that are integers (``engine.model.share``), and a stage's rows to the next."""
    dims, item = shape.dims, itemsize(form)
    size = rows * dims.hidden_size * item
    seconds = 0.0
    if layout.tensor > 1:
        count, sent = 2, 2 * 2 * size  # a ring of a sum sends twice
        if divides_by_outputs(shape, form, layout):
            experts = max((moe.top_k for moe in dims.moe if moe is not None), default=1)
            _, (out, heads), _, (_, wide) = layer_products(dims)
            count, sent = 4, rows * item * (heads + out + wide * experts + out)
        around = sent * (layout.tensor - 1) / layout.tensor / (device.link_gb_s * GB)
        seconds += dims.num_layers * (around + count * MESSAGE_S)
    if layout.pipeline > 1:
        seconds += layout.pipeline * (size / (BETWEEN_MACHINES_GB_S * GB) + MESSAGE_S)
    return seconds


def weights_read(shape: Shape, form: Format, rows: int) -> float:
    """Bytes of weights that a step of ``rows`` reads: of experts, those that some row is expected to choose."""
    found = parts(shape, form)
    moe = next((layer for layer in shape.dims.moe if layer is not None), None)
    if moe is None:
        return float(found.read_once)
    chosen = 1.0 - (1.0 - moe.top_k / moe.num_experts) ** rows
    return found.read_once + found.experts * chosen


def active_parameters(shape: Shape) -> float:
    """Weights that a token is multiplied with."""
    found = parts(shape, "fp16")  # two bytes for each
    moe = next((layer for layer in shape.dims.moe if layer is not None), None)
    experts = 0.0 if moe is None else found.experts * moe.top_k / moe.num_experts
    return (found.read_once + experts) / 2.0


def _cache_bytes(shape: Shape, form: Format, kv: str) -> int:
    dims = shape.dims
    return kv_bytes_per_token(
        num_layers=dims.num_layers,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        itemsize=itemsize(form),
        dtype="int8" if kv == "int8" else "auto",
    )
