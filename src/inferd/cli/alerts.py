"""``inferd alerts``: rules for Prometheus, from the objectives of a configuration."""

from __future__ import annotations

import os
from pathlib import Path

import click

from inferd.cli.terminal import warn
from inferd.config import load_config
from inferd.observe.alerts.burn_rates import MIN_MISSED
from inferd.observe.alerts.rule import RUNBOOKS
from inferd.observe.alerts.rules_file import rules_file, runbook_template


@click.command("alerts")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write.  [default: standard output]",
)
@click.option(
    "--runbooks",
    metavar="URL",
    default=RUNBOOKS,
    show_default=True,
    help="Where the pages of docs/runbooks/ are: an address with {alert} for the alert's name, or the address of a "
    "folder of the documentation's site, below which each is NAME.html.",
)
@click.option(
    "--min-missed",
    type=click.IntRange(min=1),
    default=MIN_MISSED,
    show_default=True,
    help="Requests that must have missed an objective in the long window of an alert, so that a single failure in a "
    "quiet hour does not fire it.",
)
def command(config: Path | None, output: Path | None, runbooks: str, min_missed: int) -> None:
    """Write the alerts of CONFIG as a rules file for Prometheus.

    Each objective of a model (models.NAME.objectives) gets alerts for its error budget: a page when it is used up 14.4
    times too fast (over 1 h and 5 m) or 6 times (6 h and 30 m), and a ticket at once (3 d and 6 h). General alerts,
    such as for errors, queues, memory and workers, are always written. Without CONFIG they are all.

    \b
    Examples:
      inferd alerts inferd.yaml -o inferd.rules.yml
      inferd alerts inferd.yaml | promtool check rules
      inferd alerts inferd.yaml --runbooks https://docs.example.com/runbooks

    Write the file again when an objective changes, and reload Prometheus. deploy/ has a prometheus.yml and an
    alertmanager.yml that fit the labels of these alerts.
    """
    if "{" in runbooks.replace("{alert}", ""):
        raise click.BadParameter(f"{runbooks!r} has a placeholder other than {{alert}}.", param_hint="--runbooks")
    read = load_config(config, os.environ, {})
    objectives = {name: model.objectives for name, model in read.models.items()}
    text = rules_file(objectives, runbooks=runbook_template(runbooks), min_missed=min_missed)
    if config is not None and "inferd-objectives" not in text:
        warn(f"{config} sets no objectives (models.NAME.objectives); the file has the general alerts alone.")
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(
            f"{output} cannot be written ({error.strerror}); choose another file with --output."
        ) from None
