"""The Config tree: file < environment < flags. The only reader of all three.

Every field carries its own documentation and limits; ``docs/configuration.md``, the JSON schema and
the command line's flags are derived from these structs. Each room receives only its own section.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from inferd.config_pipelines import with_models
from inferd.config_rules import problems_between
from inferd.config_tree import Problem, Text, branches, check, dotted
from inferd.config_versions import expand_versions
from inferd.errors import ConfigError
from inferd.types import PriorityClass

Runtime = Literal[
    "auto", "llm", "onnx", "torch", "sklearn", "xgboost", "lightgbm", "encoder", "python", "triton_python", "pipeline"
]
DType = Literal["auto", "float32", "bfloat16", "float16"]
REMOTE_PREFIX = "openai:"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: keyword only, immutable, an unknown key is an error."""


class TlsConfig(Section, frozen=True, kw_only=True):
    """The certificate that the listeners show; without one they speak plainly."""

    certificate: Annotated[
        str | None,
        Meta(
            description="PEM file with the server's certificate and those that vouch for it: clients speak https and gRPC over TLS. Read again by a reload."
        ),
    ] = None
    key: Annotated[
        str | None,
        Meta(description="PEM file with the certificate's key, without a password; unset: it is in the same file."),
    ] = None


class ServerConfig(Section, frozen=True, kw_only=True):
    """Where the server listens and how it behaves towards clients."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8000
    grpc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Port for KServe v2 over gRPC; 0 takes a free one, unset: there is none."),
    ] = None
    max_body_bytes: Annotated[int, Meta(description="Largest request body accepted, in bytes.", ge=1024)] = (
        16 * 1024 * 1024
    )
    drain_delay_s: Annotated[
        float,
        Meta(
            description="Seconds after SIGTERM during which readiness is already false and requests are still accepted.",
            ge=0,
        ),
    ] = 0.0
    grace_s: Annotated[float, Meta(description="Seconds that requests in flight get to finish at shutdown.", ge=0)] = (
        30.0
    )
    v2_name: Annotated[
        str,
        Meta(
            description="The server's name in KServe v2's metadata; Triton's own example clients insist on 'triton'.",
            min_length=1,
        ),
    ] = "inferd"
    access_log: Annotated[bool, Meta(description="Write one line per request to the log (never its text).")] = True
    log_format: Annotated[
        Literal["auto", "json", "text"],
        Meta(description="Form of the log on stderr: JSON lines, or words; auto: words on a terminal, JSON elsewhere."),
    ] = "auto"
    auth: Annotated[
        Literal["auto", "required", "off"],
        Meta(
            description="Who needs an API key. auto: everybody as soon as one key exists, and always on an address other than loopback (such a server does not start without keys); required: everybody; off: nobody."
        ),
    ] = "auto"
    public_metrics: Annotated[bool, Meta(description="Let /metrics be read without a key where keys are needed.")] = (
        False
    )
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="Web origins whose pages may call the API; none by default.")
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host names that requests may be addressed to; none: on loopback localhost and addresses, elsewhere any."
        ),
    ] = ()
    tls: TlsConfig = TlsConfig()
    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Memory that all local models together may take; a model that does not fit is refused, or the least recently used on-demand model leaves. Unset: what the machine has."
        ),
    ] = None
    send_timeout_s: Annotated[
        float,
        Meta(description="A client that takes no byte of its answer for this long is cut off.", gt=0),
    ] = 60.0
    max_connections: Annotated[
        int,
        Meta(
            description="Client connections at a time; a further one gets 503 and its end. Never more than half of the files that the process may open.",
            ge=1,
        ),
    ] = 10_000
    body_timeout_s: Annotated[
        float,
        Meta(
            description="Longest time for the whole body of a request, to which every 16 KiB that arrive add a second.",
            gt=0,
        ),
    ] = 120.0
    reload: Annotated[bool, Meta(description="Follow changes of the configuration file while serving.")] = True


class StateConfig(Section, frozen=True, kw_only=True):
    """What outlives the process: keys, usage, limits."""

    url: Annotated[
        str | None,
        Meta(
            description="postgresql://user@host/database, or sqlite:///path; unset: state.db in data_dir. Servers that share a database share keys and limits."
        ),
    ] = None
    data_dir: Annotated[
        str | None,
        Meta(description="Folder for state, journals and the control socket; unset: inferd in the user's data folder."),
    ] = None
    idempotency_ttl_s: Annotated[
        float, Meta(description="Seconds that an answer is kept for its Idempotency-Key.", gt=0)
    ] = 86_400.0
    usage_retention_days: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Days that usage is kept; unset: for ever.")
    ] = None


class CacheConfig(Section, frozen=True, kw_only=True):
    """Where answers are kept that were computed before; a model says whether its answers are."""

    url: Annotated[
        str | None, Meta(description="redis://host:port/0 of a Redis or Valkey server; unset: this process's memory.")
    ] = None
    max_bytes: Annotated[int, Meta(description="Bytes of answers kept in memory.", ge=0)] = 64 * 1024 * 1024
    max_entry_bytes: Annotated[int, Meta(description="A larger answer is not kept.", ge=1)] = 1024 * 1024


class TenantConfig(Section, frozen=True, kw_only=True):
    """One tenant: what all its keys together may use."""

    weight: Annotated[float, Meta(description="Its share of a busy model, relative to the others'.", gt=0, le=1000)] = (
        1.0
    )
    rpm: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Requests per minute; unset: no limit.")] = None
    tpm: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Tokens per minute, prompt and answer; unset: no limit.")
    ] = None
    max_in_flight: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Requests at the same time; unset: no limit.")
    ] = None
    region: Annotated[
        str | None, Meta(description="Its requests run only on replicas of this region; unset: anywhere.")
    ] = None


class QueueConfig(Section, frozen=True, kw_only=True):
    """The bounded queue in front of a model."""

    max_requests: Annotated[
        int, Meta(description="Requests that may wait for a replica; one more is refused with 503.", ge=0)
    ] = 1024
    max_tokens: Annotated[int, Meta(description="Tokens (prompt and answer, estimated) that may wait.", ge=1)] = (
        16_000_000
    )
    max_bytes: Annotated[int, Meta(description="Bytes of requests that may wait.", ge=1)] = 256 * 1024 * 1024
    max_share_per_tenant: Annotated[
        float,
        Meta(
            description="Part of each of these bounds that one tenant may fill while others have requests waiting.",
            gt=0,
            le=1,
        ),
    ] = 0.5
    timeout_s: Annotated[
        float, Meta(description="Longest time a request may wait before it is refused with 503.", gt=0)
    ] = 600.0
    aging_every: Annotated[
        int,
        Meta(
            description="Every so many dispatches the class that was served least recently goes first: no class starves.",
            ge=2,
        ),
    ] = 16


class RoutingConfig(Section, frozen=True, kw_only=True):
    """Which of a model's replicas takes a request."""

    prefix_affinity: Annotated[
        bool, Meta(description="Prefer the replica that has seen the beginning of the prompt, while its load allows.")
    ] = True
    affinity_slack: Annotated[
        float,
        Meta(description="A preferred replica may have this many times the average outstanding work, plus one.", ge=1),
    ] = 1.5
    slow_start_s: Annotated[
        float, Meta(description="Seconds over which a replica that came back gets its full share again.", ge=0)
    ] = 10.0
    eject_factor: Annotated[
        float,
        Meta(description="A replica so many times slower than the median of its peers is set aside; 0: never.", ge=0),
    ] = 3.0
    eject_s: Annotated[float, Meta(description="Seconds that a slow replica is set aside, at first.", gt=0)] = 10.0


