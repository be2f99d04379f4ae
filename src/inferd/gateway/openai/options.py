"""The fields of OpenAI's dialect that neither change the prompt nor the sampling."""

from __future__ import annotations

from msgspec import UNSET

from inferd.answer_form import AnswerForm
from inferd.gateway.call import Call, is_request_id
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.answer import model_of
from inferd.gateway.generation.options import Options
from inferd.gateway.limits import check_range
from inferd.gateway.openai.wire import GenerationFields
from inferd.gateway.upstream import ModelStatus


def begin_generation(context: Context, call: Call, body: GenerationFields, prefix: str) -> tuple[ModelStatus, str]:
    """The model that the request names, and the id of its answer. Raises ModelNotFound, InvalidRequest."""
    user = body.user
    model = model_of(context, call, body.model, "" if user is UNSET else bytes(user).decode())
    check_request_id(call, body)
    call.stream = bool(body.stream)
    return model, call.response_id(prefix)


def options_of(
    body: GenerationFields, *, form: AnswerForm | None = None, return_prompt_ids: bool = False, may_relay: bool = True
) -> Options:
    """Raises InvalidRequest."""
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= 1024:
        raise invalid("cache_salt", f"cache_salt must have 1 to 1024 characters, not {len(body.cache_salt)}.")
    streamed = body.stream_options
    return Options(
        stream=bool(body.stream),
        priority=body.priority,
        timeout=body.timeout,
        cache_salt=body.cache_salt or "",
        truncate_prompt_tokens=_truncation(body),
        form=form,
        return_prompt_ids=return_prompt_ids,
        # A remote server may ignore the field.
        may_relay=may_relay and (form is None or not form.fit),
        relays_usage=streamed is not None and streamed.include_usage is True,
    )


def check_request_id(call: Call, body: GenerationFields) -> None:
    """Take the request's id from the body's ``request_id``, which vLLM's dialect allows, instead of from the header.
    Raises InvalidRequest."""
    if body.request_id is None:
        return
    if not is_request_id(body.request_id):
        raise invalid(
            "request_id",
            f"request_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -, not {shown(body.request_id)}.",
        )
    call.given_request_id = call.request_id = body.request_id


def _truncation(body: GenerationFields) -> int | None:
    if body.truncation_side not in (None, "left"):
        raise invalid(
            "truncation_side",
            f"truncation_side must be 'left', not {shown(body.truncation_side)}.",
            "unsupported_parameter",
        )
    truncate = body.truncate_prompt_tokens
    if truncate is None:
        return None
    check_range("truncate_prompt_tokens", truncate)
    if truncate == 0:
        raise invalid(
            "truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1 for the model's limit, not 0."
        )
    return truncate
