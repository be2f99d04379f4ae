"""The fake at the bottom of the gateway's tests: a router whose answers are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import httpx
import msgspec
import uvloop

from inferd.autoscale.controller import ScalingReport
from inferd.config import Config, ModelConfig, ServerConfig
from inferd.config.versioning import MlflowConfig
from inferd.drift.monitors import DriftReport
from inferd.drift.reference import Reference, StreamReference
from inferd.errors import InferdError, InvalidRequest, ModelNotFound, StateUnavailable, Unauthenticated
from inferd.events import Event, HttpServed, ignore
from inferd.gateway.control import ModelReport, ReloadReport, ReplicaReport, ServerReport, UnloadReport
from inferd.gateway.server import create_app
from inferd.gateway.upstream import ModelState
from inferd.http.listener import HttpServer
from inferd.lifecycle.actions import Changed, NewFiles, RegistryActions
from inferd.lifecycle.contract_diff import Contract
from inferd.lifecycle.registry import Attachable, Entry, Version
from inferd.lifecycle.stages import Action, Record
from inferd.lifecycle.webhooks import Webhooks
from inferd.nodes.listener import NewToken, NodeReport
from inferd.observe import MetricsPage
from inferd.observe.startup import LoadReport, Phase, StartReport, StartupReport
from inferd.rollout.machine import Command, Progress
from inferd.rollout.rollouts import RolloutReport
from inferd.state.audit import AuditEntry
from inferd.tenancy.keys import KeyInfo, KeySpec, NewKey, check_not_stronger, check_spec
from inferd.tenancy.principal import Principal
from inferd.types import (
    Chat,
    Delta,
    End,
    GenerateRequest,
    Item,
    ModelInfo,
    Output,
    Prediction,
    PredictRequest,
    PromptReport,
    Relay,
    Relayed,
    Request,
    Sink,
    TextPrompt,
    Timings,
    TokenLogprob,
    TokenPrompt,
    TopLogprob,
    Usage,
)

TURNS: Final = 4  # of the event loop, in which a reader takes an item


class FakeStatus(msgspec.Struct):
    name: str
    state: ModelState = "ready"
    info: ModelInfo | None = None
    replicas: int = 1
    replicas_ready: int = 1
    detail: str = ""
    created: float = 1_700_000_000.0
    waiting: int = 0
    in_flight: int = 0
    load: Literal["startup", "on_demand"] = "startup"
    has_local: bool = True
    has_remote: bool = False
    memory_bytes: int = 0
    parent: str = ""


def info(name: str) -> ModelInfo:
    return ModelInfo(
        name=name,
        source="/secret/folder",
        architecture="Fake",
        dtype="float32",
        max_model_len=128,
        vocab_size=1000,
        num_parameters=1,
        num_blocks=1,
        block_size=16,
        max_num_seqs=4,
        fingerprint="fp_fake",
    )


class FakeStream:
    """A request that was submitted, whose items a test puts; ``closed`` says whether the gateway let go.

    As the router's do, it comes to an end in any case: one that is cancelled has cost ``usage``.
    """

    def __init__(self, request: Request, sink: Sink) -> None:
        self.given = request
        self.closed = threading.Event()
        self.usage = Usage()
        self.end: End | None = None
        self._sink = sink
        self._tell: Callable[[], None] | None = None

    @property
    def request(self) -> GenerateRequest:
        assert isinstance(self.given, GenerateRequest)
        return self.given

    def put(self, item: Item | InferdError | None) -> None:
        if self.end is not None:
            return
        if item is None:
            return
        if isinstance(item, InferdError):
            item = Output(self.given.id, (), None, End("failed", self.usage, failure=item.to_failure()))
        self.end = item.end
        self._sink.deliver(item)
        if self.end is not None and self._tell is not None:
            self._tell()

    def say(self, items: Sequence[Item | InferdError | None]) -> None:
        """Put the items one after the other, none before the caller is back; a reader that is not slow sees each alone."""

        def after(turns: int, position: int) -> None:
            if turns:
                loop.call_soon(after, turns - 1, position)
            elif position < len(items):
                self.put(items[position])
                after(TURNS, position + 1)

        loop = asyncio.get_running_loop()
        after(1, 0)

    def when_over(self, listener: Callable[[], None]) -> None:
        assert self.end is None
        self._tell = listener

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def cancel(self) -> None:
        self.put(Output(self.given.id, (), None, End("cancelled", self.usage)))
        self.closed.set()


Script = Callable[[GenerateRequest], Sequence[Output | InferdError | None]]
RelayScript = Callable[[Request, Relay], Sequence[Relayed]]


def logprob(token: str, value: float = -0.5, top: int = 0, token_id: int = 7) -> TokenLogprob:
    raw = token.encode()
    alternatives = tuple(TopLogprob(token_id + i, token if i == 0 else f"alt{i}", raw, value - i) for i in range(top))
    return TokenLogprob(token_id, token, raw, value, 1, alternatives)


def words(*pieces: str, finish: str = "stop") -> Script:
    """A script that says the pieces, one output each, in every choice."""

    def script(request: GenerateRequest) -> list[Output]:
        sampling = request.sampling
        prompt_ids = request.prompt.token_ids if isinstance(request.prompt, TokenPrompt) else [1, 2, 3]
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = (None, *(logprob(f"t{i}", -1.0 * i, sampling.prompt_logprobs) for i in prompt_ids[1:]))
        report = PromptReport(
            len(prompt_ids),
            cached_tokens=1,
            token_ids=tuple(prompt_ids) if request.return_prompt_ids else None,
            logprobs=prompt_logprobs,
            text="".join(f"t{i}" for i in prompt_ids) if request.return_prompt_ids else None,
        )
        said = pieces if sampling.max_tokens != 0 else ()
        outputs: list[Output] = []
        for number, piece in enumerate(said):
            last = number == len(said) - 1
            wanted = (logprob(piece, top=sampling.logprobs),) if sampling.logprobs is not None else None
            deltas = tuple(
                Delta(i, piece, (100 + number,), wanted, finish if last else None, None)  # type: ignore[arg-type]
                for i in range(sampling.n)
            )
            outputs.append(Output(request.id, deltas, report if number == 0 else None))
        usage = Usage(len(prompt_ids), len(said) * sampling.width, 1)
        end = End("done", usage, Timings(dispatched=0.001, first_token=0.01, finished=0.02))
        if not said:
            outputs.append(
                Output(request.id, tuple(Delta(i, finish_reason="length") for i in range(sampling.n)), report, end)
            )
        else:
            last_output = outputs[-1]
            outputs[-1] = Output(last_output.request_id, last_output.deltas, last_output.prompt, end)
        return outputs

    return script


class FakeRouter:
    """Records what is submitted and answers by script; without one, streams stay open."""

    def __init__(self, *names: str) -> None:
        self.statuses = [FakeStatus(name, info=info(name)) for name in names or ("tiny",)]
        self.script: Script | None = words("Hello", " world", "!")
        self.relay_script: RelayScript | None = None  # for requests that may be relayed
        self.prediction = Prediction(b'{"said":"this"}')  # the answer to every request for one
        self.relays: list[Relay | None] = []
        self.num_listed = 0  # times that all models were looked at
        self.checked: list[int] = []  # lists of requests, by their lengths
        self.refusal: InferdError | None = None
        self.draining = False
        self.streams: list[FakeStream] = []
        self.submitted = threading.Semaphore(0)

    def reset(self) -> None:
        """As new, for the next test on the same server."""
        self.__init__(*(status.name for status in self.statuses))  # type: ignore[misc]

    @property
    def last(self) -> GenerateRequest:
        return self.streams[-1].request

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        stream = FakeStream(request, sink)
        self.streams.append(stream)
        self.relays.append(relay)
        items: Sequence[Item | InferdError | None] = ()
        if relay is not None and self.relay_script is not None:
            items = self.relay_script(request, relay)
        elif isinstance(request, PredictRequest):
            end = End("done", timings=Timings(dispatched=0.001, scheduled=0.002, first_token=0.003, finished=0.004))
            items = [Output(request.id, end=end, prediction=self.prediction)]
        elif self.script is not None:
            assert isinstance(request, GenerateRequest)
            items = self.script(request)
        stream.say(items)
        self.submitted.release()
        return stream

    async def check(self, requests: list[GenerateRequest]) -> None:
        self.checked.append(len(requests))

    async def tokenize(
        self, model: str, prompt: Chat | TextPrompt, *, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]:
        self._known(model)
        text = prompt.text if isinstance(prompt, TextPrompt) else "".join(m["content"] for m in prompt.messages)
        return [ord(c) for c in text], list(text) if want_strings else None

    async def detokenize(self, model: str, token_ids: list[int]) -> str:
        self._known(model)
        return "".join(f"t{i}" for i in token_ids)

    def models(self) -> list[FakeStatus]:
        self.num_listed += 1
        return self.statuses

    def adapters(self) -> list[FakeStatus]:
        return []

    def model(self, name: str) -> FakeStatus | None:
        return next((status for status in self.statuses if status.name == name), None)

    def _known(self, model: str) -> None:
        if all(s.name != model for s in self.statuses):
            raise ModelNotFound(f"No {model}.")


class FakePermit:
    """Remembers what it was told."""

    def __init__(self, principal: Principal, model: str, prompt_tokens: int, max_tokens: int) -> None:
        self.principal = principal
        self.model = model
        self.reserved = (prompt_tokens, max_tokens)
        self.known: int | None = None
        self.settled: list[tuple[Usage | None, str]] = []
        self.over = threading.Event()

    def learned(self, prompt_tokens: int) -> None:
        self.known = prompt_tokens

    def settle(self, usage: Usage | None, outcome: str) -> None:
        self.settled.append((usage, outcome))
        self.over.set()

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"x-ratelimit-limit-requests", b"10"), (b"x-ratelimit-remaining-requests", b"9"))


class FakeDoor:
    """Knows the keys it is given, and refuses every request while ``refusal`` is set."""

    def __init__(self, keys: dict[str, Principal]) -> None:
        self.keys = keys
        self.asked: list[str | None] = []
        self.permits: list[FakePermit] = []
        self.refusal: InferdError | None = None

    def authenticate(self, token: str | None) -> Principal:
        self.asked.append(token)
        if token is None or token not in self.keys:
            raise Unauthenticated("A valid API key is needed; send it as 'Authorization: Bearer KEY'.")
        return self.keys[token]

    def holder(self, key_id: str) -> Principal | None:
        return next((principal for principal in self.keys.values() if principal.key_id == key_id), None)

    def admit(
        self, principal: Principal, request_id: str, model: str, *, prompt_tokens: int, max_tokens: int
    ) -> FakePermit:
        if self.refusal is not None:
            raise self.refusal
        self.permits.append(FakePermit(principal, model, prompt_tokens, max_tokens))
        return self.permits[-1]


class FakeKeys:
    """Keys in a list; makes what it is told to."""

    def __init__(self) -> None:
        self.keys: list[KeyInfo] = []

    def add(self, spec: KeySpec) -> KeyInfo:
        number = len(self.keys)
        self.keys.append(
            KeyInfo(
                id=f"key{number}",
                prefix=f"sk-inf-key{number}-",
                tenant=spec.tenant,
                name=spec.name,
                state="active",
                scopes=spec.scopes,
                models=spec.models,
                rpm=spec.rpm,
                tpm=spec.tpm,
                max_in_flight=spec.max_in_flight,
                priority=spec.priority,
                created_at=1.0,
                expires_at=_expiry(spec),
                revoked_at=None,
                family=f"key{number}",
            )
        )
        return self.keys[-1]

    async def list_keys(self, tenant: str | None) -> list[KeyInfo]:
        return [info for info in self.keys if tenant is None or info.tenant == tenant]

    async def create_key(self, spec: KeySpec, by: Principal) -> NewKey:
        check_spec(spec)
        check_not_stronger(spec, by, _expiry(spec))
        info = self.add(spec)
        return NewKey(key=info.prefix + "secret", info=info)

    async def revoke_key(self, key_id: str) -> KeyInfo:
        number = next(i for i, info in enumerate(self.keys) if info.id == key_id)
        self.keys[number] = msgspec.structs.replace(self.keys[number], state="revoked", revoked_at=2.0)
        return self.keys[number]

    async def rotate_key(self, key_id: str, overlap_s: float, by: Principal) -> NewKey:
        if overlap_s < 0:
            raise InvalidRequest("overlap_s is below 0.", param="overlap_s")
        old = next(info for info in self.keys if info.id == key_id)
        spec = KeySpec(tenant=old.tenant, rpm=old.rpm, tpm=old.tpm, max_in_flight=old.max_in_flight, models=old.models)
        check_not_stronger(spec, by, old.expires_at)
        info = self.add(spec)
        return NewKey(key=info.prefix + "secret", info=info)


def _expiry(spec: KeySpec) -> float | None:
    return None if spec.expires_in_s is None else time.time() + spec.expires_in_s


class FakeAuditor:
    """An audit log in memory with room for ``room`` lines."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room

    async def record(self, **line: Any) -> int:
        if self.room == 0:
            raise StateUnavailable("No space left on device.", code="audit_unavailable")
        self.room -= 1
        return 1

    def note_refused(self, **refusal: Any) -> None:
        """Refusals are in no line."""

    async def entries(self, *, before: int | None, limit: int) -> Sequence[AuditEntry]:
        return []


