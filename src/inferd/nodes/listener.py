"""Where machines join the server: the port, the first message of each connection, the nodes by their names.

A connection that has not shown a token or a key costs little and ends soon: its first frame is small and due within
``FIRST_S``, and at most ``MAX_STRANGERS`` wait. Every refusal names its reason to the other side and in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from inferd import __version__, clock
from inferd.config import NodesConfig
from inferd.config.rules import is_host
from inferd.errors import ConfigError, Unavailable
from inferd.events import Emit, NodeChanged, NodeSeen
from inferd.nodes.certificate import Shown
from inferd.nodes.files import send_file
from inferd.nodes.frames import Connection
from inferd.nodes.life import NodeLife
from inferd.nodes.link import Link
from inferd.nodes.messages import (
    MAX_FIRST_BYTES,
    PROTOCOL,
    Attach,
    Attached,
    Fetch,
    First,
    Join,
    Refused,
    first_decoder,
    framed,
)
from inferd.nodes.tokens import REJOIN_S, TokenRefusedError, Tokens, secret_of, token_text

FIRST_S: Final = 5.0
MAX_STRANGERS: Final = 256
MAX_NODES: Final = 1024
SEEN_EVERY_S: Final = 1.0

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MAX_LABELS: Final = 64

_log = logging.getLogger("inferd.nodes")


class Site(Protocol):
    """What nodes change: the router's machines and its replicas on them."""

    def add_node(self, node: Link) -> None: ...
    def remove_node(self, node: Link) -> None: ...


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node, for operators."""

    name: str
    state: str  # ready, late (no beat, though its machine answers), or leaving
    address: str
    version: str
    joined_at: float  # seconds since the epoch
    num_cores: int
    memory_bytes: int  # that it gives
    num_gpus: int
    labels: dict[str, str]
    workers: int
    heartbeat_age_s: float
    sent_bytes: int
    received_bytes: int


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """POST /admin/nodes/token: a token, which is shown once."""

    token: str
    address: str  # where machines join
    command: str  # what to run on a machine that is to join
    expires_at: float  # seconds since the epoch


class NodesListener:
    """The nodes of a server, and the port where they join.

    ``vacate`` moves the workers of a node that leaves.
    """

    def __init__(
        self,
        config: NodesConfig,
        shown: Shown,
        tokens: Tokens,
        machines: Site,
        vacate: Callable[[str], Awaitable[None]],
        emit: Emit,
    ) -> None:
        self._config = config
        self._shown = shown
        self._tokens = tokens
        self._machines = machines
        self._vacate = vacate
        self._emit = emit
        self._links: dict[str, Link] = {}
        self._lives: dict[str, tuple[Link, NodeLife]] = {}
        self._reserved: dict[str, str] = {}  # the models for which nodes were reserved, by their names
        self._strangers: set[_Stranger] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def start(self, listener: socket.socket) -> None:
        """Accept machines at a bound socket, until ``stop``."""
        self._port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Stranger(self), sock=listener, ssl=self._shown.context, ssl_handshake_timeout=FIRST_S, backlog=128
        )
        self._spawn(self._look_after())

    async def stop(self) -> None:
        """Close the port and every node's connection. Their workers were stopped before, or are lost."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for stranger in list(self._strangers):
            stranger.abort()
        for link in list(self._links.values()):
            link.may_end = True
            link.lose("the server stops")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- for operators ----------------------------------------------------------------------

    def reports(self) -> Sequence[NodeReport]:
        """The nodes by their names."""
        return [_report(link) for _, link in sorted(self._links.items())]

    def new_token(self, *, revoke: bool = False) -> NewToken:
        """A token with which machines may join until it expires. ``revoke``: no earlier one is valid any more; nodes
        that have joined stay. Raises Unavailable where it cannot be kept."""
        now, expires_s = clock.wall(), self._config.token_expires_s
        try:
            if revoke:
                self._tokens.revoke_all()
            secret = self._tokens.issue(now, expires_s)
            if revoke:
                for link in self._links.values():
                    self._renew(link)
        except OSError as error:
            raise Unavailable(
                f"The token's digest cannot be written to state.data_dir ({error.strerror}); make room there."
            ) from None
        token, address = token_text(self._shown.fingerprint, secret), self.address
        command = f"INFERD_NODE_TOKEN={token} inferd node --join {address}"
        return NewToken(token=token, address=address, command=command, expires_at=now + expires_s)

    # -- nodes that are reserved for a model ------------------------------------------------

    def reserve(self, name: str, model: str) -> str:
        """Let a node of this name join for one model; its token. Raises OSError where that cannot be kept."""
        secret = self._tokens.issue(clock.wall(), REJOIN_S, name)
        self._reserved[name] = model
        return token_text(self._shown.fingerprint, secret)

    def give_back(self, name: str) -> None:
        """Let a reserved node end, and join no more."""
        self._reserved.pop(name, None)
        with contextlib.suppress(OSError):  # the secret expires
            self._tokens.forget(name)
        link = self._links.get(name)
        if link is not None:
            link.release()

    def link(self, name: str) -> Link | None:
        """The node of this name; None: it has not joined, or is gone."""
        return self._links.get(name)

    @property
    def port(self) -> int:
        """The port where machines join."""
        return self._port

    @property
    def host(self) -> str:
        """The address of the port as it was configured; empty: every one of this machine."""
        host = split_address(self._config.listen or ":0")[0]
        return "" if host in ("0.0.0.0", "::") else host

    @property
    def address(self) -> str:
        """HOST:PORT where machines on the network reach the port, as far as this one knows."""
        host = self.host or socket.gethostname()
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    # -- connections ------------------------------------------------------------------------

    def stranger_came(self, stranger: _Stranger) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            stranger.refuse("full", f"{MAX_STRANGERS} connections wait here already; try again later")
        self._strangers.add(stranger)

    def stranger_left(self, stranger: _Stranger) -> None:
        self._strangers.discard(stranger)

    def came_in(self, stranger: _Stranger, first: First) -> None:
        """The first message of a connection: let it in, or refuse it by name."""
        match first:
            case Join():
                self._join(stranger, first)
            case Attach(key):
                found = self._lives.get(key)
                if found is None or found[1].was_attached:
                    stranger.refuse("message", "no worker waits for this connection")
                    return
                stranger.write(framed(Attached()))
                found[0].attach(found[1], stranger.leave())
            case Fetch(key, sha256, offset):
                found = self._lives.get(key)
                files = [] if found is None else [file for file in found[1].files if file.sha256 == sha256]
                if not files or not 0 <= offset <= files[0].size:
                    stranger.refuse("message", "no worker waits for this file")
                    return
                stranger.disarm()
                self._spawn(send_file(stranger, files[0], offset))

    def _join(self, stranger: _Stranger, join: Join) -> None:
        code, problem = self._problem_of(join)
        if code:
            _log.warning("a machine at %s may not join as a node: %s", stranger.address, problem)
            self._emit(NodeChanged(node=join.name[:63], state="refused", reason=problem))
            stranger.refuse(code, problem)
            return
        try:
            secret = self._tokens.issue(clock.wall(), REJOIN_S, join.name)
        except OSError as error:
            stranger.refuse("full", f"the server cannot write its tokens ({error.strerror}); make room on its disk")
            return
        link = self._links[join.name] = Link(join, stranger.address, self, self._reserved.get(join.name, ""))
        link.begin(stranger.leave(), secret)
        self.node_changed(link, f"it joined from {link.address}")
        self._tell_seen(link)  # from the first page of metrics on
        self._machines.add_node(link)

    def _problem_of(self, join: Join) -> tuple[str, str]:
        """A code and a sentence why a machine may not join; both empty: it may."""
        if not _NAME.fullmatch(join.name):
            return (
                "name",
                "a node's name has 1 to 63 letters, digits, dots, dashes and underscores; choose another --name",
            )
        try:
            self._tokens.check(join.secret, join.name, clock.wall())
        except TokenRefusedError as error:
            return "token", str(error)
        if join.protocol != PROTOCOL or join.version != __version__:
            return (
                "version",
                f"the node {join.name} has inferd {join.version[:32]} and the server {__version__}; install the same",
            )
        if join.num_cores < 1 or join.memory_bytes < 1:
            return "name", f"the node {join.name} gives no core or no memory; see --cores and --memory"
        if len(join.labels) > _MAX_LABELS:
            return "name", f"the node {join.name} has more than {_MAX_LABELS} labels; leave some out"
        there = self._links.get(join.name)
        if there is not None:
            return (
                "taken",
                f"a node {join.name} has already joined from {there.address}; choose another --name, or stop that one",
            )
        if len(self._links) >= MAX_NODES:
            return "full", f"{MAX_NODES} nodes have joined already"
        return "", ""

    # -- calls from links ---------------------------------------------------------------------

    def node_changed(self, link: Link, reason: str) -> None:
        self._emit(NodeChanged(node=link.name, state=link.state, reason=reason))

    def node_leaves(self, link: Link) -> None:
        self._spawn(self._let_go(link))

    async def _let_go(self, link: Link) -> None:
        await self._vacate(link.name)
        while link.num_lives and self._links.get(link.name) is link:
            await asyncio.sleep(0.05)
        link.release()

    def node_gone(self, link: Link, reason: str) -> None:
        if self._links.get(link.name) is link:
            del self._links[link.name]
        self._machines.remove_node(link)
        self._emit(NodeChanged(node=link.name, state="left" if link.may_end else "gone", reason=reason))

    def life_launched(self, link: Link, life: NodeLife) -> None:
        self._lives[life.key] = (link, life)

    def life_ended(self, life: NodeLife) -> None:
        self._lives.pop(life.key, None)

    # -- tasks ------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        """Tell what is known of the nodes, and renew their secrets before they expire."""
        while True:
            await asyncio.sleep(SEEN_EVERY_S)
            now = clock.wall()
            for link in list(self._links.values()):
                self._tell_seen(link)
                if now - link.renewed_at > REJOIN_S / 2:
                    with contextlib.suppress(OSError):  # tried again in a second
                        self._renew(link)

    def _tell_seen(self, link: Link) -> None:
        link.count_bytes()
        self._emit(
            NodeSeen(
                node=link.name,
                heartbeat_age_s=link.silent_s,
                sent_bytes=link.num_sent,
                received_bytes=link.num_received,
            )
        )

    def _renew(self, link: Link) -> None:
        link.renew(self._tokens.issue(clock.wall(), REJOIN_S, link.name))

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Stranger(Connection[First]):
    """A connection of which only TLS is done."""

    def __init__(self, owner: NodesListener) -> None:
        super().__init__(first_decoder, MAX_FIRST_BYTES)
        self._owner = owner
        self._has_first = False
        self._timer: asyncio.TimerHandle | None = None
        self.address = ""

    def connected(self) -> None:
        assert self.transport is not None
        peer = self.transport.get_extra_info("peername")
        self.address = f"{peer[0]}:{peer[1]}" if peer else "an unknown address"
        self._timer = asyncio.get_running_loop().call_later(FIRST_S, self.abort)
        self._owner.stranger_came(self)

    def handle(self, message: First) -> None:
        if not self._has_first:
            self._has_first = True
            self._owner.came_in(self, message)

    def refuse(self, code: str, message: str) -> None:
        """Say why, and close."""
        self._has_first = True
        self.write(framed(Refused(code, message)))
        self.finish()

    def disarm(self) -> None:
        """The connection stays, and is a stranger's no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._owner.stranger_left(self)

    def leave(self) -> asyncio.Transport:
        """The transport, for another protocol."""
        self.disarm()
        assert self.transport is not None
        return self.transport

    def closed(self, error: Exception | None) -> None:
        self.disarm()


def split_address(text: str, setting: str = "nodes.listen") -> tuple[str, int]:
    """The host and the port of ``HOST:PORT`` or ``[HOST]:PORT``. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535 or not is_host(host):
        raise ConfigError(
            f"{setting}: {text!r} is no HOST:PORT such as 0.0.0.0:8001, with a port of at most 65535.", param=setting
        )
    return host, int(port)


