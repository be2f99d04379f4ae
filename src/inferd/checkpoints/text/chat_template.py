"""Renders a conversation with the checkpoint's own chat template.

Behaves like ``apply_chat_template`` of transformers (its globals, filters, defaults and the ``{% generation %}`` tag),
in the sandbox of ``template_sandbox``: a template is untrusted input.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.utils import Namespace

from inferd.checkpoints.text.template_sandbox import MeteredSandbox, TemplateTooCostlyError
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.types import JSON, Chat

_MAX_TEMPLATE_BYTES = 1 << 20
_RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)
# Names a message's reasoning goes by; templates read the first, gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# What a template's own code can raise over messages it was not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """The template or templates of one checkpoint, compiled. Safe to use from several threads."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str], origin: str) -> None:
        """``sources``: name -> template; ``origin``: the file, for messages. Raises ModelLoadError."""
        self._special_tokens = special_tokens
        self._sources = sources
        self._sandbox = _sandbox()
        self._compiled = {name: self._compile(source, origin) for name, source in sources.items()}
        # Whether the template takes the arguments of calls as JSON text and not as objects.
        self.arguments_as_text = False

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer, override: Path | None = None) -> ChatTemplate | None:
        """The template of a checkpoint's folder, or of the file given instead; None where there is none."""
        path = override.expanduser() if override is not None else folder / "chat_template.jinja"
        if override is not None and not path.is_file():
            raise ModelLoadError(
                f"chat_template is {path}, but that file does not exist. Correct the path.", param="chat_template"
            )
        sources: dict[str, str] = {}
        if path.is_file():
            sources["default"] = _read(path)
            named = folder / "additional_chat_templates"
            if override is None and named.is_dir():
                sources |= {file.stem: _read(file) for file in sorted(named.glob("*.jinja"))}
        else:
            for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
                sources = _from_json(path)
                if sources:
                    break
        return cls(sources, tokenizer.special_tokens, str(path)) if sources else None

    @property
    def tool_source(self) -> str:
        """The template that renders conversations with tools."""
        return self._sources.get("tool_use") or self._sources.get("default") or next(iter(self._sources.values()))

    def render(self, chat: Chat) -> str:
        """The prompt's text. Raises InvalidRequest naming the field at fault.

        Rendering takes at most about a second of CPU and ``MAX_SIZE`` characters, whatever the template does.
        """
        _check(chat, self._special_tokens)
        name = self._choose(chat)
        messages = [_with_reasoning({k: v for k, v in m.items() if v is not None}) for m in chat.messages]
        if self.arguments_as_text:
            messages = [_with_text_arguments(message) for message in messages]
        final = _mark_final(messages, self._sources[name]) if chat.continue_final_message else None
        variables = {
            **self._special_tokens,
            **chat.template_kwargs,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            text = self._sandbox.render_metered(self._compiled[name], variables)
        except TemplateTooCostlyError as error:
            raise InvalidRequest(
                f"The chat template was stopped: {error.message}. Send fewer or shorter messages.", param=chat.at
            ) from error
        except SecurityError as error:
            raise InvalidRequest(
                f"The chat template did something a template may not do: {error.message}.", param=chat.at
            ) from error
        except jinja2.TemplateRuntimeError as error:
            raise InvalidRequest(
                f"The chat template cannot render these messages: {error.message}.", param=chat.at
            ) from error
        except jinja2.TemplateError as error:  # raise_exception: the template's own words to the client
            raise InvalidRequest(error.message or "The chat template refused these messages.", param=chat.at) from error
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"The chat template cannot render these messages: {_said(error)}.", param=chat.at
            ) from error
        return text if final is None else _cut_after_final(text, final)

    def _compile(self, source: str, origin: str) -> jinja2.Template:
        if len(source) > _MAX_TEMPLATE_BYTES:
            raise ModelLoadError(
                f"The chat template in {origin} has {len(source)} characters, more than {_MAX_TEMPLATE_BYTES}."
            )
        try:
            return self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"The chat template in {origin} has an error in line {error.lineno}: {error.message}. Correct it, "
                "or set chat_template to another file."
            ) from error
        except (SyntaxError, *_TEMPLATE_ERRORS) as error:
            raise ModelLoadError(
                f"The chat template in {origin} cannot be compiled: {_said(error)}. Correct it, "
                "or set chat_template to another file."
            ) from error

    def _choose(self, chat: Chat) -> str:
        if chat.tools is not None and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        if len(self._sources) == 1:
            return next(iter(self._sources))
        raise InvalidRequest(
            f"This model has the chat templates {', '.join(sorted(self._sources))} and none is the default. "
            "Set chat_template in the model's configuration.",
            param=chat.at,
        )


