"""The TLS certificate of the server's listeners, which can be replaced while connections are open.

A new certificate is loaded and checked completely before it replaces the old one. A handshake uses the newest
certificate; an established connection keeps its own. Knows files and ``ssl``. Knows protocols only as ALPN names.
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
"""Seconds that a TLS handshake may take."""

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # for TLS 1.2; every cipher suite of TLS 1.3 is allowed


class Certificate:
    """A certificate chain and its private key.

    Raises ConfigError, with the setting and the file, when a file is unreadable or the two do not belong together.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        chain, key = _file(config.certificate or "", "certificate"), config.key or config.certificate or ""
        self.digest = hashlib.sha256(chain + b"\0" + _file(key, "key")).digest()
        self.context(())  # raises now for files that no context accepts

    def context(self, protocols: Sequence[str]) -> ssl.SSLContext:
        """The context of a listener that offers ``protocols`` by ALPN. Raises ConfigError."""
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
                f"The key in {key or certificate} has a password, which a server cannot enter when it starts; give a "
                "key without one (openssl pkey -in KEY -out PLAIN), readable by the server's user alone.",
                param="server.tls.key",
            ) from None
        except (ssl.SSLError, OSError) as error:
            if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
                problem = f"The key in {key or certificate} does not belong to the certificate in {certificate}"
            else:
                files = f"{certificate} and {key or 'its key in the same file'}"
                problem = f"{files} are no certificate chain and key in PEM form"
            raise ConfigError(
                f"{problem}; the server's own certificate comes first, then those that vouch for it.",
                param="server.tls.certificate",
            ) from None
        return context


class Tls:
    """The certificate in use, for all listeners of a server."""

    def __init__(self, certificate: Certificate) -> None:
        self._certificate = certificate
        self._newest: dict[tuple[str, ...], ssl.SSLContext] = {}

    def listening(self, *protocols: str) -> ssl.SSLContext:
        """A context for one listener that offers ``protocols`` by ALPN. It stays valid when the certificate changes."""
        context = self._newest[protocols] = self._certificate.context(protocols)

        def newest(handshake: ssl.SSLObject, name: str, first: ssl.SSLContext) -> None:
            handshake.context = self._newest[protocols]

        context.sni_callback = newest  # OpenSSL calls it in every handshake, with a server name or without
        return context

    def replace(self, certificate: Certificate) -> bool:
        """Use ``certificate`` for handshakes from now on. Return False where its files have not changed."""
        has_changed = certificate.digest != self._certificate.digest
        if has_changed:
            self._certificate = certificate
            self._newest = {protocols: certificate.context(protocols) for protocols in self._newest}
        return has_changed


def certificate_of(config: TlsConfig) -> Certificate | None:
    """The configured certificate, or None where the listeners use no TLS. Raises ConfigError."""
    return Certificate(config) if config.certificate is not None else None


def listener_options(context: ssl.SSLContext | None) -> dict[str, Any]:
    """The arguments of ``loop.create_server`` for a listener with this context; none without TLS."""
    return {} if context is None else {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S}


def end_writing(transport: asyncio.Transport) -> None:
    """Close the writing side of a connection, where the transport can close one side: with TLS it cannot."""
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
