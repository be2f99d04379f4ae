"""Questions about one input: by the Decisions API in one request, and by chat completions, one request each.

A server with one model is started and asked over HTTP, in the same words. The chat completions are of two kinds:
``choice`` constrains the answer to the labels; ``logprobs`` reads the label from the first token's alternatives, which
works for labels of one token alone. Each is asked one request after the other, and with eight requests at a time. Rounds
of all kinds alternate, so that another program on the machine slows all of them. The figures are medians, and the ratio
is taken within a round.

    python -m bench.decisions
    python -m bench.decisions --model /path/of/a/model --questions 16 --rounds 3
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

LABELS = ("billing", "shipping", "technical", "sales")
SENTENCE = "The parcel came late, the box was open and one of the two cups was broken. "
AT_ONCE = 8


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a server with one model, named m."""
    with tempfile.TemporaryDirectory() as state:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", model, "--name", "m", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "INFERD_STATE__DATA_DIR": state},
        )
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if "is ready" in line)
            found = re.search(r"http://\S+", ready)
            assert found is not None
            yield found[0]
        finally:
            process.terminate()
            process.wait()


def wording(number: int) -> str:
    return f"Which team should answer remark {number}?"


class Asking:
    """The ways to get the answers to all questions about an input."""

    def __init__(self, client: httpx.Client, text: str, num_questions: int) -> None:
        self._client = client
        self._text = text
        self._numbers = range(num_questions)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._client.post(path, json={"model": "m", **body})
        answer.raise_for_status()
        return answer.json()

    def decisions(self) -> int:
        """All in one request; the tokens that were read."""
        choices = [{"value": label} for label in LABELS]
        questions = [{"type": "choice", "instructions": wording(i), "choices": choices} for i in self._numbers]
        answer = self._post("/v1/decisions", {"input": self._text, "questions": questions})
        assert len(answer["answers"]) == len(questions)
        return int(answer["usage"]["input_tokens"])

    def _chat(self, number: int, more: dict[str, Any]) -> Any:
        listed = "\n".join(f"- {label}" for label in LABELS)
        asked = f"{wording(number)}\n\nChoose one of these values. Answer with the value alone.\n{listed}"
        messages = [{"role": "user", "content": self._text}, {"role": "user", "content": asked}]
        return self._post("/v1/chat/completions", {"messages": messages, "temperature": 0, **more})

    def choice(self, number: int) -> int:
        answer = self._chat(number, {"structured_outputs": {"choice": list(LABELS)}, "max_tokens": 16})
        assert answer["choices"][0]["message"]["content"] in LABELS
        return int(answer["usage"]["prompt_tokens"])

    def logprobs(self, number: int) -> int:
        answer = self._chat(number, {"logprobs": True, "top_logprobs": 20, "max_tokens": 1})
        assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20
        return int(answer["usage"]["prompt_tokens"])

    def each(self, ask: Callable[[int], int], at_once: int) -> int:
        with ThreadPoolExecutor(at_once) as pool:
            return sum(pool.map(ask, self._numbers))


WAYS: list[tuple[str, Callable[[Asking], int]]] = [
    ("decisions", Asking.decisions),
    ("chat with choice, one by one", lambda asking: asking.each(asking.choice, 1)),
    ("chat with choice, eight at once", lambda asking: asking.each(asking.choice, AT_ONCE)),
    ("chat with logprobs, one by one", lambda asking: asking.each(asking.logprobs, 1)),
    ("chat with logprobs, eight at once", lambda asking: asking.each(asking.logprobs, AT_ONCE)),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a folder or a hub id")
    parser.add_argument("--questions", type=int, default=32, help="of one input")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sentences", type=int, nargs="+", default=[4, 48], help="of the input, for each table")
    options = parser.parse_args()
    with served(options.model) as url, httpx.Client(base_url=url, timeout=600) as client:
        for num_sentences in options.sentences:
            show(client, num_sentences, options.questions, options.rounds)
    return 0


def show(client: httpx.Client, num_sentences: int, num_questions: int, num_rounds: int) -> None:
    speeds: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    for number in range(num_rounds + 1):
        # Each way of a round has an input of its own, so that none finds the prefix that another has computed.
        for name, ask in WAYS:
            asking = Asking(client, f"Case {number} by {name}. {SENTENCE * num_sentences}", num_questions)
            began = time.perf_counter()
            tokens[name] = ask(asking)
            if number:  # the first round warms up
                speeds.setdefault(name, []).append(num_questions / (time.perf_counter() - began))
    print(f"\n{num_questions} questions of {len(LABELS)} labels about an input of {num_sentences} sentences:\n")
    print("| way | answers/s | decisions is faster by | tokens of prompts |\n| --- | --- | --- | --- |")
    for name, found in speeds.items():
        ratios = [one / other for one, other in zip(speeds["decisions"], found, strict=True)]
        told = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        print(f"| {name} | {statistics.median(found):.0f} | {told} | {tokens[name]:,} |")


if __name__ == "__main__":
    raise SystemExit(main())
