"""The tools of a request, and which of them an answer may or must call."""

from __future__ import annotations

import re
from typing import Final

from inferd.answer_form import ToolUse
from inferd.gateway.anthropic.wire import JSON, InputTool, PromptFields
from inferd.gateway.errors import invalid, printable, shown
from inferd.gateway.limits import MAX_TOOLS, check_arguments_schema

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


def rendered_tools(tools: list[InputTool] | None) -> tuple[list[JSON] | None, list[str]]:
    """The client's tools in the form that templates take, and the types of the tools that were left out because
    Anthropic's servers run or define them. Raises InvalidRequest."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools may have at most {MAX_TOOLS} entries, not {len(tools)}.")
    rendered: list[JSON] = []
    left_out: list[str] = []
    names: set[str] = set()
    for i, tool in enumerate(tools or ()):
        at = f"tools[{i}]"
        if not _is_own(tool):
            left_out.append(f"tools.{printable(tool.type or '')}")
            continue
        name = tool.name
        if name is None or _NAME.fullmatch(name) is None:
            raise invalid(
                f"{at}.name", f"{at}.name must be 1 to 128 of the characters A-Z a-z 0-9 _ -, not {shown(name)}."
            )
        if name in names:
            raise invalid(f"{at}.name", f"{at}.name is {shown(name)}, which another tool has; names must differ.")
        names.add(name)
        if tool.input_schema is None:
            raise invalid(
                f"{at}.input_schema",
                f"{at}.input_schema is missing; send the JSON Schema of the tool's arguments.",
                "missing_required_parameter",
            )
        check_arguments_schema(f"{at}.input_schema", tool.input_schema)
        function: JSON = {"name": name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        if tool.strict is not None:
            function["strict"] = tool.strict
        rendered.append({"type": "function", "function": function})
    return rendered or None, left_out


def _is_own(tool: InputTool) -> bool:
    """Whether the client defines the tool."""
    return tool.type is None or tool.type == "custom"


def tool_use_of(body: PromptFields) -> ToolUse | None:
    """The calls that the answer may or must have; None: it has no calls. Raises InvalidRequest."""
    own = {tool.name: f"tools[{i}].input_schema" for i, tool in enumerate(body.tools or ()) if _is_own(tool)}
    places = tuple(own.values())
    choice = body.tool_choice
    if choice is None:
        return ToolUse(places=places) if own else None
    is_parallel = not choice.disable_parallel_tool_use
    if choice.type == "none":
        return None
    if choice.type == "auto":
        return ToolUse(is_parallel=is_parallel, places=places) if own else None
    if choice.type == "any":
        if not own:
            raise invalid(
                "tool_choice",
                "tool_choice is 'any', but there is no tool that this server can offer the model; send one with an "
                "input_schema.",
            )
        return ToolUse(mode="required", is_parallel=is_parallel, places=places)
    if choice.type == "tool":
        if choice.name is None or choice.name not in own:
            raise invalid(
                "tool_choice.name",
                f"tool_choice.name is {shown(choice.name)}, but tools has no tool of this name with an input_schema; "
                "name one that has it.",
            )
        return ToolUse(mode="required", names=(choice.name,), is_parallel=is_parallel, places=places)
    raise invalid(
        "tool_choice.type", f"tool_choice.type must be one of auto, any, tool, none, not {shown(choice.type)}."
    )
