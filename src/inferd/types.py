"""The types of requests, answers and models. Read this file first.

Values of these types pass between packages and between processes, so all types are frozen and hold plain values.
Nothing here knows HTTP, torch or how a request is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from inferd.answer_form import AnswerForm

JSON = dict[str, Any]

Priority = int
"""The rank of a priority class; lower ranks are served earlier. Other numbers count as the nearest class."""

PriorityClass = Literal["critical", "interactive", "normal", "batch"]
RANKS: dict[PriorityClass, Priority] = {"critical": -2, "interactive": -1, "normal": 0, "batch": 1}
CLASSES: tuple[PriorityClass, ...] = ("critical", "interactive", "normal", "batch")


def class_index(priority: Priority) -> int:
    """The index of a priority's class in ``CLASSES``. Any integer is valid, because vLLM's clients send any."""
    return min(max(priority, -2), 1) + 2


def class_of(priority: Priority) -> PriorityClass:
    """The class of a priority number."""
    return CLASSES[class_index(priority)]


ModelKind = Literal["generate", "predict"]
Role = Literal["both", "prefill", "decode"]
"""What a replica computes: prompts and answers, prompts alone, or answers (and prompts that are not handed over)."""
FinishReason = Literal["stop", "length", "error", "cancelled"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when generation stops. Values are checked where a request is prepared.

    Sources: the OpenAI API and vLLM's extra sampling fields.
    """

    max_tokens: int | None = None  # None: up to the model's maximum length
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None  # candidates computed; the n best by mean log-probability are returned
    use_beam_search: bool = False  # beam width is best_of or n
    length_penalty: float = 1.0  # beam score = sum of log-probabilities / length ** length_penalty
    logprobs: int | None = None  # per generated token: this many alternatives (0: the token alone)
    prompt_logprobs: int | None = None  # likewise for the prompt's tokens
    watermark: bool = False  # requested; a model whose watermark is always there adds it to every answer
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def wants_logprob(self) -> bool:
        """Whether the log-probability is requested, or needed to rank more candidates than are returned."""
        return self.logprobs is not None or self.width > self.n

    @property
    def width(self) -> int:
        """The number of sequences that are generated for this request."""
        return max(self.n, self.best_of or self.n)


class Chat(msgspec.Struct, frozen=True, kw_only=True, tag="chat", omit_defaults=True):
    """A conversation, to be rendered by the model's own chat template in the worker."""

    messages: list[JSON]  # OpenAI messages; text parts already joined to a string
    tools: list[JSON] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[JSON] | None = None
    template_kwargs: JSON = {}
    add_special_tokens: bool = False
    at: str = "messages"  # the field of the request that holds the conversation, for messages of errors


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="text", omit_defaults=True):
    """Plain text, to be tokenized in the worker."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Token ids as the client sent them; checked against the vocabulary in the worker."""

    token_ids: list[int]


Prompt = Chat | TextPrompt | TokenPrompt


class AnswerSet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Texts that could answer a conversation, each of which is scored. Nothing is generated."""

    messages: list[JSON]  # follow the messages of the request's prompt, which is a ``Chat``
    answers: tuple[str, ...]
    at: tuple[str, ...]  # the field of the request that holds each answer, for messages


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of every request, which the router uses.

    ``num_tokens`` and ``num_bytes`` count against the queue's bounds: an estimate of the request's tokens (prompt and
    answer), and the size of its payload.
    """

    id: str
    model: str
    priority: Priority = 0
    deadline_s: float | None = None  # seconds from arrival until the request is cancelled
    first_byte_s: float | None = None  # of a stream: seconds from arrival until it must have begun
    tenant: str = ""  # its usage is charged to this tenant; also salts the prefix cache
    weight: float = 1.0  # the tenant's share among the tenants of its class
    session: str = ""  # requests of one session go to one replica while it is available
    region: str = ""  # runs only on replicas of this region; empty: anywhere
    idempotent: bool = True  # it may be computed twice, so it may be retried at another replica
    num_tokens: int = 0
    num_bytes: int = 0
    arrived_at: float = 0.0  # time.monotonic() of the gateway's host
    # A copy of a request for the new version of a rollout. It never waits, keeps nothing in caches and gives its memory
    # to others.
    is_copy: bool = False

    @property
    def width(self) -> int:
        """The number of sequences computed for this request, its part of a replica's outstanding work."""
        return 1


