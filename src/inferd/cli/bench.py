"""``inferd bench``: a load test of a running server, or of one started for it."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec

from inferd import clock
from inferd.benchmark import load, step_profile
from inferd.benchmark.dataset import Query, from_file, random_tokens
from inferd.benchmark.report import Report, load_label, milliseconds, profile_rows, render
from inferd.benchmark.stats import Record, Summary, summarise
from inferd.benchmark.step_profile import StepProfile
from inferd.cli.endpoint import DEFAULT_URL, find_endpoint
from inferd.cli.flags import Parsed
from inferd.cli.ranges import FloatRange
from inferd.cli.running.control import find_server
from inferd.cli.running.own_server import own_server
from inferd.cli.terminal import console, is_live, note
from inferd.config.units import NotAllowedError
from inferd.errors import Unavailable
from inferd.gateway.control import ServerReport


def _numbers(text: str) -> list[float]:
    """A comma-separated list of positive numbers. Raises NotAllowedError."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or not all(0 < number < 1e6 for number in found):
        raise NotAllowedError("a list of positive numbers such as 1,8,32")
    return found


_NUMBERS: Final = Parsed("numbers", "N,N,..", _numbers)


@click.command("bench")
@click.argument("source", required=False)
@click.option(
    "--url", default=None, help="Server to test.  [default: the one that runs on this machine, when no SOURCE is given]"
)
@click.option(
    "--port", type=click.IntRange(1, 65535), default=None, help="Port of the server to test, on this machine."
)
@click.option("--model", default=None, help="Model name to ask for.  [default: the first that the server lists]")
@click.option(
    "--concurrency",
    type=_NUMBERS,
    default=None,
    help="Closed loop: clients at a time, each waiting for its answer.  [default: 1,8,32]",
)
@click.option(
    "--rate",
    type=_NUMBERS,
    metavar="R,R,..",
    default=None,
    help="Open loop: requests per second, arriving whether or not earlier ones are answered.",
)
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(min=1),
    default=None,
    help="Requests per run.  [default: 4 per client, at least 16]",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Requests sent before the first run and not measured.",
)
@click.option(
    "--input-len",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Random dataset: tokens of a prompt.",
)
@click.option("--output-len", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of an answer.")
@click.option(
    "--vocab-size",
    type=click.IntRange(min=16),
    default=1024,
    show_default=True,
    help="Random dataset: token ids are below this.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    default=None,
    help='JSON-lines file of {"prompt": ..} or {"messages": [..]}, instead of random tokens.',
)
@click.option(
    "--api-key",
    envvar=["INFERD_API_KEY", "OPENAI_API_KEY"],
    default=None,
    help="Key for the server under test (also INFERD_API_KEY or OPENAI_API_KEY).",
)
@click.option(
    "--timeout",
    type=FloatRange(min=0.1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time for one answer.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random prompts and arrivals.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for answers of exactly --output-len tokens.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Tell where the engine's steps spend their time: needs an inferd server that computes the model itself.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("inferd-bench"),
    show_default=True,
    help="Results go to OUTPUT.json and OUTPUT.html.",
)
def command(
    source: str | None,
    url: str | None,
    port: int | None,
    model: str | None,
    concurrency: list[float] | None,
    rate: list[float] | None,
    num_requests: int | None,
    warmup: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    prompts: Path | None,
    api_key: str | None,
    timeout: float,
    seed: int,
    ignore_eos: bool,
    profile: bool,
    output: Path,
) -> int:
    """Load-test a server and write a table, a JSON file and an HTML report.

    Measures any server with OpenAI's completion routes. With SOURCE (what 'inferd serve' takes), a
    server is started for the test and stopped after it.

    \b
    Examples:
      inferd bench                              the server on this machine
      inferd bench demo --concurrency 1,4,16    a server of its own
      inferd bench --url http://10.0.0.5:8000 --rate 2,4,8 --prompts prompts.jsonl

    Exit code 1 when any request failed.
    """
    if source is not None and (url is not None or port is not None):
        raise click.UsageError(
            "Give either SOURCE (a server is started) or --url or --port (it runs already), not both."
        )
    dataset = _Dataset(prompts, input_len, output_len, vocab_size, seed)
    dataset.queries(1, 0)  # a bad file is reported before a server is started
    with own_server(source) if source is not None else contextlib.nullcontext(url or _running(port)) as address:
        if model is not None and url is None:
            _refuse_unknown(model, port if source is None else urlsplit(address).port, api_key)
        name = model or asyncio.run(load.find_model(address, api_key))
        target = load.Target(url=address, model=name, api_key=api_key, timeout_s=timeout, ignore_eos=ignore_eos)
        if warmup:
            _checked(asyncio.run(load.closed_loop(target, dataset.queries(warmup, 1000), 1, _ignore)), address)
        summaries, profiles = _run_all(target, dataset, _runs(concurrency, rate), num_requests, profile)
    report = Report(
        url=address,
        model=name,
        dataset=dataset.description,
        started_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(clock.wall())),
        runs=summaries,
        command="inferd " + shlex.join(sys.argv[1:]),
        profiles=profiles,
    )
    _print(report)
    _write(report, output)
    return 1 if any(run.num_errors for run in summaries) else 0


class _Dataset(NamedTuple):
    """Where the requests of a run come from: a file of prompts, or random tokens."""

    prompts: Path | None
    input_len: int
    output_len: int
    vocab_size: int
    seed: int

    def queries(self, count: int, salt: int) -> list[Query]:
        """The requests of one run. Another ``salt`` gives other random tokens."""
        if self.prompts is not None:
            return from_file(self.prompts, count, output_len=self.output_len)
        return random_tokens(
            count,
            input_len=self.input_len,
            output_len=self.output_len,
            vocab_size=self.vocab_size,
            seed=self.seed + salt,
        )

    @property
    def description(self) -> str:
        if self.prompts is not None:
            return f"prompts of {self.prompts}"
        return f"{self.input_len} random tokens in, {self.output_len} out"


def _runs(concurrency: list[float] | None, rate: list[float] | None) -> list[tuple[str, float]]:
    """The kind and load of each run."""
    clients = concurrency or ([] if rate else [1.0, 8.0, 32.0])
    return [*[("closed", float(int(count) or 1)) for count in clients], *[("open", each) for each in rate or []]]


def _run_all(
    target: load.Target,
    dataset: _Dataset,
    runs: Sequence[tuple[str, float]],
    num_requests: int | None,
    profile: bool,
) -> tuple[list[Summary], list[StepProfile]]:
    """Measure each run, with ``profile`` also the engine's steps during it."""
    summaries: list[Summary] = []
    profiles: list[StepProfile] = []
    for number, (kind, amount) in enumerate(runs):
        queries = dataset.queries(num_requests or max(16, int(4 * amount)), number)
        before = asyncio.run(step_profile.read(target)) if profile else None
        summaries.append(_measure(target, queries, kind, amount, dataset.seed))
        if before is not None:
            profiles.append(step_profile.between(before, asyncio.run(step_profile.read(target))))
    return summaries, profiles


def _write(report: Report, output: Path) -> None:
    as_json, as_html = Path(f"{output}.json"), Path(f"{output}.html")
    try:
        as_json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        as_html.write_text(render(report), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(
            f"The results cannot be written to {output}.* ({error.strerror}); choose another --output."
        ) from None
    click.echo(f"\nWritten: {as_json} and {as_html}")


def _running(port: int | None) -> str:
    """The address of the server with the port, or of the only one on this machine; else the usual one."""
    try:
        server = find_server(port, None, None, None)
    except Unavailable:
        if port is not None:
            raise
        return DEFAULT_URL
    address = server.get("/admin/status", ServerReport).address
    note(f"Testing the server at {address}.")
    return address


def _refuse_unknown(model: str, port: int | None, api_key: str | None) -> None:
    """Raises Unavailable where the server on this machine has no such model."""
    endpoint = find_endpoint(None, port, api_key)
    if endpoint is not None:
        endpoint.refuse_unknown(model)


def _ignore(record: Record) -> None:
    """The warm-up shows no progress."""


def _checked(records: Sequence[Record], address: str) -> None:
    errors = [record.error for record in records if record.error is not None]
    if errors:
        raise Unavailable(f"The server at {address} does not answer completions: {errors[0].removesuffix('.')}.")


def _measure(target: load.Target, queries: list[Query], kind: str, amount: float, seed: int) -> Summary:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    label = f"{amount:g} client{'s' * (amount != 1)}" if kind == "closed" else f"{amount:g} requests/s"
    columns = (TextColumn(f"{label:>14}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True, disable=not is_live()) as bar:
        task = bar.add_task("", total=len(queries))

        def advance(record: Record) -> None:
            bar.advance(task)

        if kind == "closed":
            records = asyncio.run(load.closed_loop(target, queries, int(amount), advance))
            return summarise(records, kind="closed", load=amount)
        return summarise(asyncio.run(load.open_loop(target, queries, amount, advance, seed)), kind="open", load=amount)


def _print(report: Report) -> None:
    from rich.table import Table

    # Two tables, each of which fits a terminal of 80 columns.
    table = Table(title=f"{report.model} at {report.url}, {report.dataset}", title_justify="left")
    for heading in ("load", "requests", "errors", "req/s", "out tok/s"):
        table.add_column(heading, justify="left" if heading == "load" else "right", no_wrap=True)
    times = Table(title="Milliseconds: p50/p95/p99", title_justify="left", collapse_padding=True, pad_edge=False)
    times.add_column("load", overflow="fold")
    for heading in ("TTFT", "TPOT", "ITL", "E2E"):
        times.add_column(heading, justify="right", overflow="fold")
    for run in report.runs:
        spreads = (
            "/".join(milliseconds(v) for v in (s.p50, s.p95, s.p99)) for s in (run.ttft, run.tpot, run.itl, run.e2e)
        )
        errors = f"[red]{run.num_errors}[/]" if run.num_errors else "0"
        row = (
            load_label(run),
            str(run.num_requests),
            errors,
            f"{run.requests_per_s:.2f}",
            f"{run.output_tokens_per_s:,.1f}",
        )
        table.add_row(*row)
        times.add_row(load_label(run), *spreads)
    out = console()
    out.print(table, times)
    if report.profiles:
        profile = Table(title="Where a step spends its time", title_justify="left")
        for heading in ("", *map(load_label, report.runs)):
            profile.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for cells in profile_rows(report.profiles):
            profile.add_row(*cells)
        out.print(profile)
    for run in report.runs:
        for sentence, count in run.errors.items():
            out.print(f"{load_label(run)}: {count} times: {sentence}", style="red", markup=False)