class BreakerConfig(Section, frozen=True, kw_only=True):
    """When a replica that fails is left alone, and how it is tried again."""

    enabled: Annotated[bool, Meta(description="Whether failures open the breaker.")] = True
    failures: Annotated[int, Meta(description="Failures within window_s that open it.", ge=1)] = 5
    window_s: Annotated[float, Meta(description="Seconds within which failures count.", gt=0)] = 10.0
    cooldown_s: Annotated[float, Meta(description="Seconds before the first probe.", gt=0)] = 5.0
    probes: Annotated[int, Meta(description="Requests let through at the same time to probe.", ge=1)] = 1
    successes: Annotated[int, Meta(description="Probes in a row that close it.", ge=1)] = 2


class RetryConfig(Section, frozen=True, kw_only=True):
    """Trying again elsewhere, before anything of an answer was sent."""

    max_attempts: Annotated[
        int, Meta(description="Replicas that a request may be given to; 1: no retries.", ge=1, le=10)
    ] = 3
    budget: Annotated[float, Meta(description="Retries and hedges as a part of live traffic, at most.", ge=0, le=1)] = (
        0.2
    )
    hedge_after_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Ask a second replica when the first has said nothing for this long; unset: never."),
    ] = None


class ModelCacheConfig(Section, frozen=True, kw_only=True):
    """Whether a model's answers are kept for equal requests."""

    enabled: Annotated[bool, Meta(description="Keep answers of deterministic requests (temperature 0, or a seed).")] = (
        False
    )
    ttl_s: Annotated[float, Meta(description="Seconds that an answer is kept.", gt=0)] = 3600.0
    any_temperature: Annotated[bool, Meta(description="Keep answers of requests that draw at random as well.")] = False


