"""The one table of metrics: every name, label, bucket and meaning, and the event each comes from.

Only this file names metrics. A row has inferd's own name, and the names that dashboards of other servers use. All names
of a row show the same values, because there is one value.
"""

from __future__ import annotations

from dataclasses import dataclass
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
CACHE_RESULTS = ("hit", "miss", "store", "error")
UNLOADS = ("asked", "idle", "evicted", "removed")
FAULTS = ("hung", "died", "failed")
RELOADS = ("accepted", "refused")
BLOCK_STATES = ("used", "cached", "free")
STAGES = ("queue", "first_token", "inter_token", "per_output_token", "inference", "total")
PREDICTION_STAGES = ("decode", "batch_wait", "compute", "encode")
QUANTILES = (0.5, 0.95, 0.99)
QUANTILE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of the same values. ``labels``: what the row's labels are called there, in order."""

    name: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A row. ``event``: the event in ``inferd.events`` that changes it, or where else it comes from.

    A row is itself and no other: the dictionaries of series look it up many times per request.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    event: str
    aliases: tuple[Alias, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, without infinity

    def __post_init__(self) -> None:
        assert (self.kind == "counter") == self.name.endswith("_total"), self.name
        assert (self.kind == "histogram") == bool(self.buckets), self.name
        assert list(self.buckets) == sorted(set(self.buckets)), self.name
        assert all(len(alias.labels) == len(self.labels) for alias in self.aliases), self.name


# Buckets as vLLM has them, so that one dashboard reads both.
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
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
_ENGINE = ("model_name", "engine")


def _vllm(name: str, *more: str) -> tuple[Alias, ...]:
    return (Alias(f"vllm:{name}", (*_ENGINE, *more)),)


# -- requests ----------------------------------------------------------------------------------

REQUESTS = Metric(
    "inferd_requests_total",
    "counter",
    "Requests that entered a model's queue and ended, by outcome.",
    (*_REPLICA, "outcome"),
    "RequestEnded",
)
FINISHED = Metric(
    "inferd_finished_total",
    "counter",
    "Answers that ended, by reason; a request for n answers counts n times.",
    (*_REPLICA, "finished_reason"),
    "RequestEnded",
    _vllm("request_success_total", "finished_reason"),
)
ERRORS = Metric(
    "inferd_errors_total", "counter", "Requests that failed, by the kind of error.", (*_MODEL, "kind"), "RequestEnded"
)
REFUSED = Metric(
    "inferd_refused_total",
    "counter",
    "Requests refused at a model's queue, by reason.",
    (*_MODEL, "reason"),
    "RequestRefused",
    (Alias("vllm:admission_rejections_total", ("model_name", "reason")),),
)
PROMPT_TOKENS = Metric(
    "inferd_prompt_tokens_total",
    "counter",
    "Prompt tokens of ended requests.",
    _REPLICA,
    "RequestEnded",
    _vllm("prompt_tokens_total"),
)
GENERATION_TOKENS = Metric(
    "inferd_generation_tokens_total",
    "counter",
    "Tokens generated by ended requests.",
    _REPLICA,
    "RequestEnded",
    _vllm("generation_tokens_total"),
)
CACHED_TOKENS = Metric(
    "inferd_prompt_cached_tokens_total",
    "counter",
    "Prompt tokens of ended requests whose KV was found in the prefix cache.",
    _REPLICA,
    "RequestEnded",
    _vllm("prompt_tokens_cached_total"),
)
FIRST_TOKEN_S = Metric(
    "inferd_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival to its first token.",
    _REPLICA,
    "RequestEnded",
    _vllm("time_to_first_token_seconds"),
    _FIRST_TOKEN_S,
)
INTER_TOKEN_S = Metric(
    "inferd_inter_token_latency_seconds",
    "histogram",
    "Between one answer's successive tokens.",
    _REPLICA,
    "RequestEnded",
    _vllm("inter_token_latency_seconds"),
    _PER_TOKEN_S,
)
PER_OUTPUT_TOKEN_S = Metric(
    "inferd_request_time_per_output_token_seconds",
    "histogram",
    "A done request's mean time per token after the first (requests for one answer).",
    _REPLICA,
    "RequestEnded",
    _vllm("request_time_per_output_token_seconds"),
    _PER_TOKEN_S,
)
REQUEST_S = Metric(
    "inferd_request_latency_seconds",
    "histogram",
    "A done request's whole life: arrival to last token.",
    _REPLICA,
    "RequestEnded",
    _vllm("e2e_request_latency_seconds"),
    _REQUEST_S,
)
QUEUE_S = Metric(
    "inferd_request_queue_time_seconds",
    "histogram",
    "A done request's wait: arrival to the first step that computed any of it.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_queue_time_seconds"),
    _REQUEST_S,
)
INFERENCE_S = Metric(
    "inferd_request_inference_time_seconds",
    "histogram",
    "A done request's time in the engine: first step to last token.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_inference_time_seconds"),
    _REQUEST_S,
)
PREFILL_S = Metric(
    "inferd_request_prefill_time_seconds",
    "histogram",
    "A done request's first step to its first token.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_prefill_time_seconds"),
    _REQUEST_S,
)
PIPELINE_STEP_S = Metric(
    "inferd_pipeline_step_seconds",
    "histogram",
    "One step of a pipeline for a done request; a model's batch counts in full for each request in it.",
    (*_REPLICA, "step"),
    "RequestEnded",
    (),
    _PIPELINE_STEP_S,
)
PREDICTION_STAGE_S = Metric(
    "inferd_prediction_stage_seconds",
    "histogram",
    "A done prediction's time in its worker, by stage: decode, batch_wait (for its batch to begin), compute, encode.",
    (*_REPLICA, "stage"),
    "RequestEnded",
    (),
    _PIPELINE_STEP_S,
)
DECODE_S = Metric(
    "inferd_request_decode_time_seconds",
    "histogram",
    "A done request's first token to its last.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_decode_time_seconds"),
    _REQUEST_S,
)
REQUEST_PROMPT_TOKENS = Metric(
    "inferd_request_prompt_tokens",
    "histogram",
    "Prompt tokens per done request.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_prompt_tokens"),
    _TOKENS,
)
REQUEST_GENERATION_TOKENS = Metric(
    "inferd_request_generation_tokens",
    "histogram",
    "Tokens generated per done request.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_generation_tokens"),
    _TOKENS,
)
REQUEST_LONGEST_TOKENS = Metric(
    "inferd_request_max_num_generation_tokens",
    "histogram",
    "Length of the longest answer per done request (requests for one answer).",
    _REPLICA,
    "RequestEnded",
    _vllm("request_max_num_generation_tokens"),
    _TOKENS,
)
REQUEST_COMPUTED_TOKENS = Metric(
    "inferd_request_prefill_kv_computed_tokens",
    "histogram",
    "Prompt tokens per done request that were not found in the prefix cache.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_prefill_kv_computed_tokens"),
    _TOKENS,
)
REQUEST_N = Metric(
    "inferd_request_params_n",
    "histogram",
    "Answers asked for per done request.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_params_n"),
    _CHOICES,
)
REQUEST_MAX_TOKENS = Metric(
    "inferd_request_params_max_tokens",
    "histogram",
    "Tokens allowed per done request that set a limit.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_params_max_tokens"),
    _TOKENS,
)
REQUEST_PREEMPTIONS = Metric(
    "inferd_request_preemptions",
    "histogram",
    "Times that a done request gave up its KV blocks and was computed again.",
    _REPLICA,
    "RequestEnded",
    _vllm("request_num_preemptions"),
    _PREEMPTIONS,
)
LATENCY_S = Metric(
    "inferd_latency_seconds",
    "summary",
    f"Quantiles of the last {QUANTILE_WINDOW_S:.0f} seconds within 1 %, by stage; NaN: nothing ended in that time.",
    (*_MODEL, "stage"),
    "RequestEnded",
)

