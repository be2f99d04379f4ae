"""``inferd generate``: one answer on stdout, for shells and pipes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import click

from inferd.cli.endpoint import find_endpoint, stream_text
from inferd.cli.ranges import FloatRange
from inferd.cli.terminal import interruptible, note
from inferd.errors import InvalidRequest
from inferd.types import JSON, SamplingParams


@click.command("generate")
@click.argument("prompt")
@click.option(
    "--model",
    default=None,
    help="A model of the server that runs, by its name; or a folder, a Hugging Face Hub id or 'demo', loaded into this "
    "process.  [default: the server's first, else demo]",
)
@click.option("--url", default=None, help="Server to ask.  [default: the one that runs on this machine]")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port of the server that is meant.")
@click.option(
    "--api-key",
    envvar=["INFERD_API_KEY", "OPENAI_API_KEY"],
    default=None,
    help="Key for --url (also INFERD_API_KEY or OPENAI_API_KEY).",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Longest answer, in tokens."
)
@click.option("--temperature", type=FloatRange(min=0), default=None, help="0 is greedy.  [default: the model's own]")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Makes a sampled answer repeatable.")
@click.option("--system", default=None, help="System message that precedes the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
def command(
    prompt: str,
    model: str | None,
    url: str | None,
    port: int | None,
    api_key: str | None,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
    system: str | None,
    raw: bool,
) -> int:
    """Answer PROMPT, which '-' reads from stdin.

    The server on this machine answers if it serves the model. Otherwise the model is loaded into this process, so a
    name that is not served is taken for a folder or a hub id. chat and bench refuse such a name, and so does the
    server of --url or --port.

    \b
    Examples:
      inferd generate "What is inferd?"
      inferd generate --model ./my-model --raw "Once upon a time" --max-tokens 100
      cat question.txt | inferd generate -
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise click.UsageError("The prompt is empty; give a text, or '-' and a text on stdin.")
    messages: list[JSON] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    endpoint = find_endpoint(url, port, api_key)
    served = [] if endpoint is None else endpoint.models()
    if endpoint is not None and (model is None or model in served or url is not None or port is not None):
        name = model or (served[0] if raw else endpoint.default_model())
        tasks = endpoint.tasks(name)
        if tasks and "generate" not in tasks:
            raise InvalidRequest(f"{name} does not write texts; use inferd predict {name} --input VALUE.")
        raw = raw or (bool(tasks) and "chat" not in tasks)
        note(f"Asking {name}, {endpoint.name}.")
        body: JSON = {"model": name, "max_tokens": max_tokens}
        body |= {} if temperature is None else {"temperature": temperature}
        body |= {} if seed is None else {"seed": seed}
        if raw and system:
            raise click.UsageError("--system needs a model with a chat template, and no --raw.")
        path = "/v1/completions" if raw else "/v1/chat/completions"
        _write(stream_text(endpoint, path, body | ({"prompt": prompt} if raw else {"messages": messages})))
        return 0
    source = model or "demo"
    note(
        f"Loading {source} into this process"
        + ("." if endpoint is None else f", as {endpoint.name} does not serve it.")
    )
    from inferd.llm import LLM

    with contextlib.ExitStack() as stack:
        with interruptible():
            llm = stack.enter_context(LLM(source))
        room = llm.info.max_model_len
        sampling = SamplingParams(
            max_tokens=min(max_tokens, room - 1), seed=seed, temperature=1.0 if temperature is None else temperature
        )
        set_by_user = ("max_tokens", "seed", *(() if temperature is None else ("temperature",)))
        is_chat = llm.info.has_chat_template and not raw
        if system and not is_chat:
            raise click.UsageError("--system needs a model with a chat template, and no --raw.")
        _write(llm.stream(messages if is_chat else prompt, sampling, explicit=set_by_user))
    return 0


def _write(pieces: Iterator[str]) -> None:
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()
