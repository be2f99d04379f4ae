"""``inferd serve``: flags become a Config, the app serves it, and the terminal shows how to use it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

import click
import msgspec

from inferd.cli.flags import MODEL_LEAVES, SERVER_LEAVES, given, model_flags, server_flags
from inferd.cli.terminal import Told, console, loading
from inferd.config import Config, load_config, model_name
from inferd.errors import ConfigError
from inferd.events import Event, LoadProgress
from inferd.registry.source import is_remote, resolve


@click.command("serve")
@click.argument("source", default="demo")
@click.option(
    "--name", default=None, help="Name that clients use for the model.  [default: the folder's name, or the hub id]"
)
@server_flags
@model_flags
def command(source: str, name: str | None, **flags: object) -> int:
    """Serve a model, or everything in a config file, through the OpenAI API.

    SOURCE is a folder, a Hugging Face Hub id (id@revision for a fixed version), 'demo' for the
    bundled chat model (the default), or a .yaml file.

    \b
    Examples:
      inferd serve
      inferd serve ./my-model --port 9000 --dtype bfloat16
      inferd serve Qwen/Qwen3-0.6B --max-model-len 8192 --kv-cache-memory 4GiB
      inferd serve inferd.yaml

    Then talk to it: inferd chat, or any OpenAI client with base URL http://127.0.0.1:8000/v1.
    """
    config = serve_config(source, name, flags)
    return run(config)


def serve_config(source: str, name: str | None, flags: dict[str, object]) -> Config:
    """The configuration for a source with its flags. Raises ConfigError or click.UsageError."""
    server, model = given(SERVER_LEAVES, flags), given(MODEL_LEAVES, flags)
    if Path(source).suffix in (".yaml", ".yml"):
        return _file_config(Path(source), name, server, model)
    chosen = name if name is not None else model_name(source)
    overrides = {"server": server, "models": {chosen: {"source": source, **model}}}
    return load_config(None, os.environ, overrides)


def _file_config(path: Path, name: str | None, server: dict[str, object], model: dict[str, object]) -> Config:
    config = load_config(path, os.environ, {"server": server})
    if name is None and not model:
        return config
    names = list(config.models)
    if name is None and len(names) == 1:
        name = names[0]
    if name not in config.models:
        raise click.UsageError(
            f"{path} serves {', '.join(names) or 'no model'}; say with --name which of them the flags are for."
        )
    return load_config(path, os.environ, {"server": server, "models": {name: model}})


def run(config: Config) -> int:
    """Serve until told to stop; the exit code."""
    if not config.models:
        raise ConfigError(
            "The configuration names no model. Add one below 'models:', for example  chat: {source: demo}.",
            param="models",
        )
    config = _downloaded(config)
    from inferd import app  # after the flags are known to be right: a mistake is told at once

    with contextlib.ExitStack() as showing:
        tell: Told | None = showing.enter_context(loading("Loading " + ", ".join(config.models)))

        def watch(event: Event) -> None:
            if tell is not None and isinstance(event, LoadProgress):
                tell(event.phase, event.done, event.total)

        def ready(address: str) -> None:
            nonlocal tell
            tell = None
            showing.close()
            show_ready(address, list(config.models))

        return app.run(config, on_ready=ready, watch=watch)


def _downloaded(config: Config) -> Config:
    """The configuration with every hub id replaced by the folder it was downloaded to."""
    models = {}
    for name, model in config.models.items():
        if is_remote(model.source):
            with loading(model.source) as tell:
                folder = resolve(model.source, tell)
            model = msgspec.structs.replace(model, source=str(folder))
        else:
            resolve(model.source)  # a missing folder is told before anything starts
        models[name] = model
    return msgspec.structs.replace(config, models=models)


def show_ready(address: str, names: list[str]) -> None:
    """The address, one curl line and five lines of Python that work when pasted."""
    name = names[0] if names else "MODEL"
    out = console()
    out.print(
        f"\n[bold green]inferd is ready[/] at [bold]{address}[/]  ({', '.join(names) or 'no models'})\n", markup=True
    )
    for title, text in (
        ("Ask it from a shell:", curl_line(address, name)),
        ("or from Python (pip install openai):", python_lines(address, name)),
    ):
        out.print(title, style="dim")
        out.print("\n".join("  " + line for line in text.splitlines()) + "\n", markup=False)
    out.print(
        f"API reference {address}/docs   metrics {address}/metrics   chat: inferd chat   stop: Ctrl-C\n", markup=False
    )
    sys.stdout.flush()


def curl_line(address: str, name: str) -> str:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "What is inferd?"}]}, ensure_ascii=False)
    return f"curl {address}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


def python_lines(address: str, name: str) -> str:
    return f'''from openai import OpenAI
client = OpenAI(base_url="{address}/v1", api_key="none")
messages = [{{"role": "user", "content": "What is inferd?"}}]
for chunk in client.chat.completions.create(model={name!r}, messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)'''
