"""From runs to the report: medians and spread, ratios to the best peer, what the goals say, the roofline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.chart import Line, bars, lines
from bench.report import Figure, markdown, ratio

OURS = "inferd"
FORMATS = ("bf16", "int8", "int4")
CLIENTS = (1, 8, 32)
BITS = {"bf16": 16.0, "int8": 8.0, "int4": 4.0}  # per weight; scales are left out, so GB/s are a lower bound
# What inferd is to reach: times the best peer of the format, by clients.
GOALS = {"bf16": (1.05, 1.25, 1.25), "int8": (1.2, 1.5, 1.5), "int4": (1.1, 1.3, 1.3)}
BANDWIDTH_GOAL = {"bf16": 0.8, "int8": 0.7, "int4": 0.7}
PREFILL_GOAL = 0.75
CONTEXT_GOAL = 0.9
START_GOAL_S = {"bf16": 3.0, "int8": 4.0, "int4": 4.0}


@dataclass(frozen=True, slots=True)
class Run:
    """What one start of one engine gave: figures by name."""

    suite: str  # http, in process, start
    engine: str
    form: str
    figures: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0  # the whole measurement


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do, measured in the same run."""

    read_gb_per_s: float
    bf16_gflop_per_s: float
    int8_gop_per_s: float

    def matrix_rate(self, form: str) -> float:
        return self.bf16_gflop_per_s if form == "bf16" else self.int8_gop_per_s


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a checkpoint: what a token costs."""

    matrix_weights: int  # multiplied for every token
    head_weights: int  # of these, the output matrix: for the last token of a prompt only
    kv_bytes_per_token: int  # 16-bit

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Shape:
        """Of a Llama-like decoder's config.json."""

        def number(name: str) -> int:
            value = config[name]
            assert isinstance(value, int), f"{name} of the checkpoint's config.json is {value!r}, not a number"
            return value

        hidden, layers, inner = number("hidden_size"), number("num_hidden_layers"), number("intermediate_size")
        heads, kv_heads = number("num_attention_heads"), number("num_key_value_heads")
        width = number("head_dim") if "head_dim" in config else hidden // heads
        layer = hidden * width * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
        head = number("vocab_size") * hidden
        return cls(layers * layer + head, head, 2 * layers * kv_heads * width * 2)

    def weight_bytes(self, form: str) -> float:
        return self.matrix_weights * BITS[form] / 8

    def own_weight_bytes(self, form: str) -> float:
        """As inferd keeps them: in int4 groups of 64 have a scale and a zero point, and the output matrix has 8 bits."""
        if form != "int4":
            return self.weight_bytes(form)
        return ((self.matrix_weights - self.head_weights) * 4.375 + self.head_weights * 8) / 8

    def decode_gb_per_s(self, form: str, tokens_per_s: float, context: float) -> float:
        """Weights and KV cache read for one sequence's tokens."""
        return (self.weight_bytes(form) + context * self.kv_bytes_per_token) * tokens_per_s / 1e9

    def prefill_gflop_per_s(self, tokens_per_s: float) -> float:
        """Matrix products alone, attention left out."""
        return 2 * (self.matrix_weights - self.head_weights) * tokens_per_s / 1e9


def gathered(runs: Sequence[Run]) -> dict[tuple[str, str, str], dict[str, Figure]]:
    """Repetitions of the same measurement together, by (suite, format, engine)."""
    values: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for run in runs:
        of_engine = values.setdefault((run.suite, run.form, run.engine), {})
        for name, value in run.figures.items():
            of_engine.setdefault(name, []).append(value)
    return {
        key: {name: Figure(tuple(column)) for name, column in figures.items()}
        for key, figures in sorted(values.items(), key=_order)
    }


def _order(item: tuple[tuple[str, str, str], object]) -> tuple[str, int, bool, str]:
    suite, form, engine = item[0]
    return suite, FORMATS.index(form), engine != OURS, engine


def is_better_lower(name: str) -> bool:
    return name.endswith((", ms", ", s", ", GB"))


