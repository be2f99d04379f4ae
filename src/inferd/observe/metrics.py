"""The one table of metrics: every name, label, bucket and meaning, and the event each comes from.

Only this file and ``aliases.py`` name metrics. Names of other servers for the same values are in ``aliases.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from inferd.events import RefusalReason

Kind = Literal["counter", "gauge", "histogram", "summary"]

FINISHED_REASONS = ("stop", "length", "abort", "error")
"""vLLM's words: ``abort`` is a request that its client left."""

OUTCOMES = ("done", "failed", "cancelled", "refused")
REFUSALS = get_args(RefusalReason)
STATES = ("starting", "loading", "ready", "hung", "died", "failed", "draining", "stopped")
BREAKER_STATES = ("closed", "open", "half_open", "ejected")
RETRY_KINDS = ("retry", "hedge", "continuation")
RETRY_RESULTS = ("granted", "refused")
HAND_OVER_RESULTS = ("whole", "partial")
CACHE_RESULTS = ("hit", "miss", "store", "error")
UNLOADS = ("asked", "idle", "evicted", "removed")
FAULTS = ("hung", "died", "failed")
TRACE_LOSSES = ("queue_full", "refused", "unavailable", "shutdown", "defect")
RELOADS = ("accepted", "refused")
STORED_KINDS = ("response", "conversation")
STORED_BOUNDS = ("bytes", "age")
OPEN_BATCHES = ("validating", "in_progress", "finalizing", "cancelling")
ENDS_OF_BATCHES = ("completed", "failed", "expired", "cancelled")
BLOCK_STATES = ("used", "cached", "free")
ROLLOUT_STATES = (
    "pending",
    "preparing",
    "running",
    "inconclusive",
    "awaiting_approval",
    "promoted",
    "rolled_back",
    "aborted",
)
NODE_STATES = ("ready", "late", "leaving", "left", "gone", "refused")
NODE_DIRECTIONS = ("sent", "received")
SCALE_STATES = ("ready", "starting", "leaving")
SCALE_DIRECTIONS = ("up", "down")
HINT_RESULTS = ("sent", "received", "unknown", "used", "stale", "unreadable")
OBJECTIVES = ("availability", "ttft", "tpot", "total")
STAGES = ("queue", "first_token", "inter_token", "per_output_token", "inference", "total")
PREDICTION_STAGES = ("decode", "batch_wait", "compute", "encode")
QUANTILES = (0.5, 0.95, 0.99)
QUANTILE_WINDOW_S = 60.0


CONTRACT_VERSION = 1
"""Raised when a stable metric is removed or renamed, or its type, unit, labels or buckets change.

Dashboards and alerts of others depend on these. ``inferd.observe.contract`` compares the table with the contract that
was published (``deploy/metrics-contract.json``), and ``make docs`` refuses a change without another version.
"""

Stability = Literal["stable", "development"]

UNITS = ("seconds", "bytes", "ratio", "celsius", "watts", "joules", "hertz")
"""Units that the name of a metric ends with, before ``_total``."""


@dataclass(slots=True, eq=False)
class Metric:
    """A row. ``event``: the event in ``inferd.events`` that changes it, or where else it comes from.

    A row is itself and no other: the dictionaries of series look it up many times per request.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    event: str
    buckets: tuple[float, ...] = field(default=(), kw_only=True)  # upper bounds of a histogram, without infinity
    is_summary: bool = field(default=False, kw_only=True)
    has_exemplars: bool = field(default=False, kw_only=True)  # of a histogram: requests of its buckets are named
    stability: Stability = field(default="stable", kw_only=True)
    since: str = field(default="0.1", kw_only=True)  # the version of inferd that first had it
    kind: Kind = field(init=False)
    unit: str = field(init=False)  # "" where the metric has none

    def __post_init__(self) -> None:
        assert list(self.buckets) == sorted(set(self.buckets)), self.name
        is_counter = self.name.endswith("_total")
        self.kind = (
            "counter" if is_counter else "histogram" if self.buckets else "summary" if self.is_summary else "gauge"
        )
        self.unit = unit_of(self.name)

    @property
    def is_kept(self) -> bool:
        """Whether its values continue after a restart of the server: what grows, and is not of one process."""
        return self.kind != "gauge" and not self.name.startswith("process_")


def unit_of(name: str) -> str:
    """The unit that a metric's name ends with."""
    last = name.removesuffix("_total").rpartition("_")[2]
    return last if last in UNITS else ""


