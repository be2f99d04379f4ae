"""What an attacker tries (SEC-01 to SEC-30), against whole servers."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle
import re
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.experiments.catalogue import experiment
from tests.experiments.client import JSON, Answer, Client, exchange, head
from tests.experiments.field import Field, together
from tests.experiments.state import guarded
from tests.experiments.upstream import EVENTS, Asked, Behaviour, Upstream, answer, chunk
from tests.experiments.upstreams import remote
from tests.stopwatch import Stopwatch

import inferd
from inferd.gateway.route import Route
from inferd.gateway.routes import ROUTES

SOURCES = Path(inferd.__file__).parent


# -- code from bytes -----------------------------------------------------------------------------

UNSAFE_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "torch.load",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}


def unsafe(source: str) -> Iterator[str]:
    """Places where bytes could become code, or a text a command."""
    tree = ast.parse(source)
    safe = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("SafeLoader" in ast.unparse(base) for base in node.bases)
    }
    taken = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                used = {attribute for module, attribute in taken if module == (alias.asname or alias.name)}
                # Another library's refusal of a pickle has the module's word for it, which opens nothing.
                if alias.name.split(".")[0] in UNSAFE_IMPORTS and used != {"UnpicklingError"}:
                    yield f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_IMPORTS:
            yield f"from {node.module} import"
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in UNSAFE_CALLS:
                yield f"{function.id}()"
            named = ast.unparse(function)
            loaders = {ast.unparse(given) for given in (*node.args, *(keyword.value for keyword in node.keywords))}
            is_narrow = named == "torch.load" and any(
                keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in node.keywords
            )
            if named in UNSAFE_ATTRIBUTES and not (named == "yaml.load" and loaders & safe) and not is_narrow:
                yield f"{named}()"
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                    yield "shell="


@experiment(
    "SEC-01a",
    injects="every source file of the server, read",
    holds="none can make code or objects out of bytes: no pickle and its like (joblib opens one where allow_pickle says so), no eval, no unsafe YAML",
    control="a file that does each of these",
    red="pickle",
    tier="thorough",
)
def no_pickle(field: Field) -> None:
    found = [f"{path.name}: {what}" for path in SOURCES.rglob("*.py") for what in unsafe(path.read_text())]
    if field.is_control:
        found += unsafe(
            "import pickle\npickle.loads(b'')\nfrom dill import loads\neval('1')\nyaml.load(b'')\nrun('ls', shell=True)\n"
            "torch.load('x')\ntorch.load('x', weights_only=False)"
        )
        assert len(found) >= 7, "the scan is blind"
    assert not found, found


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@experiment(
    "SEC-01b",
    injects="pickles and garbage on each of the server's own sockets: TCP, the control socket, a worker's channel",
    holds="nothing of it is run, the server serves on",
    control="a reader that unpickles what it gets",
    red="canary",
    tier="everyday",
)
def canary_payloads(field: Field) -> None:
    canary = field.folder / "canary"
    payload = pickle.dumps(Canary(canary))
    with field.serve() as server:
        frames = [payload, len(payload).to_bytes(4, "little") + payload, b"\x00" * 64, os.urandom(4096)]
        for sent in [*frames, head("POST", "/v1/completions", "content-type: application/json", body=payload)]:
            exchange(server.host, server.port, sent, seconds=0.5)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(0.5)
                connection.connect(server.operator.host)
                connection.sendall(sent)
                with contextlib.suppress(OSError):
                    connection.recv(4096)
        if field.is_control:
            pickle.loads(payload)
        assert not canary.exists(), "a canary was run"


@experiment(
    "SEC-02",
    injects="a look at everything the server's processes listen on",
    holds="one TCP port, on loopback, and the control socket: mode 0600 in a folder 0700",
    control="one more port is open",
    red="listens on",
    tier="everyday",
)
def listeners(field: Field) -> None:
    with field.serve(defects=("an_extra_port_is_open",)) as server:
        ports = {where for pid in (server.process.pid, *server.worker_pids()) for where in _listening(pid)}
        assert ports == {("0100007F", server.port)}, f"the server listens on {ports}"
        path = Path(server.operator.host)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    """Addresses, as the kernel writes them, and ports of a process's listening TCP sockets."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                address, _, port = fields[1].rpartition(":")
                yield address, int(port, 16)


