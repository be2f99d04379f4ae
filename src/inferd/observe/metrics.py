"""The one table of metrics: every name, label, bucket and meaning, and the event each comes from.

Only this file names metrics. A row has inferd's own name, and the names that dashboards of other servers use. All names
of a row show the same values, because there is one value.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Literal, NamedTuple, get_args

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
CACHE_RESULTS = ("hit", "miss", "store", "error")
UNLOADS = ("asked", "idle", "evicted", "removed")
FAULTS = ("hung", "died", "failed")
RELOADS = ("accepted", "refused")
BLOCK_STATES = ("used", "cached", "free")
STAGES = ("queue", "first_token", "inter_token", "per_output_token", "inference", "total")
PREDICTION_STAGES = ("decode", "batch_wait", "compute", "encode")
QUANTILES = (0.5, 0.95, 0.99)
QUANTILE_WINDOW_S = 60.0


# Names of labels in other servers' metrics, by the prefix of a metric's name.
_LABELS_OF_OTHERS = {
    "vllm:": {"model": "model_name", "replica": "engine", "num_blocks": "num_gpu_blocks"},
    "nv_": {"uuid": "gpu_uuid"},  # Triton's
    "http_": {"route": "handler"},  # the FastAPI instrumentator's
}


class Name(NamedTuple):
    """A name of the same values, and what the row's labels are called there, in order."""

    name: str
    labels: tuple[str, ...]


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
    also: InitVar[str] = field(default="", kw_only=True)  # the name that another server's dashboards use
    kind: Kind = field(init=False)
    names: tuple[Name, ...] = field(init=False)  # its own first

    def __post_init__(self, also: str) -> None:
        assert list(self.buckets) == sorted(set(self.buckets)), self.name
        is_counter = self.name.endswith("_total")
        self.kind = (
            "counter" if is_counter else "histogram" if self.buckets else "summary" if self.is_summary else "gauge"
        )
        self.names = (Name(self.name, self.labels),)
        if also:
            (called,) = [words for start, words in _LABELS_OF_OTHERS.items() if also.startswith(start)]
            self.names += (Name(also, tuple(called.get(label, label) for label in self.labels)),)


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
_gpu = partial(Metric, labels=("gpu", "uuid"), event="driver")  # NVIDIA's library, when the page is asked for

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
    also="vllm:request_success_total",
)
ERRORS = Metric("inferd_errors_total", "Requests that failed, by the kind of error.", (*_MODEL, "kind"), "RequestEnded")
REFUSED = Metric(
    "inferd_refused_total",
    "Requests refused at a model's queue, by reason.",
    (*_MODEL, "reason"),
    "RequestRefused",
    also="vllm:admission_rejections_total",
)
PROMPT_TOKENS = _ended(
    "inferd_prompt_tokens_total", "Prompt tokens of ended requests.", also="vllm:prompt_tokens_total"
)
GENERATION_TOKENS = _ended(
    "inferd_generation_tokens_total", "Tokens generated by ended requests.", also="vllm:generation_tokens_total"
)
CACHED_TOKENS = _ended(
    "inferd_prompt_cached_tokens_total",
    "Prompt tokens of ended requests whose KV was found in the prefix cache.",
    also="vllm:prompt_tokens_cached_total",
)
FIRST_TOKEN_S = _ended(
    "inferd_time_to_first_token_seconds",
    "From a request's arrival to its first token.",
    buckets=_FIRST_TOKEN_S,
    also="vllm:time_to_first_token_seconds",
)
INTER_TOKEN_S = _ended(
    "inferd_inter_token_latency_seconds",
    "Between one answer's successive tokens.",
    buckets=_PER_TOKEN_S,
    also="vllm:inter_token_latency_seconds",
)
PER_OUTPUT_TOKEN_S = _ended(
    "inferd_request_time_per_output_token_seconds",
    "A done request's mean time per token after the first (requests for one answer).",
    buckets=_PER_TOKEN_S,
    also="vllm:request_time_per_output_token_seconds",
)
REQUEST_S = _ended(
    "inferd_request_latency_seconds",
    "A done request's whole life: arrival to last token.",
    buckets=_REQUEST_S,
    also="vllm:e2e_request_latency_seconds",
)
QUEUE_S = _ended(
    "inferd_request_queue_time_seconds",
    "A done request's wait: arrival to the first step that computed any of it.",
    buckets=_REQUEST_S,
    also="vllm:request_queue_time_seconds",
)
INFERENCE_S = _ended(
    "inferd_request_inference_time_seconds",
    "A done request's time in the engine: first step to last token.",
    buckets=_REQUEST_S,
    also="vllm:request_inference_time_seconds",
)
PREFILL_S = _ended(
    "inferd_request_prefill_time_seconds",
    "A done request's first step to its first token.",
    buckets=_REQUEST_S,
    also="vllm:request_prefill_time_seconds",
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
    also="vllm:request_decode_time_seconds",
)
REQUEST_PROMPT_TOKENS = _ended(
    "inferd_request_prompt_tokens",
    "Prompt tokens per done request.",
    buckets=_TOKENS,
    also="vllm:request_prompt_tokens",
)
REQUEST_GENERATION_TOKENS = _ended(
    "inferd_request_generation_tokens",
    "Tokens generated per done request.",
    buckets=_TOKENS,
    also="vllm:request_generation_tokens",
)
REQUEST_LONGEST_TOKENS = _ended(
    "inferd_request_max_num_generation_tokens",
    "Length of the longest answer per done request (requests for one answer).",
    buckets=_TOKENS,
    also="vllm:request_max_num_generation_tokens",
)
REQUEST_COMPUTED_TOKENS = _ended(
    "inferd_request_prefill_kv_computed_tokens",
    "Prompt tokens per done request that were not found in the prefix cache.",
    buckets=_TOKENS,
    also="vllm:request_prefill_kv_computed_tokens",
)
REQUEST_N = _ended(
    "inferd_request_params_n", "Answers asked for per done request.", buckets=_CHOICES, also="vllm:request_params_n"
)
REQUEST_MAX_TOKENS = _ended(
    "inferd_request_params_max_tokens",
    "Tokens allowed per done request that set a limit.",
    buckets=_TOKENS,
    also="vllm:request_params_max_tokens",
)
REQUEST_PREEMPTIONS = _ended(
    "inferd_request_preemptions",
    "Times that a done request gave up its KV blocks and was computed again.",
    buckets=_PREEMPTIONS,
    also="vllm:request_num_preemptions",
)
LATENCY_S = Metric(
    "inferd_latency_seconds",
    f"Quantiles of the last {QUANTILE_WINDOW_S:.0f} seconds within 1 %, by stage; NaN: nothing ended in that time.",
    (*_MODEL, "stage"),
    "RequestEnded",
    is_summary=True,
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
    also="vllm:num_requests_waiting",
)
WAITING_BY_REASON = Metric(
    "inferd_waiting_by_reason",
    "Waiting requests by reason; the reason is always capacity.",
    (*_REPLICA, "reason"),
    "QueueChanged, StepDone",
    also="vllm:num_requests_waiting_by_reason",
)

