"""Sampling, thinking and the form of the answer, from the fields of a request."""

from __future__ import annotations

from typing import Any, Final

from inferd.answer_form import AnswerForm, JsonSchema
from inferd.gateway.errors import invalid, shown
from inferd.gateway.limits import INT64_MAX, check_range, check_strings
from inferd.gateway.ollama.wire import JSON, OllamaGenerationFields, OllamaOptions
from inferd.types import SamplingParams

_EFFORTS: Final = ("low", "medium", "high")
_NUMBERS: Final = {  # the option's name -> the field and the limits of the sampling
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_OFF: Final = {"typical_p": 1, "tfs_z": 1, "mirostat": 0}
"""Methods of sampling that are not supported, each with the value that turns it off."""


def sampling_of(body: OllamaGenerationFields) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling parameters, and the names of those that the client set. Raises InvalidRequest."""
    options = body.options or OllamaOptions()
    chosen: dict[str, Any] = {}
    for name, field in _NUMBERS.items():
        value = getattr(options, name)
        if value is not None:
            check_range(field, value, f"options.{name}")
            chosen[field] = value
    if options.top_p == 0:
        chosen["top_p"] = 1e-9  # 0 keeps the most likely token alone
    if options.top_k is not None:
        chosen["top_k"] = max(0, options.top_k)
    if options.num_predict is not None and options.num_predict not in (-1, -2):  # no limit but the context
        check_range("max_completion_tokens", options.num_predict, "options.num_predict")
        chosen["max_tokens"] = options.num_predict
    if options.seed is not None:
        check_range("seed", options.seed, "options.seed")
        chosen["seed"] = options.seed & INT64_MAX
    if options.stop:
        stop = [options.stop] if isinstance(options.stop, str) else options.stop
        check_strings("options.stop", stop, 16, 1024)
        chosen["stop"] = tuple(stop)
    for name, off in _OFF.items():
        if getattr(options, name) not in (None, off):
            raise invalid(
                f"options.{name}",
                f"options.{name} is not supported. Leave it out; temperature, top_p, top_k and min_p are supported.",
                "unsupported_parameter",
            )
    top = body.top_logprobs
    if top is not None:
        check_range("top_logprobs", top)
        if top and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true; set it or leave top_logprobs out.")
    if body.logprobs:
        chosen["logprobs"] = top or 0
    return SamplingParams(**chosen), tuple(chosen)


def form_of(body: OllamaGenerationFields) -> AnswerForm:
    """The form of the answer, without its calls. Raises InvalidRequest."""
    return AnswerForm(constraint=_constraint(body.format))


def template_arguments(think: bool | str | None) -> JSON:
    """The variables of the template by which ``think`` reaches a model. Raises InvalidRequest."""
    if think is None:
        return {}
    if isinstance(think, str) and think not in _EFFORTS:
        raise invalid("think", f"think must be true, false or one of {', '.join(_EFFORTS)}, not {shown(think)}.")
    arguments: JSON = {"enable_thinking": bool(think), "thinking": bool(think)}
    return {**arguments, "reasoning_effort": think} if isinstance(think, str) else arguments


def _constraint(form: str | JSON | None) -> JsonSchema | None:
    if form is None or form == "":
        return None
    if form == "json":
        return JsonSchema(schema={"type": "object"}, at="format")
    if isinstance(form, str):
        raise invalid("format", f"format must be 'json' or a JSON Schema, not {shown(form)}.", "unsupported_parameter")
    return JsonSchema(schema=form, at="format")
