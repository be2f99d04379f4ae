"""The group ``inferd registry``, which imports a command's file when it is named."""

from __future__ import annotations

import click

from inferd.cli.help import Lazy

COMMANDS = {
    "digest": "registry.digest",
    "sign": "registry.sign",
    "verify": "registry.verify",
    "register": "registry.versions:register",
    "list": "registry.versions:list_versions",
    "show": "registry.versions:show",
    "history": "registry.versions:history",
    "export": "registry.export",
    "attach": "registry.moves:attach",
    "validate": "registry.moves:validate",
    "approve": "registry.moves:approve",
    "canary": "registry.moves:canary",
    "withdraw": "registry.moves:withdraw",
    "promote": "registry.moves:promote",
    "archive": "registry.moves:archive",
    "reject": "registry.moves:reject",
    "alias": "registry.moves:alias",
    "verify-log": "registry.versions:verify_log",
}
"""A command's name, its module below ``inferd.cli``, and its function there."""


@click.group("registry", cls=Lazy, modules=COMMANDS)
def command() -> None:
    """Versions of models with their stages, evidence and history; digests and signatures of their files.

    A version goes from registered over verified, validated and approved to production. Works on the database of the
    server (state.url), with or without a running server.

    \b
    Examples:
      inferd registry digest ./my-model
      inferd registry sign ./my-model --private-key release.key
      inferd registry verify ./my-model --public-key release.pub
      inferd registry register churn ./churn.onnx
      inferd registry validate churn@1
      inferd registry approve churn@1 --reason "reviewed in ticket 812"
      inferd registry promote churn@1
      inferd registry history churn
    """