# -- queues ------------------------------------------------------------------------------------

QUEUE_WAITING = Metric(
    "inferd_queue_waiting", "gauge", "Requests in the queue in front of a model's replicas.", _MODEL, "QueueChanged"
)
QUEUE_WAITING_BY_CLASS = Metric(
    "inferd_queue_waiting_by_class",
    "gauge",
    "Requests in the queue, by class of priority.",
    (*_MODEL, "class"),
    "QueueChanged",
)
QUEUE_TOKENS = Metric(
    "inferd_queue_tokens", "gauge", "Tokens (estimated) of the requests in the queue.", _MODEL, "QueueChanged"
)
QUEUE_BYTES = Metric("inferd_queue_bytes", "gauge", "Bytes of the requests in the queue.", _MODEL, "QueueChanged")
IN_FLIGHT = Metric(
    "inferd_in_flight", "gauge", "Requests that were handed to a replica and have not ended.", _MODEL, "QueueChanged"
)
REPLICA_WAITING = Metric(
    "inferd_replica_waiting",
    "gauge",
    "Sequences that a replica's engine holds but does not compute yet.",
    _REPLICA,
    "StepDone",
)
WAITING = Metric(
    "inferd_waiting",
    "gauge",
    "Waiting requests: in the engine and, in the first replica's series, in the model's queue.",
    _REPLICA,
    "QueueChanged, StepDone",
    _vllm("num_requests_waiting"),
)
WAITING_BY_REASON = Metric(
    "inferd_waiting_by_reason",
    "gauge",
    "Waiting requests by reason; the reason is always capacity.",
    (*_REPLICA, "reason"),
    "QueueChanged, StepDone",
    _vllm("num_requests_waiting_by_reason", "reason"),
)

