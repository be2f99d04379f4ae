"""Notations that neither a response template nor an analysis of the chat template gives, by texts of the template.

The texts are the checkpoints' own tags. An entry applies where the template contains all of its texts.
"""

from __future__ import annotations

from typing import Final

from inferd.checkpoints.answers.format import (
    Arguments,
    Calls,
    Envelope,
    Id,
    Name,
    Reasoning,
    Text,
)

CHANNELS: Final = ("<|channel|>analysis<|message|>", "<|channel|>commentary")
"""Texts of a template whose answers are messages in channels (gpt-oss)."""

_ACTION: Final = Envelope(("tool_name", "parameters"), "tool_name", "parameters")
_CALLS: Final[tuple[tuple[str, tuple[str, ...], Calls], ...]] = (
    (
        "kimi",
        ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        Calls(
            (
                Text("<|tool_call_begin|>functions."),
                Name(),
                Text(":"),
                Id("[0-9]{1,4}"),
                Text("<|tool_call_argument_begin|>"),
                Arguments(),
                Text("<|tool_call_end|>"),
            ),
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    (
        "deepseek",
        ("<｜tool▁calls▁begin｜>", "```json"),
        Calls(
            (
                Text("<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
                Name(),
                Text("\n```json\n"),
                Arguments(),
                Text("\n```<｜tool▁call▁end｜>"),
            ),
            begin="<｜tool▁calls▁begin｜>",
            separator="\n",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    (
        "deepseek-v3.1",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        Calls(
            (
                Text("<｜tool▁call▁begin｜>"),
                Name(),
                Text("<｜tool▁sep｜>"),
                Arguments(),
                Text("<｜tool▁call▁end｜>"),
            ),
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    (
        "functionary",
        (">>>${recipient}", ">>>all\\n"),
        Calls((Name(), Text("\n"), Arguments()), separator=">>>", content="all\n"),
    ),
    ("firefunction", (" functools[",), Calls((Envelope(),), begin="functools", separator=", ", is_list=True)),
    ("command-r", ("Action:", "```json"), Calls((_ACTION,), "Action:\n```json", ",\n", "\n```", is_list=True)),
    ("granite", ("<|tool_call|>", "JSON list"), Calls((Envelope(),), "<|tool_call|>", ", ", is_list=True)),
)  # fmt: skip
_REASONING: Final[tuple[tuple[tuple[str, ...], Reasoning], ...]] = (
    (("<|think|>", "<|begin|>assistant"), Reasoning("<|think|>", "<|end|><|begin|>assistant")),
    (
        ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        Reasoning("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
    ),
    (("<|inner_prefix|>", "<|inner_suffix|>"), Reasoning("<|inner_prefix|>", "<|inner_suffix|>")),
    (("[THINK]", "[/THINK]"), Reasoning("[THINK]", "[/THINK]")),
    (("</think>",), Reasoning("<think>\n", "\n</think>\n\n")),
)  # fmt: skip


def known_calls(template: str) -> tuple[str, Calls] | None:
    """The family of a template and how it writes calls."""
    for family, texts, calls in _CALLS:
        if all(text in template for text in texts):
            return family, calls
    return None


def known_reasoning(template: str) -> Reasoning | None:
    """How a template writes reasoning."""
    return next((found for texts, found in _REASONING if all(text in template for text in texts)), None)