class ObjectivesConfig(Section, frozen=True, kw_only=True):
    """What the model's clients should see; scheduling and routing work towards it."""

    ttft_ms: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="Time to the first token, p95.")] = None
    tpot_ms: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="Time per output token, p95.")] = None


class RemoteSettings(Section, frozen=True, kw_only=True):
    """How a remote server is talked to."""

    model: Annotated[str | None, Meta(description="The model's name over there; unset: the name it has here.")] = None
    api_key_env: Annotated[str | None, Meta(description="Environment variable that holds the API key.")] = None
    api_key_file: Annotated[
        str | None, Meta(description="File that holds the API key; read again when it changes.")
    ] = None
    weight: Annotated[float, Meta(description="Its share of requests, relative to other replicas'.", gt=0)] = 1.0
    fallback: Annotated[bool, Meta(description="Used only while no other replica can take a request.")] = False
    max_in_flight: Annotated[int, Meta(description="Requests it gets at the same time.", ge=1)] = 256
    region: Annotated[
        str | None, Meta(description="Where it runs; requests of a tenant with another region do not go there.")
    ] = None
    connect_timeout_s: Annotated[float, Meta(description="Longest time for a connection.", gt=0)] = 5.0
    first_byte_timeout_s: Annotated[float, Meta(description="Longest time until the answer begins.", gt=0)] = 120.0
    idle_timeout_s: Annotated[float, Meta(description="Longest pause within an answer.", gt=0)] = 60.0
    ca_file: Annotated[str | None, Meta(description="Certificates to trust instead of the system's.")] = None
    probe: Annotated[
        bool, Meta(description="Ask GET /models whether the server is there: at the start, and while it fails.")
    ] = True


class RemoteConfig(RemoteSettings, frozen=True, kw_only=True):
    """A remote server as one more replica."""

    url: Annotated[
        str, Meta(description="Base URL of an OpenAI-compatible API: https://host/v1.", pattern=r"^https?://[^/\s]+")
    ]


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """How an engine fills its steps."""

    max_num_seqs: Annotated[int, Meta(description="Sequences computed together in one step.", ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(description="Token budget of one step; also the largest prefill chunk.", ge=1)
    ] = 512
    prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of shared prompt prefixes.")] = True


class KVCacheConfig(Section, frozen=True, kw_only=True):
    """The memory that holds keys and values of earlier tokens."""

    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Size of the KV arena in bytes; unset: enough for max_num_seqs sequences of typical length, within a quarter of free memory."
        ),
    ] = None
    block_size: Annotated[int, Meta(description="Tokens per block.", ge=1, le=256)] = 16
    num_blocks: Annotated[
        Annotated[int, Meta(ge=2)] | None, Meta(description="Number of blocks; overrides memory_bytes.")
    ] = None
    dtype: Annotated[
        Literal["auto", "int8"],
        Meta(
            description="Number format of keys and values. auto: the model's; int8: 8-bit integers with scales, which take about half the memory (docs/quantisation.md)."
        ),
    ] = "auto"


class SpeculationConfig(Section, frozen=True, kw_only=True):
    """Tokens that a language model is guessed to say next, computed along with the last one (never changes an answer)."""

    method: Annotated[
        Literal["auto", "none", "prompt_lookup", "draft"],
        Meta(
            description="Where guesses come from. auto: from the text itself, and from the draft model where there is one; prompt_lookup or draft: only so; none: no guesses. Whatever it is, guesses are made only while they measurably pay."
        ),
    ] = "auto"
    draft: Annotated[
        str | None,
        Meta(description="A smaller model with the same tokenizer: a folder, a Hugging Face Hub id, or 'demo-draft'."),
    ] = None
    max_tokens: Annotated[
        int, Meta(description="Tokens guessed for one sequence in one step, at most.", ge=1, le=64)
    ] = 16


