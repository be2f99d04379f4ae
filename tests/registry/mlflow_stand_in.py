"""A small server that answers as ``mlflow server`` 3.17 does: the shapes are those of recorded answers.

Versions, aliases and logged models can be changed while it serves, and its answers can be broken.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CREATED = 1795544617066

MLMODEL = """\
artifact_path: mlflow-artifacts:/1/models/m-64c90eda34cb4d0a8c570b0541cf6639/artifacts
flavors:
  {flavour}:
    code: null
{lines}
  python_function:
    data: model
    env:
      conda: conda.yaml
      virtualenv: python_env.yaml
    loader_module: mlflow.{flavour}
    python_version: 3.11.7
is_signature_from_type_hint: false
mlflow_version: 3.17.2
model_size_bytes: 111
prompts: null
run_id: eaaee166daa24fccb8f45594fb49d904
signature:
  inputs: '{inputs}'
  outputs: '[{{"type": "tensor", "tensor-spec": {{"dtype": "float32", "shape": [-1, 2]}}}}]'
  params: null
utc_time_created: '2026-11-24 18:23:30.928363'
"""
TWO = '[{"name": "x", "type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 2]}}]'


def mlmodel(flavour: str, inputs: str = TWO, **fields: str) -> bytes:
    lines = "\n".join(f"    {name}: {value}" for name, value in fields.items())
    return MLMODEL.format(flavour=flavour, lines=lines, inputs=inputs).encode()


def logged(flavour: str, files: Mapping[str, bytes], inputs: str = TWO, **fields: str) -> dict[str, bytes]:
    """The artifacts of a model, with MLflow's own files beside it."""
    own = {"MLmodel": mlmodel(flavour, inputs, **fields), "conda.yaml": b"name: mlflow-env\n"}
    return {**own, "python_env.yaml": b"python: 3.11.7\n", "requirements.txt": b"mlflow==3.17.2\n", **files}


class StandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.versions: dict[tuple[str, str], dict[str, bytes]] = {}
        self.tags: dict[tuple[str, str], dict[str, str]] = {}
        self.statuses: dict[tuple[str, str], str] = {}
        self.aliases: dict[tuple[str, str], str] = {}
        self.roots: dict[tuple[str, str], str] = {}  # artifact URIs other than the usual ones
        self.announced: dict[str, int] = {}  # wrong sizes, by path
        self.cuts: list[int] = []  # answers with files that end after so many bytes
        self.status = 0  # of every answer, instead of the answer
        self.wanted = ""  # the header Authorization, if one is needed
        self.body: bytes | None = None  # of every answer
        self.redirect = ""
        self.trickles = False  # each answer goes on until the client leaves, a blank in 10 ms
        self.silence = threading.Event()  # each answer waits for it
        self.silence.set()
        self.asked: list[str] = []  # targets of requests
        self.ranges: list[str] = []  # headers Range
        self.given: list[str] = []  # headers Authorization

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, name: str, version: int, files: dict[str, bytes], **tags: str) -> None:
        self.versions[name, str(version)] = files
        self.tags[name, str(version)] = {key.replace("__", "."): value for key, value in tags.items()}

    def count(self, part: str) -> int:
        return sum(1 for target in self.asked if part in target)

    def handle_error(self, request: object, client_address: object) -> None:
        """The client went away."""


