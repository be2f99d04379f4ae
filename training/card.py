"""Writes the model card from measured scores; ``python -m training.card`` after ``training.evaluate``.

Knows the card's text; the numbers come from the score files and from the weights themselves.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import onnx
from safetensors import safe_open

from .classifiers import scores as classifier_scores
from .classifiers.phrases import LABELS
from .evaluate import table

ROOT = Path(__file__).parents[1]
_TOLD = {"digits": "one digit of 10", "intents": "one intent of 10"}
_CARD = """# Model card: the bundled models

Written by `python -m training.card` from measured scores. `demo` is the chat model that `make demo` serves;
`demo-draft` is a smaller model with the same tokenizer, meant as the draft in speculative decoding; `demo-digits` and
`demo-intents` are [classifiers](#the-classifiers). They exist so that the server can be tried, tested and taught without
downloading anything. They are not useful assistants.

| | demo | demo-draft |
| --- | --- | --- |
| parameters | {demo_parameters:,} | {draft_parameters:,} |
| weights, bfloat16 | {demo_mb:.2f} MB | {draft_mb:.2f} MB |
{shapes}

Both are Llama decoders with tied embeddings, a byte-level BPE tokenizer of 2,048 tokens (single digits, every byte
representable) and a chat template with system, user, assistant and tool roles. Tool calls are written as
`<tool_call>` blocks with JSON inside. Suggested sampling: temperature 0.2, top-p 0.9 (in `generation_config.json`).

## What it was trained on

The training text comes from the generator in `training/` alone: dialogues about inferd, small arithmetic, lists, JSON,
tool calls, stories from templates, small talk, a few dozen facts, and refusals. It contains no other text and no
personal data. Training ran on two shared CPU cores for about an hour and saw about {tokens} million tokens; `training/README.md` has the commands.

## What it can and cannot do

The scores are measured greedily on held-out prompts: number pairs, names, phrasings, key sets and subjects that are in no training
dialogue. The most natural wordings ("What is inferd?", "Hello") are for training only and are not scored. An answer is
correct only if it passes a rule: the exact result, valid JSON with exactly the wanted keys (for extraction also the
values), a tool call equal in name and arguments, the wanted number of different and fitting items, a story about its
subject, the exact fact.

### demo

{demo_table}

### demo-draft

{draft_table}

Measured with `python -m training.evaluate src/inferd/models/demo --out docs/model-scores.json` and the same for
`demo-draft` with `--out docs/model-scores-draft.json`. {notes}

## The classifiers

| | what it tells | parameters | file | measured on | right |
| --- | --- | --- | --- | --- | ---: |
{classifier_rows}

`make demo` serves them as `digits` and `intents`, with the operations before them that `src/inferd/models/demo.yaml`
lists. Each is one ONNX file, made by `python -m training.classifiers.digits` and
`python -m training.classifiers.intents` in seconds, with fixed seeds.

`digits` is a perceptron with one hidden layer of 96. It was trained on 1,297 of the 1,797 images of 8 x 8 pixels in
scikit-learn (handwritten, from the UCI repository), each also moved, turned, paler, bolder and thinner. The last 500
are held out. Neighbours in the list tend to have one writer, so most of the 500 have other writers. A picture is
converted to grey, cut to its ink (dark on light or light on dark) and scaled to 8 x 8, so it must show one digit and
little else. The model knows only digits: a letter or a cat also gets a digit, often with high confidence.

`intents` is a logistic regression over words and pairs of words, with ten classes ({labels}). Its
phrases were **written for this repository**, from wordings with slots for words ("wake me at ... tomorrow"); they are
no records of people. One wording and one word in four is held out, so the first score is of wordings and words that
training has not seen. Unknown words have no effect, and there is no class for "none of these".
"""


def _size(name: str) -> tuple[int, float, dict[str, object]]:
    folder = ROOT / "src" / "inferd" / "models" / name
    weights = folder / "model.safetensors"
    with safe_open(weights, framework="pt") as file:
        parameters = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    return parameters, weights.stat().st_size / 1e6, json.loads((folder / "config.json").read_text())


def _classifiers() -> str:
    """A row for each thing that was measured of each classifier."""
    rows = []
    for name, scores in classifier_scores.read().items():
        file = ROOT / "src" / "inferd" / "models" / f"demo-{name}" / "model.onnx"
        about = (f"demo-{name}", _TOLD[name], f"{_parameters(file):,}", f"{file.stat().st_size / 1e3:.0f} kB")
        for what, score in scores.items():
            rows.append(f"| {' | '.join(about)} | {what} | {score:.1%} |")
            about = ("",) * len(about)
    return "\n".join(rows)


def _parameters(file: Path) -> int:
    """Weights of an ONNX file: its initializers, and those that stand in its nodes' attributes."""
    graph = onnx.load(file).graph
    return sum(prod(tensor.dims) for tensor in graph.initializer) + sum(
        len(attribute.floats) for node in graph.node for attribute in node.attribute
    )


def card(tokens: str, notes: str) -> str:
    """Return the card's text."""
    demo, draft = _size("demo"), _size("demo-draft")
    rows = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
            "max_position_embeddings")  # fmt: skip
    scores = [
        json.loads((ROOT / "docs" / name).read_text()) for name in ("model-scores.json", "model-scores-draft.json")
    ]
    return _CARD.format(
        demo_parameters=demo[0],
        draft_parameters=draft[0],
        demo_mb=demo[1],
        draft_mb=draft[1],
        shapes="\n".join(f"| {row} | {demo[2][row]} | {draft[2][row]} |" for row in rows),
        demo_table=table(scores[0]["kinds"]),
        draft_table=table(scores[1]["kinds"]),
        tokens=tokens,
        notes=notes,
        classifier_rows=_classifiers(),
        labels=", ".join(LABELS),
    )


def main() -> None:
    """Write docs/model-card.md."""
    told = json.loads((Path(__file__).parent / "card.json").read_text())
    (ROOT / "docs" / "model-card.md").write_text(card(told["tokens"], " ".join(told["notes"])))


if __name__ == "__main__":
    main()