def tables(
    runs: Sequence[Run], limits: Sequence[Limits], shape: Shape, left_out: Mapping[str, str] | None = None
) -> str:
    """The report's text. ``left_out``: what was not measured, and why."""
    found = gathered(runs)
    parts = [_limits_text(limits)]
    for suite in sorted({suite for suite, _, _ in found}):
        for form in FORMATS:
            engines = {engine: figures for (s, f, engine), figures in found.items() if (s, f) == (suite, form)}
            if engines:
                parts.append(f"## {suite}, {form}\n\n{_table(engines)}")
    parts.append("## Goals\n\n" + markdown(["what", "goal", "found", ""], verdicts(found, limits, shape)))
    if left_out:
        rows = [[what, " ".join(why.split())[:300].replace("|", "/")] for what, why in left_out.items()]
        parts.append("## Not measured\n\n" + markdown(["what", "why"], rows))
    return "\n".join(parts)


def _limits_text(limits: Sequence[Limits]) -> str:
    columns = {
        "memory read, GB/s": [one.read_gb_per_s for one in limits],
        "bf16 products, GFLOP/s": [one.bf16_gflop_per_s for one in limits],
        "int8 products, GOP/s": [one.int8_gop_per_s for one in limits],
    }
    return "## The machine\n\n" + markdown(
        ["limit", "measured"], [[name, str(Figure(tuple(values)))] for name, values in columns.items() if values]
    )


def _table(engines: Mapping[str, Mapping[str, Figure]]) -> str:
    names = list(dict.fromkeys(name for figures in engines.values() for name in figures))
    has_ratio = OURS in engines and len(engines) > 1
    rows = []
    for name in names:
        row = [name, *(str(figures[name]) if name in figures else "-" for figures in engines.values())]
        if has_ratio:
            row.append(_times(engines, name))
        rows.append(row)
    head = ["", *engines, *(["inferd / best peer"] if has_ratio else [])]
    return markdown(head, rows)


def _times(engines: Mapping[str, Mapping[str, Figure]], name: str) -> str:
    ours = engines[OURS].get(name)
    others = [figures[name] for engine, figures in engines.items() if engine != OURS and name in figures]
    times = None if ours is None else ratio(ours, others, lower_is_better=is_better_lower(name))
    return "-" if times is None else f"{times:.2f}"


def verdicts(
    found: Mapping[tuple[str, str, str], Mapping[str, Figure]], limits: Sequence[Limits], shape: Shape
) -> list[list[str]]:
    """[what, goal, found, held or not] for each goal that something was measured for."""
    rows = []

    def judge(what: str, goal: float, value: float | None) -> None:
        if value is not None:
            rows.append([what, f">= {goal:.2f}", f"{value:.2f}", "yes" if value >= goal else "NO"])

    for suite in sorted({suite for suite, _, _ in found}):
        for form in FORMATS:
            engines = {engine: figures for (s, f, engine), figures in found.items() if (s, f) == (suite, form)}
            if OURS not in engines:
                continue
            for clients, goal in zip(CLIENTS, GOALS[form], strict=True):
                name = f"{clients} clients: tokens/s"
                peers = [figures[name] for engine, figures in engines.items() if engine != OURS and name in figures]
                if name in engines[OURS]:
                    judge(f"{suite}, {form}, {clients} clients", goal, ratio(engines[OURS][name], peers))
            name = "32 clients: TTFT p95, ms"
            peers = [figures[name] for engine, figures in engines.items() if engine != OURS and name in figures]
            if name in engines[OURS]:
                times = ratio(engines[OURS][name], peers, lower_is_better=True)
                judge(f"{suite}, {form}, TTFT p95 at 32 clients, times shorter", 1.0, times)
    for (suite, form, engine), figures in found.items():
        if engine == OURS and suite == "in process" and limits:
            for what, goal, share in efficiency(figures, form, limits, shape):
                rows.append([what, f">= {goal:.0%}", _percent(share), "yes" if share.median >= goal else "NO"])
        if engine == OURS and suite == "start":
            ready = figures["second start, s"]
            what = "start to ready" if form == "bf16" else "start to ready, quantised weights kept"
            is_held = ready.median <= START_GOAL_S[form]
            rows.append([f"{form}: {what}, s", f"<= {START_GOAL_S[form]:.0f}", str(ready), "yes" if is_held else "NO"])
    return rows