_PHASES = [Phase("spawn", 0.0, 0.5), Phase("weights", 0.5, 1.0)]
STARTUP = StartupReport(
    gateway=StartReport(begun_at=1.0, seconds=0.5, is_over=True, phases=[Phase("import", 0.0, 0.5)]),
    loads=[
        LoadReport(model="tiny", replica=0, cause="load", restarts=0, begun_at=1.0, seconds=1.5, state="ready",
                   phases=_PHASES),
        LoadReport(model="team-b", replica=0, cause="restart", restarts=2, begun_at=1.0, seconds=1.5, state="failed",
                   reason="No file /secret.", phases=_PHASES),
    ],
)  # fmt: skip


class FakeRollouts:
    """Writes down what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def reports(self) -> list[RolloutReport]:
        return [self._report("tiny"), self._report("other")]

    async def report(self, model: str) -> RolloutReport:
        return self._report(model)

    async def command(self, model: str, command: Command, actor: str, why: str) -> RolloutReport:
        self.asked.append(f"{model} {command} {actor}: {why}")
        return self._report(model)

    def note_bad(self, model: str, request_id: str) -> None:
        self.asked.append(f"{model} bad {request_id}")

    def _report(self, model: str) -> RolloutReport:
        progress = Progress(state="running", share=0.05, step=0, reason="so it is")
        return RolloutReport(model=model, stable="1", new="2", unit="auto", steps=[5.0, 100.0], progress=progress)


class FakeVersions(RegistryActions):
    """One version of the model tiny."""

    def __init__(self) -> None:
        self._version = Version(
            name="tiny",
            version=1,
            source="/models/tiny",
            digest=f"tree-sha256:{1:064x}",
            num_bytes=1,
            num_files=1,
            contract=Contract(),
            description="",
            tags={},
            run_id="",
            created_at=1.0,
            record=Record(registrant="user:1"),
        )

    async def versions(self, name: str | None) -> list[Version]:
        return [self._version]

    async def find(self, name: str, ref: str) -> Version:
        return self._version

    async def history(self, name: str, before: int | None, limit: int) -> list[Entry]:
        version = self._version
        return [
            Entry(
                number=1,
                at="2026-01-01T00:00:00.000Z",
                actor="user:1",
                action="register",
                name=name,
                version=version.version,
                digest=version.digest,
                before="",
                stage="registered",
            )
        ]

    async def move(self, name: str, ref: str, action: Action, *, actor: str, reason: str, override: str) -> Changed:
        return Changed(version=self._version, line=1, hash="0" * 64)

    async def attach(
        self,
        name: str,
        ref: str,
        kind: Attachable,
        report: Mapping[str, Any],
        *,
        passed: bool,
        summary: str,
        actor: str,
    ) -> Changed:
        return Changed(version=self._version, line=1, hash="0" * 64)

    async def register(self, name: str, asked: NewFiles, *, actor: str) -> Changed:
        return Changed(version=self._version, line=1, hash="0" * 64)

    async def verify(self, name: str, ref: str, *, actor: str) -> Changed:
        return Changed(version=self._version, line=1, hash="0" * 64)

    async def alias(self, name: str, alias: str, ref: str | None, *, actor: str) -> Changed:
        return Changed(version=self._version, line=1, hash="0" * 64)


class FakeDrift:
    """Writes down what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def reports(self) -> list[DriftReport]:
        return [self.report("tiny"), self.report("other")]

    def report(self, entry: str) -> DriftReport:
        return DriftReport(
            model=entry,
            version="1",
            state="watching",
            requests=1000,
            wanted=1000,
            false_alarm_days=30.0,
            reference_version="1",
            reference_at=1.0,
            streams=[],
        )

    def reference(self, entry: str) -> Reference:
        counts = StreamReference(names=("a",), counts=(990, 10))
        return Reference(model=entry, version="1", requests=1000, taken_at=1.0, streams={"label": counts})

    async def reset(self, entry: str) -> DriftReport:
        self.asked.append(entry)
        return self.report(entry)


