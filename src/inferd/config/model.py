"""One model: where it comes from, how it runs, and the sections of its settings.

Does not know how settings are read, nor what must hold between them (``rules.py``).
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

from msgspec import Meta

from inferd.config.generation import (
    KVCacheConfig,
    ObjectivesConfig,
    ParallelConfig,
    RolesConfig,
    SchedulerConfig,
    SpeculationConfig,
    WatermarkConfig,
)
from inferd.config.patterns import DEVICE, VARIABLE, VERSION
from inferd.config.pipelines import PipelineConfig, StepConfig
from inferd.config.prediction import BatchingConfig, SequenceConfig, TensorConfig
from inferd.config.remote import RemoteConfig, RemoteSettings
from inferd.config.routing import (
    BreakerConfig,
    ModelCacheConfig,
    PlacementConfig,
    QueueConfig,
    RetryConfig,
    RoutingConfig,
    ScalingConfig,
)
from inferd.config.section import Section
from inferd.config.versioning import DriftConfig, RolloutConfig, VerifyConfig, VersionsConfig
from inferd.types import PriorityClass

Runtime = Literal[
    "auto", "llm", "onnx", "torch", "sklearn", "xgboost", "lightgbm", "encoder", "python", "triton_python", "pipeline"
]
DType = Literal["auto", "float32", "bfloat16", "float16"]
REMOTE_PREFIX = "openai:"


class ModelConfig(Section, frozen=True, kw_only=True, dict=True):
    """One model: where it comes from and how it runs."""

    source: Annotated[
        str,
        Meta(
            description="A folder, a model file (ONNX, .pt2, skops, XGBoost, LightGBM), a Python class (module:Class), "
            "a Hugging Face Hub id (optionally id@revision), registry:NAME@production, mlflow:models:/NAME@ALIAS, "
            "'demo' for the bundled chat model, or openai:https://host/v1 for a remote server."
        ),
    ]
    runtime: Annotated[
        Runtime,
        Meta(description="The runtime of the model; auto: by its files."),
    ] = "auto"
    task: Annotated[
        Literal["auto", "predict", "embed", "rerank", "classify", "token_classify"],
        Meta(description="The task of a text encoder; auto: the task that its checkpoint was made for."),
    ] = "auto"
    allow_code: Annotated[
        bool,
        Meta(
            description="Run code that comes with the model: a Python class, TorchScript, custom operators. Only for "
            "models you trust as you trust this server's own code."
        ),
    ] = False
    allow_pickle: Annotated[
        bool,
        Meta(description="Open pickles, which can run any code when they are read. Only for files you made yourself."),
    ] = False
    environment: Annotated[
        tuple[Annotated[str, Meta(pattern=VARIABLE)], ...],
        Meta(
            description=(
                "Further variables of the server's environment for the model's workers, besides those that computing "
                "needs."
            )
        ),
    ] = ()
    options: Annotated[dict[str, Any], Meta(description="The runtime's or Python class's own options.")] = {}
    replicas: Annotated[int, Meta(description="Copies of the model, each in its own worker process.", ge=1, le=64)] = 1
    dtype: Annotated[
        DType,
        Meta(
            description="Number format of weights and KV cache; auto: the checkpoint's own (float32 where the "
            "processor has no fast bfloat16)."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8"],
        Meta(
            description=(
                "Weights as integers: int8 or int4 (CPU) made when the model loads, from any checkpoint; fp8: numbers "
                "of 8 bits (CUDA); auto: the checkpoint's format; none: numbers, for any checkpoint."
            )
        ),
    ] = "auto"
    quantization_cache_bytes: Annotated[
        int,
        Meta(
            description=(
                "Disk space for weights that were quantised at load, in the user's cache folder; the least recently "
                "used are removed first. 0: none are stored."
            ),
            ge=0,
        ),
    ] = 20 << 30
    device: Annotated[
        str, Meta(description="auto, cpu, cuda or cuda:N. Ranks (parallel) have N, N + 1 and so on.", pattern=DEVICE)
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Longest prompt plus answer in tokens; unset: the checkpoint's own limit."),
    ] = None
    rope_factors: Annotated[
        Literal["auto", "short", "long"],
        Meta(
            description=(
                "LongRoPE's factors (Phi-3) for all texts; auto: the long ones if max_model_len, or the checkpoint's "
                "limit, is above its original_max_position_embeddings. short: longer texts are refused."
            )
        ),
    ] = "auto"
    max_rows: Annotated[
        Annotated[int, Meta(ge=1, le=16_777_216)] | None,
        Meta(
            description="Rows that one request for predictions may have, texts likewise; unset: 65536, and 2048 texts. "
            "More than max_batch_size of them are computed in several batches."
        ),
    ] = None
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Compute threads of a replica; unset: the cores that the server may use (taskset, cpuset, a "
            "CPU limit), divided among the replicas."
        ),
    ] = None
    attention: Annotated[
        Literal["auto", "reference", "native", "triton"],
        Meta(
            description=(
                "Attention backend; auto: the native kernels if they are built (CPU), Triton's if it is installed "
                "(CUDA), else plain torch."
            )
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="Path of a Jinja chat template that replaces the checkpoint's own.")
    ] = None
    adapters: Annotated[
        dict[str, str],
        Meta(
            description=(
                "LoRA adapters by the names that clients use: each a folder that peft saved, or a Hugging Face Hub id "
                "(optionally id@revision)."
            )
        ),
    ] = {}
    adapter_roots: Annotated[
        tuple[str, ...],
        Meta(
            description=("Folders from which POST /v1/load_lora_adapter may load; unset: it loads from the Hub alone.")
        ),
    ] = ()
    adapter_memory_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description=(
                "Most memory of a replica for adapters, which the memory plan keeps for them; unset: the plan counts "
                "those of the configuration, and others take what is free."
            )
        ),
    ] = None
    use_generation_config: Annotated[
        bool, Meta(description="Use the sampling defaults of the checkpoint's generation_config.json.")
    ] = True
    seed: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Makes requests without a seed repeatable from one start to the next; unset: they differ."),
    ] = None
    hang_timeout_s: Annotated[
        float, Meta(description="A busy replica that completes no step for this long is restarted.", gt=0)
    ] = 60.0
    load_timeout_s: Annotated[
        float, Meta(description="Longest time for loading; a model that takes longer is not loaded.", gt=0)
    ] = 1800.0
    load: Annotated[
        Literal["startup", "on_demand"],
        Meta(description="Load when the server starts, or when the first request arrives (which waits meanwhile)."),
    ] = "startup"
    idle_after_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Unload after so many seconds without a request; unset: never."),
    ] = None
    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Memory that one replica may take; the KV arena gets the part that weights and headroom leave."
        ),
    ] = None
    memory_fraction: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(
            description="Memory of one replica as a part of server.memory_bytes, which must be set: 0.25 is a quarter "
            "of it."
        ),
    ] = None
    priority: Annotated[
        PriorityClass,
        Meta(description="Priority against other models on the same cores: batch yields, and is unloaded first."),
    ] = "normal"
    region: Annotated[
        str | None,
        Meta(description="Region of its local replicas; requests of a tenant with another region do not run there."),
    ] = None
    resume_streams: Annotated[
        bool,
        Meta(
            description="When a worker dies in the middle of a stream, another one continues it, token by token the "
            "same."
        ),
    ] = False
    drain_s: Annotated[
        float, Meta(description="Seconds that requests get to finish on a replica that is replaced or unloaded.", ge=0)
    ] = 300.0
    version: Annotated[
        str,
        Meta(
            description="Version number in KServe v2; a version from a numbered folder has the folder's number.",
            pattern=VERSION,
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
    parallel: ParallelConfig = ParallelConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    watermark: WatermarkConfig | None = None
    versions: VersionsConfig = VersionsConfig()
    rollout: RolloutConfig | None = None
    verify: VerifyConfig | None = None
    drift: DriftConfig = DriftConfig()
    scaling: ScalingConfig | None = None
    roles: RolesConfig | None = None
    placement: PlacementConfig = PlacementConfig()
    queue: QueueConfig = QueueConfig()
    routing: RoutingConfig = RoutingConfig()
    breaker: BreakerConfig = BreakerConfig()
    retry: RetryConfig = RetryConfig()
    cache: ModelCacheConfig = ModelCacheConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()

    @functools.cached_property
    def is_remote(self) -> bool:
        """Whether ``source`` itself is a remote server, so that there are no local replicas."""
        return self.source.startswith(REMOTE_PREFIX)

    @property
    def is_pipeline(self) -> bool:
        """Whether the model consists of steps, so that ``source`` names no files."""
        return bool(self.pipeline.steps)

    @property
    def has_steps(self) -> bool:
        """Whether operations are part of the model."""
        return bool(self.pipeline.steps or self.preprocess or self.postprocess)

    @functools.cached_property
    def num_local(self) -> int:
        """Local replicas, at most."""
        if self.is_remote:
            return 0
        if self.roles is not None:
            return self.roles.prefill + self.roles.decode
        return self.replicas if self.scaling is None else self.scaling.max

    @property
    def first_gpu(self) -> int:
        """The number of the CUDA device that rank 0 computes on, where it computes on one."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def least_gpus(self) -> int:
        """CUDA devices that a machine has for a replica: one for each rank; 0: the settings ask for none."""
        return self.first_gpu + self.parallel.count if self.device.startswith("cuda") else 0

    @property
    def owned_gpus(self) -> range:
        """The CUDA devices of the ranks of all local replicas; empty: the settings name none, or there are no ranks."""
        count = self.num_local * self.parallel.count if self.parallel.count > 1 else 0
        return range(self.first_gpu, self.first_gpu + (count if self.device.startswith("cuda") else 0))

    @property
    def num_at_start(self) -> int:
        """Local replicas that begin with the model."""
        return self.num_local if self.scaling is None else max(1, self.scaling.min)

    @property
    def is_on_demand(self) -> bool:
        """Whether a request loads the model."""
        return self.load == "on_demand" or (self.scaling is not None and self.scaling.min == 0)

    @functools.cached_property
    def upstreams(self) -> tuple[RemoteConfig, ...]:
        """Every remote server among its replicas."""
        if not self.is_remote:
            return self.remotes
        settings = {name: getattr(self.remote, name) for name in RemoteSettings.__struct_fields__}
        return (RemoteConfig(url=self.source.removeprefix(REMOTE_PREFIX), **settings), *self.remotes)