def bound_socket(listen: str) -> socket.socket:
    """A socket for ``nodes.listen``. Raises ConfigError."""
    host, port = split_address(listen)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"nodes.listen: {listen} cannot be opened ({error.strerror or error}); choose another address or port.",
            param="nodes.listen",
        ) from None
    return made


def open_nodes(
    config: NodesConfig,
    folder: Path,
    machines: Site,
    vacate: Callable[[str], Awaitable[None]],
    emit: Emit,
) -> NodesListener:
    """The nodes of a server, with its certificate and its tokens in ``folder``. Raises ConfigError."""
    from inferd.nodes.certificate import certificate_for

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The folder {folder} for the certificate and the tokens of nodes cannot be made ({error.strerror}); name "
            "another one with state.data_dir.",
            param="state.data_dir",
        ) from None
    shown = certificate_for(config, folder)
    always = None
    if config.token_file is not None:
        always = secret_of(Path(config.token_file).expanduser(), shown.fingerprint)
    return NodesListener(config, shown, Tokens(folder / "tokens.json", always), machines, vacate, emit)


def _report(link: Link) -> NodeReport:
    link.count_bytes()
    return NodeReport(
        name=link.name,
        state=link.state,
        address=link.address,
        version=link.version,
        joined_at=link.joined_at,
        num_cores=link.num_cores,
        memory_bytes=link.memory_bytes,
        num_gpus=link.num_gpus,
        labels=dict(link.labels),
        workers=link.num_lives,
        heartbeat_age_s=round(link.silent_s, 3),
        sent_bytes=link.num_sent,
        received_bytes=link.num_received,
    )