# Buckets as vLLM has them, so that one dashboard reads both.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))[:-1]  # 1, 2, 5, ... 200 000
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
# Ours.
_STEP_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24)
_PIPELINE_STEP_S = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_HTTP_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)

_MODEL = ("model",)
_REPLICA = ("model", "replica")
_ended = partial(Metric, labels=_REPLICA, event="RequestEnded")
_step = partial(Metric, labels=_REPLICA, event="StepDone")
_replica = partial(Metric, labels=_REPLICA, event="ReplicaChanged")
_queue = partial(Metric, labels=_MODEL, event="QueueChanged")
_gpu = partial(Metric, labels=("gpu", "uuid"), event="driver")  # NVIDIA's library
_DEVICE = ("device", "kind")
_device = partial(Metric, labels=_DEVICE, event="driver")

# -- requests ----------------------------------------------------------------------------------

REQUESTS = Metric(
    "inferd_requests_total",
    "Requests that entered a model's queue and ended, by outcome.",
    (*_REPLICA, "outcome"),
    "RequestEnded",
)
FINISHED = Metric(
    "inferd_finished_total",
    "Answers that ended, by reason; a request for n answers counts n times.",
    (*_REPLICA, "finished_reason"),
    "RequestEnded",
)
ERRORS = Metric("inferd_errors_total", "Requests that failed, by the kind of error.", (*_MODEL, "kind"), "RequestEnded")
REFUSED = Metric(
    "inferd_refused_total",
    "Requests refused at a model's queue, by reason.",
    (*_MODEL, "reason"),
    "RequestRefused",
)
PROMPT_TOKENS = _ended("inferd_prompt_tokens_total", "Prompt tokens of ended requests.")
GENERATION_TOKENS = _ended("inferd_generation_tokens_total", "Tokens generated by ended requests.")
CACHED_TOKENS = _ended(
    "inferd_prompt_cached_tokens_total",
    "Prompt tokens of ended requests whose KV was found in the prefix cache.",
)
FIRST_TOKEN_S = _ended(
    "inferd_time_to_first_token_seconds",
    "From a request's arrival to its first token.",
    buckets=_FIRST_TOKEN_S,
    has_exemplars=True,
)
INTER_TOKEN_S = _ended(
    "inferd_inter_token_latency_seconds",
    "Between one answer's successive tokens.",
    buckets=_PER_TOKEN_S,
)
PER_OUTPUT_TOKEN_S = _ended(
    "inferd_request_time_per_output_token_seconds",
    "A done request's mean time per token after the first (requests for one answer).",
    buckets=_PER_TOKEN_S,
    has_exemplars=True,
)
REQUEST_S = _ended(
    "inferd_request_latency_seconds",
    "A done request's whole life: arrival to last token.",
    buckets=_REQUEST_S,
    has_exemplars=True,
)
QUEUE_S = _ended(
    "inferd_request_queue_time_seconds",
    "A done request's wait: arrival to the first step that computed any of it.",
    buckets=_REQUEST_S,
    has_exemplars=True,
)
INFERENCE_S = _ended(
    "inferd_request_inference_time_seconds",
    "A done request's time in the engine: first step to last token.",
    buckets=_REQUEST_S,
)
PREFILL_S = _ended(
    "inferd_request_prefill_time_seconds",
    "A done request's first step to its first token.",
    buckets=_REQUEST_S,
)
PIPELINE_STEP_S = Metric(
    "inferd_pipeline_step_seconds",
    "One step of a pipeline for a done request; a model's batch counts in full for each request in it.",
    (*_REPLICA, "step"),
    "RequestEnded",
    buckets=_PIPELINE_STEP_S,
)
PREDICTION_STAGE_S = Metric(
    "inferd_prediction_stage_seconds",
    "A done prediction's time in its worker, by stage: decode, batch_wait (for its batch to begin), compute, encode.",
    (*_REPLICA, "stage"),
    "RequestEnded",
    buckets=_PIPELINE_STEP_S,
)
DECODE_S = _ended(
    "inferd_request_decode_time_seconds",
    "A done request's first token to its last.",
    buckets=_REQUEST_S,
)
REQUEST_PROMPT_TOKENS = _ended(
    "inferd_request_prompt_tokens",
    "Prompt tokens per done request.",
    buckets=_TOKENS,
)
REQUEST_GENERATION_TOKENS = _ended(
    "inferd_request_generation_tokens",
    "Tokens generated per done request.",
    buckets=_TOKENS,
)
REQUEST_LONGEST_TOKENS = _ended(
    "inferd_request_max_num_generation_tokens",
    "Length of the longest answer per done request (requests for one answer).",
    buckets=_TOKENS,
)
REQUEST_COMPUTED_TOKENS = _ended(
    "inferd_request_prefill_kv_computed_tokens",
    "Prompt tokens per done request that were not found in the prefix cache.",
    buckets=_TOKENS,
)
REQUEST_N = _ended("inferd_request_params_n", "Answers asked for per done request.", buckets=_CHOICES)
REQUEST_MAX_TOKENS = _ended(
    "inferd_request_params_max_tokens",
    "Tokens allowed per done request that set a limit.",
    buckets=_TOKENS,
)
REQUEST_PREEMPTIONS = _ended(
    "inferd_request_preemptions",
    "Times that a done request gave up its KV blocks and was computed again.",
    buckets=_PREEMPTIONS,
)
LATENCY_S = Metric(
    "inferd_latency_seconds",
    f"Quantiles of the last {QUANTILE_WINDOW_S:.0f} seconds within 1 %, by stage; NaN: nothing ended in that time.",
    (*_MODEL, "stage"),
    "RequestEnded",
    is_summary=True,
)

