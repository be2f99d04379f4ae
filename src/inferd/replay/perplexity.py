"""The perplexity of a text at a running server, from the log-probabilities of prompts (``/v1/completions`` with
``echo`` and ``logprobs``).

The definition, the windows and the leading tokens are those of ``inferd perplexity`` (``engine/perplexity.py``): each
token of the text is scored once, given the tokens before it in its window; the windows do not overlap.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import msgspec

from inferd.errors import InvalidRequest, Unavailable
from inferd.replay.evaluate import PerplexityScore
from inferd.replay.server import AskedServer
from inferd.types import JSON

_HEADERS: Final = {"content-type": "application/json", "X-Inferd-Priority": "batch"}


async def perplexity(server: AskedServer, model: str | None, file: Path, context: int) -> PerplexityScore:
    """The perplexity of a UTF-8 file's text, in windows of ``context`` tokens with the leading ones.

    Raises InvalidRequest, Unavailable, and ``ServerGone``.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The text {file} cannot be read ({error}).", param="perplexity") from None
    named = {} if model is None else {"model": model}
    ids, most = await _tokens(server, {**named, "prompt": text, "add_special_tokens": False})
    leading, _ = await _tokens(server, {**named, "prompt": "", "add_special_tokens": True})
    context = min(context, most or context)
    fresh = context - len(leading)
    if fresh < 1 or context < 2:
        raise InvalidRequest(
            f"A context of {context} tokens has no room for the text; raise --context.", param="context"
        )
    if len(ids) + len(leading) < 2:
        raise InvalidRequest(f"The text {file} has {len(ids)} tokens, too few to predict one.", param="perplexity")
    losses: list[float] = []
    num_windows = 0
    for start in range(0, len(ids), fresh):
        part = ids[start : start + fresh]
        if len(leading) + len(part) < 2:
            continue
        body = {**named, "prompt": [*leading, *part], "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
        answer = await _post(server, "/v1/completions", body)
        found = answer["choices"][0]["logprobs"]["token_logprobs"]
        scored = found[max(1, len(leading)) :]
        losses += [-float(one) for one in scored]
        num_windows += 1
    mean = math.fsum(losses) / len(losses)
    spread = math.fsum([(one - mean) ** 2 for one in losses])
    spread_of_mean = math.sqrt(spread / (len(losses) - 1) / len(losses)) if len(losses) > 1 else math.inf
    return PerplexityScore(
        file=str(file),
        value=math.exp(mean) if mean < 700 else math.inf,
        standard_error=spread_of_mean,
        num_scored=len(losses),
        num_windows=num_windows,
        context=context,
    )


async def _tokens(server: AskedServer, body: JSON) -> tuple[list[int], int | None]:
    found = await _post(server, "/tokenize", body)
    return found["tokens"], found.get("max_model_len")


async def _post(server: AskedServer, path: str, body: JSON) -> Any:
    try:
        reply = await server.ask("POST", path, msgspec.json.encode(body), _HEADERS)
        answer = msgspec.json.decode(reply.body)
    except TimeoutError:
        raise Unavailable(f"{server.name} did not answer {path} within --timeout.") from None
    except msgspec.DecodeError:
        raise Unavailable(f"{server.name} answered {path} with status {reply.status} and no JSON.") from None
    if reply.status != 200:
        error = answer.get("error") if isinstance(answer, dict) else None
        said = error.get("message") if isinstance(error, dict) else f"status {reply.status}"
        raise Unavailable(f"{server.name} refused {path}: {str(said)[:300]}")
    return answer
