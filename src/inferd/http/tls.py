"""The listeners' certificate: read whole, refused before anything changes, and replaced while connections go on.

A handshake gets the newest certificate; a connection that was made keeps what it has. Knows files and ``ssl``, and neither
sockets nor protocols but by their names.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from inferd.config import TlsConfig
from inferd.errors import ConfigError

HANDSHAKE_S: Final = 10.0

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; 1.3 has no others that matter


class Certificate:
    """A chain and its key that belong together. Raises ConfigError that names the setting and the file."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        chain, key = _file(config.certificate or "", "certificate"), config.key or config.certificate or ""
        self.digest = hashlib.sha256(chain + b"\0" + _file(key, "key")).digest()
        self.context(())  # refuses now what could not be used later

    def context(self, protocols: Sequence[str]) -> ssl.SSLContext:
        """For a listener that speaks these protocols (ALPN)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        if protocols:
            context.set_alpn_protocols(list(protocols))
        certificate, key = self._config.certificate or "", self._config.key
        try:
            context.load_cert_chain(Path(certificate).expanduser(), key and Path(key).expanduser(), _no_password)
        except _EncryptedKeyError:
            raise ConfigError(
                f"The key in {key or certificate} has a password, and nobody is there to type it when a server starts; give "
                "one without (openssl pkey -in KEY -out PLAIN), readable by the server's user alone.",
                param="server.tls.key",
            ) from None
        except (ssl.SSLError, OSError) as error:
            if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
                said = f"The key in {key or certificate} does not belong to the certificate in {certificate}"
            else:
                said = f"{certificate} and {key or 'its key in the same file'} are no certificate chain and key in PEM form"
            raise ConfigError(
                f"{said}; the server's own certificate comes first, then those that vouch for it.",
                param="server.tls.certificate",
            ) from None
        return context


class Tls:
    """What the listeners show. ``take`` replaces it for handshakes from then on."""

    def __init__(self, certificate: Certificate) -> None:
        self._certificate = certificate
        self._newest: dict[tuple[str, ...], ssl.SSLContext] = {}

    def listening(self, *protocols: str) -> ssl.SSLContext:
        """For a listener, for as long as it lives."""
        context = self._newest[protocols] = self._certificate.context(protocols)

        def newest(handshake: ssl.SSLObject, name: str, first: ssl.SSLContext) -> None:
            handshake.context = self._newest[protocols]

        context.sni_callback = newest  # asked in every handshake, with a name or without
        return context

    def take(self, certificate: Certificate) -> bool:
        """Whether it is another one than before."""
        is_other = certificate.digest != self._certificate.digest
        if is_other:
            self._certificate = certificate
            self._newest = {protocols: certificate.context(protocols) for protocols in self._newest}
        return is_other


def certificate_of(config: TlsConfig) -> Certificate | None:
    """None: the listeners speak plainly. Raises ConfigError."""
    return Certificate(config) if config.certificate is not None else None


def secured(context: ssl.SSLContext | None) -> dict[str, Any]:
    """What a listener with this context is opened with."""
    return {} if context is None else {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S}


def end_writing(transport: asyncio.Transport) -> None:
    """Say that nothing more comes, where that can be said without closing: over TLS it cannot."""
    if transport.can_write_eof():
        transport.write_eof()


class _EncryptedKeyError(Exception):
    pass


def _no_password() -> str:
    raise _EncryptedKeyError


def _file(place: str, field: str) -> bytes:
    try:
        return Path(place).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be read ({error.strerror or error}); name a PEM file that the server's user may read.",
            param=f"server.tls.{field}",
        ) from None
