"""``inferd plan``: which devices a model needs, how fast it is there, and what that costs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from inferd.cli.ranges import FloatRange
from inferd.cli.terminal import fail
from inferd.errors import InvalidRequest, ModelLoadError

if TYPE_CHECKING:
    from inferd.native.roofline import Weights
    from inferd.planning.shape import Format, Shape
    from inferd.planning.tables import Device, Offer
    from inferd.planning.trace import Lengths

_HERE: Final = "this"
"""The device that this machine is, measured when it is named."""

_MEASURED: Final[tuple[Weights, ...]] = ("fp16", "int8", "int4")
"""Formats whose rates are measured on this machine."""

_FILE: Final = click.Path(dir_okay=False, path_type=Path)


@click.command("plan")
@click.argument("model")
@click.option("--devices", help="Kinds to compare, with their number: h100x8,l40s.  [default: all known GPUs]")
@click.option(
    "--requests", type=click.IntRange(1, 1_000_000), default=32, show_default=True, help="At once, a replica."
)
@click.option(
    "--tokens", type=click.IntRange(1, 10_000_000), default=2048, show_default=True, help="Of a request and its answer."
)
@click.option("--answer", type=click.IntRange(1, 10_000_000), help="Of them, generated.  [default: a quarter]")
@click.option("--trace", type=_FILE, help="Lengths and arrivals of real requests (JSON lines), instead of --tokens.")
@click.option("--rate", type=FloatRange(0, 1e9, min_open=True), help="Requests per second of all replicas.")
@click.option("--format", "formats", help="Of the weights: fp32, fp16, fp8, int8, int4.  [default: all but fp32]")
@click.option(
    "--kv", type=click.Choice(["auto", "int8"]), default="auto", show_default=True, help="Numbers of the KV cache."
)
@click.option("--copies", type=click.IntRange(1, 1000), default=1, show_default=True, help="Replicas at least.")
@click.option(
    "--busy",
    type=FloatRange(0.01, 1),
    default=0.7,
    show_default=True,
    help="Part of the time that a replica works.",
)
@click.option("--devices-file", type=_FILE, help="Devices of your own (YAML), beside the known ones.")
@click.option("--prices", type=_FILE, help="Prices of your own (YAML), instead of the known ones.")
@click.option("--config", type=_FILE, help="The configuration (YAML) that has a model named MODEL.")
@click.option("--html", type=_FILE, help="Also write a page with pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan for programs.")
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    devices: str | None,
    requests: int,
    tokens: int,
    answer: int | None,
    trace: Path | None,
    rate: float | None,
    formats: str | None,
    kv: str,
    copies: int,
    busy: float,
    devices_file: Path | None,
    prices: Path | None,
    config: Path | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Show which devices MODEL needs, how fast it is there, and the cost.

    MODEL is a shape (7b, 8b, 13b, 70b, 405b), a folder with a config.json,
    a model of a configuration (--config), or an id of the Hugging Face Hub,
    of which config.json alone is read. Nothing is loaded.

    Memory is what loading takes: weights, KV cache, and 30 % of the weights
    as headroom. Speed is an estimate by the device's bandwidth and arithmetic
    and by the fixed cost of a step; the plan says how far such estimates were
    from measured speed.

    \b
    Examples:
      inferd plan 70b
      inferd plan 13b --requests 32 --tokens 2048 --devices a100,h100x8
      inferd plan Qwen/Qwen3-8B --trace requests.jsonl --html plan.html
      inferd plan chat --config inferd.yaml --devices this
      inferd plan 70b --prices my-prices.yaml --copies 2 --json

    Exit code 0 when some device holds the model, 1 when none does.
    """
    from inferd.cli.plan.text import show
    from inferd.planning import measured
    from inferd.planning.capacity import Load
    from inferd.planning.sizing import Demand, sizing
    from inferd.planning.tables import bundled_prices, read_prices

    if trace is not None:
        for name in ("tokens", "answer"):
            if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name} is given, and --trace has the lengths; leave one of the two out.")
    elif answer is not None and answer >= tokens:
        raise click.UsageError(f"--answer {answer} leaves no prompt of --tokens {tokens}; lower it.")
    shape = _shape(model, config)
    lengths = None if trace is None else _lengths(trace)
    if lengths is not None:
        tokens, answer = lengths.total_p95, max(1, round(lengths.answer_mean))
        rate = rate if rate is not None else lengths.per_second
    load = Load(
        requests=requests,
        tokens=tokens,
        answer=min(answer if answer is not None else max(1, tokens // 4), max(1, tokens - 1)),
        kv="int8" if kv == "int8" else "auto",
    )
    forms = _formats(formats, shape)
    found = sizing(
        shape,
        Demand(load=load, per_second=rate, busy=busy, copies=copies),
        _offers(devices, devices_file, shape, forms),
        bundled_prices() if prices is None else read_prices(prices),
        measured.bundled(),
        forms=forms,
        trace=lengths,
    )
    if html is not None:
        from inferd.planning.page import page

        try:
            html.write_text(page(found), encoding="utf-8")
        except OSError as error:
            fail(f"{html} cannot be written: {error.strerror}. Name another file with --html.")
            return 1
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show(found)
        if html is not None:
            click.echo(f"The page is in {html}.")
    return 0 if found.smallest is not None else 1


def _shape(model: str, config: Path | None) -> Shape:
    """The shape that MODEL names. Raises ModelLoadError, ConfigError."""
    from inferd.planning import shape as shapes
    from inferd.registry.source import is_bundled, is_path, is_remote

    if config is not None:
        from inferd.config.load import load_config

        served = load_config(config, os.environ, {})
        if model not in served.models:
            raise ModelLoadError(
                f"{config} has no model {model!r}; it has {', '.join(served.models) or 'none'}.", param="model"
            )
        return _of_source(served.models[model].source, model)
    if model.lower() in shapes.names():
        return shapes.named(model)
    if not (is_bundled(model) or is_path(model) or is_remote(model)):
        raise ModelLoadError(
            f"{model!r} is no model: take a shape ({', '.join(shapes.names())}), a folder, a hub id such as "
            "Qwen/Qwen3-8B, or a model of a configuration with --config.",
            param="model",
        )
    return _of_source(model, model)


def _of_source(source: str, name: str) -> Shape:
    from inferd.planning.shape import of_folder
    from inferd.registry.source import fetch_config, find, is_remote, resolve

    if is_remote(source) and find(source) is None:
        with tempfile.TemporaryDirectory() as place:
            return of_folder(fetch_config(source, Path(place)), name, said=f"config.json of {source} at the hub")
    folder = resolve(source)
    if not folder.is_dir():
        raise ModelLoadError(
            f"{source} is no folder of a language model; inferd check shows the memory of other models.", param="model"
        )
    return of_folder(folder, name)


def _lengths(trace: Path) -> Lengths:
    from inferd.planning.trace import read_lengths

    try:
        with trace.open("rb") as lines:
            return read_lengths(lines)
    except OSError as error:
        raise InvalidRequest(
            f"The trace {trace} cannot be read: {error.strerror}. Check the path.", param="trace"
        ) from None


def _offers(devices: str | None, file: Path | None, shape: Shape, forms: Sequence[Format]) -> list[Offer]:
    """The devices to compare: those that are named, or every GPU and the devices of the operator's file."""
    from inferd.planning.tables import Offer, bundled_devices, offers, read_devices

    own = {} if file is None else read_devices(file)
    known = {**bundled_devices(), **own}
    if devices is None:
        return [
            Offer(name=name, device=device) for name, device in known.items() if device.vendor != "cpu" or name in own
        ]
    words = [word.strip() for word in devices.split(",") if word.strip()]
    if not words:
        raise click.UsageError("--devices names none; write h100x8,l40s, or leave it out.")
    if _HERE in words and _HERE not in known:
        click.echo("Measuring this machine (some seconds for each format) ...", err=True)
        known[_HERE] = this_machine(shape, [form for form in _MEASURED if form in forms] or _MEASURED)
    return offers(words, known)


def _formats(words: str | None, shape: Shape) -> Sequence[Format]:
    if words is None:
        return ()
    asked = [word.strip().lower() for word in words.split(",")]
    for word in asked:
        if word not in shape.formats:
            raise click.UsageError(f"--format {word!r} is none of {', '.join(shape.formats)}.")
    return [form for form in shape.formats if form in asked]


def this_machine(shape: Shape, forms: Sequence[Weights]) -> Device:
    """This machine's processor as a device: its memory, and the rates that the products of a model reach on it.

    ``forms``: the formats that are measured.
    """
    from inferd.machine.memory import limit_bytes
    from inferd.native.roofline import Heads, cache_rate, measure
    from inferd.planning.shape import layer_products
    from inferd.planning.tables import CORE_KERNEL_US, GB, Device

    dims = shape.dims
    rates = measure(forms, layer_products(dims), dims.num_layers)
    fastest = max(rate.bytes_s for rate in rates.values())
    return Device(
        title="this machine",
        vendor="cpu",
        memory_gb=limit_bytes() / GB,
        bandwidth_gb_s=fastest / GB,
        tflops={form: rate.operations_s / 1e12 for form, rate in rates.items()},
        streams_gb_s={form: rate.bytes_s / GB for form, rate in rates.items()},
        overlaps={form: rate.overlap for form, rate in rates.items()},
        cache_gb_s=cache_rate(Heads(dims.num_heads, dims.num_kv_heads, dims.head_dim)) / GB,
        kernel_us=CORE_KERNEL_US,
        source="measured by inferd.native.roofline",
        group=1,
        memory_share=1.0,
        arithmetic_share=1.0,
    )
