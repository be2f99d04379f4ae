"""How much memory models need, from the headers of their files, before anything is loaded.

The arithmetic is the engine's own (``inferd.engine.memory``), so a plan and a loaded model agree: weights to the byte,
the KV cache to the byte where its size is configured. Reads no weights, sends no request to a hub, and does not import
torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from inferd.checkpoints.adapter import read_adapter
from inferd.checkpoints.architecture import ITEM_BYTES, dtype_name, read_config
from inferd.checkpoints.decoder_config import DecoderConfig, Source
from inferd.checkpoints.footprint import used_tensors, weight_bytes
from inferd.checkpoints.longrope import factors_text, with_factors
from inferd.checkpoints.safetensors import Entry
from inferd.checkpoints.stored.layout import Layout as StoredLayout
from inferd.checkpoints.stored.layout import layouts
from inferd.config import Config, ModelConfig, ParallelConfig, SequenceConfig
from inferd.config.rules import machines_setting
from inferd.config.units import bytes_text
from inferd.engine.memory import (
    FREE_SHARE,
    Arena,
    adapters_bytes,
    headroom_bytes,
    plan_arena,
    rank_headroom_bytes,
    runtime_bytes,
)
from inferd.engine.model.share import Share, check_layout
from inferd.errors import ConfigError, ModelLoadError
from inferd.machine.memory import available_bytes
from inferd.native.kv_sizes import kv_bytes_per_token
from inferd.planning.placing import (
    Devices,
    Placed,
    Spot,
    StageNeed,
    devices_of,
    find_spot,
    fitting_spot,
    gpus_of,
    machines_of,
)
from inferd.planning.predictive import plan_predictive
from inferd.registry.artifact import Artifact, artifact_of
from inferd.registry.source import blaming, find, is_remote
from inferd.types import ModelKind, TensorSpec

TYPICAL_TOKENS = 1024
"""Tokens of a typical turn, prompt and answer, for the concurrency that is shown."""


MOST_MACHINES = 16
"""Of which a refused model is told that they hold it together."""


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica of a model takes. Sizes in bytes, lengths in tokens."""

    name: str
    folder: str  # or file
    weights_bytes: int
    headroom_bytes: int  # the process itself and a step's activations
    replicas: int
    roles: str = ""  # which of them compute prompts, and which answers
    num_answering: int = 0  # of them, those that compute answers
    kind: ModelKind = "generate"
    platform: str = "inferd_llm"
    # Of language models:
    dtype: str = ""
    rope_factors: str = ""  # a sentence, where LongRoPE's are chosen from
    checkpoint: str = ""  # how its weights are quantised: "gptq, int4, groups of 128"; "": they are numbers
    parallel: ParallelConfig = ParallelConfig()
    layout: str = ""  # "2 ranks (tensor 2 x pipeline 1)"; "": one process
    placed: Placed | None = None  # where server.devices says what devices there are
    machines_bytes: tuple[int, ...] = ()  # of each of several machines, this one first
    kv_bytes: int = 0
    kv_bytes_per_token: int = 0
    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    max_concurrency: int = 0  # sequences of max_model_len that the cache holds, at most max_num_seqs
    typical_len: int = 0
    typical_concurrency: int = 0  # sequences of typical_len that fit
    # Of models that make predictions, as far as their files say before they are loaded:
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    max_batch_size: int | None = None  # rows that are computed together; 0: it is not known to have rows
    not_batched: str = ""  # why it is not known to have rows
    named_rows: str = ""  # the exporter's name of its rows, where batches rest on that name and a trial at load

    @property
    def total_bytes(self) -> int:
        """One replica, with its KV cache full."""
        return self.weights_bytes + self.kv_bytes + self.headroom_bytes

    @property
    def here_bytes(self) -> int:
        """Its part on this machine."""
        return self.machines_bytes[0] if self.machines_bytes else self.total_bytes


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What all local models of a configuration take."""

    models: tuple[MemoryEstimate, ...]
    budget_bytes: int  # server.memory_bytes, or what is free
    startup_bytes: int  # of every replica that is loaded when the server starts
    all_bytes: int  # of every replica, also those loaded on demand
    unknown: tuple[str, ...] = ()  # models whose files are not downloaded yet
    problems: tuple[str, ...] = ()  # sentences: what does not fit, and the remedy

    @property
    def fits(self) -> bool:
        return not self.problems


def plan_model(
    name: str, config: ModelConfig, *, free_bytes: int | None = None, devices: Devices | None = None
) -> MemoryEstimate | None:
    """The memory of one replica of the model; None where it cannot be known: for a remote server, or a hub id that is
    not downloaded yet.

    ``free_bytes``: memory the replica may take (None: what is free on this machine), on each machine where it is spread
    over several; it bounds a KV cache whose size is not configured. ``devices``: where the ranks of all replicas are
    placed, in the layout that these ask for; None: there are no budgets of devices. Raises ModelLoadError, with the
    remedy, when the replica does not fit within ``memory_bytes``, ``free_bytes`` or the devices, or its files are at
    fault.
    """
    artifact = _artifact(config)
    if artifact is None:
        return None
    free_bytes = available_bytes() if free_bytes is None else free_bytes
    free = config.parallel.machines * free_bytes
    if artifact.kind == "predict":
        return _predictive(name, artifact, config, free)
    sizes = _Sizes.read(Path(artifact.path), config)
    check_layout(config, sizes.dims)
    spot = None
    if devices is not None and not config.device.startswith("cuda"):
        spot = find_spot(
            name, sizes.dims, _asked(config), config.num_local, devices, lambda parallel: sizes.needs(config, parallel)
        )
        config = msgspec.structs.replace(config, parallel=spot.parallel)
    weights_bytes = sizes.weights_bytes(config.parallel)
    runtime = config.parallel.count * runtime_bytes()
    beside = free - weights_bytes - runtime
    if beside <= 0:
        raise ModelLoadError(
            f"A replica of {name} takes more than {bytes_text(weights_bytes + runtime)} (weights "
            f"{bytes_text(weights_bytes)}, the process {bytes_text(runtime)}, and a KV cache), but "
            f"{bytes_text(free)} may be used. Give it more memory, or take a smaller model.",
            param="memory_bytes",
        )
    machines = sizes.by_machine(config) if config.parallel.machines > 1 else []
    bounds = [max(0, free_bytes - fixed) // block for fixed, block in machines]
    bounds += [] if spot is None else [spot.most_blocks]
    arena = sizes.arena(config, min([beside, *(sizes.cache_bytes(config, blocks) for blocks in bounds)]))
    typical = min(TYPICAL_TOKENS, arena.max_model_len)

    def concurrency(length: int) -> int:
        return min(arena.num_blocks // -(-length // arena.block_size), config.scheduler.max_num_seqs)

    estimate = MemoryEstimate(
        name=name,
        folder=str(sizes.folder),
        dtype=sizes.dtype,
        rope_factors=factors_text(sizes.dims),
        checkpoint="" if sizes.source.quantization is None else sizes.source.quantization.label,
        parallel=config.parallel,
        layout=config.parallel.text,
        placed=None if spot is None or devices is None else spot.placed(arena.num_blocks, devices.rooms),
        machines_bytes=tuple(fixed + arena.num_blocks * block for fixed, block in machines),
        weights_bytes=weights_bytes,
        kv_bytes=arena.nbytes,
        kv_bytes_per_token=arena.bytes_per_token,
        num_blocks=arena.num_blocks,
        block_size=arena.block_size,
        headroom_bytes=headroom_bytes(config, sizes.dims, itemsize=sizes.itemsize),
        replicas=config.num_local,
        roles=_roles_text(config),
        num_answering=config.num_local if config.roles is None else config.roles.decode,
        max_model_len=arena.max_model_len,
        max_concurrency=concurrency(arena.max_model_len),
        typical_len=typical,
        typical_concurrency=concurrency(typical),
    )
    fullest = max(estimate.machines_bytes, default=0)
    if fullest > free_bytes:
        raise ModelLoadError(
            f"A replica of {name} takes {bytes_text(fullest)} on the fullest of its {config.parallel.machines} "
            f"machines, but {bytes_text(free_bytes)} may be used on each. Lower kv_cache.memory_bytes or "
            "max_model_len, take more machines or a smaller model, or give it more memory.",
            param="memory_bytes",
        )
    if estimate.total_bytes > free:
        raise ModelLoadError(
            f"A replica of {name} takes {bytes_text(estimate.total_bytes)} (weights {bytes_text(weights_bytes)}, "
            f"KV cache {bytes_text(estimate.kv_bytes)}, the process {bytes_text(estimate.headroom_bytes)}), but "
            f"{bytes_text(free)} "
            "may be used. Lower kv_cache.memory_bytes or max_model_len, take a smaller model, or give it more memory.",
            param="memory_bytes",
        )
    return estimate


def over_machines(config: ModelConfig, each_bytes: int) -> Spot | None:
    """The fewest machines with so much memory each that hold a replica, each with a stage of its layers; None: it is
    not divided among machines, or ``MOST_MACHINES`` do not hold it. Raises ModelLoadError."""
    return _over(machines_of(MOST_MACHINES, each_bytes), config)


def over_gpus(config: ModelConfig, count: int, each_bytes: int) -> Spot | None:
    """The fewest of ``count`` GPUs with room for so many bytes each that hold a replica, with a part of its layers on
    each; None: it is not divided, or they do not hold it. Raises ModelLoadError."""
    return _over(gpus_of(count, each_bytes), msgspec.structs.replace(config, device="cuda"))


def _over(devices: Devices, config: ModelConfig) -> Spot | None:
    artifact = _artifact(config)
    if artifact is None or artifact.kind == "predict":
        return None
    sizes = _Sizes.read(Path(artifact.path), config)
    return fitting_spot(sizes.dims, None, 1, devices, lambda parallel: sizes.needs(config, parallel))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a checkpoint's folder says about the memory of a replica, in any layout."""

    folder: Path
    source: Source
    dims: DecoderConfig
    dtype: str
    asked: str  # the setting ``quantization``
    tensors: Mapping[str, Entry]
    quantised: Mapping[str, StoredLayout]
    draft_bytes: int  # of a draft model's weights
    draft_bytes_per_token: int
    adapter_bytes: int

    @classmethod
    def read(cls, folder: Path, config: ModelConfig) -> Self:
        """Raises ModelLoadError."""
        source = Source(folder / "config.json")
        dims = with_factors(read_config(source), config.rope_factors, config.max_model_len)
        dtype = dtype_name(config.dtype, dims.dtype, on_cpu=not config.device.startswith("cuda"), source=source)
        tensors = used_tensors(folder, dims)
        draft, of_token = _draft(config)
        return cls(
            folder=folder,
            source=source,
            dims=dims,
            dtype=dtype,
            asked=config.quantization,
            tensors=tensors,
            quantised={} if source.quantization is None else layouts(source.quantization, tensors, str(folder)),
            draft_bytes=draft,
            draft_bytes_per_token=of_token,
            adapter_bytes=adapters_bytes(config, _adapters(config, dims, ITEM_BYTES[dtype])),
        )

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    def share_bytes(self, share: Share) -> int:
        """A rank's part of the checkpoint."""
        return share.weight_bytes(self.tensors, self.quantised, self.dims, self.itemsize, self.asked)

    def weights_bytes(self, parallel: ParallelConfig) -> int:
        """Of all ranks, with a draft model and the part for adapters."""
        ranks = (Share(rank, parallel.tensor, parallel.pipeline) for rank in range(parallel.count))
        return sum(map(self.share_bytes, ranks)) + self.draft_bytes + self.adapter_bytes

    def arena(self, config: ModelConfig, free_bytes: int, share: float = FREE_SHARE) -> Arena:
        """Raises ModelLoadError."""
        return plan_arena(
            config,
            self.dims,
            itemsize=self.itemsize,
            weights_bytes=self.weights_bytes(config.parallel),
            free_bytes=free_bytes,
            draft_bytes_per_token=self.draft_bytes_per_token,
            share=share,
        )

    def cache_bytes(self, config: ModelConfig, blocks: int) -> int:
        """Of a KV cache of so many blocks, in all ranks together."""
        return blocks * config.kv_cache.block_size * self.arena(config, sys.maxsize, share=0.0).bytes_per_token

    def needs(self, config: ModelConfig, parallel: ParallelConfig) -> tuple[StageNeed, ...]:
        """The memory of a rank of each stage. Rank 0 also samples, and has the draft model. Adapters count as a whole
        in every rank of a stage, because some of their products are not divided."""
        divided = msgspec.structs.replace(config, parallel=parallel)
        blocks = self.arena(divided, sys.maxsize, share=0.0).num_blocks
        adapters = -(-self.adapter_bytes // parallel.pipeline)
        found = []
        for stage in range(parallel.pipeline):
            share = Share(stage * parallel.tensor, parallel.tensor, parallel.pipeline)
            part = share.config(self.dims)
            per_token = kv_bytes_per_token(
                num_layers=part.num_layers,
                num_kv_heads=part.num_kv_heads,
                head_dim=part.head_dim,
                itemsize=self.itemsize,
                dtype=config.kv_cache.dtype,
            )
            per_token += self.draft_bytes_per_token if stage == 0 else 0
            found.append(
                StageNeed(
                    weights_bytes=self.share_bytes(share) + adapters + (self.draft_bytes if stage == 0 else 0),
                    process_bytes=rank_headroom_bytes(
                        divided, self.dims, itemsize=self.itemsize, samples=share.is_first
                    ),
                    block_bytes=per_token * config.kv_cache.block_size,
                    blocks=blocks,
                )
            )
        return tuple(found)

    def by_machine(self, config: ModelConfig) -> list[tuple[int, int]]:
        """What each machine of a replica needs without a KV cache, and for a block of it. Bytes."""
        parallel = config.parallel
        of_stages = self.needs(config, parallel)
        ranks = [need for need in of_stages for _ in range(parallel.tensor)]
        each = parallel.per_machine
        return [
            (sum(need.weights_bytes + need.process_bytes for need in own), sum(need.block_bytes for need in own))
            for own in (ranks[first : first + each] for first in range(0, parallel.count, each))
        ]


def _asked(config: ModelConfig) -> ParallelConfig | None:
    """The layout that the configuration asks for; None: the one that fits."""
    return config.parallel if config.parallel.count > 1 else None


def _roles_text(config: ModelConfig) -> str:
    if config.roles is None:
        return ""
    return f"{config.roles.prefill} for prompts and {config.roles.decode} for answers"


def plan_config(config: Config, free_bytes: int | None = None) -> Plan:
    """The memory of every local model, in the order of the configuration. Each gets what the models before it
    leave. Raises ModelLoadError when a model's files are at fault; what does not fit is in ``problems``."""
    free = available_bytes() if free_bytes is None else free_bytes
    limit = budget_of(config)
    budget = free if limit is None else limit
    estimates: list[MemoryEstimate] = []
    unknown: list[str] = []
    problems: list[str] = []
    startup = 0
    devices = devices_of(config.server.devices)
    in_order = {name: at for at, name in enumerate(config.models)}
    for name, model in sorted(config.models.items(), key=lambda item: item[1].is_on_demand):
        if model.num_local == 0:
            continue
        # A model that is loaded on demand may use the memory of other such models, which are unloaded for it.
        room = budget - startup
        try:
            estimate = plan_model(name, model, free_bytes=max(room, 0) // model.num_local, devices=devices)
        except ModelLoadError as error:
            remedies = ""
            if _loads_alone(name, model):  # what is wrong is the memory that it may use
                shared = _shared(model.num_local, budget, startup) if devices is None else ""
                remedies = shared + _wider(model, config, max(room, 0) // model.num_local)
            problems.append(f"models.{name}: {error.message}{remedies}")
            continue
        if estimate is None:
            unknown.append(name)
            continue
        estimates.append(estimate)
        if not model.is_on_demand:
            startup += estimate.here_bytes * estimate.replicas
            if devices is not None and estimate.placed is not None:
                devices = devices.without(estimate.placed)
    if limit is not None and limit > free:
        what = "server.memory_bytes is" if limit == config.server.memory_bytes else "server.devices together is"
        problems.append(f"{what} {bytes_text(limit)}, but only {bytes_text(free)} are free on this machine. Lower it.")
    return Plan(
        models=tuple(sorted(estimates, key=lambda estimate: in_order[estimate.name])),
        budget_bytes=budget,
        startup_bytes=startup,
        all_bytes=sum(estimate.here_bytes * estimate.replicas for estimate in estimates),
        unknown=tuple(unknown),
        problems=tuple(problems),
    )


def _shared(count: int, budget: int, others: int) -> str:
    """A sentence on where the memory went that a replica does not have; empty: all of it was for this one."""
    if count == 1 and not others:
        return ""
    less = f", of which other models take {bytes_text(others)}" if others else ""
    share = f", shared by the {count} replicas that it may have" if count > 1 else ""
    return f" There are {bytes_text(budget)} in all{less}{share}."


def _wider(model: ModelConfig, config: Config, free_bytes: int) -> str:
    """A sentence on how machines with so much each would serve a model that this one does not hold; empty: they would
    not, or more devices are asked for than there are."""
    devices = config.server.devices
    if devices.memory_bytes is not None and model.parallel.count > devices.count:
        return ""
    artifact = _artifact(model)
    if artifact is not None and artifact.kind == "predict":
        return " Only models that generate text are divided among machines." if config.nodes.listen else ""
    try:
        spot = over_machines(msgspec.structs.replace(model, roles=None), free_bytes)
    except ModelLoadError:  # the memory that is set for a replica is too little for more processes
        return ""
    count = 1 if spot is None else spot.parallel.machines
    setting = machines_setting(count, model, config) if count > 1 else ""
    return f" {count} machines with so much hold it, each with a stage of its layers: {setting}." if setting else ""


def budget_of(config: Config) -> int | None:
    """The memory that the operator lets all local models take together; None: what the machine leaves."""
    server = config.server
    of_devices = None if server.devices.memory_bytes is None else server.devices.memory_bytes * server.devices.count
    budgets = [budget for budget in (server.memory_bytes, of_devices) if budget is not None]
    return min(budgets, default=None)


def bind(config: Config) -> Config:
    """The configuration with every model bound to its part of ``server.memory_bytes`` if it is loaded at the start, so
    that no model uses another one's, and in the layout that ``server.devices`` asks for. Unchanged when there is no
    such budget.

    Raises ConfigError, with the plan, when the models do not fit together. A model with invalid files is not bound: it
    fails when it loads, and no other model with it.
    """
    budget = budget_of(config)
    if budget is None:
        return config
    plan = plan_config(config, free_bytes=max(budget, available_bytes()))
    planned = {estimate.name: estimate for estimate in plan.models}
    models = dict(config.models)
    for name, model in config.models.items():
        is_placed = name in planned and planned[name].placed is not None
        if (model.is_on_demand and not is_placed) or model.num_local == 0 or name in plan.unknown:
            continue
        if name in planned:
            models[name] = bound(model, planned[name])
        elif _loads_alone(name, model):
            taken = ", ".join(f"{e.name} {e.replicas} x {bytes_text(e.total_bytes)}" for e in plan.models) or "nothing"
            problem = next(problem for problem in plan.problems if problem.startswith(f"models.{name}: "))
            limit, param = (
                ("the devices of the server", "server.devices")
                if budget != config.server.memory_bytes
                else (f"server.memory_bytes = {bytes_text(budget)}", "server.memory_bytes")
            )
            raise ConfigError(
                f"The models do not fit into {limit} (planned so far: {taken}). {problem}",
                param=param,
            )
    return msgspec.structs.replace(config, models=models)


def bound(model: ModelConfig, estimate: MemoryEstimate) -> ModelConfig:
    """The model with the memory and the layout that were planned."""
    return msgspec.structs.replace(model, memory_bytes=estimate.total_bytes, parallel=estimate.parallel)


def _artifact(config: ModelConfig) -> Artifact | None:
    """What would be loaded here; None for a remote server, and for a hub id that is not downloaded yet."""
    if config.is_remote:
        return None
    if not is_remote(config.source):
        return artifact_of(config)
    found = find(config.source)
    return None if found is None else artifact_of(msgspec.structs.replace(config, source=str(found)))


def _requested(inputs: Iterable[TensorSpec], sequence: SequenceConfig) -> Iterator[TensorSpec]:
    """The inputs that requests bring, without those that the server fills itself."""
    own = {*sequence.states.values(), *sequence.controls}
    return (spec for spec in inputs if spec.name not in own)


def _answered_outputs(outputs: Iterable[TensorSpec], sequence: SequenceConfig) -> Iterator[TensorSpec]:
    """The outputs of answers, without states, which stay in the server."""
    return (spec for spec in outputs if spec.name not in sequence.states)


def _predictive(name: str, artifact: Artifact, config: ModelConfig, free: int) -> MemoryEstimate:
    """The memory of one replica of a predictive model."""
    if config.parallel.count > 1:
        raise ModelLoadError(
            f"{name} has parallel, but only models that generate text are divided among ranks. Leave parallel out.",
            param="parallel",
        )
    if config.roles is not None:
        raise ModelLoadError(
            f"{name} has roles, but only models that generate text have prompts to hand over. Leave roles out.",
            param="roles",
        )
    plan = plan_predictive(artifact, config)
    signature, declared = plan.signature, config.batching.max_batch_size
    estimate = MemoryEstimate(
        name=name,
        folder=str(artifact.path),
        weights_bytes=plan.weights_bytes,
        headroom_bytes=plan.headroom_bytes,
        replicas=config.num_local,
        kind="predict",
        platform=artifact.platform,
        inputs=() if signature is None or config.preprocess else tuple(_requested(signature.inputs, config.sequence)),
        outputs=()
        if signature is None or config.postprocess
        else tuple(_answered_outputs(signature.outputs, config.sequence)),
        max_batch_size=None if signature is None else signature.max_batch_size(declared),
        not_batched="" if signature is None else signature.not_batched(declared),
        named_rows="" if signature is None else signature.named_rows(declared),
        rope_factors=plan.rope_factors,
    )
    allowed = free if config.memory_bytes is None else min(free, config.memory_bytes)
    if estimate.total_bytes > allowed:
        raise ModelLoadError(
            f"A replica of {name} takes about {bytes_text(estimate.total_bytes)} (weights "
            f"{bytes_text(estimate.weights_bytes)}, the "
            f"process and a batch {bytes_text(estimate.headroom_bytes)}), but {bytes_text(allowed)} may be used. "
            "Lower batching.max_batch_size, take a smaller model, or give it more memory.",
            param="memory_bytes",
        )
    return estimate


def _adapters(config: ModelConfig, dims: DecoderConfig, itemsize: int) -> int:
    """Bytes of the adapters that are here. One that cannot be read is not loaded either, and stops no model."""
    found = 0
    for source in config.adapters.values():
        with contextlib.suppress(ModelLoadError):
            folder = find(source)
            found += 0 if folder is None else read_adapter(folder, dims).num_bytes(itemsize)
    return found


def adapter_problems(config: ModelConfig) -> list[str]:
    """What is wrong with the files of the model's adapters, as far as these and the model's are here."""
    problems: list[str] = []
    artifact = _artifact(config) if config.adapters else None
    if artifact is None or artifact.kind == "predict":
        return problems
    dims = read_config(Source(Path(artifact.path) / "config.json"))
    for name, source in config.adapters.items():
        try:
            folder = find(source)
            if folder is not None:
                read_adapter(folder, dims)
        except ModelLoadError as error:
            problems.append(f"{name}: {error.message}")
    return problems


def _draft(config: ModelConfig) -> tuple[int, int]:
    """Bytes of a draft model's weights, and of its KV cache for each token; 0 where there is none, or it is not here
    yet."""
    speculation = config.speculation
    if speculation.draft is None or speculation.method not in ("auto", "draft"):
        return 0, 0
    with blaming("speculation.draft"):
        folder = find(speculation.draft)
    if folder is None:
        return 0, 0
    source = Source(folder / "config.json")
    dims = read_config(source)
    itemsize = ITEM_BYTES[
        dtype_name(config.dtype, dims.dtype, on_cpu=not config.device.startswith("cuda"), source=source)
    ]
    per_token = kv_bytes_per_token(
        num_layers=dims.num_layers, num_kv_heads=dims.num_kv_heads, head_dim=dims.head_dim, itemsize=itemsize
    )
    return weight_bytes(folder, source, dims, itemsize, "auto"), per_token


def _loads_alone(name: str, model: ModelConfig) -> bool:
    try:
        plan_model(name, model, free_bytes=1 << 60)
    except ModelLoadError:
        return False
    return True