# -- the engine's steps ------------------------------------------------------------------------

RUNNING = _step("inferd_running", "Sequences being computed.", also="vllm:num_requests_running")
KV_USAGE = _step(
    "inferd_kv_usage_ratio", "Share of the KV blocks that sequences hold, 0 to 1.", also="vllm:kv_cache_usage_perc"
)
KV_BLOCKS = Metric(
    "inferd_kv_blocks",
    "KV blocks, by state: held by sequences, kept for their prefix, free.",
    (*_REPLICA, "state"),
    "StepDone",
)
STEP_TOKENS = _step(
    "inferd_step_tokens", "Tokens computed per engine step.", buckets=_STEP_TOKENS, also="vllm:iteration_tokens_total"
)
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
PREEMPTIONS = _step(
    "inferd_preemptions_total", "Sequences that gave up their KV blocks to others.", also="vllm:num_preemptions_total"
)
PREFIX_QUERIES = _step(
    "inferd_prefix_cache_queries_total", "Tokens looked up in the prefix cache.", also="vllm:prefix_cache_queries_total"
)
PREFIX_HITS = _step(
    "inferd_prefix_cache_hits_total", "Tokens found in the prefix cache.", also="vllm:prefix_cache_hits_total"
)
DRAFTS = _step(
    "inferd_speculation_drafts_total",
    "Times that tokens were guessed for a sequence.",
    also="vllm:spec_decode_num_drafts_total",
)
DRAFTED_TOKENS = _step(
    "inferd_speculation_drafted_tokens_total", "Tokens guessed.", also="vllm:spec_decode_num_draft_tokens_total"
)
ACCEPTED_TOKENS = _step(
    "inferd_speculation_accepted_tokens_total",
    "Guessed tokens that were right; divided by those guessed it is the acceptance rate.",
    also="vllm:spec_decode_num_accepted_tokens_total",
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
    "inferd_replica_resident_memory_bytes", "Resident memory of the worker's process, as last reported."
)
MODEL_MAX_TOKENS = _replica("inferd_model_max_tokens", "Longest prompt plus answer.")
CACHE_CONFIG = Metric(
    "inferd_cache_config_info",
    "1; the labels describe the KV cache.",
    (*_REPLICA, "block_size", "num_blocks"),
    "ReplicaChanged",
    also="vllm:cache_config_info",
)

