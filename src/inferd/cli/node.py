"""``inferd node``: give this machine's memory and cores to a server; make the token for that."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from inferd.cli.flags import Parsed
from inferd.cli.ranges import FloatRange
from inferd.cli.running.control import find_server, which_server
from inferd.config.units import NotAllowedError, bytes_text, size
from inferd.errors import ConfigError, InvalidRequest
from inferd.machine.gpus import num_gpus

if TYPE_CHECKING:
    from inferd.nodes.dialling import NodeOptions

_MOST_BYTES: Final = 1 << 60


def _memory(text: str) -> int:
    found = size(text)
    if found > _MOST_BYTES:
        raise NotAllowedError("a size of at most 1048576TiB")
    return found


_BYTES: Final = Parsed("bytes", "8GiB", _memory)
_TOKEN_VARIABLE: Final = "INFERD_NODE_TOKEN"


@click.group("node", invoke_without_command=True)
@click.option(
    "--join",
    metavar="HOST[:PORT]",
    help="The server, where it listens for nodes (nodes.listen).  [default: port 8001; in a pod of a LeaderWorkerSet "
    "the host in LWS_LEADER_ADDRESS]",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"File with the token of inferd node token; unset: it is in {_TOKEN_VARIABLE}.",
)
@click.option("--name", help="The node's name, which no other node has.  [default: the host's name]")
@click.option("--memory", type=_BYTES, help="Memory to give.  [default: what is available now]")
@click.option("--cores", type=click.IntRange(1), help="Cores to give.  [default: all that this process may use]")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="A label for placement; may be repeated.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for files that the server sends.  [default: inferd/nodes/NAME below the user's cache folder]",
)
@click.option(
    "--drain",
    "drain_s",
    type=FloatRange(0),
    default=300.0,
    show_default=True,
    help="Seconds that the server has to move the workers when this node is to stop.",
)
@click.pass_context
def command(
    context: click.Context,
    join: str | None,
    token_file: Path | None,
    name: str | None,
    memory: int | None,
    cores: int | None,
    labels: tuple[str, ...],
    cache: Path | None,
    drain_s: float,
) -> int | None:
    """Give this machine's memory and cores to a server, until Ctrl-C.

    The server starts workers of its models here. Ctrl-C moves them away first; once more ends them.

    \b
    Examples:
      inferd node token                        on the server: what to run here
      INFERD_NODE_TOKEN=inferd1... inferd node --join gateway:8001
      inferd node --join gateway --token-file token --label zone=a
    """
    from inferd.nodes.dialling import LEADER_VARIABLE

    if context.invoked_subcommand is not None:
        return None
    join = join or os.environ.get(LEADER_VARIABLE)
    if not join:
        raise click.UsageError("Missing --join HOST:PORT, the server that this machine is for.")
    return run_node(join, token_file, name, memory, cores, labels, cache, drain_s)


@command.command("token")
@click.option("--revoke", is_flag=True, help="Let no earlier token be used again; nodes that have joined stay.")
@click.option("--json", "as_json", is_flag=True, help="Print what the server said, for programs.")
@click.option(
    "--certificate",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Ask no server: print a token for this file's certificate, which is made where there is no file.",
)
@which_server
def token(revoke: bool, as_json: bool, certificate: Path | None, **which: Any) -> None:
    """Print the line that lets a machine join, with a new token.

    Asks the running server, which keeps a digest alone. The token can be used until it expires
    (nodes.token_expires_s), for any number of machines.

    With --certificate the token is one that a server and its nodes are started with, such as pods:
    nodes.certificate and nodes.token_file name both files to the server, --token-file the token to a node. It lets
    machines join as long as the server is configured with it.

    \b
    Examples:
      inferd node token
      inferd node token --revoke
      inferd node token --certificate nodes.pem > token
    """
    from inferd.nodes.listener import NewToken

    if certificate is not None:
        asked = [flag for flag, value in {"--revoke": revoke, "--json": as_json, **_flags(which)}.items() if value]
        if asked:
            raise click.UsageError(f"--certificate asks no server; leave {', '.join(asked)} out.")
        click.echo(_made_token(certificate))
        return
    body = msgspec.json.encode({"revoke": revoke})
    answer = find_server(**which).send("/admin/nodes/token", body, {"content-type": "application/json"})
    made = msgspec.json.decode(answer.body, type=NewToken)
    if as_json:
        click.echo(msgspec.json.format(answer.body, indent=2).decode())
        return
    until = datetime.fromtimestamp(made.expires_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    click.echo(f"# on the machine that is to join, until {until}:", err=True)
    click.echo(made.command)


def _flags(which: dict[str, Any]) -> dict[str, Any]:
    """The flags that name a server, and what was given; a key alone, which may be a variable, names none."""
    return {f"--{name}": value for name, value in which.items() if name != "key"}


def _made_token(certificate: Path) -> str:
    """A token with a new secret for a file's certificate, which is made where there is no file. Raises ConfigError."""
    from inferd.nodes.certificate import fingerprint_of, make_certificate
    from inferd.nodes.tokens import new_secret, token_text

    try:
        if not certificate.exists():
            make_certificate(certificate)
        return token_text(fingerprint_of(certificate), new_secret())
    except OSError as error:
        raise ConfigError(
            f"--certificate: {certificate} cannot be used ({error.strerror}); name a file in a folder that this user "
            "may write to.",
            param="certificate",
        ) from None
    except ValueError:
        raise ConfigError(
            f"--certificate: {certificate} is no certificate in PEM form; name another file, or one that is not there.",
            param="certificate",
        ) from None