class BatchingConfig(Section, frozen=True, kw_only=True):
    """How predictions that arrive together are computed together (predictive models)."""

    mode: Annotated[
        Literal["dynamic", "static", "off"],
        Meta(
            description="dynamic: what has arrived, waiting at most max_delay_ms while waiting pays; static: always max_batch_size, however long that takes (a baseline for measurements); off: one request at a time."
        ),
    ] = "dynamic"
    max_batch_size: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        Meta(description="Rows computed together; unset: what the artifact allows and memory holds, probed at load."),
    ] = None
    max_delay_ms: Annotated[
        float, Meta(description="No request is held back for company longer than this.", ge=0, le=60_000)
    ] = 2.0
    preferred_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(description="Batch sizes that the model computes best: a batch that reaches one goes at once."),
    ] = ()
    latency_budget_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Batches are kept so small that the model's own time takes half of this budget, and nobody is held back when it does."
        ),
    ] = None
    max_batch_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Tokens computed together by models that read text; unset: chosen for the machine."),
    ] = None
    pad: Annotated[
        bool,
        Meta(description="Pad inputs of different lengths to one shape (with a mask where the model takes one)."),
    ] = False
    buckets: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(description="Lengths to which variable dimensions are padded; unset: the longest of the batch."),
    ] = ()


class SequenceConfig(Section, frozen=True, kw_only=True):
    """State that is kept between requests of one sequence (stateful models)."""

    max_sequences: Annotated[
        int, Meta(description="Sequences with a state at the same time in each replica.", ge=1)
    ] = 1024
    idle_s: Annotated[float, Meta(description="Seconds without a request after which a state is dropped.", gt=0)] = 60.0
    states: Annotated[
        dict[str, str],
        Meta(description="State outputs to the inputs they become at the next request: stateN: state."),
    ] = {}
    controls: Annotated[
        dict[str, Literal["start", "ready", "end", "id"]],
        Meta(
            description="Inputs that the server fills: whether a sequence starts, goes on (1 or 0) or ends, or its id."
        ),
    ] = {}


class TensorConfig(Section, frozen=True, kw_only=True):
    """One input or output as clients see it, where that is not, or not all of, what the artifact says."""

    name: Annotated[
        str, Meta(description="The artifact's own, or one that ends in __ and its place: INPUT__0.", min_length=1)
    ]
    datatype: Annotated[str, Meta(description="KServe v2's word: FP32, INT64, BYTES, ...")]
    shape: Annotated[
        tuple[Annotated[int, Meta(ge=-1)], ...],
        Meta(description="With the batch dimension where there is one; -1 stands for any size."),
    ]
    reshape: Annotated[
        tuple[Annotated[int, Meta(ge=-1)], ...] | None,
        Meta(description="The artifact's shape, where it is another one."),
    ] = None
    optional: Annotated[bool, Meta(description="A request may leave the input out.")] = False
    labels_file: Annotated[
        str | None, Meta(description="Names of the last dimension's places, one on each line: classes.")
    ] = None


class StepConfig(Section, frozen=True, kw_only=True):
    """One step of a pipeline: a built-in operation, or a model."""

    name: Annotated[
        str,
        Meta(
            description="Unique in the pipeline; its outputs are called name.output. Unset: the last word of the operation's name, or the model's.",
            pattern=r"^[\w-]*$",
        ),
    ] = ""
    op: Annotated[str | None, Meta(description="A built-in operation: image.decode, image.resize, labels, boxes.")] = (
        None
    )
    model: Annotated[
        str | None, Meta(description="The name of a model of this file, loaded into the pipeline's worker.")
    ] = None
    inputs: Annotated[
        dict[str, str],
        Meta(
            description="The step's inputs from the pipeline's inputs or other steps' outputs; unset: what the step before gives."
        ),
    ] = {}
    options: Annotated[dict[str, Any], Meta(description="The operation's own options.")] = {}


