"""From a model's configuration to an engine that is ready: resolve, read, plan memory, warm up.

Cheap checks come first: errors in a folder are reported before weights are read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from inferd import clock
from inferd.checkpoints.answers.notation import Notation, notation_of
from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import Source
from inferd.checkpoints.generation_config import GenerationDefaults, load_generation_defaults
from inferd.checkpoints.longrope import factors_of, factors_text
from inferd.checkpoints.text.chat_template import ChatTemplate
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.checkpoints.weight_cache import WeightCache
from inferd.config import ModelConfig
from inferd.engine.adapters import Adapters
from inferd.engine.cuda.fit import refuse_on
from inferd.engine.cuda.load import DeviceLoad, device_load, device_of
from inferd.engine.cuda.load import free_bytes as free_device_bytes
from inferd.engine.engine import Engine
from inferd.engine.forms import Forms
from inferd.engine.memory import (
    FREE_SHARE,
    Arena,
    adapters_bytes,
    headroom_bytes,
    memory_plan,
    plan_arena,
    refuse_more_than_is_free,
    runtime_bytes,
)
from inferd.engine.model.load import Decoder, digest_of_files, load_model, open_weight_cache
from inferd.engine.model.share import ALONE, Share, check_devices, check_layout
from inferd.engine.prepare import Limits, Preparer
from inferd.engine.runner import Runner
from inferd.engine.sampler import Sampler
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.scheduler import Scheduler
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.speculation.draft_load import LoadedDraft, load_draft
from inferd.engine.speculation.speculation import Speculation
from inferd.engine.watermark import Watermark, load_watermark
from inferd.errors import ModelLoadError
from inferd.machine.memory import available_bytes
from inferd.machine.placement import num_threads, usable_cores
from inferd.machine.weight_memory import WeightMemory
from inferd.native import compiled
from inferd.native.kv_cache import KVCache
from inferd.native.packed import packing_into
from inferd.native.paged_attention import AttentionKind, native_available
from inferd.native.triton import switch
from inferd.registry.source import check_folder, resolve
from inferd.structured.compiled import Compiler
from inferd.structured.vocabulary import Vocabulary
from inferd.types import RANKS, ModelInfo, SamplingParams

if TYPE_CHECKING:
    from inferd.engine.ranks.lead import Lead

Progress = Callable[[str, int, int], None]

_log = logging.getLogger("inferd.engine")

# Threads that share a step meet some ten times per layer. Below this size waiting for each other
# takes longer than the work saved: a model of 7 MB made 761 tokens/s on one thread and 95 on two
# while other programs used the cores.
_WORTH_SHARING_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What was read from a model's folder."""

    decoder: Decoder
    tokenizer: Tokenizer
    template: ChatTemplate | None
    digest: bytes  # of the files

    @property
    def num_tokens(self) -> int:
        """Tokens that can be sampled: an embedding may have more rows than the tokenizer has tokens."""
        return min(self.tokenizer.vocab_size, self.decoder.config.vocab_size)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where a model's KV cache goes, and how large it is."""

    attention: AttentionKind
    gpu: DeviceLoad | None  # None: the CPU, or a device without Triton
    arena: Arena
    weights_bytes: int  # with the draft model's, and the part for adapters


