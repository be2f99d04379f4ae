"""The address of a remote server, its time limits, and the certificates that it may present."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from inferd.errors import ConfigError


class Origin(NamedTuple):
    """The parts of a server's base URL."""

    host: str
    port: int
    is_secure: bool
    base_path: str  # in front of the path of every request; without a slash at its end

    @property
    def authority(self) -> bytes:
        """The value of the ``Host`` header (RFC 9110, section 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.is_secure else 80
        return (host if self.port == default else f"{host}:{self.port}").encode(
            "idna" if not host.isascii() else "ascii"
        )

    def __str__(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.authority.decode('ascii')}{self.base_path}"


class Timeouts(NamedTuple):
    """Time limits for the stages of an exchange, in seconds."""

    connect_s: float  # for the TCP connection and the TLS handshake
    first_byte_s: float  # from the request's last byte to the first of the answer's body
    idle_s: float  # between two pieces of an answer


def origin_of(url: str) -> Origin:
    """The origin of ``http://host:port/path``. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        port = parts.port
        (parts.hostname or "").encode("idna")  # raises for a name that no resolver accepts
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigError(f"{url!r} is no address of a server; write it as https://host/v1.", param="url")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"The address of {parts.hostname} holds a password; use api_key_env or api_key_file.", param="url"
        )
    if parts.query or parts.fragment or not parts.path.isascii() or any(c.isspace() or c < "!" for c in parts.path):
        raise ConfigError(f"{url!r} has more than a host and a path; write it as https://host/v1.", param="url")
    is_secure = parts.scheme == "https"
    return Origin(parts.hostname, port or (443 if is_secure else 80), is_secure, parts.path.rstrip("/"))


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """A TLS context for requests. It always verifies certificates and host names.

    ``ca_file``: a PEM file with the certificate authorities to trust instead of the system's. Raises ConfigError.
    """
    file = None if ca_file is None else Path(ca_file).expanduser()
    if file is not None and not file.is_file():
        raise ConfigError(f"The file {ca_file!r} with the certificates to trust does not exist.", param="ca_file")
    try:
        context = ssl.create_default_context(cafile=file)
    except ssl.SSLError as error:
        raise ConfigError(f"The file {ca_file!r} holds no usable certificates: {error}.", param="ca_file") from None
    context.set_alpn_protocols(["http/1.1"])
    return context