# -- the engine's steps ------------------------------------------------------------------------

RUNNING = Metric(
    "inferd_running", "gauge", "Sequences being computed.", _REPLICA, "StepDone", _vllm("num_requests_running")
)
KV_USAGE = Metric(
    "inferd_kv_usage_ratio",
    "gauge",
    "Share of the KV blocks that sequences hold, 0 to 1.",
    _REPLICA,
    "StepDone",
    _vllm("kv_cache_usage_perc"),
)
KV_BLOCKS = Metric(
    "inferd_kv_blocks",
    "gauge",
    "KV blocks, by state: held by sequences, kept for their prefix, free.",
    (*_REPLICA, "state"),
    "StepDone",
)
STEP_TOKENS = Metric(
    "inferd_step_tokens",
    "histogram",
    "Tokens computed per engine step.",
    _REPLICA,
    "StepDone",
    _vllm("iteration_tokens_total"),
    _STEP_TOKENS,
)
STEP_SEQUENCES = Metric(
    "inferd_step_sequences",
    "histogram",
    "Sequences computed together per engine step: the batch size.",
    _REPLICA,
    "StepDone",
    (),
    _STEP_SEQUENCES,
)
STEP_S = Metric("inferd_step_seconds", "histogram", "Duration of an engine step.", _REPLICA, "StepDone", (), _STEP_S)
STEP_PART_S = Metric(
    "inferd_step_part_seconds_total",
    "counter",
    "Time of engine steps by part: schedule, speculate, batch (the step as arrays), forward (the "
    "model's layers), logits, sample, text, send.",
    (*_REPLICA, "part"),
    "StepDone",
)
BATCH_ROWS = Metric(
    "inferd_batch_rows",
    "histogram",
    "Rows of predictions computed together, without padding: the batch size.",
    _REPLICA,
    "StepDone",
    (),
    _STEP_SEQUENCES,
)
BATCH_S = Metric(
    "inferd_batch_seconds",
    "histogram",
    "The model's own time for a batch of predictions.",
    _REPLICA,
    "StepDone",
    (),
    _PIPELINE_STEP_S,
)
PADDED_ROWS = Metric(
    "inferd_padded_rows_total",
    "counter",
    "Computed padding: rows, or tokens where rows are padded to one length.",
    _REPLICA,
    "StepDone",
)
AUDITED_ROWS = Metric(
    "inferd_audited_rows_total",
    "counter",
    "Rows of predictions that were computed again alone (batching.audit).",
    _REPLICA,
    "StepDone",
)
AUDIT_DIFFERENCES = Metric(
    "inferd_audit_differences_total",
    "counter",
    "Audited rows that differed from their result in a batch; requests are computed one by one from then on.",
    _REPLICA,
    "StepDone",
)
PREEMPTIONS = Metric(
    "inferd_preemptions_total",
    "counter",
    "Sequences that gave up their KV blocks to others.",
    _REPLICA,
    "StepDone",
    _vllm("num_preemptions_total"),
)
PREFIX_QUERIES = Metric(
    "inferd_prefix_cache_queries_total",
    "counter",
    "Tokens looked up in the prefix cache.",
    _REPLICA,
    "StepDone",
    _vllm("prefix_cache_queries_total"),
)
PREFIX_HITS = Metric(
    "inferd_prefix_cache_hits_total",
    "counter",
    "Tokens found in the prefix cache.",
    _REPLICA,
    "StepDone",
    _vllm("prefix_cache_hits_total"),
)
DRAFTS = Metric(
    "inferd_speculation_drafts_total",
    "counter",
    "Times that tokens were guessed for a sequence.",
    _REPLICA,
    "StepDone",
    _vllm("spec_decode_num_drafts_total"),
)
DRAFTED_TOKENS = Metric(
    "inferd_speculation_drafted_tokens_total",
    "counter",
    "Tokens guessed.",
    _REPLICA,
    "StepDone",
    _vllm("spec_decode_num_draft_tokens_total"),
)
ACCEPTED_TOKENS = Metric(
    "inferd_speculation_accepted_tokens_total",
    "counter",
    "Guessed tokens that were right; divided by those guessed it is the acceptance rate.",
    _REPLICA,
    "StepDone",
    _vllm("spec_decode_num_accepted_tokens_total"),
)
TOKENIZER_QUERIES = Metric(
    "inferd_tokenizer_cache_queries_total", "counter", "Texts looked up in the tokenizer's cache.", _REPLICA, "StepDone"
)
TOKENIZER_HITS = Metric(
    "inferd_tokenizer_cache_hits_total", "counter", "Texts found in the tokenizer's cache.", _REPLICA, "StepDone"
)
TOKENIZE_S = Metric(
    "inferd_tokenize_seconds_total",
    "counter",
    "Time spent rendering chat templates and tokenizing.",
    _REPLICA,
    "StepDone",
)

