"""What a training dialogue is, how it becomes text, and which side of the split it falls on.

Knows the chat format (the same that ``chat_template.jinja`` renders) and how people mistype; knows
nothing of what the dialogues are about.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "held-out"]

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks for, with its arguments."""

    name: str
    arguments: Mapping[str, object]

    def render(self) -> str:
        """Return the call as the model writes it."""
        body = json.dumps({"name": self.name, "arguments": dict(self.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue; ``scored`` turns are the ones the model learns to write."""

    role: Role
    content: str
    tool_call: ToolCall | None = None

    def as_openai(self) -> dict[str, object]:
        """Return the message in the shape that chat templates and the OpenAI API use."""
        if self.tool_call is None:
            return {"role": self.role, "content": self.content}
        function = {"name": self.tool_call.name, "arguments": dict(self.tool_call.arguments)}
        return {"role": self.role, "content": self.content, "tool_calls": [{"type": "function", "function": function}]}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A piece of the corpus.

    ``key`` names what makes it new (a number pair, a phrasing, a name): everything with one key is on
    one side of the split; without a key it is for training only. ``expect`` is what the evaluation
    checks the last answer against. A ``raw`` dialogue has one message and no chat format.
    """

    kind: str
    messages: Sequence[Message]
    key: str | None = None
    tools: Sequence[Mapping[str, object]] = ()
    expect: Mapping[str, object] = field(default_factory=dict)
    raw: bool = False

    @property
    def split(self) -> Split:
        """The side of the split that the key falls on."""
        return "held-out" if self.key is not None and is_held_out(self.key) else "train"


def is_held_out(key: str) -> bool:
    """Tell whether a key belongs to the held-out side, the same in every run and on every machine."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def user(text: str) -> Message:
    """Return a user's turn."""
    return Message("user", text)


def answer(text: str) -> Message:
    """Return an assistant's turn."""
    return Message("assistant", text)


def exchange(kind: str, question: str, reply: str, key: str | None = None, **expect: object) -> Dialogue:
    """Return the commonest dialogue: one question, one answer."""
    return Dialogue(kind, (user(question), answer(reply)), key=key, expect=expect)


def render(dialogue: Dialogue, *, generation_prompt: bool = False) -> list[tuple[str, bool]]:
    """Return the dialogue as (text, is it what the model should learn to write) pieces, in order."""
    if dialogue.raw:
        return [(dialogue.messages[0].content + END_OF_TEXT, True)]
    pieces: list[tuple[str, bool]] = []
    messages = list(dialogue.messages)
    system = messages.pop(0).content if messages and messages[0].role == "system" else ""
    if dialogue.tools:
        head = f"{system}\n\n" if system else ""
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in dialogue.tools)
        pieces.append(
            (
                f"{IM_START}system\n{head}# Tools\n\nYou may call these functions:\n<tools>{listed}\n</tools>\n\n"
                f'To call one, answer with:\n<tool_call>\n{{"name": <name>, "arguments": <arguments>}}\n</tool_call>'
                f"{IM_END}\n",
                False,
            )
        )
    elif system:
        pieces.append((f"{IM_START}system\n{system}{IM_END}\n", False))
    for message in messages:
        if message.role == "assistant":
            body = message.content
            if message.tool_call is not None:
                body += ("\n" if body else "") + message.tool_call.render()
            pieces += [(f"{IM_START}assistant\n", False), (body + IM_END, True), ("\n", False)]
        elif message.role == "tool":
            pieces.append((f"{IM_START}user\n<tool_response>\n{message.content}\n</tool_response>{IM_END}\n", False))
        else:
            pieces.append((f"{IM_START}{message.role}\n{message.content}{IM_END}\n", False))
    if generation_prompt:
        pieces.append((f"{IM_START}assistant\n", False))
    return pieces


_FIELD = re.compile(r"(\{\w+\})")


def say(rng: Random, template: str, **values: object) -> str:
    """Fill a user's sentence in, sometimes as people type it: lower case, no full stop, a typo.

    The filled-in values keep their spelling, so that the answer can repeat them.
    """
    template = _mistyped(rng, template)
    return template.format(**values)


def _mistyped(rng: Random, template: str) -> str:
    draw = rng.random()
    if draw < 0.45:
        return template
    if draw < 0.75:
        template = template.lower()
    if rng.random() < 0.5:
        template = template.rstrip("?.!")
    if rng.random() < 0.12:
        template = "".join(part if part.startswith("{") else _typo(rng, part) for part in _FIELD.split(template))
    if rng.random() < 0.08:
        template = rng.choice(("Hi, ", "Please ", "please ", "ok, ", "Hey, ", "so ", "Hello! ")) + template
    elif rng.random() < 0.06:
        template += rng.choice((" please", " thanks", ", please", "??", " :)", " pls"))
    return template


def _typo(rng: Random, text: str) -> str:
    spots = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if len(spots) < 6:
        return text
    i = rng.choice(spots)
    match rng.randrange(3):
        case 0:
            return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
        case 1:
            return text[:i] + text[i + 1 :]
        case _:
            return text[:i] + text[i] + text[i:]
