"""``inferd chat``: a conversation in the terminal, with a running server or a model in this process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Generator

import click
import msgspec

from inferd.benchmark.load import Connection, ServerError, find_model
from inferd.errors import InferdError, Unavailable
from inferd.types import JSON, SamplingParams

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = """\
/help            this text
/system TEXT     start anew with this system message
/reset           forget the conversation
/exit            leave (also Ctrl-D); Ctrl-C stops an answer"""

Answer = Callable[[list[JSON]], Generator[str, None, None]]


@click.command("chat")
@click.argument("source", required=False)
@click.option("--url", default=None, help=f"Server to talk to.  [default: {DEFAULT_URL} if one runs there]")
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
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=None, help="0 is greedy.  [default: the model's own]"
)
def command(
    source: str | None,
    url: str | None,
    model: str | None,
    api_key: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
) -> int:
    """Talk to a model; answers appear as they are written.

    With SOURCE (a folder, a hub id or 'demo') the model is loaded into this process; with --url a
    running server answers. With neither: the server on port 8000 if there is one, else the bundled model.

    \b
    Examples:
      inferd chat
      inferd chat ./my-model --system "You are terse."
      inferd chat --url http://10.0.0.5:8000
    """
    if source is not None and url is not None:
        raise click.UsageError("Give either SOURCE (loaded here) or --url (a running server), not both.")
    with contextlib.ExitStack() as stack:
        if source is None:
            try:
                address = url or DEFAULT_URL
                name = model or asyncio.run(find_model(address, api_key, timeout_s=2.0))
                title, answer = f"{name} at {address}", _over_http(address, name, api_key, max_tokens, temperature)
            except Unavailable:
                if url is not None:
                    raise
                source = "demo"
        if source is not None:
            from inferd.llm import LLM

            llm = stack.enter_context(LLM(source))
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
            said = _say(answer, messages)
            if said is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": said})


def _say(answer: Answer, messages: list[JSON]) -> str | None:
    """Print an answer as it comes; None when it failed. Ctrl-C keeps what was said."""
    pieces: list[str] = []
    try:
        with contextlib.closing(answer(messages)) as stream:
            for piece in stream:
                pieces.append(piece)
                click.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        click.secho(" (stopped)", dim=True)
    except InferdError as error:
        click.echo()
        click.secho(f"{error.message}  (/reset starts anew)", fg="red", err=True)
        return None
    else:
        click.echo()
    return "".join(pieces)


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = _Delta()


class _Fault(msgspec.Struct):
    message: str = "the server ended the answer with an error"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Fault | None = None


def _over_http(url: str, model: str, api_key: str | None, max_tokens: int, temperature: float | None) -> Answer:
    async def pieces(messages: list[JSON]) -> AsyncGenerator[str, None]:
        body: JSON = {"model": model, "messages": messages, "stream": True, "max_tokens": max_tokens}
        if temperature is not None:
            body["temperature"] = temperature
        connection = Connection(url, 600.0, api_key)
        try:
            async for line in connection.lines("POST", "/v1/chat/completions", msgspec.json.encode(body)):
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                chunk = msgspec.json.decode(line[5:], type=_Chunk)
                if chunk.error is not None:
                    raise Unavailable(chunk.error.message)
                for choice in chunk.choices:
                    if choice.delta.content:
                        yield choice.delta.content
        except (ServerError, msgspec.DecodeError) as error:
            raise Unavailable(f"The server at {url} refused: {error}") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Unavailable(
                f"The connection to {url} broke ({type(error).__name__}); is the server still there?"
            ) from None
        finally:
            connection.close()

    def answer(messages: list[JSON]) -> Generator[str, None, None]:
        with asyncio.Runner() as runner:
            stream = pieces(messages)
            try:
                while True:
                    try:
                        yield runner.run(anext(stream))
                    except StopAsyncIteration:
                        return
            finally:
                runner.run(stream.aclose())

    return answer
