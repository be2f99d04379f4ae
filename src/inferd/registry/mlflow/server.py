"""Requests to an MLflow server: its address, credentials that no message repeats, and answers within bounds.

Knows HTTP and the form of MLflow's errors. The error for a server that does not answer has a code of its own, because a
caller may go on with what it has then.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Protocol
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from inferd import clock
from inferd.config.versioning import MlflowConfig
from inferd.errors import ModelLoadError

API: Final = "/api/2.0/mlflow"
MAX_ANSWER_BYTES: Final = 16 << 20
_MAX_ERROR_BYTES: Final = 65_536
_MAX_SAID: Final = 300  # characters of the server's own message
_MAX_SECRET: Final = 8192
_AWAY_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


AWAY: Final = "mlflow_away"
"""The code of the error for a server that could not be reached, was too slow, or had a failure of its own. Nothing is
known of the model then."""

REFUSED: Final = "mlflow_refused"
"""The code of the error for a model that the server does not give: it has no such version, or the credentials do not
allow it."""


def away(sentence: str, *, param: str = "mlflow.url") -> ModelLoadError:
    return ModelLoadError(sentence, param=param, code=AWAY)


def refused(sentence: str, *, param: str = "source") -> ModelLoadError:
    return ModelLoadError(sentence, param=param, code=REFUSED)


class _Error(msgspec.Struct):
    """The body of an error of MLflow."""

    error_code: str = ""
    message: str = ""


class Server:
    """An MLflow server, with the credentials that it wants."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.headers = headers  # Authorization, or nothing; for this server alone

    def get(self, path: str, /, **query: str) -> dict[str, Any]:
        """The JSON object that ``path``, below the server's address, gives. Raises ModelLoadError."""
        address = f"{self.url}{path}?{urlencode(query)}"
        request = urllib.request.Request(address, headers={**self.headers, "Accept": "application/json"})
        until = clock.now() + self.timeout_s
        try:
            with _OPENER.open(request, timeout=self.timeout_s) as answer:
                body = _read(answer, until)
        except urllib.error.HTTPError as error:
            with error:
                self._refused(path, error, until)
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise refused(
                    f"The certificate of {self.url} is not accepted: {error.reason.verify_message}.", param="mlflow.url"
                ) from None
            raise self._away(path, str(error.reason)) from None
        except (http.client.HTTPException, OSError, _TooSlow) as error:
            raise self._away(path, str(error) or type(error).__name__) from None
        try:
            found = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._away(path, "the answer is no JSON object; is that an MLflow server?")
        return found

    def file_url(self, root: str, path: str) -> str:
        """Where the server gives a file of its artifacts. ``root``: see ``listing.proxied_root``."""
        return f"{self.url}/api/2.0/mlflow-artifacts/artifacts/{quote('/'.join(part for part in (root, path) if part))}"

    def _refused(self, path: str, error: urllib.error.HTTPError, until: float) -> NoReturn:
        said = ""
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, OSError, http.client.HTTPException, _TooSlow):
            said = msgspec.json.decode(_read(error, until, _MAX_ERROR_BYTES), type=_Error).message
        said = "".join(letter if letter.isprintable() else " " for letter in said[:_MAX_SAID]).rstrip(" .")
        if error.code in _AWAY_STATUSES:
            raise self._away(path, f"{error.code} {said or error.reason}") from None
        if error.code in (401, 403):
            raise refused(
                f"The MLflow server {self.url} refuses the credentials ({error.code}); set MLFLOW_TRACKING_TOKEN, or "
                "mlflow.token_env, mlflow.token_file or mlflow.username, to those of a user that may read the model.",
                param="mlflow",
            ) from None
        if 300 <= error.code < 400:
            raise refused(
                f"{self.url} redirects to another address; set mlflow.url to the address of the MLflow server itself.",
                param="mlflow.url",
            ) from None
        raise refused(
            f"The MLflow server {self.url} answered {error.code}: {said or error.reason}.", param="source"
        ) from None

    def _away(self, path: str, reason: str) -> ModelLoadError:
        return away(
            f"The MLflow server {self.url} did not answer {path} within {self.timeout_s:g} s as it should: "
            f"{reason[:_MAX_SAID].rstrip(' .')}. Check mlflow.url and the server, then try again.",
            param="mlflow.url",
        )


def server_of(settings: MlflowConfig, env: Mapping[str, str] | None = None) -> Server:
    """The server of the settings, or of MLflow's own variables. Raises ModelLoadError that names what is missing."""
    env = os.environ if env is None else env
    url = settings.url or env.get("MLFLOW_TRACKING_URI", "")
    if not url:
        raise ModelLoadError(
            "No MLflow server is known; set mlflow.url, or the variable MLFLOW_TRACKING_URI, to its address.",
            param="mlflow.url",
        )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or parts.query:
        raise ModelLoadError(
            "The address of the MLflow server is not one such as https://mlflow.example.com: the registry is read over "
            "HTTP, and credentials have settings of their own (mlflow.token_env, mlflow.username). Correct mlflow.url "
            "or MLFLOW_TRACKING_URI.",
            param="mlflow.url",
        )
    return Server(url, _authorization(settings, env), settings.timeout_s)


def _authorization(settings: MlflowConfig, env: Mapping[str, str]) -> dict[str, str]:
    """Basic or Bearer, as MLflow's own client chooses: a name and a password come first."""
    if settings.token_file is not None or settings.token_env is not None:
        token = secret_of(env, settings.token_env, settings.token_file, "mlflow.token")
        return {"Authorization": f"Bearer {token}"}
    password_env = settings.password_env or "MLFLOW_TRACKING_PASSWORD"
    username = settings.username or env.get("MLFLOW_TRACKING_USERNAME", "")
    if username:
        password = secret_of(env, password_env, None, "mlflow.password")
        return {"Authorization": "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()}
    if env.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {secret_of(env, 'MLFLOW_TRACKING_TOKEN', None, 'mlflow.token')}"}
    return {}


def secret_of(env: Mapping[str, str], variable: str | None, file: str | None, setting: str) -> str:
    """A secret from a variable or a file. Raises ModelLoadError that names the setting and repeats nothing of it."""
    where = f"the variable {variable}" if file is None else f"the file {file}"
    try:
        text = env.get(variable or "", "") if file is None else Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    text = text.strip()
    if not text or len(text) > _MAX_SECRET or not text.isprintable():
        raise ModelLoadError(
            f"{setting}: {where} holds no secret of printable characters on one line; set it, or correct the setting.",
            param=setting,
        )
    return text


class _TooSlow(Exception):
    """The answer did not end in time, or is too long."""


class _Body(Protocol):
    def read1(self, n: int, /) -> bytes: ...


def _read(answer: _Body, until: float, most: int = MAX_ANSWER_BYTES) -> bytes:
    """The body, within a time and a size. Raises _TooSlow."""
    parts, size = [], 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > most:
            raise _TooSlow(f"the answer has more than {most} bytes")
        if clock.now() > until:
            raise _TooSlow("the answer did not end in time")
    return b"".join(parts)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the credentials are for one address."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        return None


_OPENER: Final = urllib.request.build_opener(_NoRedirects)
