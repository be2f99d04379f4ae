"""A plan as text on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferd.cli.terminal import console, fail, warn

if TYPE_CHECKING:
    from inferd.planning.sizing import Choice, Sizing


def show(found: Sizing) -> None:
    """The plan as text: what each format takes, where it fits, what to take, and what would change that."""
    from rich import box
    from rich.table import Table

    from inferd.planning.sizing import NOTES

    for sentence in found.warnings:
        warn(sentence)
    out = console()
    load = found.demand.load
    kv = " (8-bit)" if load.kv == "int8" else ""
    lines = [
        f"{found.model}: {found.parameters_text}; {found.kv_bytes_per_token:,} bytes of KV cache{kv} a token.",
        f"Load of a replica: {load.requests:,} requests at once, each of {load.tokens:,} tokens, {load.answer:,} of "
        "them generated.",
    ]
    if found.trace is not None:
        rate = f", {found.trace.per_second:.3g} a second" if found.trace.per_second is not None else ""
        lines.append(
            f"Trace: {found.trace.num_requests:,} requests{rate}; prompts of {found.trace.prompt_mean:,.0f} and "
            f"answers of {found.trace.answer_mean:,.0f} tokens in the mean; 95 % have at most "
            f"{found.trace.total_p95:,}."
        )
    for line in lines:
        out.print(line, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("GB", "weights", "KV cache", "a request", "activations", "headroom", "together"):
        table.add_column(heading, justify="left" if heading == "GB" else "right")
    for one in found.formats:
        need = one.need
        table.add_row(
            one.form,
            *(
                f"{size / 1e9:,.1f}" if size >= 1e9 else f"{size / 1e9:.2g}"
                for size in (
                    need.weights_bytes,
                    need.kv_bytes,
                    need.kv_bytes_per_request,
                    need.activation_bytes,
                    need.headroom_bytes,
                    need.total_bytes,
                )
            ),
        )
    out.print(table)
    _show_choices(found)
    if found.smallest is None:
        fail(
            "Nothing here holds it. Take fewer bits (--format), fewer requests (--requests), shorter ones (--tokens), "
            "or other devices (--devices)."
        )
    else:
        out.print(f"Take: {_told(found.smallest, found)}.", markup=False)
        if found.smallest.is_tight:
            out.print(
                f"It uses {100 * found.smallest.used:.0f} % of the memory; above 85 % a burst of requests may fail.",
                markup=False,
            )
    out.print("What if:", markup=False)
    for change in found.what_if:
        told = "nothing here holds it" if change.choice is None else _told(change.choice, found)
        out.print(f"  {change.change}: {told}", markup=False)
    notes = {note for one in found.choices for note in one.notes}
    for name, sentence in NOTES.items():
        if name in notes:
            out.print(sentence, markup=False)
    out.print(_sources(found), markup=False)


def _show_choices(found: Sizing) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("device", "format", "devices", "used", "at once", "tokens/s", "alone", "an hour", "per 1k"):
        table.add_column(
            heading, justify="left" if heading in ("device", "format", "devices") else "right", no_wrap=True
        )
    reasons = []
    for one in found.choices:
        if one.layout is None or one.speed is None:
            reasons.append(f"{one.device} in {one.form}: {one.reason}.")
            continue
        cost = one.cost
        table.add_row(
            one.device,
            one.form,
            one.layout.text,
            Text(f"{100 * one.used:.0f} %", style="yellow" if one.is_tight else ""),
            f"{one.requests_at_once:,}",
            f"{one.speed.tokens_per_s:,.0f}",
            f"{one.speed.tokens_per_s_alone:,.1f}",
            "-" if cost is None else f"{cost.per_hour:,.2f}",
            "-" if cost is None else f"{cost.per_1000_tokens:.2g}",
        )
    out = console()
    if table.row_count:
        out.print(table)
        out.print(
            "devices: of a replica (tensor x pipeline). at once: requests of this length that fit. tokens/s: of all "
            f"requests; alone: of a single one. an hour, per 1k: {found.prices.currency}, of answers' tokens.",
            markup=False,
        )
    for reason in reasons:
        out.print(reason, markup=False)
    out.print()


def _told(one: Choice, found: Sizing) -> str:
    """A choice in words."""
    from inferd.planning.capacity import WARNING

    assert one.layout is not None
    assert one.speed is not None
    layout = one.layout
    count = f"{layout.devices} x {one.device}"
    if layout.devices > 1:
        count += f" (tensor {layout.tensor}, pipeline {layout.pipeline})"
        count += f" on {one.machines} machines" if one.machines > 1 else ""
    replicas = f"{one.replicas} replicas of {count}" if one.replicas > 1 else count
    cost = one.cost
    price = (
        "no price is known"
        if cost is None
        else f"{cost.per_hour:,.2f} {found.prices.currency} an hour, {cost.per_month:,.0f} a month"
    )
    tight = f", {100 * one.used:.0f} % of its memory" if one.used > WARNING else ""
    return f"{replicas} in {one.form}{tight}, about {one.speed.tokens_per_s * one.replicas:,.0f} tokens/s, {price}"


def _sources(found: Sizing) -> str:
    measured = found.measured
    compared = (
        f"estimates were within {measured.within} of the speed of runs on {measured.machine} ({measured.date}), and no "
        "GPU was measured"
        if measured.rows
        else "no estimate was compared with a measurement"
    )
    return (
        f"Speeds are estimates: {compared}. Prices: {found.prices.source} ({found.prices.date}); a replica works "
        f"{100 * found.demand.busy:.0f} % of the time. Sizes of {found.model}: {found.source}."
    )