@experiment(
    "SEC-20",
    injects="every admin route with texts that a shell, a template or Python would run",
    holds="none is run; no route takes code; the sources have no eval, exec or shell",
    control="the texts are given to a shell",
    red="was run",
)
def code_through_admin(field: Field) -> None:
    canary = field.folder / "ran"
    texts = [
        f"$(touch {canary})",
        f"; touch {canary} ;",
        "{{ self.__init__.__globals__ }}",
        f"__import__('os').system('touch {canary}')",
    ]
    with field.serve() as server:
        for route in ROUTES:
            if route.scope != "admin" or "drain" in route.pattern:
                continue
            for text in texts:
                path = route.pattern.replace("{model}", _quoted(text)).replace("{id}", _quoted(text))
                body = {"tenant": text, "name": text, "models": [text]} if route.method == "POST" else None
                reply = server.operator.request(route.method, path, body, seconds=30)
                assert reply.status < 500, reply
        if field.is_control:
            os.system(texts[0])
        assert not canary.exists(), "a text was run"
        assert not [what for path in SOURCES.rglob("*.py") for what in unsafe(path.read_text())]


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


# -- hostile requests ----------------------------------------------------------------------------

KNOBS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "top_k",
    "n",
    "seed",
    "logprobs",
    "best_of",
)
VALUES = ("-1e9", "2147483648", "9223372036854775808", "1e308", "true", '"x"', "[1]", "{}", "[" * 300 + "]" * 300)
LEGITIMATE = {("seed", "2147483648"), ("top_k", "2147483648")}