def create_backend(
    name: str,
    config: ModelConfig,
    progress: Progress,
    weight_memory: WeightMemory | None = None,
    far: str = "",
    leaving: Callable[[str], None] = lambda why: None,
) -> Engine:
    """Load the model that ``config.source`` names and make it ready to serve.

    ``progress(phase, done, total)`` reports how far loading is. ``weight_memory``: memory for the weights that was
    reserved in advance. ``far``: where ranks on other machines are reached, and ``leaving``: tells why the process is
    about to end, where it has other ranks (``ranks.lead``). Raises ModelLoadError with the file or field at fault and
    the remedy.
    """
    phases = _Phases()
    device = _device(config.device)
    device = device_of(device, 0) if config.parallel.count > 1 else device
    torch.set_num_threads(config.threads or num_threads(config.num_local * config.parallel.per_machine))
    folder = check_folder(resolve(config.source, progress))
    _check_layout(config, folder, device)
    ranks = _ranks(config, folder, device, far, leaving)
    phases.done("resolve")
    defaults = load_generation_defaults(folder)
    weight_cache = (
        open_weight_cache(folder, config.quantization, config.quantization_cache_bytes)
        if device.type == "cpu" and ranks is None
        else None
    )
    checkpoint = _read_checkpoint(folder, config, device, progress, weight_memory, weight_cache, phases, ranks)
    if config.threads is None and checkpoint.decoder.weights_bytes < _WORTH_SHARING_BYTES:
        torch.set_num_threads(1)
    draft = load_draft(config, folder, checkpoint.num_tokens, device, progress)
    adapters = Adapters(checkpoint.decoder, device, checkpoint.digest, config.adapter_memory_bytes, ranks)
    adapters.apply(config.adapters, progress)
    marked = config.watermark
    watermark = None if marked is None else load_watermark(marked, checkpoint.decoder.config.vocab_size)
    phases.done("adapters")
    progress("KV cache", 0, 0)
    weights_bytes, num_parameters = _whole(checkpoint, ranks)
    memory = _plan_memory(config, checkpoint.decoder, weights_bytes, draft, adapters, device, ranks)
    runner = _runner(config, checkpoint.decoder, memory, device, weight_memory, ranks)
    scheduler = _scheduler(config, memory.arena.num_blocks)
    phases.done("kv_cache")
    progress("warm-up", 0, 1)
    _warm_up(runner, scheduler, checkpoint.decoder.config.vocab_size, memory.arena.max_model_len)
    progress("warm-up", 1, 1)
    phases.done("warm_up")
    eos_ids = _eos_ids(checkpoint, defaults)
    used = defaults if config.use_generation_config else GenerationDefaults()
    notation = _notation(folder, checkpoint, eos_ids)
    phases.done("answer_format")
    engine = Engine(
        info=_info(
            name,
            config,
            checkpoint,
            num_parameters,
            memory,
            eos_ids,
            notation,
            device,
            phases,
            used,
            adapters,
            watermark,
            ranks,
            runner,
        ),
        preparer=_preparer(config, checkpoint, memory.arena, used, eos_ids, notation, adapters, watermark),
        runner=runner,
        scheduler=scheduler,
        sampler=Sampler(checkpoint.num_tokens),
        speculation=_speculation(config, scheduler, memory.arena, draft, checkpoint.num_tokens, device),
        facts=config.drift.enabled,
    )
    if weight_cache is not None:
        weight_cache.finish()  # writes in the background; before this point it would take cores from loading
    return engine


def _read_checkpoint(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    progress: Progress,
    weight_memory: WeightMemory | None,
    weight_cache: WeightCache | None,
    phases: _Phases,
    ranks: Lead | None,
) -> _Checkpoint:
    # A large vocabulary takes a second to read, as long as the weights: both are read at the same time.
    with ThreadPoolExecutor(2, "inferd-read") as pool, packing_into(weight_memory):
        reading = pool.submit(_read_text_parts, folder, config.chat_template)
        digesting = pool.submit(digest_of_files, folder)
        progress("weights", 0, 0)
        decoder = load_model(
            folder,
            dtype=config.dtype,
            device=device,
            progress=progress,
            num_positions=config.max_model_len,
            rope_factors=config.rope_factors,
            quantization=config.quantization,
            weight_cache=weight_cache,
            share=ALONE if ranks is None else ranks.share,
            peers=None if ranks is None else ranks.peers,
        )
        phases.done("weights")
        progress("tokenizer", 0, 0)
        tokenizer, template = reading.result()
        digest = digesting.result()
    phases.done("tokenizer_after_weights")
    _check_tokenizer(tokenizer, decoder, folder)
    if factors := factors_text(decoder.config):
        _log.info("%s", factors)
    return _Checkpoint(decoder, tokenizer, template, digest)


def _check_layout(config: ModelConfig, folder: Path, device: torch.device) -> None:
    """Raises ModelLoadError where the model cannot be divided as it is to be, or its devices are too few or too small.
    ``device``: of rank 0."""
    parallel = config.parallel
    if parallel.count > 1:
        dims = read_config(Source(folder / "config.json"))
        check_layout(msgspec.structs.replace(config, device=str(device)), dims)
    if device.type == "cuda":
        check_devices(config, torch.cuda.device_count())
        if parallel.count > 1 and not torch.distributed.is_nccl_available():
            raise ModelLoadError(
                "parallel divides the model among CUDA devices, but this build of torch has no NCCL, over which they "
                "exchange their parts. Install torch's build for CUDA on Linux, or set device to cpu.",
                param="parallel",
            )
        refuse_on(device, folder, config, Share(0, parallel.tensor, parallel.pipeline))