class PipelineConfig(Section, frozen=True, kw_only=True):
    """Several steps as one model (source: pipeline): a directed acyclic graph, run in one worker."""

    inputs: Annotated[
        dict[str, str],
        Meta(
            description="What a request brings: names, each with a datatype and shape such as FP32 [-1, 30], or auto: what the steps that read it ask for."
        ),
    ] = {}
    steps: tuple[StepConfig, ...] = ()
    outputs: Annotated[
        dict[str, str], Meta(description="The pipeline's outputs from steps' outputs: label: classify.label.")
    ] = {}
    models: Annotated[
        dict[str, Any],
        Meta(
            description="Models that this pipeline alone uses, each with a model's settings; they are not served by themselves."
        ),
    ] = {}


class VersionsConfig(Section, frozen=True, kw_only=True):
    """Which versions of a model are served whose folder has numbered subfolders: 1/, 2/, ..."""

    policy: Annotated[
        Literal["latest", "specific", "all"],
        Meta(description="latest: the highest numbers; specific: those in 'only'; all: every one."),
    ] = "latest"
    count: Annotated[int, Meta(description="How many versions are served by the policy latest.", ge=1)] = 1
    only: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...], Meta(description="The versions that the policy specific serves.")
    ] = ()
    aliases: Annotated[
        dict[str, Annotated[int, Meta(ge=1)]],
        Meta(description="Names for versions: with stable: 3, the name MODEL@stable is version 3."),
    ] = {}
    weights: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        Meta(
            description="Which part of the requests for the model's own name each version gets: {3: 90, 4: 10}. Requests of one session or user stay with one version. Unset: the newest gets all."
        ),
    ] = {}


