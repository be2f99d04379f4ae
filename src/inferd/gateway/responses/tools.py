"""The tools of a request, and which of them an answer may or must call.

The tools of a namespace get flat names, ``namespace__name``, which calls are mapped back from. A custom tool is a
function of one text. Tools of other types are run by OpenAI's servers; they are left out and listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from inferd.answer_form import ToolUse
from inferd.gateway.errors import invalid, printable, shown
from inferd.gateway.generation.items import INPUT, JSON, TOOLS, InputTool, Placed, ToolFormat, flat_name, kind_of
from inferd.gateway.limits import MAX_TOOLS, check_arguments_schema
from inferd.gateway.responses.grammars import GrammarError, pattern_of_lark, pattern_of_regex
from inferd.gateway.responses.wire import PromptFields, ToolChoice

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SYNTAXES: Final = {"lark": pattern_of_lark, "regex": pattern_of_regex}
MAX_DEFINITIONS_CHARS: Final = 131_072
"""Of the grammars of a request together. Each is counted once, however many tools have it."""

_MODES: Final = ("none", "auto", "required")
_REMEDY: Final = (
    'Send \'none\', \'auto\', \'required\', {"type": "function", "name": ...}, {"type": "custom", "name": ...} '
    'or {"type": "allowed_tools", "mode": ..., "tools": [...]}.'
)


class OwnTool(NamedTuple):
    """A tool of the client, as its calls name it."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None


