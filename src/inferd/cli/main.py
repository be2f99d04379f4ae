"""The command group: imports a command's file when it runs, and reports every failure in one sentence.

Importing a command only when it runs shortens the start of ``inferd serve``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

import click

from inferd import __version__
from inferd.cli.help import SETTINGS, Lazy
from inferd.cli.terminal import fail, has_colors, is_debug, speak_json
from inferd.errors import InferdError

COMMANDS = {
    "serve": "serve",
    "check": "check",
    "plan": "plan.command",
    "status": "running.status",
    "top": "running.top",
    "why": "running.why",
    "reload": "running.reload",
    "drain": "running.drain",
    "models": "running.models",
    "rollout": "running.rollout",
    "scale": "running.scale",
    "drift": "running.drift",
    "checklist": "running.checklist",
    "registry": "registry.group",
    "node": "node",
    "keys": "keys",
    "chat": "chat",
    "generate": "generate",
    "predict": "predict.command",
    "batch": "running.batch",
    "bench": "bench",
    "replay": "replay.command",
    "evaluate": "replay.evaluate",
    "quantize": "quantize",
    "perplexity": "texts.perplexity",
    "watermark": "texts.watermark",
    "config": "config",
    "alerts": "alerts",
    "audit": "audit",
    "payloads": "payloads",
    "version": "version",
    "help": "help",
}
"""A command's name and its module below ``inferd.cli``, which has a click command called ``command``."""

OVERVIEW = """One inference server for every model.

\b
Start here:
  inferd serve                     serve the bundled chat model on port 8000
  inferd serve Qwen/Qwen3-0.6B     serve a model of the Hugging Face Hub
  inferd serve ./my-model          serve a folder
  inferd check inferd.yaml         problems of a config file, and its memory
  inferd plan 70b                  devices that a model needs, and their cost
  inferd serve inferd.yaml         serve a config file, and follow its changes
  inferd status                    the state of the server
  inferd top                       its live numbers
  inferd why REQUEST_ID            where the time of a request went
  inferd chat                      talk to it
  inferd generate "Once upon"      one answer, then back to the shell
  inferd predict digits -i a.jpg   one prediction
  inferd batch run in.jsonl -o out.jsonl    the requests of a file
  inferd registry digest ./my-model    what to pin in its settings
  inferd node --join HOST          give this machine to a server
  inferd quantize ./my-model --output ./small    a smaller checkpoint
  inferd alerts inferd.yaml        rules for Prometheus from its objectives

\b
Settings come from a file < the environment (INFERD_SERVER__PORT=9000) <
flags; 'inferd config show' prints the result and 'inferd check' explains
mistakes.
"""


@click.group(cls=Lazy, modules=COMMANDS, help=OVERVIEW, context_settings=SETTINGS)
@click.version_option(__version__, "-V", "--version", prog_name="inferd", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show Python tracebacks of errors (also INFERD_DEBUG=1).")
def cli(debug: bool) -> None:
    """``main`` has read the flag before anything else."""


def main(args: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    words = sys.argv[1:] if args is None else args
    debug = is_debug() or "--debug" in words
    speak_json(False)
    if not debug:
        sys.excepthook = _one_line
    color = None if has_colors() else False
    with click.Context(cli, color=color):  # for what is said after the command, too
        return _run(words, color, debug=debug)


def _run(words: list[str], color: bool | None, *, debug: bool) -> int:
    try:
        result = cli.main(words, prog_name="inferd", standalone_mode=False, color=color)
    except click.UsageError as error:
        if error.ctx is not None:
            click.echo(error.ctx.get_usage(), err=True)
        fail(error.format_message())
        if error.ctx is not None:
            click.echo(f"Try '{error.ctx.command_path} --help'.", err=True)
        return 2
    except click.ClickException as error:
        fail(error.format_message())
        return 1
    except (click.Abort, KeyboardInterrupt):
        click.echo(err=True)
        return 130
    except BrokenPipeError:  # the reader of a pipe had enough
        sys.stderr.close()
        return 141
    except InferdError as error:
        if debug:
            raise
        fail(error.message)
        return 1
    except OSError as error:
        if debug or not isinstance(error.filename, str | Path):
            raise
        fail(f"{error.filename} cannot be used: {error.strerror}. Check the path, its permissions and its disk.")
        return 1
    return result if isinstance(result, int) else 0


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report a defect in one line."""
    fail(
        f"inferd met a defect of its own ({kind.__name__}: {error}); run it again with INFERD_DEBUG=1 and report what "
        "it says."
    )