class ModelConfig(Section, frozen=True, kw_only=True):
    """One model: where it comes from and how it runs."""

    source: Annotated[
        str,
        Meta(
            description="A folder, a model file (ONNX, .pt2, skops, XGBoost, LightGBM), a Python class (module:Class), a Hugging Face Hub id (optionally id@revision), 'demo' for the bundled chat model, or openai:https://host/v1 for a remote server."
        ),
    ]
    runtime: Annotated[
        Runtime,
        Meta(description="What computes the model; auto: what its files ask for."),
    ] = "auto"
    task: Annotated[
        Literal["auto", "predict", "embed", "rerank", "classify", "token_classify"],
        Meta(description="What a text encoder is asked for; auto: what its checkpoint was made for."),
    ] = "auto"
    allow_code: Annotated[
        bool,
        Meta(
            description="Run code that comes with the model: a Python class, TorchScript, custom operators. Only for models you trust as you trust this server's own code."
        ),
    ] = False
    allow_pickle: Annotated[
        bool,
        Meta(description="Open pickles, which can run any code when they are read. Only for files you made yourself."),
    ] = False
    options: Annotated[dict[str, Any], Meta(description="The runtime's or Python class's own options.")] = {}
    replicas: Annotated[int, Meta(description="Copies of the model, each in its own worker process.", ge=1, le=64)] = 1
    dtype: Annotated[
        DType,
        Meta(
            description="Number format of weights and KV cache; auto: the checkpoint's own (float32 where the processor has no fast bfloat16)."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8"],
        Meta(
            description="Weights as integers: int8 or int4 (CPU) made when the model loads, from any checkpoint; fp8: numbers of 8 bits (CUDA); auto: as the checkpoint has them; none: as numbers, whatever the checkpoint has."
        ),
    ] = "auto"
    quantization_cache_bytes: Annotated[
        int,
        Meta(
            description="Disk space for weights that were quantised at load, in the user's cache folder; those not used for longest go first. 0: none are kept.",
            ge=0,
        ),
    ] = 20 << 30
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N.", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = (
        "auto"
    )
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Longest prompt plus answer in tokens; unset: the checkpoint's own limit."),
    ] = None
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Compute threads of a replica; unset: the cores that the server may use (taskset, cpuset), shared out among the replicas."
        ),
    ] = None
    attention: Annotated[
        Literal["auto", "reference", "native", "triton"],
        Meta(
            description="Attention backend; auto: the native kernels where they are built (CPU), Triton's where it is installed (CUDA), else plain torch."
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="Path of a Jinja chat template that replaces the checkpoint's own.")
    ] = None
    use_generation_config: Annotated[
        bool, Meta(description="Take sampling defaults from the checkpoint's generation_config.json.")
    ] = True
    seed: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Makes requests that bring no seed repeatable from one start to the next; unset: they differ."
        ),
    ] = None
    hang_timeout_s: Annotated[
        float, Meta(description="A busy replica that completes no step for this long is restarted.", gt=0)
    ] = 60.0
    load_timeout_s: Annotated[
        float, Meta(description="Longest time for loading; a model that takes longer is not loaded.", gt=0)
    ] = 1800.0
    load: Annotated[
        Literal["startup", "on_demand"],
        Meta(description="Load when the server starts, or when the first request comes (which waits meanwhile)."),
    ] = "startup"
    idle_after_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Unload after so many seconds without a request; unset: never."),
    ] = None
    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Memory that one replica may take; the KV arena gets what weights and headroom leave of it."),
    ] = None
    memory_fraction: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Likewise as a part of server.memory_bytes, which must be set: 0.25 is a quarter of it."),
    ] = None
    priority: Annotated[
        PriorityClass,
        Meta(description="Against other models on the same cores: batch yields, and is unloaded first."),
    ] = "normal"
    region: Annotated[
        str | None, Meta(description="Where its local replicas run; requests of a tenant with another region do not.")
    ] = None
    resume_streams: Annotated[
        bool,
        Meta(
            description="When a worker dies in the middle of a stream, another one continues it, token by token the same."
        ),
    ] = False
    drain_s: Annotated[
        float, Meta(description="Seconds that requests get to finish on a replica that is replaced or unloaded.", ge=0)
    ] = 300.0
    version: Annotated[
        str,
        Meta(
            description="What KServe v2 calls this version; a version from a numbered folder has the folder's number.",
            pattern=r"^[1-9][0-9]{0,17}$",
        ),
    ] = "1"
    batching: BatchingConfig = BatchingConfig()
    sequence: SequenceConfig = SequenceConfig()
    inputs: tuple[TensorConfig, ...] = ()
    outputs: tuple[TensorConfig, ...] = ()
    preprocess: Annotated[
        tuple[StepConfig, ...],
        Meta(description="Operations before the model, each on what the one before gives."),
    ] = ()
    postprocess: Annotated[
        tuple[StepConfig, ...],
        Meta(description="Operations after the model, each on what the one before gives."),
    ] = ()
    pipeline: PipelineConfig = PipelineConfig()
    remote: RemoteSettings = RemoteSettings()
    remotes: tuple[RemoteConfig, ...] = ()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    versions: VersionsConfig = VersionsConfig()
    queue: QueueConfig = QueueConfig()
    routing: RoutingConfig = RoutingConfig()
    breaker: BreakerConfig = BreakerConfig()
    retry: RetryConfig = RetryConfig()
    cache: ModelCacheConfig = ModelCacheConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()

    @property
    def is_remote(self) -> bool:
        """Whether ``source`` itself is a remote server, so that there are no local replicas."""
        return self.source.startswith(REMOTE_PREFIX)

    @property
    def is_pipeline(self) -> bool:
        """Whether it consists of steps, so that ``source`` names no files."""
        return bool(self.pipeline.steps)

    @property
    def has_steps(self) -> bool:
        """Whether operations are part of it."""
        return bool(self.pipeline.steps or self.preprocess or self.postprocess)

    @property
    def num_local(self) -> int:
        """Local replicas."""
        return 0 if self.is_remote else self.replicas

    @property
    def upstreams(self) -> tuple[RemoteConfig, ...]:
        """Every remote server among its replicas."""
        if not self.is_remote:
            return self.remotes
        settings = {name: getattr(self.remote, name) for name in RemoteSettings.__struct_fields__}
        return (RemoteConfig(url=self.source.removeprefix(REMOTE_PREFIX), **settings), *self.remotes)


class Config(Section, frozen=True, kw_only=True):
    """Everything ``inferd serve`` can be told."""

    server: ServerConfig = ServerConfig()
    state: StateConfig = StateConfig()
    cache: CacheConfig = CacheConfig()
    tenants: dict[str, TenantConfig] = {}
    models: dict[str, ModelConfig] = {}


# -- reading -----------------------------------------------------------------------------------

ENV_PREFIX = "INFERD_"
_Tree = dict[str, object]
_Origins = dict[tuple[str, ...], str]


