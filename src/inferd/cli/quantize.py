"""``inferd quantize``: a smaller checkpoint, and its loss of quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from inferd.cli.ranges import FloatRange
from inferd.cli.terminal import console, interruptible, loading
from inferd.config.units import bytes_text

if TYPE_CHECKING:
    from inferd.engine.calibrate.result import Result


class _Share(click.ParamType):  # type: ignore[type-arg]
    """A part of one: 0.02 or 2%."""

    name = "share"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        try:
            return float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{text!r} is not a fraction; write 0.02 or 2%.", param, ctx)


@click.command("quantize")
@click.argument("source")
@click.option(
    "--method",
    type=click.Choice(["tuned", "gptq", "int4", "int8"]),
    default=None,
    help="tuned (where there is --data) learns the integers that answer most like the model did; gptq rounds what a "
    "text shows to matter with more care; int4 and int8 (where there is no --data) need no text.",
)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder to write.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="A UTF-8 text of the kind the model is for: calibrates, and its last fifth measures the result.",
)
@click.option(
    "--max-perplexity-change", "max_change", type=_Share(), default=None, help="Fail when more is lost: 0.02 or 2%."
)
@click.option(
    "--bits", type=click.Choice(["4", "8"]), default="4", show_default=True, help="Of gptq: width of the weights."
)
@click.option(
    "--group-size",
    type=click.IntRange(min=8),
    default=32,
    show_default=True,
    help="In 4 bits: inputs that share a scale; fewer lose less and take more room.",
)
@click.option("--symmetric", is_flag=True, help="In 4 bits: without zero points; a little smaller, a little worse.")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Of gptq and tuned: windows of text to calibrate with.",
)
@click.option(
    "--context", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens of a window of text."
)
@click.option(
    "--damping",
    type=FloatRange(min=0, min_open=True),
    default=0.01,
    show_default=True,
    help="Of gptq and tuned: added to what the text shows of each input, as a share of their mean; more steadies what "
    "little text shows.",
)
@click.option(
    "--mixed",
    is_flag=True,
    help="8 bits for the products that lose most in 4, as many as --max-perplexity-change asks for.",
)
@click.option(
    "--tuning-tokens",
    type=click.IntRange(min=0),
    default=None,
    help="Of tuned: tokens that are learned from. Without it a million; fewer for models that would take hours, none "
    "from some 760 million weights on.",
)
@click.option(
    "--act-order/--no-act-order",
    default=True,
    show_default=True,
    help="Of gptq and tuned: inputs are rounded by size, the largest first. Groups stay where they are, so serving is "
    "no slower.",
)
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    method: str | None,
    output: Path,
    data: Path | None,
    max_change: float | None,
    bits: str,
    group_size: int,
    symmetric: bool,
    samples: int,
    context: int,
    damping: float,
    mixed: bool,
    tuning_tokens: int | None,
    act_order: bool,
) -> int:
    """Write a quantised checkpoint of the model SOURCE (a folder, a hub id or 'demo').

    The folder is in the compressed-tensors format, with a card of the measurements; serve it like any other.
    With --max-perplexity-change a worse checkpoint is not written.

    \b
    Examples:
      inferd quantize ./my-model --output ./my-model-int8
      inferd quantize ./my-model --data text.txt --output ./my-model-int4
      inferd serve ./my-model-int4
    """
    chosen = method or ("int8" if data is None else "tuned")
    _refuse_unread(ctx, chosen, bits)
    with interruptible():
        from inferd.engine.calibrate.checkpoint import quantise
        from inferd.engine.calibrate.wish import Wish
        from inferd.registry.source import check_folder, resolve

    wish = Wish(
        method=chosen,  # type: ignore[arg-type]
        bits=int(bits),
        group_size=group_size,
        symmetric=symmetric,
        num_samples=samples,
        context=context,
        damping=damping,
        tuning_tokens=tuning_tokens,
        by_size=act_order,
        mixed=mixed,
        max_change=max_change,
    )
    with loading(f"Quantising {source}", counts=True) as tell:
        folder = check_folder(resolve(source, tell))
        result = quantise(folder, output, wish, data=data, source=_name(source), progress=tell)
    _print_result(result)
    return 0


def _refuse_unread(ctx: click.Context, method: str, bits: str) -> None:
    """Refuse a flag that the method does not use, before anything is computed."""
    is_wide = method == "int8" or (method == "gptq" and bits == "8")
    unread = {
        "bits": method != "gptq",
        "group_size": is_wide,
        "symmetric": is_wide,
        "mixed": is_wide or method == "int4",
        "samples": method in ("int4", "int8"),
        "damping": method in ("int4", "int8"),
        "act_order": method in ("int4", "int8"),
        "tuning_tokens": method != "tuned",
    }
    for name, is_unread in unread.items():
        if is_unread and ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            what = f"{method} of {bits} bits" if method == "gptq" and is_wide else method
            raise click.UsageError(
                f"--{name.replace('_', '-')} has no effect with the method {what}; leave it out, or choose another "
                "--method."
            )


def _name(source: str) -> str:
    """The source's name on the card: a folder by its name, because its path is private."""
    return Path(source).name if Path(source).exists() else source


def _print_result(result: Result) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("written", str(result.folder))
    table.add_row("size", f"{bytes_text(result.before_bytes)} -> {bytes_text(result.after_bytes)}")
    table.add_row("bits", f"{result.bits_per_weight:.2f} per weight of {result.num_quantised:,}, with scales")
    if result.before is not None and result.after is not None:
        table.add_row(
            "perplexity",
            f"{result.before.value:.5g} -> {result.after.value:.5g}, {result.change:+.2%} on the end of {result.data} "
            f"({result.after.num_scored:,} tokens)",
        )
    else:
        table.add_row("perplexity", "not measured; give a text with --data")
    console().print(table)
