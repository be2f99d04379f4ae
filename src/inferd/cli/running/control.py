"""Finding a running server and sending it commands: by its control socket on this machine, or by its URL with an admin
key.

Knows the paths and the structs of the admin API. Each command shows the answers itself.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import click
import msgspec

from inferd.app.control_socket import NoControlSocketError, connect
from inferd.config import ServerConfig, StateConfig, load_config, read_yaml
from inferd.errors import ConfigError, InferdError, InvalidRequest, Unauthenticated, Unavailable
from inferd.state.folder import data_folder

ANSWER_S: Final = 10.0
WORK_S: Final = 3600.0  # loading, unloading, downloading on the way
_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024

Decorated = TypeVar("Decorated", bound=Callable[..., object])
Shape = TypeVar("Shape")


class Answered(NamedTuple):
    """An answer's body, and its headers by their names in lower case."""

    body: bytes
    headers: dict[str, str]


class Server:
    """A running server. ``name`` is shown in messages; ``open`` makes a connection to it. ``base``: the path at which a
    proxy serves it."""

    def __init__(
        self, name: str, open_: Callable[[float], http.client.HTTPConnection], headers: dict[str, str], base: str = ""
    ) -> None:
        self.name = name
        self._open = open_
        self._headers = headers
        self._base = base

    def get(self, path: str, shape: type[Shape], *, accept: tuple[int, ...] = ()) -> Shape:
        """``accept``: statuses beside success whose bodies have the shape as well.

        Raises InferdError with the server's message, or when it does not answer."""
        return _decoded(self._ask("GET", path, ANSWER_S, accept), shape)

    def post(self, path: str, shape: type[Shape], *, accept: tuple[int, ...] = (), timeout_s: float = WORK_S) -> Shape:
        """``accept``: statuses beside success whose bodies have the shape as well."""
        return _decoded(self._ask("POST", path, timeout_s, accept), shape)

    def send(
        self, path: str, body: bytes | Iterable[bytes], headers: dict[str, str], timeout_s: float = WORK_S
    ) -> Answered:
        """POST a body that is not one of the admin API's. A body in pieces has its length in the headers. Raises
        InferdError as ``get`` does."""
        return self._exchange("POST", path, timeout_s, (), body, headers)

    def lines(self, path: str, timeout_s: float) -> Iterator[bytes]:
        """GET an answer that is streamed, line by line. ``timeout_s``: seconds without a byte. Raises InferdError."""
        try:
            with contextlib.closing(self._open(timeout_s)) as connection:
                connection.request("GET", self._base + path, headers=self._headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise _refusal(self.name, path, answer.status, answer.read(_MAX_ANSWER_BYTES))
                while line := answer.readline(_MAX_ANSWER_BYTES):
                    yield line
        except (OSError, http.client.HTTPException, NoControlSocketError) as error:
            raise self._silence(error) from None

    def _silence(self, error: Exception) -> Unavailable:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Unavailable(
            f"The server {self.name} does not answer ({said}); check that it runs, and the address.",
            code="no_server",
        )

    def _ask(self, method: str, path: str, timeout_s: float, accept: tuple[int, ...] = ()) -> bytes:
        return self._exchange(method, path, timeout_s, accept).body

    def _exchange(
        self,
        method: str,
        path: str,
        timeout_s: float,
        accept: tuple[int, ...],
        content: bytes | Iterable[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answered:
        try:
            with contextlib.closing(self._open(timeout_s)) as connection:
                connection.request(method, self._base + path, content, {**self._headers, **(headers or {})})
                answer = connection.getresponse()
                body = answer.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, NoControlSocketError) as error:
            raise self._silence(error) from None
        if answer.status < 300 or answer.status in accept:
            return Answered(body, {name.lower(): value for name, value in answer.getheaders()})
        raise _refusal(self.name, path, answer.status, body)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = connect(self._path, self._timeout_s)


def _decoded(body: bytes, shape: type[Shape]) -> Shape:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.DecodeError as error:
        raise Unavailable(
            f"The server's answer has another form than expected ({error}); check the address and its version."
        ) from None


def _refusal(name: str, path: str, status: int, body: bytes) -> InferdError:
    try:
        error = json.loads(body)["error"]
        message = error if isinstance(error, str) else str(error["message"])  # the error object of KServe or of OpenAI
    except (ValueError, KeyError, TypeError):
        message = f"The server {name} answered with status {status}."
    if status in (401, 403):
        key = "a key that may use the model"
        if path.startswith(("/admin/", "/console/")):
            key = "an admin key" if path.startswith("/admin/") else "a key with the scope metrics"
        return Unauthenticated(f"{message} Give {key} with --key, or in INFERD_API_KEY.")
    return InvalidRequest(message) if status < 500 else Unavailable(message)


# -- finding -----------------------------------------------------------------------------------


def server_options(function: Decorated) -> Decorated:
    """The options that say which server is meant; the command gets ``server: Server``."""

    def found(**given: object) -> object:
        which = {name: given.pop(name) for name in ("port", "config", "url", "key")}
        return function(server=find_server(**which), **given)  # type: ignore[arg-type]

    found.__name__, found.__doc__ = function.__name__, function.__doc__
    found.__dict__.update(function.__dict__)
    return which_server(found)  # type: ignore[return-value]


def which_server(function: Callable[..., object]) -> Callable[..., object]:
    """The options that say which server is meant, for a command that does not always need one: the arguments of
    ``find_server``."""
    for option in (
        click.option(
            "--key",
            "--api-key",
            envvar="INFERD_API_KEY",
            default=None,
            help="Key for --url (also INFERD_API_KEY); all but predict need an admin key.",
        ),
        click.option(
            "--url", default=None, help="A server elsewhere: http://host:8000, or https://host/path behind a proxy."
        ),
        click.option(
            "--config",
            type=click.Path(exists=True, path_type=Path),
            default=None,
            help="Config file of the server that is meant; its port and data_dir are taken from it.",
        ),
        click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port of the server that is meant."),
    ):
        function = option(function)
    return function


def find_server(port: int | None, config: Path | None, url: str | None, key: str | None) -> Server:
    """The server: by URL, by port, by its config file, or the only one that runs here.

    Raises InferdError with the running servers and how to choose.
    """
    return _elsewhere(url, key) if url is not None else _here(*locate(port, config))


def locate(port: int | None, config: Path | None) -> tuple[int, Path]:
    """The port and the control socket of a server on this machine: by port, by its config file, or the only one.

    Raises InferdError with the running servers and how to choose.
    """
    wanted, state = _described(config)
    port = port if port is not None else wanted
    folder = data_folder(state) / "run"
    running = {
        int(path.stem): path for path in sorted(folder.glob("*.sock")) if path.stem.isdecimal() and _answers(path)
    }
    if port is not None and port in running:
        return port, running[port]
    ports = ", ".join(map(str, sorted(running)))
    if port is not None:
        hint = f" (running: port{'s' * (len(running) != 1)} {ports})" if running else ""
        raise Unavailable(
            f"No server with port {port} answers in {folder}{hint}. Is it another user's, or has it another data_dir "
            "(then name its config file with --config)?",
            code="no_server",
        )
    if not running:
        raise Unavailable(
            f"No server runs here: nothing answers in {folder}. Start one with inferd serve, or name one "
            "elsewhere with --url.",
            code="no_server",
        )
    if len(running) > 1:
        raise InvalidRequest(f"Several servers run here, with the ports {ports}; choose one with --port.")
    ((found, path),) = running.items()
    return found, path


def _here(port: int, path: Path) -> Server:
    return Server(f"with port {port}", lambda timeout_s: _UnixConnection(path, timeout_s), {})


def _elsewhere(url: str, key: str | None) -> Server:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise InvalidRequest(f"{url!r} is not a server's URL; write it as http://host:8000.")
    base = parts.path.rstrip("/").removesuffix("/v1")  # OpenAI's clients are given the URL with /v1

    def made(timeout_s: float) -> http.client.HTTPConnection:
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    return Server(f"at {url}", made, {} if key is None else {"authorization": f"Bearer {key}"}, base)


def _answers(path: Path) -> bool:
    """False for the socket of a server that was killed."""
    try:
        connect(path, 1.0).close()
    except (OSError, NoControlSocketError):
        return False
    return True


def _described(file: Path | None) -> tuple[int | None, StateConfig]:
    """The port and state of a config file, or of the environment. A file with mistakes is read as far as possible,
    because the running server's status is needed just then."""
    try:
        config = load_config(file, os.environ, {})
        return (config.server.port if file is not None and config.server.port else None), config.state
    except ConfigError:
        pass
    tree: dict[str, object] = {}
    with contextlib.suppress(ConfigError):
        tree = read_yaml(file) if file is not None else {}
    server, state = tree.get("server"), tree.get("state")
    port = server.get("port", ServerConfig().port) if isinstance(server, dict) else ServerConfig().port
    folder = os.environ.get("INFERD_STATE__DATA_DIR") or (state.get("data_dir") if isinstance(state, dict) else None)
    return (
        port if file is not None and isinstance(port, int) else None,
        StateConfig(data_dir=folder if isinstance(folder, str) else None),
    )


def model_path(name: str, action: str) -> str:
    """Names of models may hold slashes and more."""
    return f"/admin/models/{quote(name, safe='')}/{action}"


@contextlib.contextmanager
def working(title: str) -> Iterator[None]:
    """A spinner on stderr while a server works, on a terminal."""
    from inferd.cli.terminal import console, is_live

    if not is_live():
        yield
        return
    with console(stderr=True).status(title):
        yield
