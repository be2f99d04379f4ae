"""Offline use: a model in this process, without a server.

    from inferd import LLM, SamplingParams
    with LLM("demo") as llm:
        for completion in llm.generate(["Once upon a time", "1 + 1 ="], SamplingParams(max_tokens=32)):
            print(completion.text)

Drives a backend as a worker's loop does. Does not know HTTP or processes.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, get_args

import msgspec

from inferd import clock
from inferd.answer_form import AnswerForm, Constraint
from inferd.backend import UsesIdleTime
from inferd.config import DType, ModelConfig, model_name, single_model_config
from inferd.config.tree import Text
from inferd.errors import InferdError, InvalidRequest, ModelLoadError, from_failure
from inferd.types import (
    JSON,
    Chat,
    Delta,
    End,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    Output,
    Prompt,
    PromptReport,
    SamplingParams,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    Usage,
)

if TYPE_CHECKING:
    from inferd.backend import PreparingBackend

PromptInput = str | list[int]
Conversation = list[JSON]


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One generated text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None: the request failed
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The completions of one prompt. ``outputs`` has ``sampling.n`` entries."""

    prompt: PromptInput | Conversation
    outputs: tuple[CompletionOutput, ...]
    usage: Usage = Usage()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: InferdError | None = None  # why this prompt failed; other prompts are not affected

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text if self.outputs else ""


