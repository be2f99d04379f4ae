"""The worker process: ``python -m inferd.worker --fd N``, started by the supervisor.

A generating model has twelve threads. The main thread loads the model and runs the step loop. One thread reads the
channel and one writes the outputs of steps. Seven prepare requests and answer calls of the tokenizer, and one loads
adapters (``inferd.worker.intake``). One sends a heartbeat every second. Constrained answers add threads for compiling
and for long masks, and a process that tries their forms. A predictive model has two: once it is loaded, the main thread
reads and computes in turn (``inferd.worker.direct``). The process ends when the other end of its channel is closed, so
it never outlives the gateway.

Signals to whole process groups (SIGINT, SIGTERM, SIGHUP) are ignored: the gateway gets them too, and decides how long
requests in flight may go on. SIGUSR1 writes the stack of every thread to stderr.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec

from inferd import clock
from inferd.backend import HandsOver, PredictiveBackend, PreparingBackend
from inferd.config import ModelConfig
from inferd.errors import CodeFailed, InferdError, ModelLoadError
from inferd.machine.gpus import may_compute_on_gpu, num_visible_gpus
from inferd.machine.memory import rss_bytes
from inferd.machine.parent import die_with
from inferd.machine.weight_memory import WeightMemory
from inferd.types import GenerateRequest, Link
from inferd.worker.channel import BlockingChannel, ChannelError
from inferd.worker.direct import ChannelClosedError, DirectLoop, wrong_kind
from inferd.worker.dumps import forbid_dumps
from inferd.worker.intake import NUM_FORMING, NUM_TRYING, Intake
from inferd.worker.line_writer import FileTarget, LineWriter, StreamTarget
from inferd.worker.log_lines import JsonLines, Words, trace_text
from inferd.worker.loop import Halt, Inbox, Run, StepLoop, StepsFailedError
from inferd.worker.messages import (
    Cancel,
    Check,
    Detokenize,
    FromWorker,
    HandedOver,
    Heartbeat,
    Leaving,
    Load,
    LoadFailed,
    Loading,
    Outputs,
    Prepare,
    Ready,
    SetAdapters,
    Stop,
    Submit,
    Tokenize,
    ToWorker,
    Withdraw,
)
from inferd.worker.niceness import set_niceness
from inferd.worker.outbox import Outbox

if TYPE_CHECKING:
    from inferd.registry.artifact import Artifact

HEARTBEAT_S = 1.0
LAST_LINES_S = 0.5
PROGRESS_S = 0.05

EXIT_DONE = 0
EXIT_ORPHANED = 2
EXIT_LOAD_FAILED = 3
EXIT_STEPS_FAIL = 4
EXIT_DEFECT = 5

Progress = Callable[[str, int, int], None]
Leave = Callable[[str], None]
AnyBackend = PreparingBackend | PredictiveBackend


class Create(Protocol):
    """Makes a model's backend. ``weight_memory``: what a spare worker reserved for the weights; None: nothing. ``far``:
    where ranks on other machines are reached; empty: there are none. ``leaving``: tells why the process is about to
    end."""

    def __call__(
        self,
        name: str,
        config: ModelConfig,
        progress: Progress,
        weight_memory: WeightMemory | None = None,
        far: str = "",
        leaving: Leave = ...,
        /,
    ) -> AnyBackend: ...


_OF_TEXTS = ("torch", "tokenizers")  # what the extra llm installs, and engines and encoders import at their top
_log = logging.getLogger("inferd.worker")


def create_backend(
    name: str,
    config: ModelConfig,
    progress: Progress,
    weight_memory: WeightMemory | None = None,
    far: str = "",
    leaving: Leave = lambda why: None,
) -> AnyBackend:
    """The model's backend, by what its files are. Imported here: nothing else in this room knows torch or a runtime."""
    from inferd.registry.artifact import artifact_of

    progress("files", 0, 0)
    artifact = artifact_of(config, progress)
    progress("import", 0, 0)
    try:
        return _created(name, artifact, config, progress, weight_memory, far, leaving)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if artifact.runtime not in ("llm", "encoder") or package not in _OF_TEXTS:
            raise
        raise ModelLoadError(
            f"A model of texts needs the package {package}, which is not installed; pip install 'inferd[llm]'.",
            param="runtime",
        ) from None