class _Answers(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """No log."""

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(unquote(self.path))
        server.given.append(self.headers.get("Authorization", ""))
        server.silence.wait(60)
        parts = urlsplit(self.path)
        if server.trickles:
            return self._trickle(server.status or 200)
        if server.redirect:
            return self._send(302, b"", Location=server.redirect)
        if server.status:
            return self._error(server.status, "INTERNAL_ERROR", "The store is broken.")
        if server.body is not None:
            return self._send(200, server.body)
        if server.wanted and self.headers.get("Authorization") != server.wanted:
            return self._error(401, "UNAUTHENTICATED", "You are not authenticated.")
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = unquote(parts.path)
        if path.startswith("/api/2.0/mlflow-artifacts/artifacts/"):
            return self._file(path.removeprefix("/api/2.0/mlflow-artifacts/artifacts/"))
        found: Any = None
        match path.removeprefix("/api/2.0/"):
            case "mlflow-artifacts/artifacts":
                found = self._listed(query["path"])
            case "mlflow/registered-models/alias":
                number = server.aliases.get((query["name"], query["alias"]))
                if number is None:
                    said = f"Registered model alias {query['alias']} not found."
                    return self._error(400, "INVALID_PARAMETER_VALUE", said)
                found = self._version(query["name"], number)
            case "mlflow/model-versions/get":
                found = self._version(query["name"], query["version"])
            case "mlflow/model-versions/get-download-uri":
                found = {"artifact_uri": self._root(query["name"], query["version"])}
            case "mlflow/model-versions/search":
                name = query["filter"].removeprefix("name='").removesuffix("'")
                numbers = sorted((int(number) for known, number in server.versions if known == name), reverse=True)
                found = {"model_versions": [self._version(name, str(number))["model_version"] for number in numbers]}
        if found is None:
            return self._error(404, "RESOURCE_DOES_NOT_EXIST", "Registered Model with name=none not found")
        return self._send(200, json.dumps(found, indent=2).encode())

    def _trickle(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while True:
            self.wfile.write(b" ")
            time.sleep(0.01)

    def _root(self, name: str, number: str) -> str:
        return self.server.roots.get((name, number), f"mlflow-artifacts:/1/models/{name}-{number}/artifacts")

    def _version(self, name: str, number: str) -> Any:
        key = (name, number)
        if key not in self.server.versions:
            return None
        aliases = [alias for (model, alias), held in self.server.aliases.items() if (model, held) == key]
        version = {
            "name": name,
            "version": number,
            "creation_timestamp": CREATED,
            "last_updated_timestamp": CREATED,
            "current_stage": "None",
            "description": "",
            "source": f"models:/m-{int(number):032x}",
            "run_id": "eaaee166daa24fccb8f45594fb49d904",
            "status": self.server.statuses.get(key, "READY"),
            "run_link": "",
        }
        if tags := self.server.tags.get(key):
            version["tags"] = [{"key": tag, "value": value} for tag, value in tags.items()]
        if aliases:
            version["aliases"] = aliases
        return {"model_version": version}

    def _files(self, path: str) -> tuple[dict[str, bytes], str]:
        """The artifacts whose root a path is below, and the rest of it."""
        for (name, number), files in list(self.server.versions.items()):
            root = f"1/models/{name}-{number}/artifacts"
            if path == root or path.startswith(root + "/"):
                return files, path.removeprefix(root).strip("/")
        return {}, path

    def _listed(self, path: str) -> Any:
        files, below = self._files(path)
        prefix = f"{below}/" if below else ""
        found: dict[str, Any] = {}
        for name, data in sorted(files.items()):
            if name.startswith(prefix):
                first, slash, _ = name.removeprefix(prefix).partition("/")
                size = self.server.announced.get(name, len(data))
                found[first] = (
                    {"path": first, "is_dir": True} if slash else {"path": first, "is_dir": False, "file_size": size}
                )
        return {"files": list(found.values())} if found else {}

    def _file(self, path: str) -> None:
        files, name = self._files(path)
        if name not in files:
            self._error(404, "RESOURCE_DOES_NOT_EXIST", f"No such artifact: '{path}'")
            return
        data, tag = files[name], f'"{hash(files[name]):x}"'
        begin, asked = 0, self.headers.get("Range", "")
        headers = {"ETag": tag, "Accept-Ranges": "bytes"}
        if asked and self.headers.get("If-Range", tag) == tag:
            self.server.ranges.append(asked)
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cut = self.server.cuts.pop(0) if self.server.cuts and name not in ("MLmodel",) else None
        self._send(206 if begin else 200, data[begin:], cut, **headers)

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, json.dumps({"error_code": code, "message": message}).encode())

    def _send(self, status: int, body: bytes, cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


@contextmanager
def standing_in() -> Iterator[StandIn]:
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
