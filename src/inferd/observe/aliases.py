"""The one table of aliases: names that dashboards of other servers use for inferd's values, and the rule of each.

``metrics.aliases`` chooses the servers. A ``Renamed`` alias shows all series of a row under another name. A ``Derived``
alias adds up series of rows by some of their labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from inferd.config import AliasDialect
from inferd.observe import metrics as m
from inferd.observe.metrics import Kind, Metric

Labels = tuple[str, ...]

# Names of labels in other servers' metrics.
_LABELS: dict[AliasDialect, dict[str, str]] = {
    "vllm": {
        "model": "model_name",
        "replica": "engine",
        "num_blocks": "num_gpu_blocks",
        "max_adapters": "max_lora",
        "running_adapters": "running_lora_adapters",
        "waiting_adapters": "waiting_lora_adapters",
    },
    "triton": {"uuid": "gpu_uuid"},
    "fastapi": {"route": "handler"},
}
_MICROSECONDS = 1e6
_MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True, eq=False)
class Renamed:
    """Every series of the row ``of`` under another name. Bounds and sums of a histogram are multiplied by ``scale``."""

    name: str
    dialect: AliasDialect
    of: Metric
    scale: float = 1.0

    @property
    def kind(self) -> Kind:
        return self.of.kind

    @property
    def labels(self) -> Labels:
        called = _LABELS[self.dialect]
        return tuple(called.get(label, label) for label in self.of.labels)

    @property
    def help(self) -> str:
        return self.of.help

    @property
    def rule(self) -> str:
        """The alias as an expression of Prometheus."""
        return self.of.name if self.scale == 1.0 else f"{self.of.name} with bounds and sum * {self.scale:g}"


class Part(NamedTuple):
    """Series of a row that are added up: all, or those with certain labels."""

    of: Metric
    sample: str = ""  # of a histogram: _sum or _count
    where: tuple[tuple[str, str], ...] = ()
    sign: int = 1

    def expression(self, by: Labels) -> str:
        chosen = ",".join(f'{label}="{value}"' for label, value in self.where)
        return f"sum by ({', '.join(by)}) ({self.of.name}{self.sample}{'{' + chosen + '}' if chosen else ''})"


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """The sum of ``parts`` for each value of the labels ``by``, multiplied by ``scale``.

    ``otherwise``: what is added up instead where that sum is 0. ``constants``: labels with one value, and their values.
    """

    name: str
    dialect: AliasDialect
    kind: Kind
    help: str
    by: Labels  # labels of the rows
    parts: tuple[Part, ...]
    otherwise: tuple[Part, ...] = ()
    scale: float = 1.0
    constants: tuple[tuple[str, str], ...] = ()

    @property
    def labels(self) -> Labels:
        called = _LABELS[self.dialect]
        own = tuple(called.get(label, label) for label in self.by)
        version = ("version",) if self.dialect == "triton" and "model" in self.by else ()
        return (*own, *version, *(label for label, _ in self.constants))

    @property
    def rule(self) -> str:
        """The alias as an expression of Prometheus, without the labels that are given other names."""

        def added(parts: tuple[Part, ...]) -> str:
            text = "".join(f" {'-' if part.sign < 0 else '+'} {part.expression(self.by)}" for part in parts)[3:]
            return f"({text})" if len(parts) > 1 else text

        text = added(self.parts)
        if self.otherwise:
            text = f"({text} > 0 or {added(self.otherwise)})"
        return text if self.scale == 1.0 else f"{text} * {self.scale:g}"


Alias = Renamed | Derived

_vllm = partial(Renamed, dialect="vllm")
_triton = partial(Renamed, dialect="triton")
_fastapi = partial(Renamed, dialect="fastapi")
_of_model = partial(Derived, dialect="triton", kind="counter", by=("model",))
_duration = partial(_of_model, scale=_MICROSECONDS)


def _stage(stage: str) -> tuple[Part, ...]:
    return (Part(m.PREDICTION_STAGE_S, "_sum", (("stage", stage),)),)


def _requests(outcome: str) -> tuple[Part, ...]:
    return (Part(m.REQUESTS, where=(("outcome", outcome),)),)


_FAILURES = "Requests that failed, by reason."

ALIASES: tuple[Alias, ...] = (
    # -- vLLM ------------------------------------------------------------------------------------
    _vllm("vllm:request_success_total", of=m.FINISHED),
    _vllm("vllm:admission_rejections_total", of=m.REFUSED),
    _vllm("vllm:prompt_tokens_total", of=m.PROMPT_TOKENS),
    _vllm("vllm:generation_tokens_total", of=m.GENERATION_TOKENS),
    _vllm("vllm:prompt_tokens_cached_total", of=m.CACHED_TOKENS),
    _vllm("vllm:time_to_first_token_seconds", of=m.FIRST_TOKEN_S),
    _vllm("vllm:inter_token_latency_seconds", of=m.INTER_TOKEN_S),
    _vllm("vllm:request_time_per_output_token_seconds", of=m.PER_OUTPUT_TOKEN_S),
    _vllm("vllm:e2e_request_latency_seconds", of=m.REQUEST_S),
    _vllm("vllm:request_queue_time_seconds", of=m.QUEUE_S),
    _vllm("vllm:request_inference_time_seconds", of=m.INFERENCE_S),
    _vllm("vllm:request_prefill_time_seconds", of=m.PREFILL_S),
    _vllm("vllm:request_decode_time_seconds", of=m.DECODE_S),
    _vllm("vllm:request_prompt_tokens", of=m.REQUEST_PROMPT_TOKENS),
    _vllm("vllm:request_generation_tokens", of=m.REQUEST_GENERATION_TOKENS),
    _vllm("vllm:request_max_num_generation_tokens", of=m.REQUEST_LONGEST_TOKENS),
    _vllm("vllm:request_prefill_kv_computed_tokens", of=m.REQUEST_COMPUTED_TOKENS),
    _vllm("vllm:request_params_n", of=m.REQUEST_N),
    _vllm("vllm:request_params_max_tokens", of=m.REQUEST_MAX_TOKENS),
    _vllm("vllm:request_num_preemptions", of=m.REQUEST_PREEMPTIONS),
    _vllm("vllm:num_requests_waiting", of=m.WAITING),
    _vllm("vllm:num_requests_waiting_by_reason", of=m.WAITING_BY_REASON),
    _vllm("vllm:num_requests_running", of=m.RUNNING),
    _vllm("vllm:kv_cache_usage_perc", of=m.KV_USAGE),
    _vllm("vllm:iteration_tokens_total", of=m.STEP_TOKENS),
    _vllm("vllm:num_preemptions_total", of=m.PREEMPTIONS),
    _vllm("vllm:prefix_cache_queries_total", of=m.PREFIX_QUERIES),
    _vllm("vllm:prefix_cache_hits_total", of=m.PREFIX_HITS),
    _vllm("vllm:spec_decode_num_drafts_total", of=m.DRAFTS),
    _vllm("vllm:spec_decode_num_draft_tokens_total", of=m.DRAFTED_TOKENS),
    _vllm("vllm:spec_decode_num_accepted_tokens_total", of=m.ACCEPTED_TOKENS),
    _vllm("vllm:cache_config_info", of=m.CACHE_CONFIG),
    _vllm("vllm:lora_requests_info", of=m.ADAPTERS_INFO),
    # Names that vLLM has removed and that dashboards still ask for.
    _vllm("vllm:time_per_output_token_seconds", of=m.INTER_TOKEN_S),
    _vllm("vllm:gpu_cache_usage_perc", of=m.KV_USAGE),
    _vllm("vllm:gpu_prefix_cache_queries_total", of=m.PREFIX_QUERIES),
    _vllm("vllm:gpu_prefix_cache_hits_total", of=m.PREFIX_HITS),
    # -- Triton ----------------------------------------------------------------------------------
    _of_model("nv_inference_request_success", help="Requests that were answered.", parts=_requests("done")),
    _of_model(
        "nv_inference_request_failure",
        help=_FAILURES,
        parts=(Part(m.REFUSED),),
        constants=(("reason", "REJECTED"),),
    ),
    _of_model(
        "nv_inference_request_failure",
        help=_FAILURES,
        parts=_requests("cancelled"),
        constants=(("reason", "CANCELED"),),
    ),
    _of_model(
        "nv_inference_request_failure", help=_FAILURES, parts=_requests("failed"), constants=(("reason", "BACKEND"),)
    ),
    _of_model(
        "nv_inference_count",
        help="Inferences: rows of predictions; of a model without batches its answered requests.",
        parts=(Part(m.BATCH_ROWS, "_sum"),),
        otherwise=_requests("done"),
    ),
    _of_model(
        "nv_inference_exec_count",
        help="Executions of the model: batches of predictions, steps of an engine.",
        parts=(Part(m.BATCH_ROWS, "_count"), Part(m.STEP_SEQUENCES, "_count")),
    ),
    _of_model(
        "nv_inference_pending_request_count",
        kind="gauge",
        help="Requests that wait to be computed.",
        parts=(Part(m.WAITING),),
    ),
    _duration(
        "nv_inference_request_duration_us",
        help="Time from the arrival of requests to their ends, in microseconds.",
        parts=(Part(m.REQUEST_S, "_sum"),),
    ),
    _duration(
        "nv_inference_queue_duration_us",
        help="Time that requests waited to be computed, in microseconds.",
        parts=(Part(m.QUEUE_S, "_sum"),),
    ),
    _duration(
        "nv_inference_compute_input_duration_us",
        help="Time of reading the inputs of predictions, in microseconds.",
        parts=_stage("decode"),
    ),
    _duration(
        "nv_inference_compute_infer_duration_us",
        help="Time of computing, in microseconds; of a model that generates from the first step to the last token.",
        parts=_stage("compute"),
        otherwise=(Part(m.INFERENCE_S, "_sum"),),
    ),
    _duration(
        "nv_inference_compute_output_duration_us",
        help="Time of writing the outputs of predictions, in microseconds.",
        parts=_stage("encode"),
    ),
    _triton("nv_inference_first_response_histogram_ms", of=m.FIRST_TOKEN_S, scale=_MILLISECONDS),
    _of_model(
        "nv_cache_num_hits_per_model",
        help="Lookups in the response cache that found an answer.",
        parts=(Part(m.CACHE_LOOKUPS, where=(("result", "hit"),)),),
    ),
    _of_model(
        "nv_cache_num_misses_per_model",
        help="Lookups in the response cache that found none.",
        parts=(Part(m.CACHE_LOOKUPS, where=(("result", "miss"),)),),
    ),
    _triton("nv_gpu_utilization", of=m.GPU_DUTY),
    _triton("nv_gpu_memory_used_bytes", of=m.GPU_MEMORY_USED),
    _triton("nv_gpu_memory_total_bytes", of=m.GPU_MEMORY_TOTAL),
    _triton("nv_gpu_power_usage", of=m.GPU_POWER),
    _triton("nv_cpu_memory_total_bytes", of=m.MEMORY_LIMIT),
    Derived(
        "nv_cpu_memory_used_bytes",
        dialect="triton",
        kind="gauge",
        help="Memory of the machine, or of its container, that is not available.",
        by=(),
        parts=(Part(m.MEMORY_LIMIT), Part(m.MEMORY_AVAILABLE, sign=-1)),
    ),
    # -- the FastAPI instrumentator ----------------------------------------------------------------
    Derived(
        "http_requests_total",
        dialect="fastapi",
        kind="counter",
        help="HTTP requests answered, by class of status (2xx).",
        by=("route", "method", "status"),
        parts=(Part(m.HTTP_REQUESTS),),
    ),
    _fastapi("http_request_duration_seconds", of=m.HTTP_S),
    _fastapi("http_request_size_bytes", of=m.HTTP_REQUEST_BYTES),
    _fastapi("http_response_size_bytes", of=m.HTTP_RESPONSE_BYTES),
)


def aliases_of(dialects: Iterable[AliasDialect]) -> Iterator[Alias]:
    """The aliases of these servers."""
    chosen = set(dialects)
    return (alias for alias in ALIASES if alias.dialect in chosen)


def shown_labels(alias: Derived, group: Labels, version_of: Callable[[str], tuple[str, str]]) -> Labels:
    """The values of an alias's labels, from those of the rows' labels. ``version_of`` names an entry's model and
    version as KServe v2 does."""
    if alias.dialect == "fastapi":  # the instrumentator's classes of status
        group = (*group[:-1], f"{group[-1][:1]}xx")
    elif alias.dialect == "triton" and alias.by:
        group = version_of(group[0])
    return (*group, *(value for _, value in alias.constants))