# -- replicas ----------------------------------------------------------------------------------

REPLICA_STATE = Metric(
    "inferd_replica_state",
    "gauge",
    "1 for the state that a replica is in, 0 for the others.",
    (*_REPLICA, "state"),
    "ReplicaChanged",
)
REPLICA_RESTARTS = Metric(
    "inferd_replica_restarts_total",
    "counter",
    "Times that a replica's worker was started again.",
    _REPLICA,
    "ReplicaChanged",
)
REPLICA_FAULTS = Metric(
    "inferd_replica_faults_total",
    "counter",
    "Times that a replica hung, died or failed to load.",
    (*_REPLICA, "fault"),
    "ReplicaChanged",
)
REPLICA_LOAD_S = Metric(
    "inferd_replica_load_seconds",
    "gauge",
    "How long each phase of the last load took.",
    (*_REPLICA, "phase"),
    "ReplicaChanged",
)
REPLICA_RSS = Metric(
    "inferd_replica_resident_memory_bytes",
    "gauge",
    "Resident memory of the worker's process, as last reported.",
    _REPLICA,
    "ReplicaChanged",
)
MODEL_MAX_TOKENS = Metric("inferd_model_max_tokens", "gauge", "Longest prompt plus answer.", _REPLICA, "ReplicaChanged")
CACHE_CONFIG = Metric(
    "inferd_cache_config_info",
    "gauge",
    "1; the labels describe the KV cache.",
    (*_REPLICA, "block_size", "num_blocks"),
    "ReplicaChanged",
    _vllm("cache_config_info", "block_size", "num_gpu_blocks"),
)

# -- GPUs -------------------------------------------------------------------------------------

_GPU = ("gpu", "uuid")
_GPU_IN_TRITON = ("gpu", "gpu_uuid")
_WHEN_READ = "driver"  # NVIDIA's library, when the page is asked for
GPU_DUTY = Metric(
    "inferd_gpu_duty_cycle",
    "gauge",
    "Share of the driver's last sampling period in which a GPU computed, 0 to 1.",
    _GPU,
    _WHEN_READ,
    (Alias("nv_gpu_utilization", _GPU_IN_TRITON),),
)
GPU_MEMORY_USED = Metric(
    "inferd_gpu_memory_used_bytes",
    "gauge",
    "Memory of a GPU in use by all processes.",
    _GPU,
    _WHEN_READ,
    (Alias("nv_gpu_memory_used_bytes", _GPU_IN_TRITON),),
)
GPU_MEMORY_TOTAL = Metric(
    "inferd_gpu_memory_total_bytes",
    "gauge",
    "Memory of a GPU.",
    _GPU,
    _WHEN_READ,
    (Alias("nv_gpu_memory_total_bytes", _GPU_IN_TRITON),),
)
GPU_TEMPERATURE = Metric("inferd_gpu_temperature_celsius", "gauge", "Temperature of a GPU's core.", _GPU, _WHEN_READ)
GPU_POWER = Metric(
    "inferd_gpu_power_watts",
    "gauge",
    "Power that a GPU draws.",
    _GPU,
    _WHEN_READ,
    (Alias("nv_gpu_power_usage", _GPU_IN_TRITON),),
)

MODEL_UNLOADS = Metric(
    "inferd_model_unloads_total",
    "counter",
    "Times that a model left memory, by reason.",
    (*_MODEL, "reason"),
    "ModelUnloaded",
)