def load_config(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, object]) -> Config:
    """The configuration from a YAML file < the environment < flags.

    ``env`` is the whole environment: ``INFERD_SERVER__PORT=9000`` sets ``server.port``,
    ``INFERD_MODELS__CHAT__DTYPE=bfloat16`` the ``dtype`` of the model ``chat`` (case and punctuation of
    names do not matter) and ``INFERD_MODELS__CHAT__REMOTES__0__URL`` the ``url`` of its first remote.
    Names without a double underscore are not settings (``stray_variables`` tells which look as if).
    ``overrides`` is a nested mapping in the shape of the tree. Sizes may be written as '4GiB'.

    Raises one ConfigError that lists every problem with its path, its value and what is allowed.
    """
    tree = read_yaml(path) if path is not None else {}
    origins: _Origins = {}
    _merge(tree, _environment(env, _names(tree, overrides), origins))
    _merge(tree, overrides)
    checked, problems = check(Config, tree)
    problems += _beyond_types(checked, env)
    where = str(path) if path is not None else None
    if problems:
        raise ConfigError(_sentence(problems, origins, where), param=dotted(problems[0].path))
    try:
        config = msgspec.convert(checked, Config)
    except msgspec.ValidationError as error:  # a type that ``check`` leaves to msgspec
        raise ConfigError(f"The configuration {f'in {where} ' if where else ''}is not valid: {error}.") from None
    return with_models(expand_versions(_shared_out(config)))


def _shared_out(config: Config) -> Config:
    """Fractions of the server's memory as bytes."""
    whole = config.server.memory_bytes
    if whole is None or all(model.memory_fraction is None for model in config.models.values()):
        return config
    models = {
        name: model
        if model.memory_fraction is None
        else msgspec.structs.replace(model, memory_bytes=int(whole * model.memory_fraction))
        for name, model in config.models.items()
    }
    return msgspec.structs.replace(config, models=models)


def single_model_config(
    source: str,
    *,
    name: str | None = None,
    model: Mapping[str, object] | None = None,
    server: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of a server with one model: ``inferd serve SOURCE``. Raises ConfigError."""
    chosen = name if name is not None else model_name(source)
    overrides = {"models": {chosen: {"source": source, **(model or {})}}, "server": dict(server or {})}
    return load_config(None, env or {}, overrides)


def model_name(source: str) -> str:
    """The name clients use for a source given without one: a file's stem, a folder's own name, a class's, or the hub id."""
    path = Path(source).expanduser()
    if path.is_file():
        return path.stem.removesuffix(".pkl").removesuffix(".joblib") or "model"  # classifier.pkl.onnx: classifier
    if re.fullmatch(r"(\w+\.)*\w+:\w+|.+\.py:\w+", source):
        return source.rpartition(":")[2]
    if path.is_dir() or source.startswith((".", "/", "~")):
        return path.resolve().name or "model"
    return source.partition("@")[0]


def read_yaml(path: Path) -> _Tree:
    """A YAML file's document as plain data; duplicate keys are refused. Raises ConfigError."""
    import yaml  # a server without a config file starts faster without it

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Loader, node: yaml.MappingNode) -> _Tree:
        seen: dict[object, int] = {}
        for key_node, _ in node.value:
            key, line = loader.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, list | dict):
                raise ConfigError(f"{path}, line {line}: a key must be a word, not a list or a section.")
            if key in seen:
                raise ConfigError(
                    f"{path}, line {line}: the key {key!r} is already given on line {seen[key]}; keep one of them."
                )
            seen[key] = line
        loader.flatten_mapping(node)
        return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        with path.open("rb") as file:
            document: object = yaml.load(file, Loader)
    except FileNotFoundError:
        raise ConfigError(f"The configuration file {path} does not exist; check the path.") from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error}.") from None
    except RecursionError:
        raise ConfigError(f"The configuration file {path} is nested too deeply to be one.") from None
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"The configuration file {path} is not valid YAML: {said}.") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"The configuration file {path} holds no sections; it starts with 'models:' or 'server:'.")
    return document


def _environment(env: Mapping[str, str], names: Mapping[str, list[str]], origins: _Origins) -> _Tree:
    """The settings among environment variables, as a nested tree of texts. ``names`` are those of the
    sections that have names: models and tenants."""
    tree: _Tree = {}
    for variable, value in sorted(env.items()):
        rest = variable.removeprefix(ENV_PREFIX)
        if rest == variable or "__" not in rest:
            continue
        parts = rest.split("__")
        path = [part.lower() for part in parts]
        if path[0] in names and len(path) > 1:
            wanted = _plain(parts[1])
            path[1] = next((name for name in names[path[0]] if _plain(name) == wanted), path[1])
        origins[tuple(path)] = variable
        node = tree
        for depth, part in enumerate(path[:-1], start=1):
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise ConfigError(
                    f"{variable} and {origins[tuple(path[:depth])]} contradict each other: "
                    f"one sets {part}, the other a field inside it."
                )
            node = child
        node[path[-1]] = Text(value)
    return tree


