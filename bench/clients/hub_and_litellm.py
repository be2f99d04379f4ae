"""huggingface_hub's InferenceClient and litellm, unmodified, against a running inferd.

    python bench/clients/hub_and_litellm.py http://127.0.0.1:8000 demo

Runs whichever of the two is installed in this interpreter's environment, prints one line per check and
fails if one does not hold. A streamed answer has to be the answer given in one piece.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MESSAGES = [{"role": "user", "content": "What is inferd?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}


def main() -> int:
    url, model = sys.argv[1], sys.argv[2]
    for package, run in (("huggingface_hub", hub), ("litellm", litellm)):
        try:
            number = version(package)
        except PackageNotFoundError:
            print(f"{package}: not installed, not run")
            continue
        print(f"{package} {number}")
        run(f"{url}/v1", model)
    return 0


def check(what: str, holds: bool) -> None:
    print(f"  {'ok  ' if holds else 'FAIL'} {what}", flush=True)
    if not holds:
        raise SystemExit(1)


def refused(call: Callable[[], object], status: int, says: str) -> bool:
    """The call fails with this status, and its message has the server's reason."""
    try:
        call()
    except Exception as error:  # the two libraries share no base class
        answer = getattr(error, "response", None)
        found = getattr(error, "status_code", None) or getattr(answer, "status_code", None)
        return found == status and says in str(error)
    return False


def hub(api: str, model: str) -> None:
    from huggingface_hub import AsyncInferenceClient, InferenceClient

    client = InferenceClient(base_url=api, api_key="none", timeout=60)

    def ask(**fields: Any) -> Any:
        return client.chat_completion(MESSAGES, model=model, **GREEDY, **fields)

    whole = ask()
    text = whole.choices[0].message.content
    check(f"chat_completion: {text!r}", bool(text) and whole.usage.completion_tokens > 0)
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    check("its stream is the same text", _joined(chunks) == text)
    check("and brings usage", chunks[-1].usage.completion_tokens == whole.usage.completion_tokens)
    entries = ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    check("logprobs", "".join(entry.token for entry in entries).startswith(text) and entries[0].logprob < 0)
    check("stop", ask(stop=[text[3:6]]).choices[0].message.content == text[: text.index(text[3:6])])
    check("tools are accepted", ask(tools=TOOLS).choices[0].finish_reason in ("stop", "tool_calls", "length"))

    async def streamed() -> str:
        kept = AsyncInferenceClient(base_url=api, api_key="none")  # a client that is dropped closes its streams
        stream = await kept.chat_completion(MESSAGES, model=model, stream=True, **GREEDY)
        return _joined([chunk async for chunk in stream])

    check("AsyncInferenceClient streams it", asyncio.run(streamed()) == text)
    check("an unknown model is a 404", refused(lambda: client.chat_completion(MESSAGES, model="none"), 404, "none"))


def litellm(api: str, model: str) -> None:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download at import
    import litellm

    litellm.suppress_debug_info = True
    for provider in ("openai", "hosted_vllm"):

        def ask(name: str = model, provider: str = provider, **fields: Any) -> Any:
            settings = {**GREEDY, "api_base": api, "api_key": "none", **fields}
            return litellm.completion(model=f"{provider}/{name}", messages=MESSAGES, max_retries=0, **settings)

        text = ask().choices[0].message.content
        check(f"completion({provider}/{model}): {text!r}", bool(text))
        check("its stream is the same text", _joined(list(ask(stream=True))) == text)
        built = litellm.stream_chunk_builder(list(ask(stream=True, stream_options={"include_usage": True})))
        check("stream_chunk_builder with usage", built.usage.completion_tokens == ask().usage.completion_tokens)
        settings = {**GREEDY, "api_base": api, "api_key": "none"}
        later = litellm.acompletion(model=f"{provider}/{model}", messages=MESSAGES, **settings)
        check("acompletion", asyncio.run(later).choices[0].message.content == text)
        check("tools are accepted", ask(tools=TOOLS).choices[0].finish_reason in ("stop", "tool_calls", "length"))
        check("an unknown model is a 404", refused(lambda: ask("none"), 404, "none"))
        check("a bad value is a 400", refused(lambda: ask(temperature=3), 400, "temperature"))
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="Once", api_base=api, api_key="none", **GREEDY
    )
    check("text_completion", bool(text.choices[0].text))


def _joined(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


if __name__ == "__main__":
    sys.exit(main())