IGNORED_HEADER: Final = b"x-inferd-ignored-params"
UNENFORCED_HEADER: Final = b"x-inferd-unenforced-params"
WATERMARK_HEADER: Final = b"x-inferd-watermark"
TOLD: Final = (IGNORED_HEADER, UNENFORCED_HEADER, WATERMARK_HEADER)
"""Headers in which an answer tells what has become of its request's fields. Those of another inferd are forwarded."""


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its client sent it, for a replica that uses the client's protocol.

    Only the gateway's process holds it.
    """

    path: str  # below the remote server's base URL: "/chat/completions"
    body: bytes  # JSON object
    stream: bool = False
    wants_usage: bool = False  # the client asked for usage in the stream; else it is removed
    headers: tuple[tuple[bytes, bytes], ...] = ()  # forwarded: x-request-id, traceparent, tracestate
    unchanged_for: str = ""  # a server that calls the model so gets the body's fields unchanged; empty: none does
    lacks_stream_options: bool = False  # the body has no field stream_options


class RelayHead(msgspec.Struct, frozen=True):
    """The status and headers of a relayed answer, which may be forwarded."""

    status: int
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a stream that were sent when its worker died; another worker continues after them."""

    token_ids: tuple[int, ...]  # of the answer's only choice, as they were sent
    seed: int  # the seed of its sampling


