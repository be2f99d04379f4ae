"""A gRPC listener around the gateway's fake router, in a thread; and tensors for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import msgspec
import uvloop
from tests.gateway.fakes import FakeRouter, FakeStatus, FakeStream, Told, info
from tests.gateway.grpc.messages import message_type, with_parameters

from inferd.config import Config, ServerConfig
from inferd.gateway.grpc.server import GrpcServer
from inferd.gateway.server import create_app
from inferd.http.listener import reserve
from inferd.types import End, Output, Prediction, PredictRequest, Relay, Request, Sink, TensorSpec, Timings, Usage

SERVICE = "inference.GRPCInferenceService"
Answer = Callable[[PredictRequest], Sequence[Output]]


def predicted(request: PredictRequest) -> list[Output]:
    """One answer, which has the request's id for its bytes of an output."""
    message: Any = message_type("ModelInferResponse")(model_name=request.model, raw_output_contents=[b"!"])
    message.id = message_type("ModelInferRequest").FromString(request.body).id  # type: ignore[attr-defined]
    end = End("done", Usage(3), Timings(dispatched=0.001, finished=0.002))
    return [Output(request.id, (), None, end, Prediction(message.SerializeToString()))]


class PredictingRouter(FakeRouter):
    """Has a model that computes (``digits``) beside the one that writes (``tiny``)."""

    def __init__(self, *names: str) -> None:
        super().__init__(*(names or ("tiny",)))
        known = msgspec.structs.replace(
            info("digits"),
            kind="predict",
            platform="onnxruntime_onnx",
            tasks=("predict",),
            inputs=(TensorSpec("x", "FP32", (-1, 4)),),
            outputs=(TensorSpec("y", "FP32", (-1, 2)),),
            max_batch_size=8,
        )
        self.statuses = [*self.statuses, FakeStatus("digits", info=known)]
        self.answer: Answer | None = predicted
        self.defect: Exception | None = None

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> FakeStream:
        if self.defect is not None:
            raise self.defect
        if not isinstance(request, PredictRequest):
            return super().submit(request, sink, relay)
        if self.refusal is not None:
            raise self.refusal
        stream = FakeStream(request, sink)
        for output in self.answer(request) if self.answer is not None else ():
            asyncio.get_running_loop().call_soon(stream.put, output)
        self.streams.append(stream)
        self.submitted.release()
        return stream


class GrpcRunning(Told):
    """Its listener, and what it told its observer."""

    def __init__(self, router: PredictingRouter, config: Config | ServerConfig, app: dict[str, Any]) -> None:
        self.router = router
        super().__init__()
        self._config = config
        self._app = app
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        gateway = create_app(self.router, self._config, self.emit, **self._app)
        server = self._config.server if isinstance(self._config, Config) else self._config
        reserved = reserve(server)
        assert reserved is not None
        self.server = GrpcServer(gateway, server, reserved)
        await self.server.start()
        self.port = self.server.port
        self._started.set()
        await self.server.serve()

    def reset(self) -> GrpcRunning:
        self.router.reset()
        self.forget()
        return self

    def start(self) -> GrpcRunning:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def begin_stop(self, *, now: bool = False) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended already
            self.loop.call_soon_threadsafe(lambda: self.server.stop(now=now))

    def stop(self) -> None:
        self.begin_stop()
        self.begin_stop(now=True)
        self.ended()

    def ended(self, seconds: float = 10) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive()

    def put(self, stream: FakeStream, item: Output) -> None:
        """Let a stream say something, from the test's thread."""
        self.loop.call_soon_threadsafe(stream.put, item)

    @contextlib.contextmanager
    def channel(self, *options: tuple[str, Any]) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            yield channel


@contextlib.contextmanager
def running(
    router: PredictingRouter | None = None, config: Config | ServerConfig | None = None, **app: Any
) -> Iterator[GrpcRunning]:
    """``app``: what ``create_app`` gets besides router and configuration."""
    chosen = config if config is not None else ServerConfig(port=0, grpc_port=0, grace_s=1)
    server = GrpcRunning(router or PredictingRouter(), chosen, app).start()
    try:
        yield server
    finally:
        server.stop()


def infer_request(model: str = "digits", **fields: Any) -> Any:
    """A ModelInferRequest of one tensor; ``parameters`` are given as plain values."""
    parameters = fields.pop("parameters", {})
    message: Any = message_type("ModelInferRequest")(model_name=model, **fields)
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([1, 2, 3, 4])
    return with_parameters(message, parameters)


def text_request(text: str, **parameters: Any) -> Any:
    message: Any = message_type("ModelInferRequest")(model_name="tiny", id="t")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    return with_parameters(message, parameters)


def unary(channel: grpc.Channel, name: str, message: Any = None, **call: Any) -> Any:
    """Call a method of one answer; the answer's message."""
    return unary_future(channel, name, message, **call).result()


def unary_future(channel: grpc.Channel, name: str, message: Any = None, **call: Any) -> Any:
    asked = message if message is not None else message_type(f"{name}Request")()
    method: Any = channel.unary_unary(
        f"/{SERVICE}/{name}",
        request_serializer=lambda request: request if isinstance(request, bytes) else request.SerializeToString(),
        response_deserializer=message_type(f"{name}Response").FromString,
    )
    call.setdefault("timeout", 20)
    return method.future(asked, **call)


def stream(channel: grpc.Channel, requests: Iterator[Any], **call: Any) -> Any:
    """ModelStreamInfer: the iterator of answers."""
    method: Any = channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer",
        request_serializer=lambda request: request if isinstance(request, bytes) else request.SerializeToString(),
        response_deserializer=message_type("ModelStreamInferResponse").FromString,
    )
    call.setdefault("timeout", 20)
    return method(requests, **call)
