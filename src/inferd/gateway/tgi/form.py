"""Sampling and the form of the answer, from a request's parameters."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.answer_form import AnswerForm, Constraint, JsonSchema, Regex
from inferd.gateway.body.embedded import decoded_text
from inferd.gateway.errors import invalid, shown
from inferd.gateway.limits import INT64_MAX, check_range, check_strings
from inferd.gateway.tgi.wire import GrammarField, Parameters
from inferd.types import SamplingParams

MAX_STOP: Final = 16
"""Stop sequences of a request."""

MAX_NEW_TOKENS: Final = 100
"""Of a request that names none, as in text-generation-inference."""

_JSON: Final = ("json", "json_schema")
_NUMBERS: Final = ("temperature", "top_p", "top_k", "repetition_penalty", "frequency_penalty")


def sampling_of(parameters: Parameters, *, with_tokens: bool) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling parameters, and the names of those that the client set. ``with_tokens``: the answer tells its tokens
    with their log-probabilities.

    The most likely token is taken, unless ``do_sample`` is true or a parameter of sampling is set, as in
    text-generation-inference. Raises InvalidRequest.
    """
    most = MAX_NEW_TOKENS if parameters.max_new_tokens is None else parameters.max_new_tokens
    check_range("max_completion_tokens", most, "parameters.max_new_tokens")
    chosen: dict[str, Any] = {"max_tokens": most}
    for name in _NUMBERS:
        value = getattr(parameters, name)
        if value is not None:
            check_range(name, value, f"parameters.{name}")
            chosen[name] = value
    samples = parameters.do_sample or any(name in chosen for name in ("temperature", "top_p", "top_k"))
    chosen.setdefault("temperature", 1.0 if samples else 0.0)
    if parameters.top_p == 0:
        chosen["top_p"] = 1e-9  # 0 keeps the most likely token alone
    if parameters.top_k is not None:
        chosen["top_k"] = max(0, parameters.top_k)
    if parameters.seed is not None:
        check_range("seed", parameters.seed, "parameters.seed")
        chosen["seed"] = parameters.seed & INT64_MAX
    if parameters.stop:
        check_strings("parameters.stop", parameters.stop, MAX_STOP, 1024)
        chosen["stop"] = tuple(parameters.stop)
    top = parameters.top_n_tokens or 0
    check_range("top_logprobs", top, "parameters.top_n_tokens")
    if with_tokens:
        chosen["logprobs"] = top
    if parameters.watermark:
        chosen["watermark"] = True
    if parameters.decoder_input_details:
        chosen["prompt_logprobs"] = 0
    # TGI's texts end with the stop sequence that ended them.
    chosen["include_stop_str_in_output"] = True
    return SamplingParams(**chosen), tuple(chosen)


def form_of(parameters: Parameters) -> AnswerForm:
    """The form of the answer, which is text alone. Raises InvalidRequest."""
    constraint = None if parameters.grammar is None else _constraint(parameters.grammar)
    return AnswerForm(constraint=constraint, splits_reasoning=False)


def check_supported(parameters: Parameters, *, is_stream: bool) -> None:
    """Raises InvalidRequest for a parameter that would change the answer and is not supported."""
    refused = {
        "typical_p": (parameters.typical_p not in (None, 1), "top_p and top_k are supported."),
        "best_of": (parameters.best_of not in (None, 1), "POST to /v1/completions, which has best_of."),
        "decoder_input_details": (
            is_stream and bool(parameters.decoder_input_details),
            "In a stream it is not: POST to /generate.",
        ),
    }
    for name, (is_given, remedy) in refused.items():
        if is_given:
            raise invalid(
                f"parameters.{name}", f"parameters.{name} is not supported. {remedy}", "unsupported_parameter"
            )


def _constraint(grammar: GrammarField) -> Constraint:
    at, value = "parameters.grammar.value", grammar.value
    if grammar.type == "regex":
        if not isinstance(value, str) or not value:
            raise invalid(at, f"{at} must be the pattern of the answer as a text.")
        return Regex(pattern=value, at=at)
    if grammar.type not in _JSON:
        raise invalid(
            "parameters.grammar.type",
            f"parameters.grammar.type must be json, json_schema or regex, not {shown(grammar.type)}.",
            "unsupported_parameter",
        )
    if grammar.type == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict):
        return JsonSchema(schema=value["schema"], at=f"{at}.schema")
    if isinstance(value, str):  # clients send a schema also as a text
        try:
            value = msgspec.convert(decoded_text(value), dict[str, Any])
        except ValueError as error:
            raise invalid(at, f"{at} is a text that is no JSON Schema: {error}. Send an object.") from error
    if not isinstance(value, dict):
        raise invalid(at, f"{at} must be a JSON Schema, an object.")
    return JsonSchema(schema=value, at=at)
