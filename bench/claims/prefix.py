"""A prefix cache against none: many questions about one long text, and requests that share nothing."""

from __future__ import annotations

from bench.chart import bars
from bench.claims.claim import Claim, Scale
from bench.claims.engine import load, random_prompts, timed
from bench.report import Figure

SHARED, OWN = 448, 32  # tokens


def measure(scale: Scale) -> Claim:
    count = scale.pick(16, 40)
    times: dict[tuple[str, bool], list[float]] = {}
    whole: dict[tuple[str, bool], float] = {}
    engines = {caching: load(scale, {"scheduler": {"prefix_caching": caching}}) for caching in (False, True)}
    try:
        some = engines[False]
        (text,) = random_prompts(some, [SHARED], 1)
        for kind in ("shared", "nothing shared"):

            def prompts(seed: int, kind: str = kind) -> list[list[int]]:
                if kind == "shared":
                    return [text + question for question in random_prompts(some, [OWN] * count, seed)]
                return random_prompts(some, [SHARED + OWN] * count, seed)

            for i, prompt in enumerate(prompts(2)):
                for caching, llm in engines.items():
                    seconds = timed(llm, [prompt], [1])
                    if i:  # the first has to compute the text in either case
                        times.setdefault((kind, caching), []).append(1e3 * seconds)
            for caching, llm in engines.items():
                whole[kind, caching] = count * 16 / timed(llm, prompts(3), [16] * count)
    finally:
        for llm in engines.values():
            llm.close()
    ttft = {key: Figure(tuple(values)) for key, values in times.items()}
    gains = {kind: ttft[kind, False].median / ttft[kind, True].median for kind in ("shared", "nothing shared")}
    groups = ["shared", "nothing shared"]
    return Claim(
        name="prefix",
        claim="Prompts that begin alike are computed once: their time to first token falls, and prompts that share nothing lose nothing.",
        baseline="the same engine with scheduler.prefix_caching false.",
        head=["prompts", "TTFT without, ms", "TTFT with, ms", "times shorter", "tokens/s without", "with"],
        rows=[
            [
                f"{SHARED} tokens shared + {OWN}" if kind == "shared" else f"{SHARED + OWN} of their own",
                f"{ttft[kind, False].median:.2f}",
                f"{ttft[kind, True].median:.2f}",
                f"{gains[kind]:.2f}",
                f"{whole[kind, False]:.0f}",
                f"{whole[kind, True]:.0f}",
            ]
            for kind in groups
        ],
        picture=bars(
            groups,
            [
                ("without", [ttft[kind, False].median for kind in groups]),
                ("with prefix cache", [ttft[kind, True].median for kind in groups]),
            ],
            title="Time to first token",
            y_label="ms",
        ),
        verdicts=[
            (gains["shared"] > 1.5, f"TTFT is {gains['shared']:.1f} times shorter where {SHARED} tokens are shared"),
            (gains["nothing shared"] > 0.9, f"it is {gains['nothing shared']:.2f} times as short where nothing is"),
        ],
        data={
            "ttft_ms": {f"{kind}, {'with' if on else 'without'}": f.values for (kind, on), f in ttft.items()},
            "tokens_per_s": {f"{kind}, {'with' if on else 'without'}": value for (kind, on), value in whole.items()},
        },
    )
