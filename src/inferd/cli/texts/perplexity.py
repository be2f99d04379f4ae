"""``inferd perplexity``: how well a model predicts a text."""

from __future__ import annotations

import json
from pathlib import Path

import click

from inferd.cli.terminal import interruptible, loading


@click.command("perplexity")
@click.argument("source")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="The text, a UTF-8 file.",
)
@click.option(
    "--context",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    help="Tokens of a window; never more than the model was made for.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    default=None,
    help="Tokens from one window to the next; fewer give each token more context.  [default: windows do not overlap]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    default=None,
    help="Measure the text's first tokens alone.  [default: all]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Number format of weights and cache.",
)
@click.option(
    "--quantization",
    type=click.Choice(["auto", "none", "int8", "int4"]),
    default="auto",
    show_default=True,
    help="As in a model's settings.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a sentence.")
def command(
    source: str,
    data: Path,
    context: int,
    stride: int | None,
    max_tokens: int | None,
    dtype: str,
    quantization: str,
    as_json: bool,
) -> int:
    """Measure how well the model SOURCE predicts a text: perplexity, less is better.

    The text is cut into windows; every token is scored once, given what stands before it in its window. The model
    computes as it would when it is served. docs/quantisation.md has the definition.

    \b
    Examples:
      inferd perplexity demo --data book.txt
      inferd perplexity ./small --data book.txt --context 1024 --stride 512
    """
    with interruptible():
        from inferd.engine.calibrate.measure import measure

    with loading(f"Measuring {source}", counts=True) as tell:
        found = measure(
            source,
            data,
            context=context,
            stride=stride,
            max_tokens=max_tokens,
            dtype=dtype,  # type: ignore[arg-type]
            quantization=quantization,  # type: ignore[arg-type]
            progress=tell,
        )
    if as_json:
        row = {
            "source": source,
            "data": str(data),
            "perplexity": found.value,
            "standard_error": found.error,
            "num_scored": found.num_scored,
            "num_windows": found.num_windows,
            "context": found.context,
        }
        click.echo(json.dumps(row))
        return 0
    click.echo(
        f"perplexity {found.value:.5g} of {source} on {data.name}: {found.num_scored:,} tokens in "
        f"{found.num_windows:,} window{'s' * (found.num_windows != 1)} "
        f"of {found.context}, mean loss with a standard error of {found.error:.3f} nats"
    )
    return 0
