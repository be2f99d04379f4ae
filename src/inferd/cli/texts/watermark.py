"""``inferd watermark``: whether a text has a model's watermark."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

import click

from inferd.cli.ranges import FloatRange
from inferd.cli.terminal import interruptible
from inferd.config import load_config
from inferd.errors import InvalidRequest

FOUND_Z = 4.0
"""Standard deviations above chance from which on a text counts as marked: 3 of 100,000 texts without a watermark are as
green."""


@click.command("watermark")
@click.argument("text", type=click.File("r", encoding="utf-8"), metavar="FILE")
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="The configuration file of the server: it has the model, and the file of its key.",
)
@click.option("--name", default=None, help="The model's name there.  [default: the only one with a watermark]")
@click.option(
    "--threshold",
    type=FloatRange(min=0),
    default=FOUND_Z,
    show_default=True,
    help="Standard deviations above chance from which on a text counts as marked.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a sentence.")
def command(text: TextIO, config: Path, name: str | None, threshold: float, as_json: bool) -> int:
    """Find out whether the text in FILE has the watermark of a model.

    FILE is UTF-8 text, without its prompt; - is the standard input. A text of fewer than 50 tokens seldom tells.
    docs/watermarks.md has the method. Exit code 0: the watermark is there, 1: it is not.

    \b
    Examples:
      inferd watermark answer.txt --config inferd.yaml
      inferd watermark - --config inferd.yaml --name chat --json
    """
    models = load_config(config, os.environ, {}).models
    marked = [one for one, model in models.items() if model.watermark is not None]
    if name is not None and name not in marked:
        raise InvalidRequest(
            f"The model {name!r} has no watermark in {config}; those with one: {', '.join(marked) or 'none'}.",
            param="name",
        )
    if name is None and len(marked) != 1:
        raise InvalidRequest(
            f"{config} has {len(marked)} models with a watermark{': ' * bool(marked)}{', '.join(marked)}; "
            + ("choose one with --name." if marked else "set watermark.key_file of one."),
            param="name",
        )
    with interruptible():
        from inferd.engine.watermark import score_text

        found = score_text(models[name or marked[0]], text.read())
    is_marked = found.z >= threshold
    if as_json:
        row = {
            "watermarked": is_marked,
            "z": found.z,
            "p_value": found.p_value,
            "num_scored": found.num_scored,
            "num_green": found.num_green,
        }
        click.echo(json.dumps(row))
    else:
        click.echo(
            f"{'The watermark is there' if is_marked else 'No watermark was found'}: {found.num_green} of "
            f"{found.num_scored} tokens are green, {found.z:.2f} standard deviations above chance "
            f"(a text without it is as green with a probability of {found.p_value:.2g})."
        )
    return 0 if is_marked else 1