def _ranks(
    config: ModelConfig, folder: Path, device: torch.device, far: str, leaving: Callable[[str], None]
) -> Lead | None:
    """The other ranks of the replica, which begin to load; None: there are none. Raises ModelLoadError."""
    if config.parallel.count == 1:
        return None
    from inferd.engine.ranks.lead import Lead  # torch.distributed, which other replicas do not need

    return Lead(config, folder, torch.get_num_threads(), far=far, leaving=leaving, device=device)


def _whole(checkpoint: _Checkpoint, ranks: Lead | None) -> tuple[int, int]:
    """Bytes of the weights of all ranks, and the model's parameters."""
    decoder = checkpoint.decoder
    weights_bytes, num_parameters = (0, 0) if ranks is None else ranks.loaded(checkpoint.digest)
    return decoder.weights_bytes + weights_bytes, decoder.num_parameters + num_parameters


def _plan_memory(
    config: ModelConfig,
    decoder: Decoder,
    weights_bytes: int,
    draft: LoadedDraft | None,
    adapters: Adapters,
    device: torch.device,
    ranks: Lead | None,
) -> _Memory:
    """Raises ModelLoadError where the KV cache does not fit."""
    weights_bytes += draft.decoder.weights_bytes if draft is not None else 0
    for_adapters = adapters_bytes(config, sum(state.num_bytes for state in adapters.states.values()))
    attention = _attention(config, decoder, device)
    gpu = device_load(config, decoder, attention)
    is_on_device = gpu is not None or device.type == "cuda"
    measure = partial(free_device_bytes, decoder, gpu) if is_on_device else available_bytes
    free_bytes = measure() if ranks is None else ranks.meet(attention, measure)
    of_draft = draft.kv_bytes_per_token if draft is not None else 0
    if ranks is not None and is_on_device:
        # The device of rank 0 has all of it, and the others have as many blocks.
        of_draft = ranks.share.in_all(of_draft, decoder.config.num_layers)
    arena = plan_arena(
        config,
        decoder.config,
        itemsize=decoder.dtype.itemsize,
        weights_bytes=weights_bytes + for_adapters,
        free_bytes=free_bytes,
        share=FREE_SHARE if gpu is None else 1.0,
        draft_bytes_per_token=of_draft,
    )
    refuse_more_than_is_free(arena, config, free_bytes)
    return _Memory(attention, gpu, arena, weights_bytes + for_adapters)


def _runner(
    config: ModelConfig,
    decoder: Decoder,
    memory: _Memory,
    device: torch.device,
    weight_memory: WeightMemory | None,
    ranks: Lead | None,
) -> Runner:
    gpu = memory.gpu
    dims = decoder.config if ranks is None else ranks.share.config(decoder.config)
    cache = KVCache(
        num_layers=dims.num_layers,
        # One block more on a GPU: the rows that fill up a recorded graph write to it.
        num_blocks=memory.arena.num_blocks + (gpu is not None),
        block_size=config.kv_cache.block_size,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        dtype=decoder.dtype,
        device=device,
        in_bytes=config.kv_cache.dtype == "int8",
        in_rows=gpu is not None,
    )
    # Pages that were touched for weights and not used are touched again at once: later the system would have returned
    # them to its host, and each would cost ten times as much.
    spare = 0 if weight_memory is None else weight_memory.spare_bytes
    while spare > 0 and (touched := cache.touch_more()):
        spare -= touched
    on_device = None if gpu is None else gpu.steps(cache, memory.arena.max_model_len)
    if ranks is not None:
        ranks.begin(memory.arena.num_blocks)
    return Runner(decoder, cache, memory.attention, device, config.scheduler.max_num_batched_tokens, on_device, ranks)


def _scheduler(config: ModelConfig, num_blocks: int) -> Scheduler:
    tpot_ms = config.objectives.tpot_ms
    tpot_s = None if tpot_ms is None else tpot_ms / 1000
    return Scheduler(config.scheduler, BlockPool(num_blocks), config.kv_cache.block_size, tpot_s=tpot_s)