# -- trying elsewhere --------------------------------------------------------------------------

BREAKER_STATE = Metric(
    "inferd_breaker_state",
    "gauge",
    "1 for the state that a replica's breaker is in (ejected: too slow), 0 for the others.",
    (*_REPLICA, "state"),
    "BreakerChanged",
)
BREAKER_CHANGES = Metric(
    "inferd_breaker_changes_total",
    "counter",
    "Times that a replica's breaker entered a state.",
    (*_REPLICA, "state"),
    "BreakerChanged",
)
RETRIES = Metric(
    "inferd_retries_total",
    "counter",
    "Requests sent to another replica (granted), or not sent because the budget was used up (refused).",
    (*_MODEL, "kind", "result"),
    "Retried",
)

# -- kept answers ------------------------------------------------------------------------------

CACHE_LOOKUPS = Metric(
    "inferd_response_cache_total",
    "counter",
    "Accesses to the response cache by result; errors of its server belong to no model.",
    (*_MODEL, "result"),
    "CacheLooked",
)
CACHE_BYTES = Metric(
    "inferd_response_cache_bytes_total",
    "counter",
    "Bytes of answers taken from the response cache (hit) and put into it (store).",
    (*_MODEL, "result"),
    "CacheLooked",
)

# -- HTTP --------------------------------------------------------------------------------------

HTTP_REQUESTS = Metric(
    "inferd_http_requests_total",
    "counter",
    "HTTP requests answered, by exact status (499: the client left first).",
    ("route", "method", "status"),
    "HttpServed",
)
HTTP_REQUESTS_BY_CLASS = Metric(
    "http_requests_total",
    "counter",
    "HTTP requests answered, by class of status (2xx), in the words of the FastAPI instrumentator.",
    ("handler", "method", "status"),
    "HttpServed",
)
HTTP_S = Metric(
    "inferd_http_request_duration_seconds",
    "histogram",
    "From an HTTP request's first byte to its answer's last.",
    ("route", "method"),
    "HttpServed",
    (Alias("http_request_duration_seconds", ("handler", "method")),),
    _HTTP_S,
)
HTTP_REQUEST_BYTES = Metric(
    "inferd_http_request_size_bytes",
    "summary",
    "Size of HTTP request bodies.",
    ("route",),
    "HttpServed",
    (Alias("http_request_size_bytes", ("handler",)),),
)
HTTP_RESPONSE_BYTES = Metric(
    "inferd_http_response_size_bytes",
    "summary",
    "Size of HTTP response bodies.",
    ("route",),
    "HttpServed",
    (Alias("http_response_size_bytes", ("handler",)),),
)
TURNED_AWAY = Metric(
    "inferd_http_connections_refused_total",
    "counter",
    "Connections refused with 503 because there were server.max_connections already.",
    (),
    "ClientTurnedAway",
)

# -- the observer itself -----------------------------------------------------------------------

BUILD = Metric("inferd_build_info", "gauge", "1; the labels describe the server.", ("version", "python"), "start")
LINES_DROPPED = Metric(
    "inferd_log_lines_dropped_total",
    "counter",
    "Log lines dropped because the log's reader did not keep up.",
    (),
    "log writer",
)
OBSERVER_FAILURES = Metric(
    "inferd_observer_failures_total",
    "counter",
    "Events that could not be observed: defects in the observer.",
    (),
    "sink",
)

# -- configuration -----------------------------------------------------------------------------

CONFIG_RELOADS = Metric(
    "inferd_config_reloads_total",
    "counter",
    "Times the configuration file was read again, by whether it was adopted.",
    ("result",),
    "ConfigReloaded",
)
CONFIG_OK = Metric(
    "inferd_config_last_reload_successful",
    "gauge",
    "1 while the configuration file is served completely, 0 after a change that was refused or whose models did "
    "not all load.",
    (),
    "start, ConfigReloaded",
)

# -- state -------------------------------------------------------------------------------------

STATE_AVAILABLE = Metric(
    "inferd_state_available",
    "gauge",
    "1 while the database of keys, limits and usage answers; 0: known keys continue, none can be changed.",
    (),
    "start, StateChanged",
)
STATE_OUTAGES = Metric(
    "inferd_state_outages_total", "counter", "Times that the database stopped answering.", (), "StateChanged"
)

TABLE: tuple[Metric, ...] = tuple(row for row in list(globals().values()) if isinstance(row, Metric))