# -- objectives --------------------------------------------------------------------------------

OBJECTIVE_REQUESTS = Metric(
    "inferd_objective_requests_total",
    "Requests that count for an objective of the model: availability, ttft, tpot, total.",
    (*_MODEL, "objective"),
    "RequestEnded, RequestRefused",
)
OBJECTIVE_GOOD = Metric(
    "inferd_objective_good_total",
    "Those of them that met it; the others used up the error budget.",
    (*_MODEL, "objective"),
    "RequestEnded, RequestRefused",
)
OBJECTIVE_TARGET = Metric(
    "inferd_objective_target_ratio",
    "Fraction of requests that are to meet an objective, as configured.",
    (*_MODEL, "objective"),
    "start, ConfigReloaded",
)
OBJECTIVE_LIMIT_S = Metric(
    "inferd_objective_limit_seconds",
    "Duration within which a request meets an objective, as configured.",
    (*_MODEL, "objective"),
    "start, ConfigReloaded",
)

# -- queues ------------------------------------------------------------------------------------

QUEUE_WAITING = _queue("inferd_queue_waiting", "Requests in the queue in front of a model's replicas.")
QUEUE_WAITING_BY_CLASS = Metric(
    "inferd_queue_waiting_by_class", "Requests in the queue, by class of priority.", (*_MODEL, "class"), "QueueChanged"
)
QUEUE_TOKENS = _queue("inferd_queue_tokens", "Tokens (estimated) of the requests in the queue.")
QUEUE_BYTES = _queue("inferd_queue_bytes", "Bytes of the requests in the queue.")
IN_FLIGHT = _queue("inferd_in_flight", "Requests that were handed to a replica and have not ended.")
REPLICA_WAITING = _step("inferd_replica_waiting", "Sequences that a replica's engine holds but does not compute yet.")
WAITING = Metric(
    "inferd_waiting",
    "Waiting requests: in the engine and, in the first replica's series, in the model's queue.",
    _REPLICA,
    "QueueChanged, StepDone",
)
WAITING_BY_REASON = Metric(
    "inferd_waiting_by_reason",
    "Waiting requests by reason; the reason is always capacity.",
    (*_REPLICA, "reason"),
    "QueueChanged, StepDone",
)

# -- the engine's steps ------------------------------------------------------------------------