# -- the environment --------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it is plain."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Namespace(Namespace):
    """A namespace without underscore-prefixed attributes, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


class _Dict:
    """``dict`` without its type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sandbox() -> MeteredSandbox:
    sandbox = MeteredSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    sandbox.globals["dict"] = _Dict()
    sandbox.globals["namespace"] = _Namespace
    sandbox.seal()
    return sandbox


# -- the conversation -------------------------------------------------------------------------


def _check(chat: Chat, special_tokens: dict[str, str]) -> None:
    if not chat.messages:
        raise InvalidRequest(f"{chat.at} is empty. Give at least one message.", param=chat.at)
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true, "
            "but the answer is either continued or begun. Set one to false.",
            param="continue_final_message",
        )
    reserved = sorted(chat.template_kwargs.keys() & (_RESERVED | special_tokens.keys()))
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs contains {reserved[0]!r}, which the server sets itself. Remove it.",
            param="chat_template_kwargs",
        )


def _with_reasoning(message: JSON) -> JSON:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_text_arguments(message: JSON) -> JSON:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    written = [
        {**call, "function": {**call["function"], "arguments": _tojson(call["function"]["arguments"])}}
        if isinstance(call["function"].get("arguments"), dict)
        else call
        for call in calls
    ]
    return {**message, "tool_calls": written}


def _mark_final(messages: list[JSON], source: str) -> str:
    """Mark where the last message's text ends; returns that text."""
    content = messages[-1].get("content")
    if "content" not in source or not content:
        raise InvalidRequest(
            "continue_final_message is true, but the last message has no content to continue. Give it some, "
            "or set it to false.",
            param="continue_final_message",
        )
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_TAG
        return content
    for at in reversed(range(len(content))):
        part = content[at]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            messages[-1]["content"] = [
                *content[:at],
                {**part, "text": part["text"] + _CONTINUE_TAG},
                *content[at + 1 :],
            ]
            return str(part["text"])
    raise InvalidRequest(
        "continue_final_message is true, but the last message has no text to continue. Give it some, "
        "or set it to false.",
        param="continue_final_message",
    )


def _cut_after_final(text: str, final: str) -> str:
    """The text up to the end of the last message, as transformers cuts it."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequest(
            "continue_final_message is true, but this model's chat template changes the last message, "
            "so it cannot be continued.",
            param="continue_final_message",
        )
    if text.startswith(_CONTINUE_TAG, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims messages


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}".rstrip(": .")


# -- files ------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}. Give a UTF-8 text file.") from error


def _from_json(path: Path) -> dict[str, str]:
    """The ``chat_template`` entry: one template, or a list of {name, template}."""
    if not path.is_file():
        return {}
    try:
        entry = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("chat_template")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is not a JSON object: {error}. Download it again.") from error
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    try:
        return {item.name: item.template for item in msgspec.convert(entry, type=list[_Named])}
    except msgspec.ValidationError as error:
        raise ModelLoadError(
            f"chat_template in {path} is neither a string nor a list of templates with names: {error}."
        ) from error


class _Named(msgspec.Struct, frozen=True):
    name: str
    template: str