class Tools:
    """The tools of a request."""

    __slots__ = ("_at", "_list", "_patterns", "_places", "by_name", "echo", "left_out", "rendered")

    def __init__(self, given: Iterable[InputTool] | None) -> None:
        """Raises InvalidRequest."""
        self.rendered: list[JSON] = []  # in the form that templates take
        self.left_out: list[str] = []  # types of tools that were left out
        self.by_name: dict[str, OwnTool] = {}  # by the names that the model sees
        self._at: dict[str, str] = {}
        self._places: list[str] = []  # of the schemas, as ``ToolUse.places``
        self._patterns: dict[tuple[str, str], str] = {}  # by syntax and definition
        self._list = "tools"  # the field whose tools are taken
        self.echo = self._take_all(given or ())

    def add(self, given: Iterable[InputTool], at: str) -> None:
        """Take the tools of an item of the conversation. A tool that has the name of an earlier item's replaces it.
        Raises InvalidRequest."""
        self._list = at
        self._take_all(given)

    def _take_all(self, given: Iterable[InputTool]) -> list[JSON]:
        """How the response has the tools."""
        told = [self._take(tool, f"{self._list}[{i}]") for i, tool in enumerate(given)]
        if len(self.rendered) > MAX_TOOLS:
            raise invalid(
                self._list, f"{self._list}: there may be at most {MAX_TOOLS} tools, not {len(self.rendered)}."
            )
        return [echo for echo in told if echo is not None]

    def _take(self, tool: InputTool, at: str) -> JSON | None:
        """How the response has a tool; None: it is left out."""
        if tool.type == "namespace":
            name = _name_of(tool, at)
            inner: list[JSON] = []
            for j, one in enumerate(tool.tools or ()):
                if one.type not in ("function", "custom"):
                    self.left_out.append(f"tools.{printable(one.type)}")
                    continue
                inner.append(self._own(one, f"{at}.tools[{j}]", namespace=name, about=tool.description))
            return {"type": "namespace", "name": name, "description": tool.description, "tools": inner}
        if tool.type in ("function", "custom"):
            return self._own(tool, at)
        self.left_out.append(f"tools.{printable(tool.type)}")
        return None

    def _own(self, tool: InputTool, at: str, namespace: str | None = None, about: str | None = None) -> JSON:
        """Take a tool of the client; returns how the response has it."""
        name = _name_of(tool, at)
        flat = flat_name(name, namespace)
        if flat in self.by_name and self._at[flat].startswith(f"{self._list}["):
            raise invalid(
                f"{at}.name",
                f"{at}.name is {shown(name)}, but {self._at[flat]} has the same name {shown(flat)} for the model; "
                "names must differ.",
            )
        description = "\n".join(text for text in (about, tool.description) if text)
        self._at[flat] = at
        if tool.type == "custom":
            parameters, format_echo, hint = self._custom(tool.format, f"{at}.format")
            description = "\n\n".join(text for text in (description, hint) if text)
            function: JSON = {"name": flat, "description": description, "parameters": parameters}
            if "pattern" in parameters["properties"][INPUT]:
                function["strict"] = True
            self._put(flat, OwnTool("custom", name, namespace), function, f"{at}.format")
            return {"type": "custom", "name": name, "description": tool.description, "format": format_echo}
        check_arguments_schema(f"{at}.parameters", tool.parameters)
        function = {"name": flat}
        if description:
            function["description"] = description
        function["parameters"] = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
        if tool.strict is not None:
            function["strict"] = tool.strict
        self._put(flat, OwnTool("function", name, namespace), function, f"{at}.parameters")
        return {
            "type": "function",
            "name": name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }

    def _put(self, flat: str, tool: OwnTool, function: JSON, place: str) -> None:
        """Add a tool, or replace the one of this name."""
        rendered: JSON = {"type": "function", "function": function}
        if flat in self.by_name:
            index = list(self.by_name).index(flat)
            self.rendered[index], self._places[index] = rendered, place
        else:
            self.rendered.append(rendered)
            self._places.append(place)
        self.by_name[flat] = tool

    def use_of(self, body: PromptFields) -> ToolUse | None:
        """The calls that the answer may or must have; None: it has no calls. Raises InvalidRequest."""
        choice = body.tool_choice
        is_parallel, places = body.parallel_tool_calls is not False, tuple(self._places)
        if choice is None:
            return ToolUse(is_parallel=is_parallel, places=places) if self.by_name else None
        if isinstance(choice, str):
            if choice not in _MODES:
                raise invalid("tool_choice", f"tool_choice is {shown(choice)}. {_REMEDY}")
            if choice == "required":
                self._check_any("tool_choice", "tool_choice is 'required'")
                return ToolUse(mode="required", is_parallel=is_parallel, places=places)
            return ToolUse(is_parallel=is_parallel, places=places) if choice == "auto" and self.by_name else None
        kind = choice.type
        if kind in ("function", "custom"):
            names = (self._chosen(choice, "tool_choice"),)
            return ToolUse(mode="required", names=names, is_parallel=is_parallel, places=places)
        if kind == "allowed_tools":
            return self._allowed(choice, is_parallel=is_parallel)
        raise invalid(
            "tool_choice.type",
            f"tool_choice.type is {shown(kind)}, which this server cannot force. {_REMEDY}",
            "unsupported_parameter",
        )

    def _allowed(self, choice: ToolChoice, *, is_parallel: bool) -> ToolUse:
        at = "tool_choice"
        mode, given = choice.mode, choice.tools
        if mode not in ("auto", "required"):
            raise invalid(f"{at}.mode", f"{at}.mode must be 'auto' or 'required', not {shown(mode)}.")
        if not given:
            raise invalid(f"{at}.tools", f"{at}.tools must be a list with at least one tool.")
        names: dict[str, None] = {}
        for i, one in enumerate(given):
            kind = one.type
            if kind == "namespace":
                names |= dict.fromkeys(self._of_namespace(one, f"{at}.tools[{i}]"))
            elif kind in ("function", "custom"):
                names[self._chosen(one, f"{at}.tools[{i}]")] = None
            else:
                self.left_out.append(f"tool_choice.{printable(kind)}")
        if not names:
            raise invalid(
                f"{at}.tools",
                f"{at}.tools has no tool that this server can offer the model; name a function or a custom tool.",
                "unsupported_parameter",
            )
        return ToolUse(
            mode="required" if mode == "required" else "auto",
            names=tuple(names),
            is_parallel=is_parallel,
            places=tuple(self._places),
        )

    def _of_namespace(self, one: ToolChoice, at: str) -> list[str]:
        found = [flat for flat, tool in self.by_name.items() if one.name is not None and tool.namespace == one.name]
        if not found:
            raise invalid(f"{at}.name", f"{at}.name is {shown(one.name)}, but tools has no such namespace.")
        return found

    def _chosen(self, choice: ToolChoice, at: str) -> str:
        """The name, for the model, of a tool that ``tool_choice`` names: with its namespace, flat, or alone where no
        other tool has it. Raises InvalidRequest."""
        name, namespace = choice.name, choice.namespace
        if name is not None:
            found = [
                flat
                for flat, tool in self.by_name.items()
                if tool.kind == choice.type
                and (flat == name if namespace is None else (tool.name, tool.namespace) == (name, namespace))
            ] or [
                flat
                for flat, tool in self.by_name.items()
                if tool.kind == choice.type and tool.name == name and namespace is None
            ]
            if len(found) == 1:
                return found[0]
        known = f"the tools are {', '.join(list(self.by_name)[:16])}" if self.by_name else "there are none"
        if name is None:
            raise invalid(f"{at}.name", f"{at}.name is missing; name a tool: {known}.", "missing_required_parameter")
        raise invalid(
            f"{at}.name",
            f"{at}.name is {shown(name)}, which must be the name of one tool of type {shown(choice.type)}; {known}. "
            f"{'Name one of them, with its namespace where it has one' if self.by_name else 'Send it in tools'}.",
        )

    def _check_any(self, at: str, what: str) -> None:
        if not self.by_name:
            raise invalid(
                at,
                f"{what}, but there is no tool that this server can offer the model; send one of type function, "
                "custom or namespace.",
            )

    def _custom(self, given: ToolFormat | None, at: str) -> tuple[JSON, JSON, str]:
        """The parameters of the function for a custom tool, its format as the response has it, and its format in words
        for the model. Raises InvalidRequest."""
        text: JSON = {"type": "string"}
        echo: JSON = {"type": "text"}
        hint = ""
        if given is not None and given.type == "grammar":
            if given.syntax not in _SYNTAXES:
                raise invalid(f"{at}.syntax", f"{at}.syntax must be 'lark' or 'regex', not {shown(given.syntax)}.")
            if not given.definition:
                raise invalid(f"{at}.definition", f"{at}.definition is missing; send the grammar.")
            text["pattern"] = self._pattern(given.syntax, given.definition, f"{at}.definition")
            echo = {"type": "grammar", "syntax": given.syntax, "definition": given.definition}
            hint = f"The input matches this {given.syntax}:\n{given.definition}"
        elif given is not None and given.type != "text":
            raise invalid(f"{at}.type", f"{at}.type must be 'text' or 'grammar', not {shown(given.type)}.")
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        return parameters, echo, hint

    def _pattern(self, syntax: str, definition: str, at: str) -> str:
        """The pattern of a grammar's sentences. Raises InvalidRequest."""
        known = self._patterns.get((syntax, definition))
        if known is not None:
            return known
        num_chars = len(definition) + sum(len(other) for _, other in self._patterns)
        if num_chars > MAX_DEFINITIONS_CHARS:
            raise invalid(
                at,
                f"{at}: the grammars of the request have {num_chars} characters up to this one; at most "
                f"{MAX_DEFINITIONS_CHARS} are read. Shorten them, or leave the format of some tools out.",
                "unsupported_schema",
            )
        try:
            made = self._patterns[syntax, definition] = _SYNTAXES[syntax](definition)
        except GrammarError as error:
            raise invalid(at, f"{at}: {error}.", "unsupported_schema") from None
        return made


def add_tools(tools: Tools, items: Sequence[Placed]) -> None:
    """Add the tools that items of the conversation bring. Raises InvalidRequest."""
    for at, item, _ in items:
        if kind_of(item) != TOOLS:
            continue
        if item.role != "developer":
            raise invalid(f"{at}.role", f"{at}.role must be 'developer', not {shown(item.role)}.")
        if item.tools is None:
            raise invalid(
                f"{at}.tools",
                f"{at}.tools is missing; an item of type {TOOLS} needs it.",
                "missing_required_parameter",
            )
        tools.add(item.tools, f"{at}.tools")


def _name_of(tool: InputTool, at: str) -> str:
    name = tool.name
    if name is None or _NAME.fullmatch(name) is None:
        raise invalid(f"{at}.name", f"{at}.name must be 1 to 128 of the characters A-Z a-z 0-9 _ -, not {shown(name)}.")
    return name