class LLM:
    """A model loaded into this process.

    ``source`` is a folder, a hub id, or 'demo'. The keyword arguments are the main fields of ModelConfig; ``config``
    replaces all of them. Raises ModelLoadError or ConfigError.
    """

    def __init__(
        self,
        source: str = "demo",
        *,
        dtype: DType = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        kv_cache_memory: int | str | None = None,
        threads: int | None = None,
        chat_template: str | None = None,
        seed: int | None = None,
        config: ModelConfig | None = None,
        progress: bool = True,
    ) -> None:
        name = model_name(source)
        if config is None:
            scheduler = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
            kv_cache: dict[str, object] = {}
            if kv_cache_memory is not None:
                kv_cache["memory_bytes"] = (
                    Text(kv_cache_memory) if isinstance(kv_cache_memory, str) else kv_cache_memory
                )
            settings: dict[str, object] = {
                "dtype": dtype,
                "device": device,
                "max_model_len": max_model_len,
                "threads": threads,
                "chat_template": chat_template,
                "seed": seed,
                "scheduler": scheduler,
                "kv_cache": kv_cache,
            }
            config = single_model_config(source, name=name, model=settings).models[name]
        self._start(_load(name, config, progress))

    @classmethod
    def over(cls, backend: PreparingBackend) -> LLM:
        """An LLM that uses a loaded engine; ``close`` closes the engine."""
        made = cls.__new__(cls)
        made._start(backend)
        return made

    def _start(self, backend: PreparingBackend) -> None:
        self._backend = backend
        self._lock = threading.RLock()
        self._ids = itertools.count()
        self._running: dict[str, _Collected] = {}
        self._is_closed = False
        self._is_idle = threading.Event()  # no request is running or about to start
        self._is_idle.set()
        if isinstance(backend, UsesIdleTime):
            is_leaving = threading.Event()
            arguments = (backend, is_leaving)
            ahead = threading.Thread(target=self._use_idle_time, args=arguments, name="inferd-ahead", daemon=True)
            ahead.start()
            # Python aborts when it exits while a thread computes in native code.
            weakref.finalize(self, _end, ahead, is_leaving, self._is_idle)

    @property
    def info(self) -> ModelInfo:
        """The properties of the model."""
        return self._backend.info

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        constraint: Constraint | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete one prompt or many, each a text or token ids. Completions are in the order of the prompts.

        ``sampling`` None uses the model's defaults. ``constraint``: what each completion must be (``inferd.answer_form``).
        All prompts are checked before the first is computed. Raises InvalidRequest, which names the prompt, or the
        field ``at`` of the constraint.
        """
        inputs: list[PromptInput | Conversation] = list(_as_prompts(prompts))
        return self._run(inputs, [_text_or_tokens(prompt) for prompt in inputs], sampling, constraint, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[JSON] | None = None,
        constraint: Constraint | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer one conversation (a list of OpenAI messages) or many, through the model's chat template.

        ``constraint``: what the text of each answer must be, behind its reasoning.
        """
        conversations = _as_conversations(messages)
        chats: list[Prompt] = [Chat(messages=_joined(conversation), tools=tools) for conversation in conversations]
        return self._run(list(conversations), chats, sampling, constraint, progress)

    def stream(
        self,
        prompt: PromptInput | Conversation,
        sampling: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
        explicit: Sequence[str] | None = None,
    ) -> Generator[str, None, None]:
        """The text of one answer, in parts. Ending the iteration early cancels the request.

        ``prompt`` is a text, token ids, or a conversation. ``explicit`` names the fields of ``sampling`` that are used;
        the model's defaults replace the others (default: all fields are used). Raises InvalidRequest at the first part.
        """
        made = Chat(messages=_joined(prompt)) if _is_conversation(prompt) else _text_or_tokens(prompt)
        running = self._add(self._request(made, sampling, constraint, stream=True, explicit=explicit))
        try:
            while True:
                while running.pending:
                    for delta in running.pending.popleft():
                        if delta.index == 0 and delta.text:
                            yield delta.text
                if running.end is not None:
                    break
                self._step()
        finally:
            self._abandon([running])
        if running.end.failure is not None:
            raise from_failure(running.end.failure)

    def close(self) -> None:
        """Free the model. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._is_idle.set()
                self._backend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- driving the engine -----------------------------------------------------------------

    def _run(
        self,
        inputs: list[PromptInput | Conversation],
        prompts: list[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        constraint: Constraint | None,
        progress: bool,
    ) -> list[Completion]:
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"sampling has {len(each)} entries for {len(prompts)} prompts; give one for all or one for each.",
                param="sampling",
            )
        prepared: list[tuple[str, object]] = []
        for position, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            request = self._request(prompt, params, constraint, stream=False)
            try:
                prepared.append((request.id, self._prepare(request)))
            except InferdError as error:
                if len(prompts) > 1:
                    error.message = f"Prompt {position} of {len(prompts)}: {error.message}"
                    error.args = (error.message,)
                raise
        waiting = deque(prepared)
        runnings: list[_Collected] = []
        capacity = 2 * self.info.max_num_seqs  # enough to fill the engine, within the bound of its queue
        try:
            with _Bar(len(prompts), progress) as bar:
                active: list[_Collected] = []
                while waiting or active:
                    while waiting and len(self._running) < capacity:
                        runnings.append(self._submit(*waiting.popleft()))
                        active.append(runnings[-1])
                    self._step()
                    active = [running for running in active if running.end is None]
                    bar.show(len(runnings) - len(active), runnings)
        finally:
            self._abandon(runnings)
        return [running.completion(given) for running, given in zip(runnings, inputs, strict=True)]

    def _request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        constraint: Constraint | None,
        *,
        stream: bool,
        explicit: Sequence[str] | None = None,
    ) -> GenerateRequest:
        if explicit is None:
            explicit = SamplingParams.__struct_fields__ if sampling is not None else ()
        return GenerateRequest(
            id=f"llm-{next(self._ids)}",
            model=self.info.name,
            prompt=prompt,
            sampling=sampling or SamplingParams(),
            explicit=tuple(explicit),
            stream=stream,
            form=_form(prompt, constraint),
            arrived_at=clock.now(),
        )

    def _prepare(self, request: GenerateRequest) -> object:
        if self._is_closed:
            raise InvalidRequest("This LLM is closed; create another one.")
        return self._backend.prepare(request)

    def _add(self, request: GenerateRequest) -> _Collected:
        return self._submit(request.id, self._prepare(request))

    def _submit(self, request_id: str, prepared: object) -> _Collected:
        running = _Collected(request_id)
        self._is_idle.clear()
        with self._lock:
            try:
                self._backend.add(prepared, clock.now())
                self._running[request_id] = running
            finally:
                self._update_idle()
        return running

    def _update_idle(self) -> None:
        if self._running:
            self._is_idle.clear()
        else:
            self._is_idle.set()

    def _use_idle_time(self, backend: UsesIdleTime, is_leaving: threading.Event) -> None:
        """Run in a thread: prepare later steps while no request runs, until nothing is left to prepare."""
        is_left = True
        while is_left:
            self._is_idle.wait()
            with self._lock:
                is_over = self._is_closed or is_leaving.is_set()
                is_left = not is_over and (bool(self._running) or backend.use_idle_time())

    def _step(self) -> None:
        """One step of the engine, or the wait until one is due."""
        with self._lock:
            now = clock.now()
            due = self._backend.due(now)
            if due is not None and due > now:
                time.sleep(due - now)
            outputs, _ = self._backend.step(clock.now())
            for output in outputs:
                running = self._running.get(output.request_id)
                if running is not None:
                    running.add(output)
                    if running.end is not None:
                        del self._running[output.request_id]
            self._update_idle()

    def _abandon(self, runnings: Iterable[_Collected]) -> None:
        """Cancel the requests that have not ended, and run the engine until their blocks are free."""
        with self._lock:
            open_ones = [running for running in runnings if running.end is None]
            for running in open_ones:
                self._backend.cancel(running.request_id)
            while any(running.end is None for running in open_ones):
                self._step()


class _Collected:
    """The outputs of one request."""

    __slots__ = ("choices", "end", "num_tokens", "pending", "prompt", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.choices: dict[int, list[Delta]] = {}
        self.pending: deque[tuple[Delta, ...]] = deque()
        self.prompt: PromptReport | None = None
        self.end: End | None = None
        self.num_tokens = 0

    def add(self, output: Output) -> None:
        self.pending.append(output.deltas)
        for delta in output.deltas:
            self.choices.setdefault(delta.index, []).append(delta)
            self.num_tokens += len(delta.token_ids)
        self.prompt = output.prompt or self.prompt
        self.end = output.end

    def completion(self, prompt: PromptInput | Conversation) -> Completion:
        assert self.end is not None
        failure = self.end.failure
        return Completion(
            prompt=prompt,
            outputs=tuple(_joined_choice(index, deltas) for index, deltas in sorted(self.choices.items())),
            usage=self.end.usage,
            prompt_logprobs=self.prompt.logprobs if self.prompt else None,
            error=from_failure(failure) if failure is not None else None,
        )


def _joined_choice(index: int, deltas: list[Delta]) -> CompletionOutput:
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    return CompletionOutput(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs or ()) if has_logprobs else None,
    )


class _Bar:
    """A progress bar with finished requests and tokens per second on stderr, if it is a terminal."""

    def __init__(self, total: int, wanted: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._began = clock.now()
        self._shown_at = 0.0
        self._total = total
        self._progress = Progress(
            TextColumn("Generating"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not wanted or not (console.is_terminal or console.is_jupyter),
        )
        self._task = self._progress.add_task("", total=total, rate="")

    def show(self, num_done: int, runnings: list[_Collected]) -> None:
        now = clock.now()
        if now - self._shown_at > 0.1 or num_done == self._total:
            self._shown_at = now
            rate = sum(running.num_tokens for running in runnings) / max(now - self._began, 1e-9)
            self._progress.update(self._task, completed=num_done, rate=f"{rate:,.0f} tokens/s")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def _refuse_what_writes_no_text(config: ModelConfig) -> None:
    """Raises ModelLoadError for a missing source and for a predictive model, before torch is imported."""
    from inferd.registry.artifact import artifact_of
    from inferd.registry.source import is_remote

    if is_remote(config.source):
        return  # its files are checked after the download
    artifact = artifact_of(config)
    if artifact.kind != "generate":
        raise ModelLoadError(
            f"{config.source} makes predictions and writes no text ({artifact.platform}); serve it with "
            f"inferd serve {config.source}, and ask it with inferd predict.",
            param="source",
        )


def _load(name: str, config: ModelConfig, progress: bool) -> PreparingBackend:
    if config.verify is not None:
        from inferd.registry.verified import verified

        config, _ = verified(name, config)
    _refuse_what_writes_no_text(config)
    if config.parallel.count > 1:
        raise ModelLoadError(
            "parallel divides a model among processes, which only a server starts. Leave parallel out, or use inferd "
            "serve.",
            param="parallel",
        )
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    hidden = not progress or not (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(f"Loading {name}", total=None)

        def tell(phase: str, done: int, total: int) -> None:
            bar.update(task, description=f"Loading {name}: {phase}", completed=done, total=total if total > 1 else None)

        from inferd.engine.weight_memory import reserve_weight_memory

        weight_memory = reserve_weight_memory(config, with_cache=True)  # reserved while torch is imported
        from inferd.engine.load import create_backend  # takes some seconds, shown by the bar

        return create_backend(name, config, tell, weight_memory)


def _form(prompt: Prompt, constraint: Constraint | None) -> AnswerForm | None:
    """The reasoning of a conversation's answer precedes what the constraint demands, and is left out of its text."""
    if constraint is None:
        return None
    if not isinstance(constraint, Constraint):
        names = ", ".join(kind.__name__ for kind in get_args(Constraint))
        raise InvalidRequest(
            f"constraint is of type {type(constraint).__name__}; give one of {names} (inferd.answer_form).",
            param="constraint",
        )
    return AnswerForm(constraint=constraint, splits_reasoning=isinstance(prompt, Chat))


