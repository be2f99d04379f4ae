"""Plans of four sizes of models equal a calculation by hand; laws of memory, layouts, speed and cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd import models
from inferd.engine.model.layouts import Layout
from inferd.errors import ModelLoadError
from inferd.planning import measured, shape
from inferd.planning.capacity import Load, Need, need, possible, smallest
from inferd.planning.shape import Format, Shape
from inferd.planning.sizing import Choice, Demand, Sizing, choice, sizing
from inferd.planning.speed import MESSAGE_S, messages, prompt_seconds, speed, step_seconds
from inferd.planning.tables import Device, Offer, bundled_devices, bundled_prices, offers
from inferd.planning.trace import Lengths

ONE: Final = Layout(tensor=1, pipeline=1)
GPUS: Final = ("l4", "l40s", "a100", "h100", "h200", "mi300x")
FORMS: Final[tuple[Format, ...]] = ("fp16", "fp8", "int8", "int4")
SHAPES: Final = {name: shape.named(name) for name in shape.names()}

# By hand, from the published sizes: vocabulary, hidden size, inner size, layers, heads, key heads; a head has 128.
SIZES: Final = {
    "7b": (32_000, 4096, 11_008, 32, 32, 32),
    "13b": (32_000, 5120, 13_824, 40, 40, 40),
    "70b": (128_256, 8192, 28_672, 80, 64, 8),
    "405b": (128_256, 16_384, 53_248, 126, 128, 8),
}
PARAMETERS: Final = {"7b": 6_738_415_616, "13b": 13_015_864_320, "70b": 70_553_706_496, "405b": 405_853_388_800}

# Devices of a replica that serves 32 requests of 2,048 tokens: the powers of two for which
# 1.3 x weights / devices + KV / devices stays within the memory of one. None: not with 32, or no such units.
DEVICES: Final[dict[str, dict[Format, tuple[int | None, ...]]]] = {
    #              L4  L40S  A100 H100 H200 MI300X
    "7b": {
        "fp16": (4, 2, 1, 1, 1, 1),  # 1.3 x 13.5 + 34.4 = 51.9 GB
        "fp8": (2, 1, None, 1, 1, 1),  # 1.3 x 6.7 + 34.4 = 43.1
        "int8": (2, 1, 1, 1, 1, 1),
        "int4": (2, 1, 1, 1, 1, 1),  # 1.3 x 3.8 + 34.4 = 39.3
    },
    "13b": {
        "fp16": (4, 2, 2, 2, 1, 1),  # 1.3 x 26.0 + 53.7 = 87.5
        "fp8": (4, 2, None, 1, 1, 1),  # 1.3 x 13.0 + 53.7 = 70.6
        "int8": (4, 2, 1, 1, 1, 1),
        "int4": (4, 2, 1, 1, 1, 1),  # 1.3 x 7.3 + 53.7 = 63.2
    },
    "70b": {
        "fp16": (16, 8, 4, 4, 2, 2),  # 1.3 x 141.1 + 21.5 = 204.9
        "fp8": (8, 4, None, 2, 1, 1),  # 1.3 x 70.6 + 21.5 = 113.2
        "int8": (8, 4, 2, 2, 1, 1),
        "int4": (4, 2, 1, 1, 1, 1),  # 1.3 x 39.6 + 21.5 = 72.9
    },
    "405b": {
        "fp16": (None, 32, 16, 16, 8, 8),  # 1.3 x 811.7 + 33.8 = 1,089.0
        "fp8": (32, 16, None, 8, 4, 4),  # 1.3 x 405.9 + 33.8 = 561.4
        "int8": (32, 16, 8, 8, 4, 4),
        "int4": (16, 8, 8, 8, 4, 2),  # 1.3 x 223.9 + 33.8 = 324.8
    },
}


def by_hand(name: str, form: Format) -> tuple[int, int]:
    """(bytes of weights, bytes of a token's keys and values), written out for a Llama without grouped tensors."""
    vocab, hidden, inner, layers, heads, key_heads = SIZES[name]
    keys = key_heads * 128
    norms = hidden * (2 * layers + 1)
    tables = [(vocab, hidden), (vocab, hidden)]
    products = [(hidden, heads * 128), (keys, hidden), (keys, hidden), (heads * 128, hidden)]
    products += [(inner, hidden), (inner, hidden), (hidden, inner)]

    def matrix(out: int, size: int, *, is_table: bool) -> int:
        match form:
            case "fp16":
                return 2 * out * size
            case "fp8":
                return out * size + 4 * out  # a scale of 4 bytes for each output
            case "int4" if not is_table:
                return (
                    out * (size // 64) * (32 + 2 + 1) + 4 * out
                )  # 64 in 32 bytes, a scale, a zero point; its own scale
            case _:
                return out * size + 8 * out  # a scale and a sum for each output

    weights = 2 * norms + sum(matrix(*each, is_table=True) for each in tables)
    weights += layers * sum(matrix(*each, is_table=False) for each in products)
    return weights, 2 * layers * keys * 2


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_the_memory_of_four_sizes_is_that_of_a_calculation_by_hand(name: str, form: Format) -> None:
    weights, per_token = by_hand(name, form)
    found = need(SHAPES[name], form, Load(), ONE, on_cpu=False)
    assert SHAPES[name].num_parameters == PARAMETERS[name]
    assert found.weights_bytes == weights
    assert found.kv_bytes == 32 * 2048 * per_token
    assert found.headroom_bytes == round(0.3 * weights) > found.activation_bytes
    assert found.total_bytes == weights + 32 * 2048 * per_token + round(0.3 * weights)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_the_smallest_layout_on_every_device_is_that_of_the_table(name: str, form: Format) -> None:
    devices = bundled_devices()
    for device, wanted in zip(GPUS, DEVICES[name][form], strict=True):
        found = choice(SHAPES[name], form, Demand(), Offer(name=device, device=devices[device]), bundled_prices())
        assert (found.layout and found.layout.devices) == wanted, device
        if found.layout is None:
            assert found.reason
            continue
        assert found.layout.tensor == min(found.layout.devices, 8)
        weights, per_token = by_hand(name, form)
        # A device holds 1.3 of its share of the weights and its share of the cache. Norms and scales of outputs are in
        # every device of a layer. 405B in a pipeline has stages that differ by a layer and by the embedding, so the
        # fullest device is above the mean.
        assert found.need is not None
        mean = (1.3 * weights + 32 * 2048 * per_token) / found.layout.devices
        assert mean * 0.999 <= found.need.total_bytes <= mean * (1.005 if found.layout.pipeline == 1 else 1.15)
        assert found.used <= 1.0


def test_the_table_of_the_page_is_what_plans_say() -> None:
    page = (Path(__file__).parents[2] / "docs/choosing-hardware.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    found = {(row[0], row[1]): row[2:] for row in rows if len(row) == 11 and row[0] in SIZES}
    assert len(found) == len(SIZES) * len(FORMS)
    devices = bundled_devices()
    for name in SIZES:
        for form in FORMS:
            one = need(SHAPES[name], form, Load(), ONE, on_cpu=False)
            cells = [f"{size / 1e9:,.1f}" for size in (one.weights_bytes, one.kv_bytes, one.total_bytes)]
            for device in GPUS:
                fit = choice(SHAPES[name], form, Demand(), Offer(name=device, device=devices[device]), bundled_prices())
                cells.append("-" if fit.layout is None else f"{fit.layout.devices}{'*' * fit.is_tight}")
            assert found[name, form] == cells


def test_the_speeds_of_the_page_are_what_plans_say() -> None:
    page = (Path(__file__).parents[2] / "docs/choosing-hardware.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    devices = bundled_devices()
    titles = {"64-core EPYC 9554, 12 channels of DDR5": "epyc-9554", "L4": "l4", "L40S": "l40s", "H100": "h100"}
    found = {titles[row[0]]: row[1:] for row in rows if len(row) == 4 and row[0] in titles}
    assert len(found) == len(titles)
    for name, cells in found.items():
        forms: tuple[Format, ...] = ("fp16", "int8")
        for form, cell in zip(forms, cells, strict=False):
            steps = [(each, step_seconds(SHAPES["8b"], form, each, 1024, ONE, devices[name])) for each in (1, 8, 32)]
            assert cell == " / ".join(f"{each / step:,.0f}" for each, step in steps)
        assert float(cells[2]) == pytest.approx(
            prompt_seconds(SHAPES["8b"], "fp16", 1024, ONE, devices[name]), rel=0.05, abs=0.005
        )


def test_rules_of_thumb_that_are_wrong() -> None:
    devices = bundled_devices()
    kv = need(SHAPES["13b"], "fp16", Load(requests=32, tokens=2048), ONE, on_cpu=False).kv_bytes
    assert kv == 53_687_091_200, "not 15 to 20 GB"
    one = Load(requests=1)
    assert need(SHAPES["70b"], "fp16", one, ONE, on_cpu=False).weights_bytes > devices["a100"].memory_bytes
    assert smallest(SHAPES["70b"], "int8", one, offers(["h100x1"], devices)[0]) is None, "70 GB and 30 % are 92 GB"
    assert smallest(SHAPES["405b"], "fp16", one, offers(["h100x8"], devices)[0]) is None
    assert devices["a100"].lacks("fp8")
    # 13B in 16 bits: 26 GB and 7.8 GB of headroom leave room for few requests in 40 GB.
    found = need(SHAPES["13b"], "fp16", one, ONE, on_cpu=False)
    assert 33e9 < found.weights_bytes + found.headroom_bytes < 34e9
    assert found.requests_within(40 * 10**9) == 3


def test_half_the_bits_double_the_largest_model_of_a_device() -> None:
    for name, big in (("7b", "13b"), ("13b", "7b")):
        a, b = (need(SHAPES[name], form, Load(requests=1), ONE, on_cpu=False).weights_bytes for form in FORMS[0:3:2])
        assert 0.5 < b / a < 0.502, big


def test_published_speeds_are_within_reach_of_the_estimate() -> None:
    """4 x H100 serve 70B with 200 to 400 tokens/s, and 8 x H100 405B with 50 to 100, for a few requests at once."""
    h100 = bundled_devices()["h100"]
    cases: list[tuple[str, Format, int, int, int, int]] = [
        ("70b", "fp16", 4, 4, 200, 400),
        ("405b", "fp8", 8, 2, 50, 100),
    ]
    for name, form, tensor, requests, low, high in cases:
        step = step_seconds(SHAPES[name], form, requests, 1024, Layout(tensor=tensor, pipeline=1), h100)
        assert low <= requests / step <= high


def test_a_speed_is_that_of_the_formula_by_hand() -> None:
    device = Device(
        title="d", vendor="other", memory_gb=80, bandwidth_gb_s=1000, tflops={"fp16": 100.0}, source="", memory_share=1,
        arithmetic_share=1, kernel_us=2.0, cache_gb_s=500.0,
    )  # fmt: skip
    read = PARAMETERS["7b"] - 32_000 * 4096  # the embedding's rows are looked up
    # 32 layers of 10 kernels; products with inputs and outputs of 16,384 + 8,192 + 26,112 + 15,104 values.
    fixed = 32 * 10 * 2e-6 + 200e-6
    row = 1000 * 524_288 / 5e11 + 2 * 2 * 32 * 65_792 / 1e12 + 2 * 4 * 32_000 / 1e12 + 20e-6
    alone = step_seconds(SHAPES["7b"], "fp16", 1, 1000, ONE, device)
    assert alone == pytest.approx(2 * read / 1e12 + fixed + row)
    many = step_seconds(SHAPES["7b"], "fp16", 512, 1000, ONE, device)
    assert many == pytest.approx(512 * (2 * read / 1e14 + row) + fixed)
    in_turns = msgspec.structs.replace(device, overlaps={"fp16": 0.0})
    assert step_seconds(SHAPES["7b"], "fp16", 1, 1000, ONE, in_turns) == pytest.approx(alone + 2 * read / 1e14)
    found = speed(SHAPES["7b"], "fp16", Load(requests=4, tokens=1500, answer=500), ONE, device)
    wave = 4 * found.first_token_s + 500 * found.step_s
    assert found.tokens_per_s == pytest.approx(2000 / wave)


@pytest.mark.parametrize("device", GPUS)
def test_a_tiny_model_waits_for_kernels_and_the_engine(device: str) -> None:
    """Its bytes and operations alone would give 20,000 to 330,000 tokens/s to one request."""
    tiny = shape.of_folder(models.path("demo"), "demo")
    step = step_seconds(tiny, "fp16", 1, 512, ONE, bundled_devices()[device])
    assert 200 <= 1 / step <= 5000
    assert step > 10 * tiny.dims.num_layers * 1.3e-6


LOADS: Final = st.builds(Load, requests=st.integers(1, 300), tokens=st.integers(2, 8192), answer=st.just(1))


@given(name=st.sampled_from(sorted(SIZES)), form=st.sampled_from(FORMS), load=LOADS, more=st.integers(1, 5000))
def test_memory_grows_with_tokens_requests_and_bits(name: str, form: Format, load: Load, more: int) -> None:
    model = SHAPES[name]

    def total(form: Format, load: Load) -> Need:
        return need(model, form, load, ONE, on_cpu=False)

    base = total(form, load)
    assert base.total_bytes < total(form, msgspec.structs.replace(load, tokens=load.tokens + more)).total_bytes
    assert base.total_bytes < total(form, msgspec.structs.replace(load, requests=load.requests + more)).total_bytes
    by_bits: tuple[Format, ...] = ("fp32", "fp16", "int8", "int4")
    totals = [total(each, load).total_bytes for each in by_bits]
    assert totals == sorted(totals, reverse=True)
    assert total(form, msgspec.structs.replace(load, kv="int8")).total_bytes < base.total_bytes
    memory = base.total_bytes + more
    assert base.requests_within(memory) >= load.requests


@given(
    name=st.sampled_from(sorted(SIZES)), form=st.sampled_from(FORMS), load=LOADS, factor=st.floats(1.0, 4.0),
    device=st.sampled_from(GPUS),
)  # fmt: skip
def test_what_fits_a_device_fits_a_larger_one(name: str, form: Format, load: Load, factor: float, device: str) -> None:
    small = bundled_devices()[device]
    large = msgspec.structs.replace(small, memory_gb=small.memory_gb * factor)
    found = smallest(SHAPES[name], form, load, Offer(name="small", device=small))
    if found is not None:
        again = smallest(SHAPES[name], form, load, Offer(name="large", device=large))
        assert again is not None
        assert again[0].devices <= found[0].devices


@given(name=st.sampled_from(sorted(SIZES)), form=st.sampled_from(FORMS), layout=st.integers(0, 30))
def test_a_layouts_devices_hold_the_whole_model_between_them(name: str, form: Format, layout: int) -> None:
    model = SHAPES[name]
    found = list(possible(model, Offer(name="h100", device=bundled_devices()["h100"])))
    assert sorted({each.devices for each in found}) == [2**power for power in range(6)]
    assert [each.devices for each in found] == sorted(each.devices for each in found)
    one = found[min(layout, len(found) - 1)]
    each = need(model, form, Load(), one, on_cpu=False)
    whole = need(model, form, Load(), ONE, on_cpu=False)
    assert each.weights_bytes * one.devices >= whole.weights_bytes
    assert each.kv_bytes * one.devices >= whole.kv_bytes
    assert model.dims.num_heads % one.tensor == 0


@given(
    name=st.sampled_from(sorted(SIZES)), form=st.sampled_from(FORMS), requests=st.integers(1, 500),
    context=st.integers(1, 100_000), factor=st.floats(1.01, 8.0),
)  # fmt: skip
def test_a_step_is_longer_with_more_requests_and_shorter_on_a_faster_device(
    name: str, form: Format, requests: int, context: int, factor: float
) -> None:
    device = bundled_devices()["h200"]
    step = step_seconds(SHAPES[name], form, requests, context, ONE, device)
    assert step_seconds(SHAPES[name], form, requests + 1, context, ONE, device) > step
    assert step_seconds(SHAPES[name], form, requests, context + 1, ONE, device) > step
    more = step_seconds(SHAPES[name], form, requests + 1, context, ONE, device)
    assert step / requests >= more / (requests + 1) * (1 - 1e-9)
    faster = msgspec.structs.replace(
        device,
        bandwidth_gb_s=device.bandwidth_gb_s * factor,
        tflops={key: value * factor for key, value in device.tflops.items()},
    )
    assert step_seconds(SHAPES[name], form, requests, context, ONE, faster) < step


def planned(name: str, demand: Demand, words: list[str], trace: Lengths | None = None) -> Sizing:
    return sizing(
        SHAPES[name], demand, offers(words, bundled_devices()), bundled_prices(), measured.bundled(), trace=trace
    )


def chosen(found: Sizing, device: str, form: Format) -> Choice:
    return next(one for one in found.choices if (one.device, one.form) == (device, form))


def test_cost_is_the_price_of_the_seconds_that_tokens_take() -> None:
    one = chosen(planned("8b", Demand(busy=0.5), ["h100"]), "h100", "fp16")
    price = bundled_prices().per_hour["h100"]
    assert one.cost is not None
    assert one.speed is not None
    assert one.cost.per_hour == price
    assert one.cost.per_month == pytest.approx(price * 730)
    assert one.cost.per_1000_tokens == pytest.approx(price / 3600 * 1000 / (one.speed.tokens_per_s * 0.5))
    twice = chosen(planned("8b", Demand(busy=0.5, copies=2), ["h100"]), "h100", "fp16")
    assert twice.cost is not None
    assert twice.cost.per_hour == 2 * price, "a second replica, so that one may fail, is paid for"


def test_a_rate_of_requests_asks_for_replicas() -> None:
    demand = Demand(load=Load(requests=32, tokens=1024, answer=256), per_second=100.0, busy=0.7)
    one = chosen(planned("8b", demand, ["h100"]), "h100", "fp16")
    assert one.speed is not None
    assert one.replicas == math.ceil(100 * 256 / (one.speed.tokens_per_s * 0.7)) > 1
    few = chosen(planned("8b", demand, ["h100x2"]), "h100", "fp16")
    assert few.layout is None
    assert "replicas need" in few.reason


def test_replicas_on_different_devices_have_weights_by_their_speed() -> None:
    found = planned("8b", Demand(), ["h100", "l40s"])
    fast, slow = chosen(found, "h100", "fp8"), chosen(found, "l40s", "fp8")
    assert fast.weight == 1.0
    assert fast.speed is not None
    assert slow.speed is not None
    assert slow.weight == pytest.approx(slow.speed.tokens_per_s / fast.speed.tokens_per_s, abs=1e-4)


def test_more_than_85_percent_is_a_warning_and_fewer_devices_are_preferred() -> None:
    found = planned("13b", Demand(), ["h100", "h200"])
    assert chosen(found, "h100", "fp8").is_tight
    assert not chosen(found, "h200", "fp8").is_tight
    assert found.smallest is not None
    assert (found.smallest.device, found.smallest.form) == ("h200", "fp16")
    changes = {what.change: what.choice for what in found.what_if}
    assert {"twice the tokens", "int4 weights", "on h100", "one more replica, so that one may fail"} <= set(changes)
    assert changes["one request at a time"] is not None
    assert changes["one request at a time"].device == "h100"
    assert planned("405b", Demand(), ["l4x8"]).smallest is None


def test_more_devices_answer_one_request_slower_than_their_number_promises() -> None:
    h100 = bundled_devices()["h100"]
    alone = step_seconds(SHAPES["8b"], "fp16", 1, 1024, ONE, h100)
    eight = step_seconds(SHAPES["8b"], "fp16", 1, 1024, Layout(tensor=8, pipeline=1), h100)
    assert alone / 8 < eight < alone
    pipeline = step_seconds(SHAPES["8b"], "fp16", 1, 1024, Layout(tensor=1, pipeline=8), h100)
    assert pipeline > alone / 2, "a pipeline gives one request nothing but messages"


def test_too_few_devices_are_told_with_how_many_and_how_large_ones_would_do() -> None:
    devices = bundled_devices()
    few = choice(SHAPES["70b"], "fp16", Demand(), offers(["h100x2"], devices)[0], bundled_prices())
    assert few.reason == ("needs 205 GB, which 2 devices of 80 GB do not hold: take 4 (4 x 1), or 2 of at least 103 GB")
    four = choice(SHAPES["70b"], "fp16", Demand(), offers(["h100x4"], devices)[0], bundled_prices())
    assert four.layout is not None
    larger = msgspec.structs.replace(devices["h100"], memory_gb=103)
    two = choice(SHAPES["70b"], "fp16", Demand(), Offer(name="h100", device=larger, count=2), bundled_prices())
    assert two.layout is not None
    small = choice(SHAPES["405b"], "fp16", Demand(), offers(["l4x8"], devices)[0], bundled_prices())
    assert small.reason.endswith("do not hold: 8 of at least 137 GB"), "not with 32 of them"


def test_what_inferd_does_not_serve_is_said() -> None:
    found = planned("70b", Demand(), ["h100", "mi300x"])
    assert chosen(found, "h100", "fp16").notes == ("parallel",)
    assert chosen(found, "h100", "int4").notes == ("int4",)
    assert chosen(found, "mi300x", "fp8").notes == ("vendor",)


def test_a_shape_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(ModelLoadError, match="there are 7b, 8b, 13b, 70b, 405b"):
        shape.named("9b")


def test_every_bundled_shape_and_device_names_its_source() -> None:
    assert all(one.source and isinstance(one, Shape) for one in SHAPES.values())
    assert all(device.source for device in bundled_devices().values())
    assert set(bundled_prices().per_hour) <= set(bundled_devices())


def test_messages_of_a_divided_layer_are_those_of_its_form() -> None:
    """By hand, of 32 layers of 4,096 hidden, 4,096 attended and 14,336 inner columns over two H100: numbers are added
    twice in a layer, and the inputs and outputs of products of integers are exchanged."""
    of, device, rows = SHAPES["8b"], bundled_devices()["h100"], 16
    link = device.link_gb_s * 1e9
    divided = Layout(tensor=2, pipeline=1)
    numbers = 2 * (2 * 0.5 * rows * 4096 * 2 / link + MESSAGE_S)
    integers = 0.5 * rows * 2 * (4096 + 4096 + 14336 + 4096) / link + 4 * MESSAGE_S
    assert messages(of, rows, "fp16", divided, device) == pytest.approx(32 * numbers)
    assert messages(of, rows, "int8", divided, device) == pytest.approx(32 * integers)
    assert messages(of, rows, "int4", divided, device) == pytest.approx(32 * integers)
    assert messages(of, rows, "int8", Layout(tensor=1, pipeline=1), device) == 0.0


@pytest.mark.parametrize(("group", "machines"), [(1, 2), (2, 1)])
def test_processors_of_several_machines_are_told_with_what_serves_them(group: int, machines: int) -> None:
    load = Load(requests=1, tokens=128, answer=32)
    whole = need(SHAPES["7b"], "int8", load, ONE, on_cpu=True).total_bytes
    processor = msgspec.structs.replace(bundled_devices()["epyc-9554"], memory_gb=0.7 * whole / 1e9, group=group)
    offer = Offer(name="box", device=processor, count=2)
    found = choice(SHAPES["7b"], "int8", Demand(load=load), offer, bundled_prices())
    assert found.layout is not None
    assert (found.layout.devices, found.machines, "machines" in found.notes) == (2, machines, machines > 1)
