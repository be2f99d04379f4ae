"""The fields of OpenAI's dialect that say which tools may be called, and how the model reasons.

Knows no notation of a model: the worker writes and reads calls and reasoning as the checkpoint does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from inferd.answer_form import JSON, ToolUse
from inferd.gateway.errors import invalid, shown
from inferd.gateway.openai.wire import AllowedTools, ChatRequest, ChosenFunction, ChosenTool

_MODES: Final = ("none", "auto", "required")
_REMEDY: Final = (
    'Send \'none\', \'auto\', \'required\', {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}.'
)
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Templates know these three; the dialect's other words mean the nearest.
_TEMPLATE_EFFORTS: Final = {"minimal": "low", "xhigh": "high", "max": "high"}
_LONGEST_BUDGET: Final = 1_000_000


def check_function(kind: str, at: str, remedy: str = "") -> None:
    """Refuse a tool, or the call of one, of another type than ``function``. Raises InvalidRequest."""
    if kind != "function":
        said = f"{at}.type must be 'function', not {shown(kind)}."
        raise invalid(f"{at}.type", f"{said} {remedy}" if remedy else said, "unsupported_parameter")


def tool_use_of(body: ChatRequest) -> ToolUse | None:
    """The calls that the answer may or must have; None: it has none. Raises InvalidRequest."""
    choice = body.tool_choice
    names = [tool.function.name for tool in body.tools or () if tool.function is not None]
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in _MODES:
            raise invalid("tool_choice", f"tool_choice is {shown(choice)}. {_REMEDY}")
        if choice == "required" and not names:
            raise invalid("tool_choice", "tool_choice is 'required', but tools is empty; send at least one tool.")
        if choice == "none" or not names:
            return None
        return ToolUse(mode="required" if choice == "required" else "auto", is_parallel=_is_parallel(body))
    match choice.type:
        case "function":
            name = _named(choice.function, names, "tool_choice")
            return ToolUse(mode="required", names=(name,), is_parallel=_is_parallel(body))
        case "allowed_tools":
            at = "tool_choice.allowed_tools"
            if choice.allowed_tools is None:
                raise invalid(at, f"{at} is missing. {_REMEDY}", "missing_required_parameter")
            return ToolUse(
                mode=_mode(choice.allowed_tools, at),
                names=_allowed(choice.allowed_tools.tools, names, f"{at}.tools"),
                is_parallel=_is_parallel(body),
            )
        case other:
            raise invalid("tool_choice.type", f"tool_choice.type is {shown(other)}. {_REMEDY}")


def _mode(allowed: AllowedTools, at: str) -> Literal["auto", "required"]:
    if allowed.mode not in ("auto", "required"):
        raise invalid(f"{at}.mode", f"{at}.mode must be 'auto' or 'required', not {shown(allowed.mode)}.")
    return "required" if allowed.mode == "required" else "auto"


def _allowed(tools: Sequence[ChosenTool], names: Sequence[str], at: str) -> tuple[str, ...]:
    if not tools:
        raise invalid(at, f"{at} is empty; name at least one.")
    found: dict[str, None] = {}
    for i, tool in enumerate(tools):
        check_function(tool.type, f"{at}[{i}]")
        found[_named(tool.function, names, f"{at}[{i}]")] = None
    return tuple(found)


def reasoning_kwargs(body: ChatRequest) -> JSON:
    """The variables of the template by which ``reasoning_effort`` reaches a model. Raises InvalidRequest."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise invalid(
            "reasoning_effort", f"reasoning_effort must be one of {', '.join(_EFFORTS)}, not {shown(effort)}."
        )
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": _TEMPLATE_EFFORTS.get(effort, effort), "enable_thinking": True, "thinking": True}


def reasoning_budget_of(body: ChatRequest) -> int | None:
    """The most tokens of reasoning; None: no limit of their own. Raises InvalidRequest."""
    budget = body.thinking_token_budget
    if budget is not None and not 0 <= budget <= _LONGEST_BUDGET:
        raise invalid(
            "thinking_token_budget", f"thinking_token_budget must be from 0 to {_LONGEST_BUDGET}, not {budget}."
        )
    return budget


def _is_parallel(body: ChatRequest) -> bool:
    return body.parallel_tool_calls is not False


def _named(function: ChosenFunction | None, names: Sequence[str], at: str) -> str:
    """The name of a tool of the request that a choice names. Raises InvalidRequest."""
    if function is None:
        raise invalid(f"{at}.function", f"{at}.function is missing. {_REMEDY}", "missing_required_parameter")
    if function.name not in names:
        known = f"the tools are {', '.join(names[:16])}" if names else "tools is empty"
        raise invalid(
            f"{at}.function.name",
            f"{at}.function.name is {shown(function.name)}, but {known}. Name one of the request's tools.",
        )
    return function.name