RUNNING = _step("inferd_running", "Sequences being computed.")
KV_USAGE = _step("inferd_kv_usage_ratio", "Share of the KV blocks that sequences hold, 0 to 1.")
KV_BLOCKS = Metric(
    "inferd_kv_blocks",
    "KV blocks, by state: held by sequences, kept for their prefix, free.",
    (*_REPLICA, "state"),
    "StepDone",
)
STEP_TOKENS = _step("inferd_step_tokens", "Tokens computed per engine step.", buckets=_STEP_TOKENS)
STEP_SEQUENCES = _step(
    "inferd_step_sequences", "Sequences computed together per engine step: the batch size.", buckets=_STEP_SEQUENCES
)
STEP_S = _step("inferd_step_seconds", "Duration of an engine step.", buckets=_STEP_S)
STEP_PART_S = Metric(
    "inferd_step_part_seconds_total",
    "Time of engine steps by part: schedule, speculate, batch (the step as arrays), forward (the "
    "model's layers), logits, sample, text, send.",
    (*_REPLICA, "part"),
    "StepDone",
)
BATCH_ROWS = _step(
    "inferd_batch_rows",
    "Rows of predictions computed together, without padding: the batch size.",
    buckets=_STEP_SEQUENCES,
)
BATCH_S = _step("inferd_batch_seconds", "The model's own time for a batch of predictions.", buckets=_PIPELINE_STEP_S)
PADDED_ROWS = _step(
    "inferd_padded_rows_total", "Computed padding: rows, or tokens where rows are padded to one length."
)
AUDITED_ROWS = _step(
    "inferd_audited_rows_total", "Rows of predictions that were computed again alone (batching.audit)."
)
AUDIT_DIFFERENCES = _step(
    "inferd_audit_differences_total",
    "Audited rows that differed from their result in a batch; requests are computed one by one from then on.",
)
INVALID_ANSWERS = _step(
    "inferd_invalid_answers_total",
    "Constrained answers that failed the check of their schema and ended with an error: defects.",
)
UNMATCHED_CALLS = _step(
    "inferd_unmatched_calls_total",
    "Tool calls that were sent although their arguments do not match the tool's schema, which could not be enforced.",
)
PREEMPTIONS = _step("inferd_preemptions_total", "Sequences that gave up their KV blocks to others.")
PREFIX_QUERIES = _step("inferd_prefix_cache_queries_total", "Tokens looked up in the prefix cache.")
PREFIX_HITS = _step("inferd_prefix_cache_hits_total", "Tokens found in the prefix cache.")
DRAFTS = _step(
    "inferd_speculation_drafts_total",
    "Times that tokens were guessed for a sequence.",
)
DRAFTED_TOKENS = _step("inferd_speculation_drafted_tokens_total", "Tokens guessed.")
ACCEPTED_TOKENS = _step(
    "inferd_speculation_accepted_tokens_total",
    "Guessed tokens that were right; divided by those guessed it is the acceptance rate.",
)
TOKENIZER_QUERIES = _step("inferd_tokenizer_cache_queries_total", "Texts looked up in the tokenizer's cache.")
TOKENIZER_HITS = _step("inferd_tokenizer_cache_hits_total", "Texts found in the tokenizer's cache.")
TOKENIZE_S = _step("inferd_tokenize_seconds_total", "Time spent rendering chat templates and tokenizing.")

# -- replicas ----------------------------------------------------------------------------------

REPLICA_STATE = Metric(
    "inferd_replica_state",
    "1 for the state that a replica is in, 0 for the others.",
    (*_REPLICA, "state"),
    "ReplicaChanged",
)
REPLICA_RESTARTS = _replica("inferd_replica_restarts_total", "Times that a replica's worker was started again.")
REPLICA_FAULTS = Metric(
    "inferd_replica_faults_total",
    "Times that a replica hung, died or failed to load.",
    (*_REPLICA, "fault"),
    "ReplicaChanged",
)
REPLICA_LOAD_S = Metric(
    "inferd_replica_load_seconds", "How long each phase of the last load took.", (*_REPLICA, "phase"), "ReplicaChanged"
)
REPLICA_RSS = _replica(
    "inferd_replica_resident_memory_bytes",
    "Resident memory of the worker's process and of its ranks on its machine, as last reported.",
)
REPLICA_VERIFICATION = Metric(
    "inferd_replica_verification_info",
    "1; result: verified, or failed where the files were loaded nevertheless. Absent where nothing is verified.",
    (*_REPLICA, "result"),
    "ReplicaChanged",
)
MODEL_MAX_TOKENS = _replica("inferd_model_max_tokens", "Longest prompt plus answer.")
CACHE_CONFIG = Metric(
    "inferd_cache_config_info",
    "1; the labels describe the KV cache.",
    (*_REPLICA, "block_size", "num_blocks"),
    "ReplicaChanged",
)