@experiment(
    "SEC-06",
    injects="every numeric knob at -1e9, 2^31, 2^63, 1e308, and as bool, text, list, object",
    holds="400 that names it, in 50 ms (median), while a golden stream runs",
    control="knobs have no ranges",
    red="was taken",
    tier="everyday",
)
def knobs(field: Field) -> None:
    with (
        field.serve(defects=("knobs_have_no_ranges",)) as server,
        server.client.stream("pace=0.01", max_tokens=26) as golden,
    ):
        begun = golden.first()["choices"][0]["text"]
        times = []
        for name in KNOBS:
            for value in VALUES:
                if (name, value) in LEGITIMATE:
                    continue
                body = f'{{"model": "tiny", "prompt": "hello", "max_tokens": 1, "{name}": {value}}}'.encode()
                watch = Stopwatch()
                reply = server.client.post("/v1/completions", body)
                times.append(watch.seconds)
                assert reply.status == 400, f"{name}: {value[:20]} was taken: {reply}"
        assert sorted(times)[len(times) // 2] < 0.05
        assert begun + golden.rest() == "abcdefghijklmnopqrstuvwxyz"


@experiment(
    "SEC-11",
    injects="every error that can be provoked from outside",
    holds="no address, path, traceback, module, key or text of another request in any answer",
    control="an answer with a traceback",
    red="tells",
    tier="everyday",
)
def errors_tell_nothing(field: Field) -> None:
    with guarded(field) as server:
        secret = server.key("team")
        user = server.client.with_key(secret)
        answers = [
            server.client.with_key("sk-inf-wrong-key").complete("hello"),
            user.complete("hello", model="../../etc/passwd"),
            user.complete("raise"),
            user.complete("invalid"),
            user.complete("defect"),
            user.post("/v1/completions", b"{"),
            user.post("/v1/completions", b"\xff\xfe"),
            user.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": 7}]}),
            user.post("/admin/keys", {"tenant": "x"}),
            user.get("/nowhere"),
            user.request("DELETE", "/v1/models"),
            user.complete("hello", temperature="hot"),
            user.complete("hello", max_tokens=-1),
            server.operator.request("DELETE", "/admin/keys/nobody"),
            server.operator.post("/admin/models/nobody/load"),
        ]
        if field.is_control:
            answers.append(Answer(500, {}, b'Traceback (most recent call last):\n File "/usr/x.py", line 1, in f'))
        telling = re.compile(
            rb"Traceback|File \"|/usr/|/home/|/opt/|/var/|/root/|/tmp/|site-packages|0x[0-9a-f]{6,}|inferd\.[a-z]+\.|\.py\b|sk-inf-\w|"
            + re.escape(str(Path(inferd.__file__).parents[1]).encode())
        )
        for reply in answers:
            assert reply.status >= 400, reply
            assert not telling.search(reply.body), f"an answer tells too much: {reply}"
            assert secret.encode() not in reply.body


@experiment(
    "SEC-14",
    injects="a flood of headers, a body of 64 MiB, one without an end in chunks, a compressed bomb",
    holds="400, 413, 415 or 431 and the connection closed; memory stays bounded",
    control="max_body_bytes: 1 GiB",
    red="was read",
    tier="thorough",
)
def floods(field: Field) -> None:
    with field.serve({"server": {"max_body_bytes": field.either(1_000_000, 2**30)}}) as server:
        rss = server.rss_bytes
        flood = b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: " + b"b" * 200_000 + b"\r\n\r\n"
        assert exchange(server.host, server.port, flood, seconds=2).startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        lines = ("content-type: application/json",)
        announced = head("POST", "/v1/completions", *lines, f"content-length: {2**26}") + b" " * 2**20
        received = exchange(server.host, server.port, announced, seconds=2)
        assert received.startswith(b"HTTP/1.1 413"), f"a body that is too large was read: {received[:60]!r}"
        endless = head("POST", "/v1/completions", *lines, "transfer-encoding: chunked") + chunk(b" " * 65536) * 64
        assert exchange(server.host, server.port, endless, seconds=2).startswith(b"HTTP/1.1 413")
        import gzip

        bomb = gzip.compress(b" " * 2**26)
        packed = head("POST", "/v1/completions", *lines, "content-encoding: gzip", "connection: close", body=bomb)
        assert exchange(server.host, server.port, packed, seconds=2).startswith((b"HTTP/1.1 415", b"HTTP/1.1 400"))
        grown = (server.rss_bytes - rss) >> 20
        assert grown < 60, f"memory grew by {grown} MiB"


@experiment(
    "SEC-15",
    injects="JSON that is deep, repeats its fields, is no JSON, or has integers beyond 64 bits",
    holds="400, and still ready",
    control="a body that is right",
    red="was answered",
    tier="everyday",
)
def odd_json(field: Field) -> None:
    with field.serve() as server:
        bodies = [
            b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
            b'{"model": "tiny", "prompt": "\xff"}',
            b'{"model": "tiny", "prompt": [' + b"9" * 400 + b"]}",
            b'{"model": "tiny", "prompt": "hello", "n": 1, "n": 2}',
            b"[]",
            b"",
        ]
        if field.is_control:
            bodies.append(b'{"model": "tiny", "prompt": "hello", "max_tokens": 1}')
        for body in bodies:
            reply = server.client.post("/v1/completions", body)
            assert reply.status == 400, f"{body[:40]!r} was answered with {reply.status}"
        assert server.is_ready()


# -- permissions ---------------------------------------------------------------------------------


def _path(route: Route) -> str:
    return route.pattern.replace("{model}", "tiny").replace("{id}", "nobody")


@experiment(
    "SEC-16",
    injects="every route without a key, with a wrong, an expired, a revoked one and one of another role; odd Host and OPTIONS",
    holds="401 or 403 before the body is read; only the probes are open",
    control="server.auth: off",
    red="let in",
    tier="thorough",
)
def every_route(field: Field) -> None:
    config = {"server": {"auth": field.either("required", "off"), "public_metrics": False}}
    with guarded(field, config) as server:
        reader = server.key("team", scopes=["metrics"])
        infers = server.key("team", scopes=["infer"])
        expired = server.key("team", expires_in_s=0.2)
        revoked = server.key("team")
        identity = next(
            k["id"] for k in server.operator.get("/admin/keys").json["data"] if revoked.startswith(f"sk-inf-{k['id']}-")
        )
        server.operator.request("DELETE", f"/admin/keys/{identity}")
        time.sleep(0.3)
        plain = Client(server.host, server.port, server.tally)
        for route in ROUTES:
            if route.scope == "public":
                # Files, the sign-in and its redirect need no key; without one the sign-in and unknown files are errors.
                allowed = (200, 204, 308, 400, 404) if route.of_console else (200, 503)
                if route.pattern == "/admin/mlflow/webhook":
                    allowed = (400, 401)  # a signature stands for the key, and there is none
                assert plain.request(route.method, _path(route)).status in allowed, route
                continue
            wrong: list[Client] = [
                plain,
                *(plain.with_key(key) for key in ("sk-inf-x-y", expired, revoked, infers + "0")),
            ]
            for client in wrong:
                status = client.request(route.method, _path(route), b"{" if route.request else None).status
                assert status == 401, f"{route.method} {route.pattern} let in a request without a valid key: {status}"
            other = reader if route.scope != "metrics" else infers
            status = plain.with_key(other).request(route.method, _path(route), b"{" if route.request else None).status
            assert status == 403, f"{route.method} {route.pattern} let in another role: {status}"
        for host in ("localhost/v1/models?", "localhost@evil", "evil\\localhost", ""):
            sent = head("GET", "/v1/models", "connection: close").replace(b"host: localhost", f"host: {host}".encode())
            status_line = exchange(server.host, server.port, sent, seconds=2).partition(b"\r\n")[0]
            assert status_line.split(b" ")[1] in (b"400", b"401", b"403", b"421"), (host, status_line)
        # The answer comes although the body never does.
        waiting = head("POST", "/v1/completions", "content-type: application/json", "content-length: 100000")
        assert exchange(server.host, server.port, waiting, seconds=1.5).startswith(b"HTTP/1.1 401")
        assert plain.request("OPTIONS", "/v1/models").status in (204, 401)


@experiment(
    "SEC-17",
    injects="keys that are SQL, and a look at what is stored of real ones",
    holds="refused with 401 like any; nothing stored or logged contains a key; a revoked one is refused within 1 s",
    control="a key lies in a file of the data folder",
    red="stored",
    tier="everyday",
)
def keys_are_hashed(field: Field) -> None:
    with guarded(field) as server:
        text = server.key("team")
        assert server.client.with_key(text).complete("hello").status == 200
        identity = text.split("-")[2]
        for odd in (
            f"sk-inf-{identity}-' OR '1'='1",
            "sk-inf-%-%",
            "sk-inf-' UNION SELECT 1 --",
            text[:-1],
            text.upper(),
            "x" * 10_000,
        ):
            assert server.client.with_key(odd).complete("hello").status == 401
        if field.is_control:
            (server.folder / "data" / "copy").write_text(text)
        secret = text.split("-")[-1].encode()
        for path in server.folder.rglob("*"):
            if path.is_file():
                assert secret not in path.read_bytes(), f"a key is stored in {path.name}"
        assert secret.decode() not in server.log
        assert secret not in server.client.get("/metrics").body


@experiment(
    "SEC-18",
    injects="another tenant's Idempotency-Key, session, cached answer and key ids",
    holds="each tenant sees its own alone",
    control="both keys are of one tenant",
    red="another tenant's",
    tier="everyday",
)
def other_tenants_ids(field: Field) -> None:
    model = {"source": "tiny", "cache": {"enabled": True}}
    with guarded(field, {"models": {"tiny": model}}) as server:
        alice = server.client.with_key(server.key("a"))
        bob = server.client.with_key(server.key(field.either("b", "a")))
        own = {"idempotency-key": "same", "x-session-id": "same"}
        assert alice.complete("hello", headers=own).status == 200
        replayed = bob.complete("hello", headers=own)
        assert replayed.headers.get("idempotent-replayed") != "true", "another tenant's answer was repeated"
        assert alice.complete("hello", temperature=0).headers.get("x-inferd-cache") == "miss"
        assert alice.complete("hello", temperature=0).headers.get("x-inferd-cache") == "hit"
        cached = bob.complete("hello", temperature=0)
        assert cached.headers.get("x-inferd-cache") == "miss", "another tenant's answer came from the cache"
        admin = server.client.with_key(server.key("b", scopes=["admin"]))
        seen = {key["tenant"] for key in admin.get("/admin/keys").json["data"]}
        assert seen <= {"b"}, "another tenant's keys are listed"
        foreign = next(key["id"] for key in server.operator.get("/admin/keys").json["data"] if key["tenant"] == "a")
        assert admin.request("DELETE", f"/admin/keys/{foreign}").status == 404


@experiment(
    "SEC-19",
    injects="a user sets its own role, tenant, class and limits, and mints keys",
    holds="403 or no effect; a key never makes a stronger one",
    control="the user is an admin",
    red="was made",
    tier="everyday",
)
def self_promotion(field: Field) -> None:
    with guarded(field) as server:
        text = server.key("team", scopes=field.either(["infer", "models"], ["infer", "admin"]))
        user = server.client.with_key(text)
        made = user.post("/admin/keys", {"tenant": "team", "scopes": ["infer"]})
        assert made.status == 403, f"a key was made: {made.status}"
        for name in ("x-inferd-tenant", "x-tenant", "x-inferd-scopes", "x-forwarded-user", "x-inferd-key-id"):
            assert user.post("/admin/keys", {"tenant": "team"}, headers={name: "admin"}).status == 403
        assert user.complete("hello", headers={"x-inferd-priority": "critical"}).status == 200  # clamped, not granted
        assert user.complete("hello", tenant="other").status == 400
        limited = server.client.with_key(server.key("team", scopes=["admin"], models=["tiny"]))
        wider = limited.post("/admin/keys", {"tenant": "team", "scopes": ["admin"]})
        assert wider.status == 403, f"a wider key was made: {wider}"
        assert limited.post("/admin/keys", {"tenant": "other", "models": ["tiny"]}).status == 403


@experiment(
    "SEC-29",
    injects="spoofed addresses, parallel connections, n, aborts, aliases of the key",
    holds="one quota, and everything is charged to it",
    control="no quota",
    red="let through",
    tier="everyday",
)
def quota_evasion(field: Field) -> None:
    with guarded(field) as server:
        text = server.key("team", **({"rpm": 20} if not field.is_control else {}))
        began = time.monotonic()

        def ask(number: int) -> int:
            headers = {
                "x-forwarded-for": f"10.0.0.{number}",
                "forwarded": f"for=10.1.1.{number}",
                "x-real-ip": f"10.2.2.{number}",
            }
            key = {"authorization": f"bearer {text}"} if number % 2 else {"x-api-key": text}
            return Client(server.host, server.port, server.tally).complete("hello", headers={**headers, **key}).status

        passed = together(60, ask).count(200)
        most = 20 + (time.monotonic() - began) / 3 + 1
        assert passed <= most, f"{passed} requests were let through at a limit of 20"
        tokens = server.client.with_key(server.key("spender", tpm=400))
        spent = [tokens.complete("hello", n=4, max_tokens=25).status for _ in range(8)]
        assert 429 in spent, "n candidates were not charged"


# -- other people's text -------------------------------------------------------------------------


def echo(connection: socket.socket, asked: Asked) -> bool:
    """Says the prompt again, in pieces."""
    prompt = str(asked.fields["prompt"])
    if asked.fields.get("stream"):
        words = [
            chunk(
                b"data: "
                + json.dumps(
                    {
                        "id": "1",
                        "object": "text_completion",
                        "created": 1,
                        "model": "m",
                        "choices": [{"index": 0, "text": piece, "finish_reason": None}],
                    }
                ).encode()
                + b"\n\n"
            )
            for piece in (prompt[:4], prompt[4:])
        ]
        connection.sendall(EVENTS + b"".join(words) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    else:
        choice = {"index": 0, "text": prompt, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        connection.sendall(answer(json.dumps(body).encode()))
    return True


class Confused:
    """Now and then gives one client what another one asked."""

    def __init__(self) -> None:
        self.last: Asked | None = None
        self.lock = threading.Lock()

    def __call__(self, connection: socket.socket, asked: Asked) -> bool:
        with self.lock:
            other, self.last = self.last, asked
        return echo(connection, other if other is not None and len(asked.body) % 3 == 0 else asked)


@experiment(
    "SEC-22",
    injects="10,000 requests with canaries from 32 clients, streamed and not, some left half-way, two servers behind",
    holds="no client sees the canary of another one",
    control="a remote server that mixes up its answers",
    red="foreign",
)
def canaries(field: Field) -> None:
    behaviour: Behaviour = Confused() if field.is_control else echo
    with (
        Upstream(behaviour) as one,
        Upstream(behaviour) as two,
        field.serve(remote(one, two)) as server,
    ):
        server.allow(descriptors=64)  # connections to the remote servers are kept for a while

        def run(number: int) -> None:
            for turn in range(field.either(313, 20)):
                canary = f"canary-{number}-{turn}-{'x' * (turn % 7)}"
                if turn % 3 == 0:
                    said = server.client.complete(canary, model="far").text
                else:
                    with server.client.stream(canary, model="far") as stream:
                        if turn % 10 == 1:
                            stream.first()
                            server.tally.cut()
                            continue
                        said = stream.rest()
                assert said == canary, f"a foreign canary: {said!r} instead of {canary!r}"

        together(32, run)


@experiment(
    "SEC-23",
    injects="requests with two meanings, hop-by-hop and internal headers, the client's credentials",
    holds="refused or stripped: the remote server sees one request, and no header that was not meant for it",
    control="the remote server is asked directly",
    red="went along",
    tier="everyday",
)
def smuggling(field: Field) -> None:
    with Upstream() as upstream, field.serve(remote(upstream)) as server:
        body = b'{"model": "far", "prompt": "hello"}'
        lines = [
            "content-type: application/json", "connection: close, x-secret", "x-secret: 1", "te: trailers", "authorization: Bearer client",
            "x-api-key: client", "cookie: a=b", "x-inferd-tenant: root", "x-forwarded-for: 10.0.0.1", "proxy-authorization: Basic eA==",
        ]  # fmt: skip
        port = field.either(server.port, upstream.port)
        exchange(server.host, port, head("POST", "/v1/completions", *lines, body=body), seconds=3)
        server.tally.cut()
        sent = upstream.asked[-1].head.lower()
        for name in (
            b"x-secret",
            b"te:",
            b"bearer client",
            b"x-api-key",
            b"cookie",
            b"x-inferd-",
            b"x-forwarded-for",
            b"proxy-auth",
        ):
            assert name not in sent, f"{name.decode()} went along to the remote server"
        before = upstream.num_asked
        hidden = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
        ambiguous = [
            b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + hidden,
            b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello" + hidden,
            b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + hidden,
            b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + hidden,
            b"content-length: +5\r\n\r\nhello" + hidden,
            b" folded: x\r\ncontent-length: 0\r\n\r\n" + hidden,
        ]
        for framing in ambiguous:
            start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            received = exchange(server.host, server.port, start + framing, seconds=2)
            assert received.startswith(b"HTTP/1.1 400"), (framing[:40], received[:80])
            assert len(re.findall(rb"HTTP/1.1 \d{3} ", received)) == 1, (framing[:40], received)
        assert upstream.num_asked == before


@experiment(
    "SEC-24",
    injects="line breaks, ANSI codes and JSON breakers in model, user, ids and paths",
    holds="the log is one valid line of plain text per request; labels are a closed set",
    control="a log line with a break in it",
    red="line of the log",
    tier="everyday",
)
def odd_texts(field: Field) -> None:
    nasty = 'x\r\n{"event": "forged"}\x1b[31m"\\\u2028\x00'
    with field.serve() as server:
        before = 0
        for number in range(30):
            if number == 1:
                before = len(server.metrics().values)
            server.client.complete("hello", model=nasty + str(number))
            server.client.complete("hello", user=nasty, metadata={"a": nasty})
            server.client.get(f"/v1/models/{_quoted(nasty)}{number}")
            server.client.get(f"/{_quoted(nasty)}{number}")
            server.client.complete("hello", headers={"x-request-id": f"id-{number}\x1b[31m", "user-agent": "a\x1b]0;b"})
        assert len(server.metrics().values) <= before + 5, "labels are made of what clients send"
        log = server.log + field.either("", '{"model": "x\n{"event": "forged"}\n')
        for line in log.splitlines():
            try:
                event: JSON = json.loads(line)
            except ValueError:
                raise AssertionError(f"no valid line of the log: {line!r}") from None
            assert event["event"] != "forged", f"a forged line of the log: {line!r}"
            assert line.isprintable(), f"control characters in a line of the log: {line!r}"


@experiment(
    "SEC-25",
    injects="pages of other origins, other host names (DNS rebinding), preflights, simple forms",
    holds="refused; nothing lets another page read",
    control="cors_origins: *",
    red="may",
    tier="everyday",
)
def web_pages(field: Field) -> None:
    with field.serve({"server": {"cors_origins": field.either([], ["*"])}}) as server:
        evil = {"origin": "https://evil.example"}
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
        posted = server.client.post("/v1/completions", body, headers=evil)
        assert posted.status == 403, f"a page of another origin may call: {posted.status}"
        read = server.client.get("/v1/models", headers=evil)
        assert "access-control-allow-origin" not in read.headers, "a page of another origin may read"
        preflight = server.client.request(
            "OPTIONS", "/v1/completions", headers={**evil, "access-control-request-method": "POST"}
        )
        assert "access-control-allow-origin" not in preflight.headers
        rebound = server.client.get("/v1/models", headers={"host": "evil.example"})
        assert rebound.status in (403, 421), f"another host's name may be used: {rebound.status}"
        form = server.client.post("/v1/completions", body, headers={"content-type": "text/plain"})
        assert form.status in (400, 415)
        assert server.client.post("/admin/drain").status in (401, 403)


@experiment(
    "SEC-30",
    injects="canary texts in prompts, answers, bodies that fail and names",
    holds="in no log line, metric, database or file, during and after",
    control="one is written to a file",
    red="was kept",
    tier="everyday",
)
def retention(field: Field) -> None:
    canary = "CANARY7f3a9"
    model = {"source": "tiny", "cache": {"enabled": True}}
    with guarded(field, {"models": {"tiny": model}}, checked=False) as server:
        server.client.complete(f"{canary} hello", temperature=0)
        server.client.chat(f"{canary} hello")
        server.client.complete(f"{canary} raise")
        server.client.complete(f"{canary} invalid")
        server.client.post("/v1/completions", b'{"prompt": "' + canary.encode())
        with server.client.stream(f"{canary} hello", max_tokens=3) as stream:
            stream.rest()
        if field.is_control:
            (server.folder / "data" / "dump").write_text(canary)
        page = server.client.get("/metrics").body
        server.stop()
        assert canary.encode() not in page, "a prompt was kept in a metric"
        assert canary not in server.log, "a prompt was kept in the log"
        for path in server.folder.rglob("*"):
            if path.is_file():
                assert canary.encode() not in path.read_bytes(), f"a prompt was kept in {path.name}"
