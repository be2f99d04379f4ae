"""What speculation brings: an engine with and without it, in turns within one run.

    python -m bench.speculation                     # the bundled model and its draft
    python -m bench.speculation --model DIR         # another checkpoint, by prompt lookup (--draft DIR for a draft model)

Three tables. *Talk*: questions to the model, greedily and drawn at random, at several numbers of sequences, the last of
them a full batch. *Quoting*: a long prompt, and an answer of which a part is quoted from it; what is said is prescribed
(tokens are computed, drawn and then exchanged), as small models cannot quote, so chances are those of the text and
costs those of the model; and the prompt said again with changes. *Nothing to guess*: answers of random tokens, where all that guessing can do is cost.

A lone sequence's requests are played one by one, larger batches list by list, each by every way before the next comes, in an order
that turns round each time. The ratio is that of the sums of seconds, as the cost of trials falls on few requests; its interval (95 %)
is that of the same ratio over pairs drawn again and again from those that were played (Efron's bootstrap). Where all of the interval
lies above 0.97, a loss of 3 % is ruled out; where all of it lies below, it is shown; else more rounds are needed (``--rounds``).

Every answer is compared with that of the engine without guesses; the run fails where one differs. *None again* is that
engine once more: its ratio is what the machine makes of nothing, and no other ratio says more than that.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from inferd.config import ModelConfig, SchedulerConfig, SpeculationConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.engine.sampler import Drawn, Sampled, Sampler, SampleRow
from inferd.engine.speculation.draft_model import DraftModel
from inferd.engine.speculation.speculation import Speculation
from inferd.types import Chat, GenerateRequest, SamplingParams, TextPrompt, TokenPrompt

QUESTIONS = (
    "Tell me a story about a dog and a cat.",
    "What is inferd?",
    "How do I install inferd?",
    "What is 12 + 35?",
    "List five fruits.",
    "Explain continuous batching.",
    "Tell me a story.",
    "What can you do?",
    "How does the KV cache work?",
    "Count from 1 to 20.",
)
Method = Literal["none", "auto", "prompt_lookup", "draft"]
MOST_LOST = 0.03  # of the speed, whatever is said
DOCS = Path(__file__).resolve().parent.parent / "docs"


@dataclass(frozen=True)
class Round:
    """What one engine did with one list of requests."""

    seconds: float
    num_tokens: int
    num_steps: int
    drafted: int
    accepted: int
    said: dict[str, tuple[int, ...]]


class Prescribed(Sampler):
    """Draws as ever, and says what it was told to: ``scripts`` by the request's seed."""

    def __init__(self, vocab_size: int, scripts: dict[int, list[int]]) -> None:
        super().__init__(vocab_size)
        self.scripts = scripts

    def draw(self, logits: Tensor, rows: list[SampleRow]) -> Drawn:
        drawn = super().draw(logits, rows)
        drawn.results = [Sampled(self.scripts[row.seed][len(row.output_ids)]) for row in rows]
        return drawn