class GenerateRequest(Request, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """A request for generated text, as the gateway sends it to a worker."""

    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    # Fields of ``sampling`` that the client set. The worker replaces the others by the defaults in the model's
    # generation_config.
    explicit: tuple[str, ...] = ()
    cache_salt: str = ""  # client-supplied addition to the salt
    truncate_prompt_tokens: int | None = None  # keep this many of the prompt's last tokens
    lowers_max_tokens: bool = False  # max_tokens above what the prompt leaves is lowered to it, and not refused
    stream: bool = True  # False: only the terminal output need carry text
    return_prompt_ids: bool = False
    form: AnswerForm | None = None  # None: the model's plain text
    resumes: Continuation | None = None  # continue an answer instead of starting one
    answer_sets: tuple[AnswerSet, ...] = ()  # score these answers instead of generating one
    adapter: str = ""  # the name of the adapter that changes the model; empty: the model itself
    adapter_identity: str = ""  # the adapter must be this one; empty: any of its name
    # Compute the prompt alone, and hand its KV blocks over to the worker that listens at this address; empty: answer.
    hands_over_to: str = ""
    hands_over_for: str = ""  # the id of the request that the blocks are for

    @property
    def width(self) -> int:
        return self.sampling.width


class PredictRequest(Request, frozen=True, kw_only=True, tag="predict", omit_defaults=True):
    """A request for a prediction, with the payload as the client sent it.

    Only the worker knows the model's inputs, so it decodes ``body``: the gateway's process reads no tensor.
    ``dialect`` names the codec (``inferd.predict.codecs``) that reads the body and writes the answer.
    """

    dialect: str
    body: bytes
    header_bytes: int = -1  # KServe v2's binary extension: length of the JSON part; -1: there is none
    version: str = ""  # of the model, where the client named one
    sequence: str = ""  # requests of one sequence share a state; empty: none
    sequence_start: bool = False
    sequence_end: bool = False
    may_wait: bool = True  # False: computed at once, without waiting for a larger batch


class Prediction(msgspec.Struct, frozen=True, array_like=True):
    """An answer in the bytes of its dialect, ready to be sent."""

    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability (natural log) and the best alternatives, best first."""

    token_id: int
    token: str
    raw: bytes  # the token's bytes, which may be an incomplete UTF-8 character
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[TopLogprob, ...] = ()


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One of the most likely tokens at a position."""

    token_id: int
    token: str
    raw: bytes  # the token's bytes, which may be an incomplete UTF-8 character
    logprob: float


class CallDelta(msgspec.Struct, frozen=True, array_like=True):
    """The new part of a tool call."""

    index: int  # of the call in its choice, from 0
    name: str | None = None  # of the tool; in the first part of a call and in no other
    arguments: str = ""  # the next characters of a JSON object


def joined_calls(calls: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Parts of calls, with one part per call."""
    joined: list[CallDelta] = []
    for part in calls:
        if joined and joined[-1].index == part.index:
            last = joined[-1]
            joined[-1] = CallDelta(last.index, last.name, last.arguments + part.arguments)
        else:
            joined.append(part)
    return tuple(joined)


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """The new part of one choice of an answer: text, reasoning or calls. Where an answer goes from one of the three to
    another, an output has one delta for each, in their order."""

    index: int
    text: str = ""  # of the answer, without its reasoning and its calls where the request's form splits them off
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None  # in the choice's last delta
    stop_reason: int | str | None = None  # the stop string or token id that ended it
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    @property
    def kind(self) -> DeltaKind:
        return "calls" if self.calls else "reasoning" if self.reasoning else "text" if self.text else ""


DeltaKind = Literal["", "text", "reasoning", "calls"]
"""What a delta has; empty: only tokens, or the end."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0  # of all generated sequences, also those not returned
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    reasoning_tokens: int = 0  # of completion_tokens, where reasoning is split off


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """When each stage was reached, in seconds after the request's arrival at the gateway.

    None: the stage was never reached. The stages are the pipeline's: receive (0), queue, infer,
    stream. For a prediction ``tokenized`` says when its inputs were decoded and checked, ``scheduled`` when
    its batch began, ``first_token`` when the model had computed, and ``finished`` when the answer was written.
    """

    dispatched: float | None = None  # sent from the router's queue to a replica
    tokenized: float | None = None
    scheduled: float | None = None  # first step that computed a part of it
    first_token: float | None = None
    finished: float | None = None
    steps_s: dict[str, float] | None = None  # of a pipeline: the duration of each of its steps
    # Its replica began to tokenize it, or to decode its inputs. Before that it waited for those of other requests, and
    # in a worker that predicts also for the batch that was computed.
    begun: float | None = None
    behind_s: float = 0.0  # of a prediction: between tokenized and scheduled, while other batches were computed


class EngineTimes(msgspec.Struct, frozen=True, array_like=True):
    """What a generated request's time in its replica was spent on, in seconds.

    The parts add up to the time from ``Timings.tokenized`` to ``Timings.finished``. Each is at least 0, except
    ``speculation``, which is at most 0: the seconds that its accepted guesses saved. For a request with several
    sequences the parts are of the request, not of the sequences.
    """

    schedule_wait: float = 0.0  # it was ready and in no step yet
    prefill: float = 0.0  # steps of its prompt: the fitted cost of its own tokens alone
    prefill_shared: float = 0.0  # the same steps: the fitted cost of other requests' tokens
    decode: float = 0.0  # steps of its answer: the fitted cost of its own tokens alone
    crowding: float = 0.0  # the same steps: the fitted cost of other requests' decodes
    others_prefill: float = 0.0  # the same steps: the fitted cost of other requests' prefill
    preempted: float = 0.0  # out of the batch after a preemption
    recomputed: float = 0.0  # computing again what a preemption dropped
    masks: float = 0.0  # masks of structured output
    speculation: float = 0.0  # negative: what accepted guesses saved
    slowed: float = 0.0  # steps that took longer than fitted for all their tokens
    rest: float = 0.0  # the remainder: work between steps, and pauses of the loop
    num_steps: int = 0  # steps that computed a part of it


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica hands KV blocks over to others of its model, or gets them."""

    role: Role
    address: str  # the path of the Unix socket where a worker that gets blocks listens
    key: bytes = msgspec.field(default=b"")  # of the checksums, one for all replicas of the model


class Handed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a hand-over, by the worker that computed the prompt."""

    request_id: str  # of the request that the blocks are for
    num_tokens: int = 0  # of the prompt
    num_computed: int = 0  # of them, those that this worker's cache did not have
    num_blocks: int = 0  # that the receiver has taken
    num_bytes: int = 0  # that were sent
    compute_s: float = 0.0  # from its arrival in the engine to the end of the prompt
    wait_s: float = 0.0  # from then to the receipt
    failure: str = ""  # why the receiver lacks blocks; empty: it has all


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """Whether the prompt of a request was computed by another replica than its answer, and why."""

    why: str
    replica: int | None = None  # that computed the prompt; None: the one that answered
    seconds: float = 0.0  # from the dispatch until the replica of the answer was asked to go on
    num_blocks: int = 0
    num_bytes: int = 0
    failure: str = ""


class Routing(msgspec.Struct, frozen=True, array_like=True):
    """What a request met between its arrival at the router and its end: the queue, its replica and failed attempts."""

    ahead: int = 0  # requests in the model's queue when it was queued
    ahead_of_class: int = 0  # of them, those of its class or a better one
    ahead_tenant: str = ""  # the tenant with most of them
    ahead_of_tenant: int = 0  # of them, those of ``ahead_tenant``
    load_s: float = 0.0  # of its wait: while the model was loaded, on demand or for the first time
    restart_s: float = 0.0  # of its wait: while no replica worked, because workers had died or were restarted
    lost_s: float = 0.0  # attempts that failed, each until the next attempt began
    attempts: int = 0  # dispatches to a replica, hedges included
    worker_deaths: int = 0  # workers that died while they computed it
    was_hedged: bool = False
    was_remote: bool = False  # the replica of its last attempt is another server
    replica: int | None = None  # of its last attempt
    hand_over: HandOver | None = None  # of its last attempt; None: its model has no roles


class PromptReport(msgspec.Struct, frozen=True, array_like=True):
    """Facts about the prompt that the worker computed; sent once, with the first output."""

    num_tokens: int
    cached_tokens: int = 0
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob | None, ...] | None = None  # first entry is None
    text: str | None = None  # the prompt's text, for echo
    seed: int | None = None  # the seed of the sampling, for a worker that must continue the answer
    # Of each answer of each answer set: the natural logarithm of the probability that the model gives this answer and
    # ends.
    scores: tuple[tuple[float, ...], ...] | None = None
    # Fields of the request with schemas of tools that do not bind the answer: arguments are any JSON object there.
    unenforced: tuple[str, ...] = ()
    watermark: str = ""  # the scheme of the answer's watermark; empty: there is none


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error as a message between processes; ``inferd.errors.from_failure`` makes the exception."""

    kind: str  # an InferdError subclass's ``kind``
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None  # when trying again makes sense; None: unknown


NUM_FEATURES: Final = 32
"""Features of an embedding in the facts of an answer."""

CallsFact = Literal["", "none", "valid", "unmatched", "unchecked", "cut"]
"""What an answer to a request with tools has: no call; calls that match their schemas; a call that does not match a
schema that is not enforced; calls that nothing validates; or calls in an answer that ``max_tokens`` or a stop string
has ended. Empty: the request has no tools, or it is not known."""


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """Facts of one answer, for its model's drift. Of a prediction the numbers are of its first row, because the rows of
    a request are alike; of a generated text they are of its first choice."""

    rows: int = 1  # 0: it is a generated text
    input: float | None = None  # the mean of the first input of numbers
    is_missing: bool | None = None  # an input has a NaN; None: no input has floats
    label: str = ""  # a declared label, or the number of a class; empty: it is no classification
    score: float | None = None  # the largest of the classes
    output: float | None = None  # a few outputs: their mean; many: a fixed projection of them
    embedding: bytes = b""  # of many outputs: NUM_FEATURES float32 of their direction; see ``predict/facts.py``
    is_refusal: bool | None = None  # a text begins as refusals do
    calls: CallsFact = ""


class End(msgspec.Struct, frozen=True, array_like=True):
    """How a request ended. Every accepted request has exactly one end."""

    outcome: Literal["done", "failed", "cancelled", "refused"]
    usage: Usage = Usage()
    timings: Timings = Timings()
    failure: Failure | None = None
    num_preemptions: int = 0
    engine: EngineTimes | None = None  # of a generated text; None: no engine of this server prepared it
    routing: Routing | None = None  # set by the router
    facts: Facts | None = None  # where its model's drift is watched, from a worker of this server


class Output(msgspec.Struct, frozen=True, array_like=True):
    """The output of one step for one request. The last output has ``end``."""

    request_id: str
    deltas: tuple[Delta, ...] = ()
    prompt: PromptReport | None = None
    end: End | None = None
    prediction: Prediction | None = None

    @staticmethod
    def ended(request_id: str, end: End) -> Output:
        """A last output without deltas."""
        return Output(request_id, (), None, end)


class Relayed(msgspec.Struct, frozen=True):
    """A part of a relayed answer, forwarded unchanged. The first part has ``head``, the last has ``end``."""

    request_id: str
    head: RelayHead | None = None
    data: bytes = b""
    end: End | None = None


Item = Output | Relayed
"""What a request produces."""


class Sink(Protocol):
    """Receives what one request produces: the answer of an HTTP call, a gRPC call, or a stream that a task reads.

    Called in the gateway's event loop. The last item has ``end``; nothing follows it. What a sink raises ends its own
    request and no other.
    """

    def deliver(self, item: Item, /) -> None: ...


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a model needs, in bytes."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    kv_bytes_per_token: int = 0
    activation_bytes: int = 0
    process_bytes: int = 0  # of the worker without a model; 0: weights and cache are on a device with its own memory

    @property
    def total_bytes(self) -> int:
        """Of a worker whose KV cache is full, in its largest step."""
        return self.weights_bytes + self.kv_bytes + self.activation_bytes + self.process_bytes


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output of a predictive model, in the terms of KServe v2 (Open Inference Protocol)."""

    name: str
    datatype: str  # BOOL, UINT8 ... INT64, FP16, BF16, FP32, FP64, BYTES
    shape: tuple[int, ...]  # with the batch dimension where there is one; -1: of any size
    is_optional: bool = False
    labels: tuple[str, ...] = ()  # names of the classes along the last dimension


class AdapterState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One adapter of a replica."""

    source: str
    identity: str = ""  # digest of its files and of the base; empty: it is not loaded
    num_bytes: int = 0  # memory of its matrices
    failure: Failure | None = None  # of the last load


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a loaded model."""

    name: str
    source: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    num_parameters: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...] = ()
    has_chat_template: bool = False
    temperature: float = 1.0  # of requests that name none
    top_p: float = 1.0
    answer_format: str = ""  # its notation of calls and reasoning, and how it was found; empty: none was found
    fingerprint: str = ""  # digest of weights' identity, dtype and engine settings
    quantization: str = "none"  # integer format of its matrix products: none, int8, int4/64+int8, ...
    artifact: str = ""  # digest of its files when they were loaded; empty: unknown
    verified: str = ""  # why its files were accepted, or FAILED and why not; empty: they were not verified
    attention: str = "reference"
    memory: MemoryPlan = MemoryPlan()
    load_s: dict[str, float] = {}  # phase -> seconds
    kind: ModelKind = "generate"
    platform: str = (
        "inferd_llm"  # KServe v2's name of the runtime: onnxruntime_onnx, pytorch_pt2, python, ensemble, ...
    )
    tasks: tuple[str, ...] = ("generate",)  # requests it serves: generate, predict, embed, rerank, classify, ...
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    max_batch_size: int = 0  # rows computed together; 0: the model has no batch dimension
    max_rows: int = 0  # of one request; 0: unknown
    max_json: tuple[int, int] | None = None  # values, and lists and objects, of one request in JSON; None: unknown
    not_batched: str = ""  # why the model's files exclude batching; empty: they do not
    is_stateful: bool = False  # requests of one sequence must reach the same replica
    version: str = "1"  # its name in the configuration
    num_threads: int = 0  # compute threads of a replica; 0: unknown
    cores: tuple[int, ...] = ()  # the processor cores of these threads; empty: unknown
    kernels: str = ""  # instruction set of the compiled kernels; none: only torch computes it; empty: unknown
    is_decoupled: bool = False  # one request may have several answers
    adapters: dict[str, AdapterState] = {}  # by name, as they were when the model was loaded
    layout: str = ""  # "2 ranks (tensor 2 x pipeline 1)"; empty: one process
    rank_pids: tuple[int, ...] = ()  # processes of its other ranks on the worker's machine
    keeps_rows: bool = False  # what it computes for a request has the same bits beside any other requests