ADAPTERS_INFO = Metric(
    "inferd_adapters_info",
    "When the adapters that a replica's sequences use last changed, in seconds since the epoch. The labels name them, "
    "separated by commas, and count those that are loaded. Absent where none is.",
    (*_REPLICA, "max_adapters", "running_adapters", "waiting_adapters"),
    "StepDone",
)

MEMORY_LIMIT = Metric(
    "inferd_memory_limit_bytes", "Memory of the machine, or the limit of its container if that is less.", (), "system"
)
MEMORY_AVAILABLE = Metric(
    "inferd_memory_available_bytes", "Memory of that limit that processes can still take; caches count.", (), "system"
)

# -- GPUs -------------------------------------------------------------------------------------

GPU_DUTY = _gpu(
    "inferd_gpu_duty_cycle",
    "Share of the time since the last reading in which a GPU computed, 0 to 1.",
)
GPU_MEMORY_USED = _gpu("inferd_gpu_memory_used_bytes", "Memory of a GPU in use by all processes.")
GPU_MEMORY_TOTAL = _gpu("inferd_gpu_memory_total_bytes", "Memory of a GPU.")
GPU_TEMPERATURE = _gpu("inferd_gpu_temperature_celsius", "Temperature of a GPU's core.")
GPU_POWER = _gpu("inferd_gpu_power_watts", "Power that a GPU draws.")

# -- devices ----------------------------------------------------------------------------------

DEVICE_INFO = Metric(
    "inferd_device_info",
    "1; the labels describe a device: kind gpu, cpu, memory or sensor.",
    (*_DEVICE, "name", "uuid"),
    "driver",
)
DEVICE_DUTY = _device(
    "inferd_device_duty_cycle", "Share of the time since the last reading in which a device computed, 0 to 1."
)
DEVICE_MEMORY_USED = _device("inferd_device_memory_used_bytes", "Memory of a device in use by all processes.")
DEVICE_MEMORY_TOTAL = _device("inferd_device_memory_total_bytes", "Memory of a device.")
DEVICE_TEMPERATURE = _device("inferd_device_temperature_celsius", "Temperature of a device.")
DEVICE_POWER = _device("inferd_device_power_watts", "Power that a device draws.")
DEVICE_ENERGY = _device("inferd_device_energy_joules_total", "Energy that a device used since it was first read.")
DEVICE_IDLE_ENERGY = _device(
    "inferd_device_idle_energy_joules_total", "Part of that energy that belongs to no model: no step was computed."
)
DEVICE_THROTTLED_S = Metric(
    "inferd_device_throttled_seconds_total",
    "Time that a device ran at a reduced speed, by reason: power (its limit), thermal, hardware, quota (a "
    "container's limit of processor time, summed over processors).",
    (*_DEVICE, "reason"),
    "driver",
)
DEVICE_ERRORS = Metric(
    "inferd_device_errors_total",
    "Errors in a device's memory since the server started: corrected, uncorrected.",
    (*_DEVICE, "error"),
    "driver",
)
DEVICE_FAILURES = Metric(
    "inferd_device_read_failures_total",
    "Readings of devices that failed or took too long, by source; their devices have no series meanwhile.",
    ("source",),
    "driver",
)
MODEL_DEVICE_S = Metric(
    "inferd_model_device_seconds_total", "Time that devices computed for a model: its steps.", _MODEL, "StepDone"
)
MODEL_ENERGY = Metric(
    "inferd_model_energy_joules_total",
    "Energy of devices while they computed for a model, in proportion to the time of its steps.",
    _MODEL,
    "StepDone, driver",
)
MODEL_COST = Metric(
    "inferd_model_cost_total",
    "That energy and time at the prices of the configuration.",
    (*_MODEL, "currency"),
    "StepDone, driver",
)

MODEL_UNLOADS = Metric(
    "inferd_model_unloads_total", "Times that a model left memory, by reason.", (*_MODEL, "reason"), "ModelUnloaded"
)

# -- trying elsewhere --------------------------------------------------------------------------

BREAKER_STATE = Metric(
    "inferd_breaker_state",
    "1 for the state that a replica's breaker is in (ejected: too slow), 0 for the others.",
    (*_REPLICA, "state"),
    "BreakerChanged",
)
BREAKER_CHANGES = Metric(
    "inferd_breaker_changes_total",
    "Times that a replica's breaker entered a state.",
    (*_REPLICA, "state"),
    "BreakerChanged",
)
RETRIES = Metric(
    "inferd_retries_total",
    "Requests sent to another replica (granted), or not sent because the budget was used up (refused).",
    (*_MODEL, "kind", "result"),
    "Retried",
)