def prepare_for(config: ModelConfig) -> WeightMemory | None:
    """Import what a model needs, without loading it, and reserve the memory of its weights where ``spare_memory`` says
    so. Raises InferdError and ImportError."""
    from inferd.registry.artifact import artifact_of

    artifact = artifact_of(config, lambda phase, done, total: None)
    if artifact.kind == "predict":
        from inferd.predict.load import import_runtime

        import_runtime(artifact.runtime)
        return None
    weight_memory = None
    if config.scaling is not None and config.scaling.spare_memory:
        from inferd.engine.weight_memory import reserve_weight_memory

        weight_memory = reserve_weight_memory(config)
    importlib.import_module("inferd.engine.load")
    return weight_memory


def _on_own_gpus(config: ModelConfig, replica: int) -> ModelConfig:
    """The settings of a replica whose ranks have GPUs of their own."""
    if config.parallel.count == 1 or not may_compute_on_gpu(config.device):
        return config
    from inferd.engine.model.share import own_devices

    return own_devices(config, replica, num_visible_gpus())


def _verified(name: str, config: ModelConfig, progress: Progress) -> tuple[ModelConfig, str]:
    """Settings that load what was verified, and words about it."""
    if config.verify is None and not config.pipeline.models:
        return config, ""
    from inferd.registry.verified import verified  # imported here: most models are not verified

    return verified(name, config, progress)


def _identity(config: ModelConfig) -> str:
    from inferd.registry.identity import identity_of  # imported here: the channel is read sooner

    return identity_of(config)


def _created(
    name: str,
    artifact: Artifact,
    config: ModelConfig,
    progress: Progress,
    weight_memory: WeightMemory | None,
    far: str,
    leaving: Leave,
) -> AnyBackend:
    if artifact.kind == "predict":
        if weight_memory is not None:  # the model's files are others than those that it was reserved for
            weight_memory.close()
        if config.adapters:
            raise ModelLoadError(
                f"{name} has adapters, but only models that generate text take them. Leave adapters out.",
                param="adapters",
            )
        if config.parallel.count > 1:
            raise ModelLoadError(
                f"{name} has parallel, but only models that generate text are divided among ranks. Leave parallel out.",
                param="parallel",
            )
        from inferd.predict.load import load_predictor

        return load_predictor(name, artifact, config, progress)
    if weight_memory is None:
        from inferd.engine.weight_memory import reserve_weight_memory

        weight_memory = reserve_weight_memory(config)  # the system finds it while torch is imported
    from inferd.engine.load import create_backend as create

    return create(name, config, progress, weight_memory, far, leaving)