def _eos_ids(checkpoint: _Checkpoint, defaults: GenerationDefaults) -> frozenset[int]:
    """Tokens that end an answer, by any of the checkpoint's files."""
    ids = frozenset(defaults.eos_token_ids) | frozenset(checkpoint.decoder.config.eos_token_ids)
    own = checkpoint.tokenizer.eos_token_id
    return ids if own is None else ids | {own}


def _notation(folder: Path, checkpoint: _Checkpoint, eos_ids: frozenset[int]) -> Notation | None:
    """How the checkpoint writes calls and reasoning, told in the log."""
    if checkpoint.template is None:
        return None
    notation = notation_of(folder, checkpoint.template, checkpoint.tokenizer, eos_ids)
    if notation is None:
        _log.info("No notation of tool calls or reasoning was found in the chat template.")
    elif notation.defect:
        _log.warning("Notation of tool calls and reasoning: %s", notation.told)
    else:
        _log.info("Notation of tool calls and reasoning: %s", notation.told)
    return notation


def _info(
    name: str,
    config: ModelConfig,
    checkpoint: _Checkpoint,
    num_parameters: int,
    memory: _Memory,
    eos_ids: frozenset[int],
    notation: Notation | None,
    device: torch.device,
    phases: _Phases,
    defaults: GenerationDefaults,
    adapters: Adapters,
    watermark: Watermark | None,
    ranks: Lead | None,
    runner: Runner,
) -> ModelInfo:
    decoder, arena = checkpoint.decoder, memory.arena
    dims = decoder.config
    return ModelInfo(
        name=name,
        source=config.source,
        architecture=dims.architecture,
        dtype=str(decoder.dtype).removeprefix("torch."),
        quantization=decoder.quantization,
        max_model_len=arena.max_model_len,
        vocab_size=dims.vocab_size,
        num_parameters=num_parameters,
        num_blocks=arena.num_blocks,
        block_size=config.kv_cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        eos_token_ids=tuple(sorted(eos_ids)),
        has_chat_template=checkpoint.template is not None,
        temperature=1.0 if defaults.temperature is None else defaults.temperature,
        top_p=1.0 if defaults.top_p is None else defaults.top_p,
        answer_format=notation.told if notation is not None else "",
        fingerprint=_fingerprint(checkpoint.digest, decoder, memory.attention, config, watermark),
        attention=memory.attention,
        memory=memory_plan(
            arena,
            weights_bytes=memory.weights_bytes,
            activations=headroom_bytes(config, dims, itemsize=decoder.dtype.itemsize)
            - config.parallel.count * runtime_bytes(),
            num_processes=config.parallel.count if device.type == "cpu" else 0,
        ),
        load_s=phases.seconds,
        num_threads=torch.get_num_threads(),
        cores=usable_cores(),
        kernels=compiled.level() if device.type == "cpu" else "",
        adapters=adapters.states,
        layout=config.parallel.text,
        rank_pids=() if ranks is None else ranks.pids,
        keeps_rows=runner.keeps_rows,
    )


def _preparer(
    config: ModelConfig,
    checkpoint: _Checkpoint,
    arena: Arena,
    defaults: GenerationDefaults,
    eos_ids: frozenset[int],
    notation: Notation | None,
    adapters: Adapters,
    watermark: Watermark | None,
) -> Preparer:
    limits = Limits(
        vocab_size=checkpoint.decoder.config.vocab_size,
        max_model_len=arena.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_blocks=arena.num_blocks,
        block_size=config.kv_cache.block_size,
    )
    compiler = Compiler(Vocabulary(checkpoint.tokenizer, checkpoint.num_tokens, eos_ids))
    return Preparer(
        checkpoint.tokenizer,
        checkpoint.template,
        defaults,
        eos_ids,
        limits,
        config.seed,
        Forms(compiler, notation),
        adapters,
        watermark,
        is_always_marked=config.watermark is not None and config.watermark.apply == "always",
    )


def _speculation(
    config: ModelConfig,
    scheduler: Scheduler,
    arena: Arena,
    draft: LoadedDraft | None,
    num_tokens: int,
    device: torch.device,
) -> Speculation:
    draft_model = draft.with_cache(config, arena.num_blocks, num_tokens) if draft is not None else None
    # One thread's processor time is steadier than the wall clock; of several threads it would leave out the others.
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    return Speculation(config, scheduler, arena.max_model_len, draft_model, clock.computing if is_alone else clock.now)


