"""An API server of Kubernetes that records what a client creates: as much of it as Helm's installation asks for.

It knows the resources of the chart by name, and finds nothing that exists. Helm's own Secrets, which it writes in
protobuf, are answered as they came and forgotten.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RESOURCES = {
    "v1": {
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apps/v1": {"deployments": "Deployment"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
}
VERBS = ["create", "delete", "get", "list", "patch", "update"]


class Recorder:
    """The address, and the objects that were created since the last ``taken``."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.unknown: list[str] = []
        self.url = ""

    def taken(self) -> list[dict[str, Any]]:
        found, self.objects = self.objects, []
        return found


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

        def _answer(self, status: int, body: object) -> None:
            self._send(status, json.dumps(body).encode(), "application/json")

        def _send(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _read(self) -> bytes:
            return self.rfile.read(int(self.headers.get("content-length") or 0))

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].rstrip("/")
            version = path.removeprefix("/apis/").removeprefix("/api/")
            if path == "/version":
                self._answer(200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"})
            elif path == "/api":
                self._answer(200, {"kind": "APIVersions", "versions": ["v1"]})
            elif path == "/apis":
                self._answer(200, _groups())
            elif version in RESOURCES:
                self._answer(200, _resources(version))
            elif path.endswith("/secrets"):
                self._answer(200, {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []})
            else:
                self._answer(404, _status(404, "NotFound"))

        def do_POST(self) -> None:
            content = self._read()
            if "/secrets" in self.path:
                self._send(201, content, self.headers["content-type"])
                return
            made = json.loads(content)
            recorder.objects.append(made)
            self._answer(201, made)

        def do_PUT(self) -> None:
            content = self._read()
            if "/secrets" not in self.path:
                recorder.unknown.append(f"PUT {self.path}")
            self._send(200, content, self.headers["content-type"])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    recorder.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield recorder
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _groups() -> dict[str, Any]:
    groups = []
    for name in RESOURCES:
        group, _, version = name.partition("/")
        if version:
            known = {"groupVersion": name, "version": version}
            groups.append({"name": group, "versions": [known], "preferredVersion": known})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(version: str) -> dict[str, Any]:
    found = [
        {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": VERBS}
        for name, kind in RESOURCES[version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def _status(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
