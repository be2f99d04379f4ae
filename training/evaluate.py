"""Scores a model on held-out prompts of each kind, greedily, and writes JSON and the model card's table.

``python -m training.evaluate src/inferd/models/demo --out docs/model-scores.json``. Generation runs
through ``transformers`` (a development dependency), so the scores do not rest on inferd's own engine.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from .corpus import exchanges
from .dialogue import END_OF_TEXT, IM_END, Dialogue, Split, render
from .words import TOPICS

LONGEST_ANSWER = 200
_CALL = re.compile(r"^<tool_call>\n(.*)\n</tool_call>$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Scored:
    """One prompt, what the model wrote, and whether that was right and ended."""

    kind: str
    prompt: str
    wanted: str
    written: str
    correct: bool
    ended: bool


def is_correct(dialogue: Dialogue, written: str) -> bool:
    """Tell whether an answer meets what its dialogue expects."""
    expect = dialogue.expect
    if expect.get("no_call") and "<tool_call>" in written:
        return False
    if "call" in expect:
        found = _CALL.match(written)
        return found is not None and _parsed(found[1]) == expect["call"]
    if "exact" in expect:
        return written == expect["exact"]
    if "object" in expect:
        return _parsed(written) == expect["object"]
    if "keys" in expect:
        value = _parsed(written)
        return isinstance(value, dict) and list(value) == expect["keys"]
    if "topic" in expect:
        items = _parsed(written) if expect.get("json") else _items(written)
        known = TOPICS[str(expect["topic"])]
        return (
            isinstance(items, list)
            and len(items) == expect["count"]
            and len(set(map(str, items))) == len(items)
            and all(item in known for item in items)
        )
    if "result" in expect:
        numbers = re.findall(r"\d+", written)
        return str(expect["result"]) in (numbers[-1:] if "=" in written else numbers)
    if "subject" in expect:
        return str(expect["subject"]) in written and len(written) > 60
    if "text" in expect:
        return str(expect["text"]) in written
    return written == dialogue.messages[-1].content


def _parsed(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value


def _items(text: str) -> list[str]:
    if "\n" in text or text.startswith("1."):
        return [re.sub(r"^\d+\. ", "", line) for line in text.split("\n")]
    return text.split(", ")


def prompts(per_kind: int, seed: int, split: Split = "held-out") -> list[Dialogue]:
    """Return up to ``per_kind`` distinct dialogues of each kind."""
    chosen: dict[str, dict[str, Dialogue]] = defaultdict(dict)
    for dialogue in islice(exchanges(seed, split), per_kind * 400):
        if dialogue.raw or (split == "held-out" and dialogue.key is None):
            continue
        found = chosen[dialogue.kind]
        text = "".join(text for text, _ in render(dialogue))
        if len(found) < per_kind:
            found[text] = dialogue
    return [dialogue for found in chosen.values() for dialogue in found.values()]


def answers(folder: Path, dialogues: Sequence[Dialogue], batch: int = 64) -> Iterable[Scored]:
    """Yield the model's greedy answer to the last turn of each dialogue."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pending = []
    for dialogue in dialogues:
        asked = Dialogue(dialogue.kind, dialogue.messages[:-1], tools=dialogue.tools)
        pending.append((dialogue, "".join(text for text, _ in render(asked, generation_prompt=True))))
    pending.sort(key=lambda pair: len(pair[1]))
    for start in range(0, len(pending), batch):
        part = pending[start : start + batch]
        inputs = tokenizer([prompt for _, prompt in part], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            output = model.generate(  # type: ignore[misc]
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=LONGEST_ANSWER,
                do_sample=False,
                temperature=None,
                top_p=None,
            )
        for (dialogue, prompt), row in zip(part, output[:, inputs["input_ids"].shape[1] :], strict=True):
            text = str(tokenizer.decode(row))
            ended = IM_END in text
            written = text.split(IM_END)[0].replace(END_OF_TEXT, "")
            last = dialogue.messages[-1]
            wanted = last.tool_call.render() if last.tool_call else last.content
            yield Scored(dialogue.kind, prompt, wanted, written, is_correct(dialogue, written), ended)


def table(scores: dict[str, dict[str, float]]) -> str:
    """Return the scores as a Markdown table."""
    lines = ["| kind | held-out prompts | correct | ended its answer |", "| --- | ---: | ---: | ---: |"]
    for kind, score in scores.items():
        lines.append(f"| {kind} | {score['prompts']:.0f} | {score['correct']:.1%} | {score['ended']:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Score a model and print the table and some wrong answers."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--split", choices=("held-out", "train"), default="held-out")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--wrong", type=int, default=3, help="wrong answers of each kind to print")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    by_kind: dict[str, list[Scored]] = defaultdict(list)
    for scored in answers(options.folder, prompts(options.per_kind, options.seed, options.split)):
        by_kind[scored.kind].append(scored)
    scores = {
        kind: {
            "prompts": len(found),
            "correct": sum(s.correct for s in found) / len(found),
            "ended": sum(s.ended for s in found) / len(found),
        }
        for kind, found in sorted(by_kind.items())
    }
    for kind, found in sorted(by_kind.items()):
        for scored in [s for s in found if not (s.correct and s.ended)][: options.wrong]:
            question = scored.prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
            print(f"[{kind}] {question!r}\n  wanted {scored.wanted!r}\n  wrote  {scored.written!r}")
    print(table(scores))
    if options.out:
        options.out.write_text(
            json.dumps({"split": options.split, "seed": options.seed, "kinds": scores}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