class FakeScaling:
    """One model, whose number of replicas follows its load."""

    def reports(self) -> Sequence[ScalingReport]:
        return [self.report("tiny")]

    def report(self, model: str) -> ScalingReport:
        if model != "tiny":
            raise InvalidRequest(f"The model {model!r} has a fixed number of replicas.", param="model")
        return ScalingReport(model=model, min=1, max=4, desired=2, ready=1, starting=1, rule="panic", reason="9 of 4")


class FakeNodes:
    """One node, and a token."""

    def reports(self) -> Sequence[NodeReport]:
        return [
            NodeReport(
                name="one",
                state="ready",
                address="10.0.0.2:4000",
                version="1",
                joined_at=1.0,
                num_cores=2,
                memory_bytes=100,
                num_gpus=0,
                labels={"zone": "a"},
                workers=1,
                heartbeat_age_s=0.1,
                sent_bytes=1,
                received_bytes=2,
            )
        ]

    def new_token(self, *, revoke: bool) -> NewToken:
        token = "revoked" if revoke else "new"
        return NewToken(token=token, address="gateway:8001", command="inferd node", expires_at=1.0)


class FakeAdapters:
    """Adapters by name; a path with "bad" in it cannot be loaded."""

    def __init__(self) -> None:
        self.loaded: dict[str, tuple[str, str, bool]] = {}

    async def load(self, name: str, source: str, model: str, *, in_place: bool) -> None:
        if "bad" in source:
            raise InvalidRequest("It cannot be loaded.", param="lora_path")
        self.loaded[name] = (source, model, in_place)

    async def unload(self, name: str) -> None:
        if self.loaded.pop(name, None) is None:
            raise ModelNotFound(f"No adapter {name!r} is loaded.", param="lora_name")