def _end(ahead: threading.Thread, is_leaving: threading.Event, is_idle: threading.Event) -> None:
    is_leaving.set()
    is_idle.set()
    if ahead is not threading.current_thread():
        ahead.join(1.0)  # a thread that waits can be left alone, and computing takes milliseconds


def _is_conversation(prompt: PromptInput | Conversation) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _as_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[int(str(item)) for item in prompts]]
    return [item if isinstance(item, str) else list(item) for item in prompts if not isinstance(item, int)]


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    found: list[Conversation] = []
    if messages and isinstance(messages[0], dict):
        return [[message for message in messages if isinstance(message, dict)]]
    for conversation in messages:
        if not isinstance(conversation, list):
            raise InvalidRequest("messages is neither one conversation nor a list of conversations.", param="messages")
        found.append(conversation)
    return found


def _text_or_tokens(prompt: PromptInput | Conversation) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    return TokenPrompt(token_ids=[token for token in prompt if isinstance(token, int)])


def _joined(conversation: object) -> Conversation:
    """The conversation with text parts joined to one string, as chat templates expect."""
    joined: Conversation = []
    for message in conversation if isinstance(conversation, list) else ():
        content = message.get("content")
        if isinstance(content, list):
            other = next((part for part in content if not isinstance(part, dict) or part.get("type") != "text"), None)
            if other is not None:
                raise InvalidRequest(
                    f"messages holds a content part that is not text: {other!r:.80}.", param="messages"
                )
            message = {**message, "content": "".join(str(part.get("text", "")) for part in content)}
        joined.append(message)
    return joined
