"""Tokens with which machines join: made, kept as digests, checked, expired.

A token has the fingerprint of the server's certificate and a secret: ``inferd1.FINGERPRINT.SECRET``. A machine checks
the fingerprint before it sends the secret, so another server never sees it. The file of the server has a digest of each
secret, so a copy of the file lets no machine join. The operator's token (``nodes.token_file``) is valid while the server
is configured with it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from inferd.errors import ConfigError, InvalidRequest

REJOIN_S: Final = 7 * 86_400.0
"""Seconds in which a machine that was a node may join again under its name."""

_KEPT_S: Final = 30 * 86_400.0
"""Seconds for which an expired token is known, so that its refusal can say so."""

_MAX_TOKENS: Final = 10_000
_FORM: Final = re.compile(r"inferd1\.([A-Za-z0-9_-]{43})\.([A-Za-z0-9_-]{43})")


class Token(NamedTuple):
    """A token in its parts."""

    fingerprint: bytes  # SHA-256 of the certificate
    secret: str


class TokenRefusedError(Exception):
    """The secret lets no machine join; why, for its operator."""


class _Kept(msgspec.Struct):
    """A secret's digest; ``node``: the name that it is for, empty: any."""

    sha256: str
    expires_at: float  # seconds since the epoch
    node: str = ""


def token_text(fingerprint: bytes, secret: str) -> str:
    """A token as it is shown."""
    return f"inferd1.{base64.urlsafe_b64encode(fingerprint).decode().rstrip('=')}.{secret}"


def parse_token(text: str) -> Token:
    """Raises InvalidRequest, without the token's text."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(
            "This is no token of a server: one is inferd1, 43 characters and 43 characters, with a dot between; "
            "take the line that inferd node token prints.",
            param="token",
        )
    return Token(base64.urlsafe_b64decode(match[1] + "="), match[2])


def new_secret() -> str:
    """256 random bits as text."""
    return base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")


def secret_of(path: Path, fingerprint: bytes) -> str:
    """The secret of the operator's token in a file. Raises ConfigError where it is none for this certificate."""
    remedy = "make one with inferd node token --certificate FILE, where FILE is nodes.certificate."
    try:
        token = parse_token(path.read_text("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(
            f"nodes.token_file: {path} cannot be read ({error.strerror}); check its permissions.",
            param="nodes.token_file",
        ) from None
    except InvalidRequest:
        raise ConfigError(f"nodes.token_file: {path} has no token; {remedy}", param="nodes.token_file") from None
    if token.fingerprint != fingerprint:
        raise ConfigError(
            f"nodes.token_file: the token in {path} is for another certificate than the one that nodes are shown; "
            f"{remedy}",
            param="nodes.token_file",
        )
    return token.secret


class Tokens:
    """The secrets that are known, in one file, and ``always``, one that is valid without it.

    Raises ConfigError where the file is not one of tokens."""

    def __init__(self, path: Path, always: str | None = None) -> None:
        self._path = path
        self._always = None if always is None else _digest(always)
        self._kept: list[_Kept] = []
        try:
            self._kept = msgspec.json.decode(path.read_bytes(), type=list[_Kept])
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"The file {path} with the digests of nodes' tokens cannot be read ({error}); delete it, and make new "
                "tokens with inferd node token.",
                param="nodes.listen",
            ) from None

    def issue(self, now: float, expires_s: float, node: str = "") -> str:
        """A new secret, kept before it is returned. Of one node's the last two stay valid, as the newest may not have
        reached it. Raises OSError."""
        secret = new_secret()
        self._kept = [one for one in self._kept if one.expires_at + _KEPT_S > now]
        if node:
            own = [one for one in self._kept if one.node == node]
            for one in own[:-1]:
                self._kept.remove(one)
        self._kept = [*self._kept[-_MAX_TOKENS + 1 :], _Kept(_digest(secret), now + expires_s, node)]
        self._write()
        return secret

    def check(self, secret: str, name: str, now: float) -> None:
        """Raises TokenRefusedError for a secret that does not let a machine of this name join now."""
        digest = _digest(secret)
        if self._always is not None and secrets.compare_digest(self._always, digest):
            return
        for one in self._kept:
            if secrets.compare_digest(one.sha256, digest):
                break
        else:
            raise TokenRefusedError(
                "the token is not one of this server's, or was revoked; make one with inferd node token"
            )
        if one.expires_at <= now:
            raise TokenRefusedError("the token has expired; make another one with inferd node token")
        if one.node and one.node != name:
            raise TokenRefusedError(f"the secret is that of the node {one.node}, not of {name}")

    def forget(self, node: str) -> None:
        """Let no secret of one node be used again. Raises OSError."""
        self._kept = [one for one in self._kept if one.node != node]
        self._write()

    def revoke_all(self) -> int:
        """Let no secret of the file be used again; how many there were. Raises OSError."""
        count, self._kept = len(self._kept), []
        self._write()
        return count

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self._kept))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._path)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