class FakeControl:
    """Writes down what was asked of it."""

    def __init__(self) -> None:
        self.versions: RegistryActions = FakeVersions()
        self.keys = FakeKeys()
        self.rollouts = FakeRollouts()
        self.scaling = FakeScaling()
        self.nodes = FakeNodes()
        self.adapters = FakeAdapters()
        self.drift = FakeDrift()
        self.webhooks = Webhooks(MlflowConfig, lambda: self.asked.append("look"), time.time, ignore)
        self.asked: list[str] = []
        self.problems: tuple[str, ...] = ()
        self.failed: tuple[str, ...] = ()

    def status(self) -> ServerReport:
        return ServerReport(
            status="serving",
            version="1",
            pid=1,
            started_at=1.0,
            config_path=None,
            last_reload=None,
            reload_since=None,
            memory_bytes=5,
            memory_budget_bytes=None,
            models=[self._report("tiny")],
        )

    def startup(self) -> StartupReport:
        return STARTUP

    def drain(self) -> None:
        self.asked.append("drain")

    async def reload(self) -> ReloadReport:
        return ReloadReport(at=1.0, accepted=not self.problems, details=self.problems, failed=self.failed)

    async def load(self, model: str) -> ModelReport:
        self.asked.append(f"load {model}")
        return self._report(model)

    async def override(self, model: str, config: ModelConfig) -> None:
        self.asked.append(f"override {model} {config.batching.max_batch_size}")

    async def unload(self, model: str) -> UnloadReport:
        self.asked.append(f"unload {model}")
        return UnloadReport(model=model, freed_bytes=7)

    async def restart(self, model: str) -> ModelReport:
        self.asked.append(f"restart {model}")
        return self._report(model)

    def _report(self, name: str) -> ModelReport:
        replica = ReplicaReport(index=0, kind="local", name="worker 0", state="ready")
        return ModelReport(
            name=name, state="ready", load="startup", replicas_ready=1, replicas=[replica], waiting=0, in_flight=0
        )