# -- prompts that another replica computes -----------------------------------------------------

HAND_OVERS = Metric(
    "inferd_hand_overs_total",
    "Prompts that one replica computed for another one, by whether all their KV blocks came (whole), or not (partial).",
    (*_MODEL, "result"),
    "HandedOver",
)
HAND_OVER_BLOCKS = Metric(
    "inferd_hand_over_blocks_total", "KV blocks that another replica has by hand-overs.", _MODEL, "HandedOver"
)
HAND_OVER_BYTES = Metric(
    "inferd_hand_over_bytes_total", "Bytes of KV blocks that were sent to another replica.", _MODEL, "HandedOver"
)
HAND_OVER_S = Metric(
    "inferd_hand_over_seconds",
    "Duration of a hand-over, from the dispatch until the other replica was asked to go on.",
    _MODEL,
    "HandedOver",
    buckets=_FIRST_TOKEN_S,
)

# -- kept answers ------------------------------------------------------------------------------

CACHE_LOOKUPS = Metric(
    "inferd_response_cache_total",
    "Accesses to the response cache by result; errors of its server belong to no model.",
    (*_MODEL, "result"),
    "CacheLooked",
)
CACHE_BYTES = Metric(
    "inferd_response_cache_bytes_total",
    "Bytes of answers taken from the response cache (hit) and put into it (store).",
    (*_MODEL, "result"),
    "CacheLooked",
)

# -- HTTP --------------------------------------------------------------------------------------

HTTP_REQUESTS = Metric(
    "inferd_http_requests_total",
    "HTTP requests answered, by exact status (499: the client left first).",
    ("route", "method", "status"),
    "HttpServed",
)
HTTP_S = Metric(
    "inferd_http_request_duration_seconds",
    "From an HTTP request's first byte to its answer's last.",
    ("route", "method"),
    "HttpServed",
    buckets=_HTTP_S,
)
HTTP_REQUEST_BYTES = Metric(
    "inferd_http_request_size_bytes",
    "Size of HTTP request bodies.",
    ("route",),
    "HttpServed",
    is_summary=True,
)
HTTP_RESPONSE_BYTES = Metric(
    "inferd_http_response_size_bytes",
    "Size of HTTP response bodies.",
    ("route",),
    "HttpServed",
    is_summary=True,
)
TURNED_AWAY = Metric(
    "inferd_http_connections_refused_total",
    "Connections refused with 503 because there were server.max_connections already.",
    (),
    "ClientTurnedAway",
)

# -- the observer itself -----------------------------------------------------------------------

BUILD = Metric("inferd_build_info", "1; the labels describe the server.", ("version", "python"), "start")
LINES_DROPPED = Metric(
    "inferd_log_lines_dropped_total",
    "Log lines dropped because the reader of the log or its disk was slow, full or gone.",
    (),
    "log writer",
)
PAYLOADS_DROPPED = Metric(
    "inferd_payloads_dropped_total",
    "Payloads that were to be recorded and were not: too many waited, or the disk was slow, full or gone.",
    (),
    "log writer",
)
OBSERVER_FAILURES = Metric(
    "inferd_observer_failures_total", "Events that could not be observed: defects in the observer.", (), "sink"
)

# -- traces ------------------------------------------------------------------------------------

TRACES_EXPORTED = Metric(
    "inferd_traces_exported_total", "Requests and loads whose spans the collector took.", (), "exporter"
)
TRACES_DROPPED = Metric(
    "inferd_traces_dropped_total",
    "Requests and loads whose spans were not sent, by reason: a full queue, a collector that refused them or did not "
    "answer, the end of the server, a defect.",
    ("reason",),
    "exporter",
)
SPANS_REJECTED = Metric(
    "inferd_trace_spans_rejected_total", "Spans that the collector rejected from what it took.", (), "exporter"
)

# -- configuration -----------------------------------------------------------------------------

CONFIG_RELOADS = Metric(
    "inferd_config_reloads_total",
    "Times the configuration file was read again, by whether it was adopted.",
    ("result",),
    "ConfigReloaded",
)
CONFIG_OK = Metric(
    "inferd_config_last_reload_successful",
    "1 while the configuration file is served completely, 0 after a change that was refused or whose models did "
    "not all load.",
    (),
    "start, ConfigReloaded",
)

