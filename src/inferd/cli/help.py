"""Help: the lists of commands and of their options, and ``inferd help``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

import click

SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Commands(click.Group):
    """A group that lists each command with its whole first sentence, and shows its help when it is given no word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not self.invoke_without_command:
            click.echo(ctx.get_help())
            ctx.exit(0)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises UsageError, with a name that is close, where there is no such command."""
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names:
            import difflib

            close = difflib.get_close_matches(args[0], names, n=1)
            hint = f"did you mean '{ctx.command_path} {close[0]}'?" if close else f"there are: {', '.join(names)}."
            raise click.UsageError(f"There is no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        found = [(name, self.get_command(ctx, name)) for name in names]
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in found if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Lazy(Commands):
    """A group that imports a command's module when the command is named.

    ``modules``: a command's name and its module below ``inferd.cli``, which has a click command called ``command``, or
    one of another name: ``keys:create``.
    """

    def __init__(self, name: str | None = None, *, modules: Mapping[str, str], **settings: Any) -> None:
        super().__init__(name, **settings)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = self._modules.get(cmd_name)
        if module is None:
            return None
        module, _, function = module.partition(":")
        found: object = getattr(importlib.import_module(f"inferd.cli.{module}"), function or "command")
        assert isinstance(found, click.Command)
        return found


class Sectioned(click.Command):
    """A command that lists its options in sections. An option's ``section`` is the title. The common ones come first,
    by their ``place``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in self._sections(ctx).items():
            rows = [row for option in options if (row := option.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=26)

    def _sections(self, ctx: click.Context) -> dict[str, list[click.Parameter]]:
        found: dict[str, list[click.Parameter]] = {COMMON: []}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                found.setdefault(str(getattr(param, "section", COMMON)), []).append(param)
        found[COMMON].sort(key=lambda param: getattr(param, "place", 0))
        return found


COMMON: Final = "Options"
"""The section of options that name none."""


@click.command("help")
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def command(context: click.Context, words: tuple[str, ...]) -> None:
    """Show what inferd can do, or the help of a command.

    \b
    Examples:
      inferd help
      inferd help serve
      inferd help keys create
    """
    root = context.find_root()
    found: click.Command = root.command
    made = root
    for word in words:
        if not isinstance(found, click.Group):
            raise click.UsageError(f"inferd {' '.join(words[: words.index(word)])} has no commands of its own.", root)
        _, inner, _ = found.resolve_command(made, [word])
        assert inner is not None
        made = click.Context(inner, info_name=word, parent=made)
        found = inner
    click.echo(found.get_help(made))
