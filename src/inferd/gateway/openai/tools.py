"""The fields of OpenAI's dialect that say which tools may be called, and how the model reasons.

Knows no notation of a model: the worker writes and reads calls and reasoning as the checkpoint does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from inferd.answer_form import JSON, ToolUse
from inferd.gateway.errors import invalid, shown
from inferd.gateway.openai.wire import ChatRequest

_MODES: Final = ("none", "auto", "required")
_REMEDY: Final = (
    'Send \'none\', \'auto\', \'required\', {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}.'
)
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Templates know these three; the dialect's other words mean the nearest.
_TEMPLATE_EFFORTS: Final = {"minimal": "low", "xhigh": "high", "max": "high"}
_LONGEST_BUDGET: Final = 1_000_000
_Choice = TypeVar("_Choice")


class _Function(msgspec.Struct, frozen=True):
    name: str


class _NamedTool(msgspec.Struct, frozen=True):
    type: str
    function: _Function


class _Allowed(msgspec.Struct, frozen=True):
    mode: str
    tools: list[_NamedTool]


class _AllowedTools(msgspec.Struct, frozen=True):
    type: str
    allowed_tools: _Allowed


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
    match choice.get("type"):
        case "function":
            named = _converted(choice, _NamedTool)
            _check_known([named.function.name], names, "tool_choice.function.name")
            return ToolUse(mode="required", names=(named.function.name,), is_parallel=_is_parallel(body))
        case "allowed_tools":
            allowed = _converted(choice, _AllowedTools).allowed_tools
            if allowed.mode not in ("auto", "required"):
                raise invalid(
                    "tool_choice.allowed_tools.mode",
                    f"tool_choice.allowed_tools.mode must be 'auto' or 'required', not {shown(allowed.mode)}.",
                )
            wanted = [tool.function.name for tool in allowed.tools]
            if not wanted:
                raise invalid(
                    "tool_choice.allowed_tools.tools", "tool_choice.allowed_tools.tools is empty; name at least one."
                )
            _check_known(wanted, names, "tool_choice.allowed_tools.tools")
            return ToolUse(
                mode="required" if allowed.mode == "required" else "auto",
                names=tuple(dict.fromkeys(wanted)),
                is_parallel=_is_parallel(body),
            )
        case other:
            raise invalid("tool_choice.type", f"tool_choice.type is {shown(other)}. {_REMEDY}")


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


def _converted(choice: JSON, kind: type[_Choice]) -> _Choice:
    try:
        return msgspec.convert(choice, kind)
    except msgspec.ValidationError as error:
        raise invalid("tool_choice", f"tool_choice is not well formed: {error}. {_REMEDY}") from error


def _check_known(wanted: Sequence[str], names: Sequence[str], at: str) -> None:
    unknown = next((name for name in wanted if name not in names), None)
    if unknown is not None:
        known = f"the tools are {', '.join(names[:16])}" if names else "tools is empty"
        raise invalid(at, f"{at} is {shown(unknown)}, but {known}. Name one of the request's tools.")