class Told:
    """What a listener tells its observer."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.emitted = threading.Semaphore(0)

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.emitted.release()

    def served(self) -> HttpServed:
        """The next HttpServed event, waited for."""
        assert self.emitted.acquire(timeout=10), "no event was emitted"
        event = self.events[-1]
        assert isinstance(event, HttpServed)
        return event

    def forget(self) -> None:
        self.events.clear()
        self.emitted = threading.Semaphore(0)


async def fake_metrics(accept: str) -> MetricsPage:
    return MetricsPage(b"# metrics\n", "text/plain; version=0.0.4; charset=utf-8")


class Running(Told):
    """A gateway on a real socket in a thread, and what it told its observer."""

    def __init__(
        self, router: FakeRouter, config: Config | ServerConfig | None = None, app: Mapping[str, Any] | None = None
    ) -> None:
        self.router = router
        super().__init__()
        self._config = config or ServerConfig(port=0, grace_s=1)
        self._app = dict(app or {})
        self._started = threading.Event()
        self.http = httpx.Client(timeout=10, trust_env=False)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.app = create_app(self.router, self._config, self.emit, **{"metrics": fake_metrics, **self._app})
        server = self._config.server if isinstance(self._config, Config) else self._config
        server = msgspec.structs.replace(server, port=0)  # the default port may be in use
        self.server = HttpServer(self.app, server, emit=self.emit)
        self.port = self.server.port
        self._started.set()
        await self.server.serve()

    def reset(self) -> Running:
        """Forget what earlier tests did, so that they can share a server."""
        self.router.reset()
        self.forget()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Running:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def stop(self) -> None:
        self.http.close()
        with contextlib.suppress(RuntimeError):  # a test has stopped it already
            self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def put(self, stream: FakeStream, item: Item | InferdError | None) -> None:
        """Let a stream say something, from the test's thread."""
        self.loop.call_soon_threadsafe(stream.put, item)


@contextlib.contextmanager
def running(
    router: FakeRouter | None = None, config: Config | ServerConfig | None = None, **app: Any
) -> Iterator[Running]:
    """``app``: what ``create_app`` gets besides router and configuration."""
    server = Running(router or FakeRouter(), config, app).start()
    try:
        yield server
    finally:
        server.stop()


def sse(text: str) -> list[Any]:
    """The decoded events of a stream; the framing must be exact."""
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames), frames
    return [frame if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def post(server: Running, path: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.http.post(server.url + path, content=content, headers={"content-type": "application/json", **headers})