class Bench:
    """One engine, whose ways of guessing are put in and taken out: the same weights in the same memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = ModelConfig(
            source=options.model,
            threads=options.threads,
            max_model_len=options.max_model_len,
            scheduler=SchedulerConfig(max_num_seqs=options.batch, prefix_caching=False),
            speculation=SpeculationConfig(draft=options.draft),
        )
        self.engine = create_backend(options.model, config, lambda phase, done, total: None)
        loaded = self.engine._speculation
        assert loaded is not None
        scheduler, length, draft = self.engine._scheduler, self.engine.info.max_model_len, loaded.draft

        def way(method: Method, draft: DraftModel | None) -> Speculation:
            settings = msgspec.structs.replace(config, speculation=SpeculationConfig(method=method))
            return Speculation(settings, scheduler, length, draft, loaded.read_clock)

        self.ways: dict[str, Speculation | None] = {"none": None, "prompt lookup": way("prompt_lookup", None)}
        if draft is not None:
            self.ways |= {"draft model": way("draft", draft), "auto": way("auto", draft)}


def play(engine: Engine, way: Speculation | None, requests: list[GenerateRequest], num_seqs: int) -> Round:
    """Answer the requests, ``num_seqs`` of them at a time."""
    engine._speculation = way
    prepared = [engine.prepare(request) for request in requests]
    said: dict[str, tuple[int, ...]] = {}
    waiting, running = list(reversed(prepared)), 0
    steps = drafted = accepted = 0
    read_clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter  # other programs do not count
    began = read_clock()
    while waiting or running:
        while waiting and running < num_seqs:
            engine.add(waiting.pop(), 0.0)
            running += 1
        outputs, stats = engine.step(0.0)
        assert stats is not None
        steps += 1
        drafted += stats.drafted_tokens
        accepted += stats.accepted_tokens
        for output in outputs:
            for delta in output.deltas:
                said[output.request_id] = said.get(output.request_id, ()) + delta.token_ids
            if output.end is not None:
                assert output.end.outcome == "done", output.end
                running -= 1
    return Round(read_clock() - began, sum(map(len, said.values())), steps, drafted, accepted, said)


def compare(
    name: str,
    engine: Engine,
    ways: dict[str, Speculation | None],
    requests: list[GenerateRequest],
    num_seqs: int,
    rounds: int,
) -> None:
    """One line for each way of guessing, the first of which is not to."""
    order = list(ways)
    lists = [[request] for request in requests] if num_seqs == 1 else [requests]
    first: dict[str, list[Round]] = {key: [] for key in ways}
    seen: dict[str, list[Round]] = {key: [] for key in ways}
    for at in range((rounds + 1) * len(lists)):
        for key in order if at % 2 else reversed(order):
            one = play(engine, ways[key], lists[at % len(lists)], num_seqs)
            (first if at < len(lists) else seen)[key].append(one)
    plain = seen[order[0]]
    for key, played in seen.items():
        for one, twin in zip(first[key] + played, first[order[0]] + plain, strict=True):
            assert one.said == twin.said, f"{name}: {key} says something else than {order[0]}"
        ratio, low, high = interval([twin.seconds for twin in plain], [one.seconds for one in played])
        at_first, _, _ = interval([twin.seconds for twin in first[order[0]]], [one.seconds for one in first[key]])
        tokens, steps = sum(one.num_tokens for one in played), sum(one.num_steps for one in played)
        drafted, accepted = sum(one.drafted for one in played), sum(one.accepted for one in played)
        rate = f"{accepted / drafted:4.0%} of {drafted / len(played) * len(lists):.0f}" if drafted else "-"
        verdict = "no" if low >= 1 - MOST_LOST else "yes" if high < 1 - MOST_LOST else "?"
        print(
            f"{name:30s} {num_seqs:4d}  {key:14s} {tokens / sum(one.seconds for one in played):8.1f}  {ratio:5.3f} "
            f"({low:.3f} to {high:.3f}; at first {at_first:.2f})  {verdict:>3s}  {tokens / steps:6.2f}  {rate}",
            flush=True,
        )


def interval(plain: list[float], others: list[float]) -> tuple[float, float, float]:
    """How many times as fast the others were, and the bounds between which that lies at 95 %, from seconds in pairs."""
    pairs = np.array([plain, others])
    drawn = np.random.default_rng(0).integers(0, len(plain), (4000, len(plain)))
    sums = pairs[:, drawn].sum(-1)
    low, high = np.quantile(sums[0] / sums[1], (0.025, 0.975))
    return float(pairs[0].sum() / pairs[1].sum()), float(low), float(high)


def questions(count: int, temperature: float, max_tokens: int, *, is_chat: bool) -> list[GenerateRequest]:
    requests = []
    for i in range(count):
        text = QUESTIONS[i % len(QUESTIONS)]
        requests.append(
            GenerateRequest(
                id=f"q{i}",
                model="m",
                prompt=Chat(messages=[{"role": "user", "content": text}]) if is_chat else TextPrompt(text=text),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i),
                explicit=("max_tokens", "temperature", "seed"),
            )
        )
    return requests


def quoting(engine: Engine, count: int, share: float, scripts: dict[int, list[int]]) -> list[GenerateRequest]:
    """Pages of the documentation, and answers that quote runs of 8 to 40 tokens of them, with new words between."""
    tokenizer, vocab_size = engine._preparer.tokenizer, engine._sampler._vocab_size
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))]
    length = engine.info.max_model_len
    requests = []
    for i in range(count):
        draw = random.Random(i)
        prompt = tokenizer.encode(pages[i % len(pages)], False)[: min(600, length // 2)]
        script: list[int] = []
        while len(script) < 160:
            length_of_quote = draw.randint(8, 40)
            at = draw.randrange(max(len(prompt) - length_of_quote, 1))
            if share > 0:
                script += prompt[at : at + length_of_quote]
            num_new = round(length_of_quote / share - length_of_quote) if share else length_of_quote
            script += [draw.randrange(vocab_size) for _ in range(num_new)]
        seed = 1000 * round(share * 100) + i
        scripts[seed] = script
        requests.append(
            GenerateRequest(
                id=f"s{i}",
                model="m",
                prompt=TokenPrompt(token_ids=prompt),
                sampling=SamplingParams(
                    max_tokens=min(160, length // 2 - 1), temperature=0.0, seed=seed, ignore_eos=True
                ),
                explicit=("max_tokens", "temperature", "seed", "ignore_eos"),
            )
        )
    return requests


def editing(engine: Engine, count: int, scripts: dict[int, list[int]]) -> list[GenerateRequest]:
    """The same pages said again from some place on, with up to three words in the place of up to three others every 4 to 26."""
    requests = []
    for i, request in enumerate(quoting(engine, count, 1.0, {})):
        assert isinstance(request.prompt, TokenPrompt)
        draw, prompt = random.Random(i), request.prompt.token_ids
        at, script = draw.randrange(len(prompt) // 2), list[int]()
        while len(script) < 160:
            run = draw.randint(4, 26)
            script += prompt[at : at + run]
            at = (at + run + draw.randint(0, 3)) % (len(prompt) - 30)
            script += [draw.randrange(engine._sampler._vocab_size) for _ in range(draw.randint(0, 3))]
        seed = 1_000_000 + i
        scripts[seed] = script
        sampling = msgspec.structs.replace(request.sampling, seed=seed)
        requests.append(msgspec.structs.replace(request, sampling=sampling))
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default=None, help="a draft model; the bundled one for the bundled model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="sequences of a full batch (max_num_seqs)")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--sizes", default="1,4,16,full", help="sequences at a time")
    parser.add_argument("--only", choices=("talk", "quoting", "nothing"), default=None)
    options = parser.parse_args()
    if options.model == "demo" and options.draft is None:
        options.draft = "demo-draft"
    sizes = [options.batch if word == "full" else int(word) for word in options.sizes.split(",")]
    torch.set_num_threads(options.threads)
    print(f"{'':30s} seqs  {'':14s} tokens/s  ratio (95 % interval)                 lost 3 %  per step  accepted")
    bench = Bench(options)
    engine, ways = bench.engine, {"none": None, "none again": None, **bench.ways}
    if options.only in (None, "talk"):
        for temperature in (0.0, 0.8):
            for size in sizes:
                asked = questions(max(3 * size, 20), temperature, 100, is_chat=engine.info.has_chat_template)
                compare(f"talk, temperature {temperature}", engine, ways, asked, size, options.rounds)
    scripts: dict[int, list[int]] = {}
    engine._sampler = Prescribed(engine._sampler._vocab_size, scripts)
    ways = {name: way for name, way in ways.items() if name in ("none", "none again", "prompt lookup")}
    if options.only in (None, "quoting"):
        for share in (1.0, 0.8, 0.5):
            asked = quoting(engine, 6, share, scripts)
            compare(f"quoting {share:.0%} of the answer", engine, ways, asked, 1, options.rounds)
        compare("saying again, with changes", engine, ways, editing(engine, 6, scripts), 1, options.rounds)
    if options.only in (None, "nothing"):
        for size in sizes:
            asked = quoting(engine, max(2 * size, 8), 0.0, scripts)
            compare("nothing to guess", engine, ways, asked, size, options.rounds)


if __name__ == "__main__":
    main()