def _read_text_parts(folder: Path, override: str | None) -> tuple[Tokenizer, ChatTemplate | None]:
    tokenizer = Tokenizer.load(folder)
    return tokenizer, ChatTemplate.load(folder, tokenizer, Path(override) if override else None)


class _Phases:
    """Seconds each phase of loading took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = clock.now()

    def done(self, phase: str) -> None:
        now = clock.now()
        self.seconds[phase] = round(now - self._began, 4)
        self._began = now


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ModelLoadError(
            f"device is {wanted!r}, which is no device. Use auto, cpu, cuda or cuda:N.", param="device"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device is {wanted!r}. Use auto, cpu, cuda or cuda:N.", param="device")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ModelLoadError(
            f"device is {wanted!r}, but this machine has {torch.cuda.device_count()} CUDA devices that torch can use. "
            "Use auto or cpu.",
            param="device",
        )
    return device


def _attention(config: ModelConfig, decoder: Decoder, device: torch.device) -> AttentionKind:
    """The attention implementation, with ``auto`` resolved. Raises ModelLoadError for one that this device does not
    support."""
    if config.attention == "auto":
        if device.type == "cuda":
            return "triton" if switch.takes_device(device) else "reference"
        in_bytes = config.kv_cache.dtype == "int8"
        is_native = native_available(decoder.dtype, decoder.config.head_dim, in_bytes=in_bytes)
        return "native" if is_native else "reference"
    runs_on = {"native": "cpu", "triton": "cuda"}.get(config.attention)
    if runs_on is not None and runs_on != device.type:
        raise ModelLoadError(
            f"attention is {config.attention!r}, which computes on {runs_on} only, but the device is {device}. "
            "Set attention to auto.",
            param="attention",
        )
    if config.attention == "triton" and not switch.installed():
        raise ModelLoadError(
            "attention is 'triton', but Triton is not installed, which torch's CUDA builds include. Install it, "
            "or set attention to auto.",
            param="attention",
        )
    return config.attention


def _check_tokenizer(tokenizer: Tokenizer, decoder: Decoder, folder: Path) -> None:
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise ModelLoadError(
            f"{folder / 'tokenizer.json'} has {tokenizer.vocab_size} tokens, "
            f"but the model's embedding in {folder / 'config.json'} "
            f"has vocab_size = {decoder.config.vocab_size}: they do not belong together. "
            "Use the tokenizer that came with the checkpoint."
        )


def _warm_up(runner: Runner, scheduler: Scheduler, vocab_size: int, max_model_len: int) -> None:
    """Compute one chunk and one decode step, so that the first request does not wait for lazy initialisation."""
    sequence = Sequence(
        request_id="warm-up",
        index=0,
        prompt_ids=[i % vocab_size for i in range(min(32, max_model_len - 1) or 1)],
        sampling=SamplingParams(),
        seed=0,
        priority=RANKS["batch"],  # no other class is to be protected because of it
        use_cache=False,
    )
    scheduler.add(sequence)
    with torch.inference_mode():
        for _ in range(2):
            step = scheduler.schedule()
            hidden = runner.run(step)
            runner.logits(hidden, [hidden.shape[0] - 1])
            scheduler.commit(step)
            sequence.tokens.append(0)
    scheduler.remove(sequence)
    scheduler.pool.clear_cache()


def _fingerprint(
    files: bytes, decoder: Decoder, attention: str, config: ModelConfig, watermark: Watermark | None
) -> str:
    """A digest of everything that decides the answers: files, number format, kernels."""
    digest = hashlib.blake2b(files, digest_size=6)
    digest.update(f"{decoder.dtype}:{decoder.quantization}:{attention}:{torch.__version__}".encode())
    if config.kv_cache.dtype != "auto":
        digest.update(f":kv {config.kv_cache.dtype}".encode())
    if config.parallel.tensor > 1:  # sums are added in another order; stages change nothing
        digest.update(f":tensor {config.parallel.tensor}".encode())
    if (factors := factors_of(decoder.config)) != "auto":
        digest.update(f":rope {factors}".encode())
    if watermark is not None:
        digest.update(b":watermark " + watermark.identity)
    return "fp_" + digest.hexdigest()
