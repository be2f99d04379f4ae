"""POST /tokenize and /detokenize: the served model's own tokenizer and chat template, in vLLM's dialect."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.gateway.admission import find_model, reserve
from inferd.gateway.call import Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid
from inferd.gateway.generation.requests import ignored_header
from inferd.gateway.generation.writer import encode
from inferd.gateway.limits import check_token_ids
from inferd.gateway.openai.messages import chat_of
from inferd.gateway.openai.wire import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from inferd.types import Chat, TextPrompt

_MAX_TOKENS = 4 * 1024 * 1024


async def tokenize(context: Context, call: Call, body: TokenizeRequest, ignored: Sequence[str]) -> Response:
    """``ignored``: keys of the body that have no effect.

    Raises InvalidRequest, ModelNotFound, QuotaExceeded, Unavailable.
    """
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Send either 'prompt' or 'messages', one of the two.", "missing_required_parameter")
    prompt: Chat | TextPrompt
    if body.messages is not None:
        prompt, left_out = chat_of(body, body.messages, default_special_tokens=False)
        call.ignored = [*ignored, *left_out]
    else:
        call.ignored = list(ignored)
        prompt = TextPrompt(text=body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    model = find_model(context, call, body.model)
    call.model = model.name
    reserve(context, call, model.name)
    ids, strings = await context.router.tokenize(
        model.name, prompt, want_strings=bool(body.return_token_strs), tenant=call.principal.tenant
    )
    limit = model.info.max_model_len if model.info is not None else None
    answer = TokenizeResponse(count=len(ids), max_model_len=limit, tokens=ids, token_strs=strings)
    return Response(200, encode(answer), headers=ignored_header(call.ignored))


async def detokenize(context: Context, call: Call, body: DetokenizeRequest) -> Response:
    """Raises InvalidRequest, ModelNotFound, QuotaExceeded, Unavailable."""
    check_token_ids("tokens", body.tokens, _MAX_TOKENS)
    model = find_model(context, call, body.model)
    call.model = model.name
    reserve(context, call, model.name)
    return Response(200, encode(DetokenizeResponse(await context.router.detokenize(model.name, body.tokens))))