def named_server(join: str) -> tuple[str, int]:
    """The host and the port that ``--join`` names. Raises ConfigError."""
    from inferd.nodes.dialling import DEFAULT_PORT
    from inferd.nodes.listener import split_address

    if join.count(":") > 1 and not join.startswith("["):
        try:
            return str(ipaddress.IPv6Address(join)), DEFAULT_PORT
        except ValueError:
            raise ConfigError(
                f"--join: {join!r} is no name of a host and no address; an address of IPv6 with a port is [HOST]:PORT.",
                param="join",
            ) from None
    has_port = ":" in join and not join.endswith("]")
    return split_address(join if has_port else f"{join}:{DEFAULT_PORT}", "--join")


def run_node(
    join: str,
    token_file: Path | None,
    name: str | None,
    memory: int | None,
    cores: int | None,
    labels: tuple[str, ...],
    cache: Path | None,
    drain_s: float,
    prepare: Callable[[NodeOptions], NodeOptions] = lambda options: options,
) -> int:
    """Be a node; the exit code. ``prepare`` changes how it is started. Raises InferdError."""
    import asyncio

    from inferd.machine.memory import available_bytes
    from inferd.machine.placement import usable_cores
    from inferd.nodes.agent import Agent, parse_labels
    from inferd.nodes.cache import Cache, cache_folder
    from inferd.nodes.dialling import NodeOptions
    from inferd.nodes.tokens import parse_token

    text = os.environ.pop(_TOKEN_VARIABLE, "") if token_file is None else token_file.read_text("utf-8", "replace")
    if not text.strip():
        raise InvalidRequest(
            f"A token is missing: put the one of inferd node token into {_TOKEN_VARIABLE}, or into a file named with "
            "--token-file.",
            param="token",
        )
    host, port = named_server(join)
    if not host or not port:
        raise click.UsageError(f"--join {join} names no {'port' if host else 'host'} of a server; write gateway:8001.")
    called = socket.gethostname() if name is None else name
    usable = usable_cores()
    if cores is not None and cores < len(usable) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, usable[:cores])  # workers inherit it, and count their threads by it
    options = prepare(
        NodeOptions(
            host=host,
            port=port,
            token=parse_token(text),
            name=called,
            num_cores=min(cores or len(usable), len(usable)),
            memory_bytes=available_bytes() if memory is None else memory,
            num_gpus=num_gpus(),
            labels=parse_labels(labels),
            drain_s=drain_s,
        )
    )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("inferd.node").info(
        "node %s gives %d cores and %s to %s:%d",
        options.name,
        options.num_cores,
        bytes_text(options.memory_bytes),
        host,
        port,
    )

    files = Cache(cache_folder(called) if cache is None else cache.absolute())
    if not files.lock():
        if cache is None:
            raise ConfigError(f"A node {called} runs on this machine already; choose another --name.", param="name")
        raise files.unusable("another node uses it")

    async def be() -> int:
        agent = Agent(options, files)
        agent.handle_signals()
        return await agent.run()

    return asyncio.run(be())
