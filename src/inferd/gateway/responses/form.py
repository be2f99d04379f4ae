"""Sampling, reasoning and the form of the answer, from the fields of a request."""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET

from inferd.answer_form import AnswerForm, JsonSchema
from inferd.gateway.errors import invalid, printable, shown
from inferd.gateway.generation.items import JSON
from inferd.gateway.limits import check_range
from inferd.gateway.responses.tools import Tools
from inferd.gateway.responses.wire import (
    PromptFields,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
    TextFormat,
)
from inferd.types import SamplingParams

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Templates know these three; the dialect's other words mean the nearest.
_TEMPLATE_EFFORTS: Final = {"minimal": "low", "xhigh": "high", "max": "high"}
_VERBOSITIES: Final = ("low", "medium", "high")
_TRUNCATIONS: Final = ("auto", "disabled")
_OF_SERVER_TOOLS: Final = frozenset(
    (
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)
"""Values of ``include`` for items that no answer of this server has."""
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512  # of metadata
_NAMES: Final = {"user": 1024, "safety_identifier": 1024, "prompt_cache_key": 1024}
"""Texts that the response repeats, with the most characters of each."""


def check_fields(body: ResponsesRequest) -> list[str]:
    """The names of the fields that were sent and have no effect. Raises InvalidRequest for a value that would change
    the answer and is not supported."""
    if body.prompt is not UNSET and bytes(body.prompt) != b"null":
        raise invalid(
            "prompt",
            "prompt is not supported: this server keeps no prompt templates. Send the text in instructions and input.",
            "unsupported_parameter",
        )
    if body.max_output_tokens is not None:
        check_range("max_completion_tokens", body.max_output_tokens, "max_output_tokens")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise invalid("max_tool_calls", f"max_tool_calls must be at least 1, not {body.max_tool_calls}.")
    check_metadata(body.metadata or {})
    for name, longest in _NAMES.items():
        text = getattr(body, name)
        if text is not None and len(text) > longest:
            raise invalid(name, f"{name} has {len(text)} characters; at most {longest} are taken.")
    ignored = check_prompt_fields(body)
    for value in body.include or ():
        if value not in (LOGPROBS, ENCRYPTED) and value not in _OF_SERVER_TOOLS:
            ignored.append(f"include.{printable(value)}")
    if body.service_tier not in (None, "auto", "default"):
        ignored.append("service_tier")
    return ignored


def check_prompt_fields(body: PromptFields) -> list[str]:
    """As ``check_fields``, for the fields that determine a prompt."""
    ignored: list[str] = []
    if body.truncation is not None and body.truncation not in _TRUNCATIONS:
        raise invalid("truncation", f"truncation must be 'auto' or 'disabled', not {shown(body.truncation)}.")
    if body.text is not None and body.text.verbosity is not None:
        if body.text.verbosity not in _VERBOSITIES:
            allowed = ", ".join(_VERBOSITIES)
            raise invalid("text.verbosity", f"text.verbosity must be {allowed}, not {shown(body.text.verbosity)}.")
        if body.text.verbosity != "medium":
            ignored.append("text.verbosity")
    if body.text is not None and body.text.format is not None and body.text.format.description:
        ignored.append("text.format.description")
    if body.reasoning is not None:
        for name in ("summary", "generate_summary", "context", "mode"):
            if getattr(body.reasoning, name) not in (None, "standard"):
                ignored.append(f"reasoning.{name}")
    return ignored


def reasoning_arguments(reasoning: ReasoningConfig | None) -> JSON:
    """The variables of the template by which ``reasoning.effort`` reaches a model. Raises InvalidRequest."""
    effort = reasoning.effort if reasoning is not None else None
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise invalid(
            "reasoning.effort", f"reasoning.effort must be one of {', '.join(_EFFORTS)}, not {shown(effort)}."
        )
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": _TEMPLATE_EFFORTS.get(effort, effort), "enable_thinking": True, "thinking": True}


def sampling_of(body: ResponsesRequest) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling parameters, and the names of those that the client set. Raises InvalidRequest."""
    chosen: dict[str, Any] = {}
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        value = getattr(body, name)
        if value is not None:
            check_range(name, value)
            chosen[name] = value
    if body.top_p == 0:
        chosen["top_p"] = 1e-9  # 0 keeps the most likely token alone
    if body.max_output_tokens is not None:
        chosen["max_tokens"] = body.max_output_tokens
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs)
    if wants_logprobs(body):
        chosen["logprobs"] = body.top_logprobs or 0
    return SamplingParams(**chosen), tuple(chosen)


def wants_logprobs(body: ResponsesRequest) -> bool:
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def wants_encrypted(body: ResponsesRequest) -> bool:
    return ENCRYPTED in (body.include or ())


def form_of(body: PromptFields, tools: Tools, *, fit: bool = False) -> AnswerForm:
    """The form of the answer. Raises InvalidRequest."""
    return AnswerForm(constraint=_constraint(body.text), tools=tools.use_of(body), fit=fit)


def text_echo(text: TextConfig | None) -> JSON:
    """``text`` as the response has it."""
    verbosity = text.verbosity if text is not None else None
    return {"format": _format_echo(text.format if text is not None else None), "verbosity": verbosity or "medium"}


def reasoning_echo(reasoning: ReasoningConfig | None) -> JSON:
    """``reasoning`` as the response has it: reasoning is given whole, without a summary."""
    return {"effort": reasoning.effort if reasoning is not None else None, "summary": None}


def _format_echo(given: TextFormat | None) -> JSON:
    if given is None or given.type == "text":
        return {"type": "text"}
    if given.type == "json_object":
        return {"type": "json_object"}
    return {
        "type": given.type,
        "name": given.name,
        "description": given.description,
        "schema": given.schema,
        "strict": given.strict,
    }


def _constraint(text: TextConfig | None) -> JsonSchema | None:
    given = text.format if text is not None else None
    at = "text.format"
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return JsonSchema(schema={"type": "object"}, at=at)
    if given.type != "json_schema":
        raise invalid(
            f"{at}.type",
            f"{at}.type must be text, json_object or json_schema, not {shown(given.type)}.",
            "unsupported_parameter",
        )
    if given.schema is None:
        raise invalid(
            f"{at}.schema", f"{at}.schema is missing; send the JSON Schema of the answer.", "missing_required_parameter"
        )
    return JsonSchema(schema=given.schema, at=f"{at}.schema")


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises InvalidRequest."""
    if len(metadata) > _MOST_PAIRS:
        raise invalid("metadata", f"metadata may have at most {_MOST_PAIRS} pairs, not {len(metadata)}.")
    for key, value in metadata.items():
        if len(key) > _LONGEST_KEY:
            raise invalid("metadata", f"The key {shown(key)} of metadata is longer than {_LONGEST_KEY} characters.")
        if len(value) > _LONGEST_VALUE:
            raise invalid(
                f"metadata.{printable(key)}",
                f"The value of {shown(key)} in metadata has {len(value)} characters; at most {_LONGEST_VALUE} are "
                "taken.",
            )