# -- state -------------------------------------------------------------------------------------

STATE_AVAILABLE = Metric(
    "inferd_state_available",
    "1 while the database of keys, limits and usage answers; 0: known keys continue, none can be changed.",
    (),
    "start, StateChanged",
)
STATE_OUTAGES = Metric("inferd_state_outages_total", "Times that the database stopped answering.", (), "StateChanged")

# -- gateways of one database -------------------------------------------------------------------

CONFIG_DIGEST = Metric(
    "inferd_config_digest_info",
    "1; the label is a digest of the settings that must be equal at all gateways of one database.",
    ("digest",),
    "GatewaysCompared",
)
GATEWAYS = Metric(
    "inferd_gateways", "Gateways that share the database and are alive, with this one.", (), "GatewaysCompared"
)
GATEWAYS_DIFFERING = Metric(
    "inferd_gateways_differing",
    "Gateways of the same database whose settings differ from those of this one.",
    (),
    "start, GatewaysCompared",
)

HINTS = Metric(
    "inferd_hints_total",
    "Hints about remote servers, exchanged with the other gateways of the database, by what became of them: sent; "
    "received; unknown, about servers or models that this one does not have; used, requests that went to a server "
    "because of a hint; stale, exchanges of others that were replaced before this one read them; unreadable ones.",
    ("result",),
    "HintsExchanged",
)

# -- rollouts ----------------------------------------------------------------------------------

ROLLOUT_WEIGHT = Metric(
    "inferd_rollout_weight",
    "Part of a model's units that a version serves, while the model has a rollout: 0 to 1.",
    ("model", "version"),
    "RolloutChanged",
)
ROLLOUT_STATE = Metric(
    "inferd_rollout_state",
    "1 for the state of a model's rollout, 0 for the others.",
    ("model", "state"),
    "RolloutChanged",
)
ROLLOUT_EVIDENCE = Metric(
    "inferd_rollout_evidence",
    "Evidence of a rollout's guard as a part of what decides, on a logarithmic scale: at 1 of 'against' the new "
    "version is withdrawn, at 1 of 'in_favour' the guard is passed.",
    ("model", "guard", "side"),
    "RolloutChanged",
)
ROLLOUT_CHANGES = Metric(
    "inferd_rollout_changes_total",
    "Changes of a model's rollout that this server adopted, by the state that they led to.",
    ("model", "state"),
    "RolloutChanged",
)

ROLLOUT_COPIES = Metric(
    "inferd_rollout_copies_total",
    "Requests of shadowed units, by what became of their copies: equal, differs or failed; dropped because the new "
    "version was busy, unavailable or short of memory, or the copy late; not compared because of the request's or the "
    "answer's kind: large, random, sequence, form.",
    ("model", "result"),
    "CopyEnded",
)

# -- drift -------------------------------------------------------------------------------------

DRIFT_PSI = Metric(
    "inferd_drift_psi",
    "Population stability index of the last smallest window against the reference. Chance alone makes it more than 0.",
    ("model", "stream"),
    "DriftRead",
)
DRIFT_MMD = Metric(
    "inferd_drift_mmd",
    "Maximum mean discrepancy of the embeddings of the last smallest window against the reference. Chance alone makes "
    "it more than 0.",
    ("model", "stream"),
    "DriftRead",
)
DRIFT_DETECTED = Metric(
    "inferd_drift_detected",
    "1 if the last window of any size differs from the reference by more than chance, else 0.",
    ("model", "stream"),
    "DriftRead",
)
DRIFT_WINDOWS = Metric(
    "inferd_drift_windows_total",
    "Windows that were compared with the reference, of all sizes.",
    ("model", "stream"),
    "DriftRead",
)
DRIFT_ALARMS = Metric(
    "inferd_drift_alarms_total",
    "Windows that differ from the reference by more than chance.",
    ("model", "stream"),
    "DriftRead",
)

# -- MLflow ------------------------------------------------------------------------------------

WEBHOOKS = Metric(
    "inferd_mlflow_webhooks_total",
    "Webhooks of MLflow, by what became of them: accepted, or refused as forged, old, replayed, or unset: no secret is "
    "set.",
    ("result",),
    "WebhookCame",
)

# -- scaling -----------------------------------------------------------------------------------