def _percent(share: Figure) -> str:
    if len(share.values) == 1:
        return f"{share.median:.0%}"
    return f"{share.median:.0%} ({min(share.values):.0%}-{max(share.values):.0%})"


def efficiency(
    figures: Mapping[str, Figure], form: str, limits: Sequence[Limits], shape: Shape
) -> list[tuple[str, float, Figure]]:
    """(what, goal, share of the machine's limit) of one engine in process."""
    rows = []

    def share(what: str, goal: float, name: str, factor: float) -> None:
        if name in figures:
            rows.append((f"{form}: {what}", goal, Figure(tuple(value * factor for value in figures[name].values))))

    share(
        "decode of one sequence, of the read bandwidth", BANDWIDTH_GOAL[form], "decode, % of the read bandwidth", 0.01
    )
    rate = Figure(tuple(one.matrix_rate(form) for one in limits)).median
    prefill = shape.prefill_gflop_per_s(1.0) / rate
    share("prefill, of the matrix rate", PREFILL_GOAL, "prefill 512, tokens/s", prefill)
    context = "decode at 4096, % of what KV bytes leave"
    share("decode at 4,096, of what the KV bytes leave", CONTEXT_GOAL, context, 0.01)
    return rows


def bandwidth_picture(
    found: Mapping[tuple[str, str, str], Mapping[str, Figure]], limits: Sequence[Limits], shape: Shape
) -> str:
    """Bytes read per second in decode of one sequence, beside the bandwidth."""
    read = Figure(tuple(one.read_gb_per_s for one in limits)).median
    name = "decode, tokens/s"
    engines = list(dict.fromkeys(engine for (_, _, engine), figures in found.items() if name in figures))

    def rate(engine: str, form: str) -> float | None:
        for (_, f, e), figures in found.items():
            if (e, f) == (engine, form) and name in figures:
                return shape.decode_gb_per_s(form, figures[name].median, 160)
        return None

    series: list[tuple[str, Sequence[float | None]]] = [
        (engine, [rate(engine, form) for form in FORMATS]) for engine in engines
    ]
    series.append(("measured bandwidth", [read] * len(FORMATS)))
    return bars(FORMATS, series, title="Decode of one sequence: bytes read", y_label="GB/s (without scales)")


def roofline_picture(
    found: Mapping[tuple[str, str, str], Mapping[str, Figure]], limits: Sequence[Limits], shape: Shape
) -> str:
    """Work per second over work per byte: decode of one sequence and prefill of 512 tokens, under the roofs."""
    read = Figure(tuple(one.read_gb_per_s for one in limits)).median
    roofs = {
        "bf16 roof": Figure(tuple(one.bf16_gflop_per_s for one in limits)).median,
        "int8 roof": Figure(tuple(one.int8_gop_per_s for one in limits)).median,
    }
    low, high = 0.5, 4096.0
    curves = [
        Line(name, [low, roof / read, high], [low * read, roof, roof], dashed=True) for name, roof in roofs.items()
    ]
    for form in FORMATS:
        for is_ours in (True, False):
            x, y = [], []
            for (_, f, engine), figures in found.items():
                if f != form or (engine == OURS) != is_ours:
                    continue
                if "decode, tokens/s" in figures:
                    x.append(2 * shape.matrix_weights / (shape.weight_bytes(form) + 160 * shape.kv_bytes_per_token))
                    y.append(2 * shape.matrix_weights * figures["decode, tokens/s"].median / 1e9)
                if "prefill 512, tokens/s" in figures:
                    x.append(2 * 512 * 8 / BITS[form])
                    y.append(shape.prefill_gflop_per_s(figures["prefill 512, tokens/s"].median))
            if x:
                curves.append(Line(f"{OURS if is_ours else 'peers'} {form}", x, y, joined=False))
    return lines(
        curves,
        title="Roofline: decode of one sequence (left), prefill of 512 (right)",
        x_label="operations per byte of weights and KV",
        y_label="GFLOP/s",
        log_x=True,
        log_y=True,
    )
