"""``inferd chat``: a conversation in the terminal, with a running server or a model in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

import click
import msgspec

from inferd.cli.endpoint import Answer, answers, find_endpoint
from inferd.cli.ranges import FloatRange
from inferd.cli.terminal import interruptible, note
from inferd.errors import InferdError, InvalidRequest
from inferd.types import JSON, SamplingParams

HELP = """\
/help            this text
/system TEXT     begin again with this system message
/reset           forget the conversation
/exit            leave (also Ctrl-D); Ctrl-C stops an answer"""


@click.command("chat")
@click.argument("source", required=False)
@click.option("--url", default=None, help="Server to talk to.  [default: the one that runs on this machine]")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port of the server that is meant.")
@click.option("--model", default=None, help="Model name to ask the server for.  [default: the first that it lists]")
@click.option(
    "--api-key",
    envvar=["INFERD_API_KEY", "OPENAI_API_KEY"],
    default=None,
    help="Key for the server (also INFERD_API_KEY or OPENAI_API_KEY).",
)
@click.option("--system", default=None, help="System message to start with.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Longest answer, in tokens."
)
@click.option("--temperature", type=FloatRange(min=0), default=None, help="0 is greedy.  [default: the model's own]")
def command(
    source: str | None,
    url: str | None,
    port: int | None,
    model: str | None,
    api_key: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
) -> int:
    """Talk to a model; answers appear as they are written.

    With SOURCE (a folder, a hub id or 'demo') the model is loaded into this process; with --url or --port a
    running server answers. With none of them: the server that runs on this machine, else the bundled model,
    loaded into this process.

    \b
    Examples:
      inferd chat
      inferd chat ./my-model --system "You are terse."
      inferd chat --port 9000 --model chat
      inferd chat --url http://10.0.0.5:8000
    """
    if source is not None and (url is not None or port is not None):
        raise click.UsageError("Give either SOURCE (loaded here) or --url or --port (a running server), not both.")
    with contextlib.ExitStack() as stack:
        if source is None:
            endpoint = find_endpoint(url, port, api_key)
            if endpoint is not None:
                if model is not None:
                    endpoint.refuse_unknown(model)
                name = model or endpoint.default_model()
                tasks = endpoint.tasks(name)
                if tasks and "chat" not in tasks:
                    writes = "generate" in tasks
                    other = f"inferd generate --model {name} TEXT" if writes else f"inferd predict {name} --input VALUE"
                    raise InvalidRequest(f"{name} does not answer conversations; use {other}.")
                endpoint.refuse_unavailable(name)
                title = f"{name}, {endpoint.name}"
                settings: JSON = {"model": name, "max_tokens": max_tokens}
                answer = answers(endpoint, settings if temperature is None else settings | {"temperature": temperature})
            else:
                note("No server runs here: the bundled model 'demo' is loaded into this process.")
                source = "demo"
        if source is not None:
            from inferd.llm import LLM

            with interruptible():
                llm = stack.enter_context(LLM(source))
            if not llm.info.has_chat_template:
                raise InvalidRequest(
                    f"{llm.info.name} has no chat template, so it cannot answer a conversation; use "
                    f"inferd generate --model {source} TEXT"
                )
            title = f"{llm.info.name}, in this process"
            sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0 if temperature is None else temperature)
            explicit = ("max_tokens", *(() if temperature is None else ("temperature",)))
            room = llm.info.max_model_len

            def answer(messages: list[JSON]) -> Generator[str, None, None]:
                fitting = msgspec.structs.replace(sampling, max_tokens=min(max_tokens, max(room // 2, 1)))
                return llm.stream(messages, fitting, explicit=explicit)

        click.secho(f"Talking to {title}. /help for help, /exit to leave.", dim=True)
        converse(answer, system)
    return 0


def converse(answer: Answer, system: str | None) -> None:
    """Read lines and print answers until the input ends."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history

    def fresh() -> list[JSON]:
        return [{"role": "system", "content": system}] if system else []

    messages = fresh()
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(/exit or Ctrl-D to leave)")
            continue
        word, _, rest = line.partition(" ")
        if not line:
            continue
        if word in ("/exit", "/quit"):
            return
        if word == "/help":
            click.echo(HELP)
        elif word in ("/reset", "/system"):
            system = (rest.strip() or None) if word == "/system" else system
            messages = fresh()
            click.secho("(a new conversation)", dim=True)
        elif word.startswith("/") and word[1:].isalpha():
            click.secho(f"There is no command {word}; /help lists them.", fg="yellow")
        else:
            messages.append({"role": "user", "content": line})
            said = _print_answer(answer, messages)
            if said is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": said})


def _print_answer(answer: Answer, messages: list[JSON]) -> str | None:
    """Print an answer as it comes; None when it failed. Ctrl-C keeps the part that was printed."""
    pieces: list[str] = []
    try:
        with contextlib.closing(answer(messages)) as stream:
            for piece in stream:
                pieces.append(piece)
                click.echo(piece, nl=False)
    except KeyboardInterrupt:
        click.secho(" (stopped)", dim=True)
    except InferdError as error:
        click.echo()
        click.secho(f"{error.message}  (/reset begins again)", fg="red", err=True)
        return None
    else:
        click.echo()
    return "".join(pieces)