# Variables that are read elsewhere, and those that Kubernetes sets for a service called inferd.
_NO_SETTINGS = re.compile(r"INFERD_(DEBUG|API_KEY|URL|(PORT|SERVICE_(HOST|PORT))(_.*)?)")


def stray_variables(env: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like a setting and is none: INFERD_PORT, INFERD_SERVER_PORT."""
    settings = {
        _plain("_".join((*branch.path, leaf.name))): (*branch.path, leaf.name)
        for section, kind in (("server", ServerConfig), ("state", StateConfig), ("cache", CacheConfig))
        for branch in branches(kind, (section,))
        for leaf in branch.leaves
    }
    by_field = {path[-1]: path for path in reversed(settings.values())}
    found = []
    for variable, value in sorted(env.items()):
        rest = variable.removeprefix(ENV_PREFIX)
        if rest == variable or "__" in rest:
            continue
        path = settings.get(_plain(rest)) or by_field.get(_plain(rest))
        # Of a service called inferd, Kubernetes makes INFERD_PORT=tcp://10.0.0.1:80.
        if _NO_SETTINGS.fullmatch(variable) and (path is None or "://" in value):
            continue
        hint = f"did you mean {ENV_PREFIX}{'__'.join(path).upper()}?" if path else "a setting has two underscores."
        found.append(f"{variable} is no setting and was ignored; {hint}")
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _names(*trees: Mapping[str, object]) -> dict[str, list[str]]:
    """What the sections are called whose names people choose."""
    found: dict[str, list[str]] = {"models": [], "tenants": []}
    for tree in trees:
        for section, names in found.items():
            below = tree.get(section)
            names += [str(name) for name in below] if isinstance(below, Mapping) else []
    return found


def _merge(into: _Tree, over: Mapping[str, object]) -> None:
    """Lay ``over`` upon ``into``: sections are merged, also numbered ones upon a list; values replaced."""
    for key, value in over.items():
        below = into.get(key)
        if isinstance(value, Mapping) and isinstance(below, list) and all(str(place).isdecimal() for place in value):
            below = into[key] = {str(place): section for place, section in enumerate(below)}
        if isinstance(value, Mapping) and (isinstance(below, dict) or below is None):
            child: _Tree = below if isinstance(below, dict) else {}
            _merge(child, value)
            into[key] = child
        else:
            into[key] = value


def _beyond_types(tree: object, env: Mapping[str, str]) -> Iterator[Problem]:
    """What the structs cannot say."""
    if not isinstance(tree, dict):
        return
    for section, noun in (("models", "model"), ("tenants", "tenant")):
        names = tree.get(section)
        for name in names if isinstance(names, dict) else ():
            if not name or name != name.strip() or not name.isprintable():
                yield Problem((section, name), f"{name!r} is not a {noun} name: it is empty, or has blanks around it.")
    yield from problems_between(_sound(tree), env)


def _sound(tree: _Tree) -> Config:
    """The part of a checked tree that has the right types; defaults stand in for the rest."""
    found: dict[str, object] = {}
    for name, kind in (("server", ServerConfig), ("state", StateConfig), ("cache", CacheConfig)):
        with contextlib.suppress(msgspec.ValidationError):
            found[name] = msgspec.convert(tree.get(name, {}), kind)
    for name, named in (("tenants", TenantConfig), ("models", ModelConfig)):
        below, whole = tree.get(name), {}
        for key, section in below.items() if isinstance(below, dict) else ():
            with contextlib.suppress(msgspec.ValidationError):
                whole[str(key)] = msgspec.convert(section, named)
        found[name] = whole
    return msgspec.structs.replace(Config(), **found)


def _sentence(problems: list[Problem], origins: _Origins, where: str | None) -> str:
    lines = []
    for problem in problems:
        origin = origins.get(tuple(map(str, problem.path)))
        lines.append(f"{dotted(problem.path)}{f' (from {origin})' if origin else ''}: {problem.sentence}")
    if len(lines) == 1:
        return lines[0]
    head = f"{len(lines)} problems in the configuration{f' ({where})' if where else ''}:"
    return "\n  - ".join([head, *lines])