class StepParts(msgspec.Struct, frozen=True, array_like=True):
    """The seconds of an engine step, by activity."""

    schedule: float = 0.0  # choosing sequences, and bookkeeping after the step
    speculate: float = 0.0  # guessing next tokens
    masks: float = 0.0  # of constrained answers, where a drawn token was not known to be allowed
    batch: float = 0.0  # building the arrays of the step
    forward: float = 0.0  # the model's layers
    logits: float = 0.0
    sample: float = 0.0
    text: float = 0.0  # tokens to text, stop conditions, outputs
    send: float = 0.0  # sending the outputs of the step before to the gateway


STEP_PARTS: Final = StepParts.__struct_fields__


class AdapterUse(msgspec.Struct, frozen=True, array_like=True):
    """Which adapters of a model the sequences of a replica use."""

    num_loaded: int = 0
    running: tuple[str, ...] = ()  # names, sorted
    waiting: tuple[str, ...] = ()


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """Counts after one step, from which metrics are made."""

    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0  # evictable, in the prefix cache
    step_tokens: int = 0
    step_sequences: int = 0
    step_s: float = 0.0
    num_preempted: int = 0  # this step
    prefix_query_tokens: int = 0  # this step
    prefix_hit_tokens: int = 0  # this step
    tokenizer_cache_hits: int = 0  # cumulative
    tokenizer_cache_queries: int = 0  # cumulative
    tokenize_s: float = 0.0  # cumulative seconds spent rendering and tokenizing, or decoding inputs
    batch_rows: int = 0  # step of a prediction: rows computed together, without padding
    padded_rows: int = 0  # rows of padding (tokens, where rows are padded to one length)
    parts: StepParts = StepParts()  # of an engine's step
    num_drafts: int = 0  # this step: sequences with guessed tokens
    drafted_tokens: int = 0  # this step
    accepted_tokens: int = 0  # this step: guessed tokens that were accepted
    audited_rows: int = 0  # this step: rows of predictions that were computed again alone
    not_batched: str = ""  # this step: why predictions are computed one by one after it
    num_invalid: int = 0  # this step: constrained answers that do not satisfy their schema, and were not sent
    num_unmatched: int = 0  # this step: calls that do not match a schema that is not enforced, and were sent
    adapters: AdapterUse = AdapterUse()
    utilization: float = 1.0  # the part of this step's time that full steps would have needed for its work