class Worker:
    """One process's parts, from the channel to the backend."""

    def __init__(self, channel: BlockingChannel, create: Create) -> None:
        self._channel = channel
        self._create = create
        self._inbox: Inbox = queue.SimpleQueue()
        self._load: queue.SimpleQueue[Load | Prepare] = queue.SimpleQueue()
        self._intake: Intake | None = None
        self._loop: StepLoop | DirectLoop | None = None
        self._rank_pids: tuple[int, ...] = ()
        self._take_over, self._taken_over = socket.socketpair()  # closing the first ends the reading thread
        self._is_taken_over = False

    def run(self) -> int:
        """Load the model and serve until Stop; the exit code."""
        reader = self._start("read", self._read)
        load, weight_memory = self._loaded()
        self._start("heartbeat", self._beat)
        set_niceness(load.model.priority)  # before the model starts threads, which inherit it
        try:
            # Before the files are read: a change while they are read is then seen as a change later.
            artifact = _identity(load.model)
            progress = self._progress()
            model, words = _verified(load.name, load.model, progress)
            model = _on_own_gpus(model, load.replica)
            backend = self._create(load.name, model, progress, weight_memory, load.far, self._leave)
            if load.link is not None and not isinstance(backend, HandsOver):
                raise ModelLoadError(
                    f"{load.name} has roles, but only models that generate text have prompts to hand over. Leave roles "
                    "out.",
                    param="roles",
                )
        except InferdError as error:
            code = error.__cause__ if isinstance(error.__cause__, CodeFailed) else None
            trace = trace_text(code.__cause__) if code is not None and code.__cause__ is not None else ""
            self._send(LoadFailed(error.to_failure(), trace))
            return EXIT_LOAD_FAILED
        except Exception as error:
            failure = ModelLoadError(f"The model could not be loaded: {type(error).__name__}: {error}.")
            self._send(LoadFailed(failure.to_failure(), "".join(traceback.format_exception(error)).rstrip()))
            return EXIT_LOAD_FAILED
        gc.freeze()  # the loaded model stays, so the garbage collector need not examine it again
        gc.enable()
        known = {"artifact": artifact, "verified": words}
        if isinstance(backend, PreparingBackend):
            return self._generate(backend, known, load.link)
        self._is_taken_over = True
        self._take_over.close()
        reader.join()
        return self._predict(backend, known)

    def _loaded(self) -> tuple[Load, WeightMemory | None]:
        """The model to load, and the memory of its weights. Until it is named, what it needs is prepared."""
        weight_memory = None
        while True:
            message = self._load.get()
            if isinstance(message, Load):
                _name_log(f"{message.name}/{message.replica}")
                return message, weight_memory
            try:
                weight_memory = prepare_for(message.model)
            except (InferdError, ImportError) as error:  # the load says it
                _log.warning("a spare worker could not prepare what its model needs: %s", error)

    def _generate(self, backend: PreparingBackend, known: dict[str, str], link: Link | None) -> int:
        """Serve a generating model, with threads for reading, preparing and writing. ``known``: of its files."""
        if link is not None and isinstance(backend, HandsOver):
            backend.open_link(
                link,
                lambda action: self._inbox.put(Run(action)),
                lambda handed: self._send(HandedOver(handed)),
            )
        intake = Intake(backend, self._inbox, self._send)
        outbox = Outbox(self._channel)
        loop = StepLoop(backend, self._inbox, lambda outputs: outbox.post([outputs]))
        writer = self._start("write", outbox.run)
        self._start("prepare", intake.run)
        for number in range(NUM_FORMING):
            self._start(f"prepare-form-{number}", intake.run_formed)
        for number in range(NUM_TRYING):
            self._start(f"try-form-{number}", intake.run_tried)
        self._start("tokenize", intake.run_calls)
        self._start("adapters", intake.run_adapters)
        self._intake, self._loop, self._rank_pids = intake, loop, backend.info.rank_pids
        self._send(Ready(msgspec.structs.replace(backend.info, **known)))
        try:
            loop.run()
        except StepsFailedError as error:
            _log.critical("%s The worker ends, and another one replaces it.", error)
            return EXIT_STEPS_FAIL
        finally:
            outbox.close()
            writer.join()
        return EXIT_DONE

    def _predict(self, backend: PredictiveBackend, known: dict[str, str]) -> int:
        """Serve a predictive model, in this thread. ``known``: of its files."""
        # The requests of a batch are many objects, none of which the collector could free.
        gc.set_threshold(20_000, *gc.get_threshold()[1:])
        loop = self._loop = DirectLoop(backend, self._channel.socket, self._channel.frames, self._send)
        self._send(Ready(msgspec.structs.replace(backend.info, **known)))
        try:
            loop.run()
        except ChannelClosedError:
            return EXIT_ORPHANED
        except ChannelError as error:
            _log.critical("the gateway's channel broke: %s", error)
            return EXIT_ORPHANED
        return EXIT_DONE

    # -- threads ----------------------------------------------------------------------------

    def _start(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except OSError:
                _exit(EXIT_ORPHANED)  # the gateway closed the channel
            except BaseException:
                _log.critical("the %s thread failed", name, exc_info=True)
                _exit(EXIT_DEFECT)

        thread = threading.Thread(target=guarded, name=f"inferd-{name}", daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        try:
            for messages in self._channel.receive_until(self._taken_over):
                for message in messages:
                    self._handle(message)
        except ChannelError as error:
            _log.critical("the gateway's channel broke: %s", error)
        if not self._is_taken_over:
            _exit(EXIT_ORPHANED)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Load() | Prepare():
                self._load.put(message)
                return
            case Stop() if self._loop is None:
                _exit(EXIT_DONE)  # while loading, which cannot be interrupted otherwise
            case Stop():
                self._inbox.put(Halt())
                return
        intake = self._intake
        if intake is None:
            _log.error("a %s came before the model was ready", type(message).__name__)
            return
        match message:
            case Submit(GenerateRequest() as request):
                intake.submit(request)
            case Submit(request):
                self._send(Outputs([wrong_kind(request, "This model generates text; it makes no predictions.")]))
            case Cancel(request_id):
                intake.cancel(request_id)
            case Tokenize() | Detokenize() | Check():
                intake.call(message)
            case Withdraw(call_id):
                intake.withdraw(call_id)
            case SetAdapters():
                intake.set_adapters(message)

    def _beat(self) -> None:
        pause = threading.Event()
        while True:
            loop, intake = self._loop, self._intake
            steps, busy = 0, False
            if loop is not None:
                steps, busy = loop.steps, loop.is_busy
            if intake is not None:
                steps, busy = steps + intake.num_done, busy or intake.is_busy
            self._send(Heartbeat(steps, busy, rss_bytes() + sum(map(rss_bytes, self._rank_pids))))
            pause.wait(HEARTBEAT_S)

    def _leave(self, why: str) -> None:
        """Tell the gateway why the process is about to end, if it reads."""
        self._start("leave", lambda: self._send(Leaving(why))).join(LAST_LINES_S)

    def _send(self, message: FromWorker) -> None:
        self._channel.send([message])

    def _progress(self) -> Progress:
        """Report the progress of loading to the gateway, every PROGRESS_S at most."""
        sent_phase, sent_at = "", 0.0

        def report(phase: str, done: int, total: int) -> None:
            nonlocal sent_phase, sent_at
            now = clock.now()
            if phase != sent_phase or done == total or now - sent_at >= PROGRESS_S:
                sent_phase, sent_at = phase, now
                self._send(Loading(phase, done, total, now))

        return report


def _exit(code: int) -> NoReturn:
    """End the process at once, from any thread, without waiting for the teardown of the model's libraries. The lines of
    the log get ``LAST_LINES_S`` to be written."""
    for handler in logging.getLogger().handlers:
        handler.close()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _LogHandler(logging.Handler):
    """Sends Python's logging into a log that blocks no caller, whatever its reader or disk does."""

    def __init__(self, log: LineWriter) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write(self.format(record))

    def close(self) -> None:
        """Write the lines that wait."""
        self._log.close(LAST_LINES_S)
        super().close()


def _begin_log(name: str, *, as_json: bool, level: str, file: str | None) -> None:
    """Log as the gateway does: to the stderr that the worker shares with it, or to the same file. What libraries write
    to stderr by themselves stays there."""
    target = StreamTarget(sys.stderr) if file is None else FileTarget(file)
    handler = _LogHandler(LineWriter(target, _count_nothing, gather_s=0.0))
    handler.setFormatter(JsonLines(name) if as_json else Words(name))
    logging.basicConfig(handlers=[handler], level=level.upper())


def _name_log(name: str) -> None:
    """Name the worker in the log from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLines | Words):
            handler.formatter.worker = name


def _count_nothing() -> None:
    """The log itself says how many lines were dropped; a worker has no metrics."""


def main(argv: Sequence[str] | None = None, create: Create = create_backend) -> NoReturn:
    """The process's entry. ``create`` makes the backend; tests put a small one there."""
    parser = argparse.ArgumentParser(prog="inferd.worker", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="this end of the channel")
    parser.add_argument("--parent", type=int, required=True, help="the supervisor's process id")
    parser.add_argument("--name", required=True, help="model/replica, shown in process lists and logs")
    parser.add_argument("--json-log", action="store_true", help="write log records as JSON lines, not as words")
    parser.add_argument("--log-level", default="info", help="lowest level of its log records")
    parser.add_argument("--log-file", help="file for its log records, instead of stderr")
    options = parser.parse_args(argv)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if not die_with(options.parent):  # also while the channel is not read
        _exit(EXIT_ORPHANED)
    forbid_dumps()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _begin_log(options.name, as_json=options.json_log, level=options.log_level, file=options.log_file)
    os.set_inheritable(options.fd, False)
    channel = BlockingChannel(socket.socket(fileno=options.fd))
    code = EXIT_DEFECT
    try:
        code = Worker(channel, create).run()
    except OSError as error:
        _log.warning("the gateway is gone: %s", error)
        code = EXIT_ORPHANED
    except Exception:
        _log.critical("the worker failed", exc_info=True)
    _exit(code)