SCALE_DESIRED = Metric(
    "inferd_scale_desired_replicas",
    "Local replicas that a model with scaling is to have, those that start included.",
    _MODEL,
    "Scaled",
)
SCALE_REPLICAS = Metric(
    "inferd_scale_replicas",
    "Local replicas of a model with scaling, by state: ready, starting, or leaving (they end what they have).",
    ("model", "state"),
    "Scaled",
)
SCALE_NEEDED = Metric(
    "inferd_scale_needed_replicas",
    "Replicas that an input of the decision needs, when the decision changed last; the largest input counts.",
    ("model", "input"),
    "Scaled",
)
SCALE_CHANGES = Metric(
    "inferd_scale_changes_total",
    "Changes of a model's number of replicas by its load, by direction: up or down.",
    ("model", "direction"),
    "Scaled",
)

# -- nodes ------------------------------------------------------------------------------------

_NODE = ("node",)
NODES_UP = Metric("inferd_nodes_up", "Machines that have joined as nodes and are heard.", (), "NodeChanged")
NODE_CHANGES = Metric(
    "inferd_node_changes_total",
    "Times that a node reached a state: ready, late (no beat, though its machine answers), leaving, left (after its "
    "workers ended), gone (with them); or was refused.",
    ("state",),
    "NodeChanged",
)
NODE_BEAT_AGE = Metric(
    "inferd_node_heartbeat_age_seconds", "Seconds since a node's last beat; five come in a second.", _NODE, "NodeSeen"
)
NODE_TRAFFIC = Metric(
    "inferd_node_traffic_bytes",
    "Bytes over all connections to a node since it joined, with TLS, by direction: sent or received.",
    (*_NODE, "direction"),
    "NodeSeen",
)

# -- stored responses --------------------------------------------------------------------------

STORED_BYTES = Metric(
    "inferd_stored_bytes",
    "Bytes of stored responses and conversations in the database, of all tenants.",
    (),
    "StoredCounted",
)
STORED_ENTRIES = Metric(
    "inferd_stored_entries",
    "Stored responses and conversations in the database, of all tenants, by kind.",
    ("kind",),
    "StoredCounted",
)
STORED_TENANTS = Metric("inferd_stored_tenants", "Tenants with a stored response or conversation.", (), "StoredCounted")
STORED_MOST_USED = Metric(
    "inferd_stored_most_used_ratio",
    "Share of state.responses.max_bytes that the tenant with the most has stored; near 1 its oldest are deleted.",
    (),
    "StoredCounted",
)
STORED_DROPPED = Metric(
    "inferd_stored_dropped_total",
    "Stored responses and conversations that this server deleted because of a bound of their tenant: bytes or age.",
    ("reason",),
    "StoredDropped",
)

# -- files and batches -------------------------------------------------------------------------

FILES = Metric("inferd_files", "Files of clients, of all tenants.", (), "JobsCounted")
FILES_BYTES = Metric(
    "inferd_files_bytes", "Bytes of the contents of files of clients, of all tenants.", (), "JobsCounted"
)
BATCHES = Metric(
    "inferd_batches",
    "Batches that have not ended, of all tenants, by status: validating (also those that wait), in_progress, "
    "finalizing or cancelling.",
    ("status",),
    "JobsCounted",
)
BATCH_LINES = Metric(
    "inferd_batch_requests_total",
    "Requests of batches whose answers count, by result: done or failed.",
    ("result",),
    "LinesAnswered",
)
BATCHES_ENDED = Metric(
    "inferd_batches_ended_total",
    "Batches that ended at this server, by status: completed, failed, expired or cancelled.",
    ("status",),
    "BatchEnded",
)
# -- the gateway's process ---------------------------------------------------------------------

# The names and texts of every Prometheus client.
_process = partial(Metric, labels=(), event="/proc")
PROCESS_VIRTUAL = _process("process_virtual_memory_bytes", "Virtual memory size in bytes.")
PROCESS_RESIDENT = _process("process_resident_memory_bytes", "Resident memory size in bytes.")
PROCESS_START = _process("process_start_time_seconds", "Start time of the process since unix epoch in seconds.")
PROCESS_CPU = _process("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.")
PROCESS_FILES = _process("process_open_fds", "Number of open file descriptors.")
PROCESS_MAX_FILES = _process("process_max_fds", "Maximum number of open file descriptors.")

TABLE: tuple[Metric, ...] = tuple(row for row in list(globals().values()) if isinstance(row, Metric))
