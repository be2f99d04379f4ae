"""Sampling, thinking and the form of the answer, from the fields of a request."""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET

from inferd.answer_form import AnswerForm, JsonSchema
from inferd.gateway.anthropic.tools import tool_use_of
from inferd.gateway.anthropic.wire import MessagesRequest, OutputFormat, PromptFields, Thinking
from inferd.gateway.errors import invalid, shown
from inferd.gateway.limits import check_range, check_strings
from inferd.types import Chat, SamplingParams

MIN_BUDGET: Final = 1024
_THINKING: Final = ("enabled", "disabled", "adaptive", "between_tools")
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_DISPLAYS: Final = ("summarized", "omitted")
_REFUSED: Final = {
    "thread": ("thread_unsupported_request", "This server keeps no conversations; send all messages, without it."),
    "compaction": ("unsupported_parameter", "Ask for a summary in a message."),
}
"""Fields that would change the answer, each with the code of its error and the remedy. By the first code Anthropic's
clients know that they must send the whole conversation."""


def sampling_of(body: MessagesRequest) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling parameters, and the names of those that the client set. Raises InvalidRequest."""
    check_range("max_completion_tokens", body.max_tokens, "max_tokens")
    chosen: dict[str, Any] = {"max_tokens": body.max_tokens}
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(body, name)
        if value is not None:
            check_range(name, value)
            chosen[name] = value
    if body.top_p == 0:
        chosen["top_p"] = 1e-9  # 0 keeps the most likely token alone
    if body.top_k is not None:
        chosen["top_k"] = max(0, body.top_k)
    if body.stop_sequences:
        check_strings("stop_sequences", body.stop_sequences, 16, 1024)
        chosen["stop"] = tuple(body.stop_sequences)
    return SamplingParams(**chosen), tuple(chosen)


def form_of(body: MessagesRequest, chat: Chat) -> AnswerForm:
    """The form of the answer. Raises InvalidRequest."""
    constraint = _constraint(body)
    tools = tool_use_of(body)
    thinking = body.thinking
    budget = None
    if thinking is not None and thinking.type == "enabled":
        budget = _budget(thinking, body.max_tokens)
    if chat.continue_final_message:
        _check_continued(body, is_forced=tools is not None and tools.mode == "required")
    return AnswerForm(constraint=constraint, tools=tools, fit=bool(body.fit), reasoning_budget=budget)


def check_supported(body: PromptFields) -> None:
    """Raises InvalidRequest for a field that would change the answer and is not supported."""
    for name, (code, remedy) in _REFUSED.items():
        value = getattr(body, name, UNSET)
        if value is not UNSET and bytes(value) != b"null":
            raise invalid(name, f"{name} is not supported. {remedy}", code)
    _check_thinking(body)


def _check_thinking(body: PromptFields) -> None:
    """Check thinking and effort, which the prompt's template gets. Raises InvalidRequest."""
    thinking = body.thinking
    if thinking is not None:
        if thinking.type not in _THINKING:
            raise invalid(
                "thinking.type", f"thinking.type must be one of {', '.join(_THINKING)}, not {shown(thinking.type)}."
            )
        if thinking.display is not None and thinking.display not in _DISPLAYS:
            allowed = " or ".join(_DISPLAYS)
            raise invalid("thinking.display", f"thinking.display must be {allowed}, not {shown(thinking.display)}.")
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None and effort not in _EFFORTS:
        raise invalid(
            "output_config.effort", f"output_config.effort must be one of {', '.join(_EFFORTS)}, not {shown(effort)}."
        )


def _budget(thinking: Thinking, max_tokens: int) -> int:
    budget = thinking.budget_tokens
    if budget is None or budget < MIN_BUDGET:
        raise invalid(
            "thinking.budget_tokens",
            f"thinking.budget_tokens must be at least {MIN_BUDGET} where thinking is enabled, not {shown(budget)}.",
        )
    if budget >= max_tokens:
        raise invalid(
            "thinking.budget_tokens",
            f"thinking.budget_tokens ({budget}) must be below max_tokens ({max_tokens}), which counts the thinking "
            "and the answer.",
        )
    return budget


def _constraint(body: MessagesRequest) -> JsonSchema | None:
    config = body.output_config
    newer, older = config.format if config is not None else None, body.output_format
    if newer is not None and older is not None:
        raise invalid("output_format", "output_format is the older name of output_config.format; send one of the two.")
    return _schema(newer, "output_config.format") or _schema(older, "output_format")


def _schema(form: OutputFormat | None, at: str) -> JsonSchema | None:
    if form is None:
        return None
    if form.type != "json_schema":
        raise invalid(
            f"{at}.type", f"{at}.type must be 'json_schema', not {shown(form.type)}.", "unsupported_parameter"
        )
    if form.schema is None:
        raise invalid(
            f"{at}.schema",
            f"{at}.schema is missing; send the JSON Schema of the answer.",
            "missing_required_parameter",
        )
    return JsonSchema(schema=form.schema, at=f"{at}.schema")


def _check_continued(body: MessagesRequest, *, is_forced: bool) -> None:
    """Check an answer that the request begins with its last message. Raises InvalidRequest."""
    excluded = None
    if body.thinking is not None and body.thinking.type == "enabled":
        excluded = "thinking of type 'enabled'"
    elif (body.output_config is not None and body.output_config.format is not None) or body.output_format is not None:
        excluded = "a format of the answer"
    elif is_forced:
        excluded = "a tool_choice that demands a call"
    if excluded is not None:
        last = len(body.messages) - 1
        raise invalid(
            f"messages[{last}].role",
            f"messages[{last}] begins the answer, which excludes {excluded}; end the messages with a user message.",
        )