# -- GPUs -------------------------------------------------------------------------------------

GPU_DUTY = _gpu(
    "inferd_gpu_duty_cycle",
    "Share of the driver's last sampling period in which a GPU computed, 0 to 1.",
    also="nv_gpu_utilization",
)
GPU_MEMORY_USED = _gpu(
    "inferd_gpu_memory_used_bytes", "Memory of a GPU in use by all processes.", also="nv_gpu_memory_used_bytes"
)
GPU_MEMORY_TOTAL = _gpu("inferd_gpu_memory_total_bytes", "Memory of a GPU.", also="nv_gpu_memory_total_bytes")
GPU_TEMPERATURE = _gpu("inferd_gpu_temperature_celsius", "Temperature of a GPU's core.")
GPU_POWER = _gpu("inferd_gpu_power_watts", "Power that a GPU draws.", also="nv_gpu_power_usage")

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
HTTP_REQUESTS_BY_CLASS = Metric(
    "http_requests_total",
    "HTTP requests answered, by class of status (2xx), in the words of the FastAPI instrumentator.",
    ("handler", "method", "status"),
    "HttpServed",
)
HTTP_S = Metric(
    "inferd_http_request_duration_seconds",
    "From an HTTP request's first byte to its answer's last.",
    ("route", "method"),
    "HttpServed",
    buckets=_HTTP_S,
    also="http_request_duration_seconds",
)
HTTP_REQUEST_BYTES = Metric(
    "inferd_http_request_size_bytes",
    "Size of HTTP request bodies.",
    ("route",),
    "HttpServed",
    is_summary=True,
    also="http_request_size_bytes",
)
HTTP_RESPONSE_BYTES = Metric(
    "inferd_http_response_size_bytes",
    "Size of HTTP response bodies.",
    ("route",),
    "HttpServed",
    is_summary=True,
    also="http_response_size_bytes",
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
    "inferd_log_lines_dropped_total", "Log lines dropped because the log's reader did not keep up.", (), "log writer"
)
OBSERVER_FAILURES = Metric(
    "inferd_observer_failures_total", "Events that could not be observed: defects in the observer.", (), "sink"
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

TABLE: tuple[Metric, ...] = tuple(row for row in list(globals().values()) if isinstance(row, Metric))
