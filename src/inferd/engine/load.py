"""From a model's configuration to an engine that is ready: resolve, load, plan, warm up.

The order is cheap checks first: what is wrong with a folder is said before weights are read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from inferd import clock
from inferd.checkpoints.generation_config import GenerationDefaults, load_generation_defaults
from inferd.checkpoints.longrope import factors_of, factors_told
from inferd.checkpoints.text.chat_template import ChatTemplate
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.config import ModelConfig
from inferd.engine.engine import Engine
from inferd.engine.memory import (
    FREE_SHARE,
    RUNTIME_BYTES,
    headroom_bytes,
    memory_plan,
    plan_arena,
    refuse_more_than_is_free,
)
from inferd.engine.model.load import Decoder, kept_weights, load_model
from inferd.engine.prepare import Limits, Preparer
from inferd.engine.runner import Runner
from inferd.engine.sampler import Sampler
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.scheduler import Scheduler
from inferd.engine.scheduling.sequence import Sequence
from inferd.engine.speculation.draft_load import load_draft
from inferd.engine.speculation.speculation import Speculation
from inferd.errors import ModelLoadError
from inferd.machine.memory import available_bytes
from inferd.machine.placement import num_threads, usable_cores
from inferd.machine.weight_memory import Room
from inferd.native import compiled
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import AttentionKind, native_available
from inferd.native.triton import switch
from inferd.registry.source import check_folder, resolve
from inferd.types import ModelInfo, SamplingParams

if TYPE_CHECKING:
    from inferd.engine.cuda.load import DeviceLoad

Progress = Callable[[str, int, int], None]

_log = logging.getLogger("inferd.engine")

# Threads that share a step meet some ten times per layer. Below this size waiting for each other
# takes longer than the work saved: a model of 7 MB made 761 tokens/s on one thread and 95 on two
# while other programs used the cores.
_WORTH_SHARING_BYTES = 64 * 1024 * 1024


def create_backend(name: str, config: ModelConfig, progress: Progress, room: Room | None = None) -> Engine:
    """Load the model ``config.source`` names and make it ready to serve.

    ``progress(phase, done, total)`` is told how far it is. ``room``: memory for the weights, where it was asked for before.
    Raises ModelLoadError with the file or
    field at fault and the remedy.
    """
    phases = _Phases()
    device = _device(config.device)
    torch.set_num_threads(config.threads or num_threads(config.replicas))
    folder = check_folder(resolve(config.source, progress))
    phases.done("resolve")
    defaults = load_generation_defaults(folder)
    on_cpu = device.type == "cpu"
    kept = kept_weights(folder, config.quantization, config.quantization_cache_bytes) if on_cpu else None
    # A large vocabulary takes a second to read, as long as the weights: side by side.
    with ThreadPoolExecutor(2, "inferd-read") as pool, compiled.packing_into(room):
        reading = pool.submit(_read_text_parts, folder, config.chat_template)
        digesting = pool.submit(_digest_of_files, folder)
        decoder = load_model(
            folder,
            dtype=config.dtype,
            device=device,
            progress=progress,
            num_positions=config.max_model_len,
            rope_factors=config.rope_factors,
            quantization=config.quantization,
            kept=kept,
        )
        phases.done("weights")
        tokenizer, template = reading.result()
        digest = digesting.result()
    phases.done("tokenizer_after_weights")
    _check_tokenizer(tokenizer, decoder, folder)
    if config.threads is None and decoder.weights_bytes < _WORTH_SHARING_BYTES:
        torch.set_num_threads(1)

    dims = decoder.config
    if told := factors_told(dims):
        _log.info("%s", told)
    num_tokens = min(tokenizer.vocab_size, dims.vocab_size)
    draft = load_draft(config, folder, num_tokens, device, progress)
    weights_bytes = decoder.weights_bytes + (draft.decoder.weights_bytes if draft is not None else 0)
    attention = _attention(config, decoder, device)
    gpu = _device_load(config, decoder, attention, device) if attention == "triton" else None
    free_bytes = _free_bytes(device) if gpu is None else gpu.free_bytes()
    arena = plan_arena(
        config,
        dims,
        itemsize=decoder.dtype.itemsize,
        weights_bytes=weights_bytes,
        free_bytes=free_bytes,
        share=FREE_SHARE if gpu is None else 1.0,
        draft_bytes_per_token=draft.kv_bytes_per_token if draft is not None else 0,
    )
    refuse_more_than_is_free(arena, config, free_bytes)
    max_model_len, num_blocks = arena.max_model_len, arena.num_blocks
    cache = KVCache(
        num_layers=dims.num_layers,
        num_blocks=num_blocks + (gpu is not None),  # the last is nobody's: rows that fill a graph up write to it
        block_size=config.kv_cache.block_size,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        dtype=decoder.dtype,
        device=device,
        in_bytes=config.kv_cache.dtype == "int8",
        in_rows=gpu is not None,
    )
    # Before the system has told its host that they are free: then each of them costs a tenth.
    spare = 0 if room is None else room.spare_bytes
    while spare > 0 and (touched := cache.touch_more()):
        spare -= touched
    on_device = None if gpu is None else gpu.steps(cache, max_model_len)
    runner = Runner(decoder, cache, attention, device, config.scheduler.max_num_batched_tokens, on_device)
    blocks = BlockPool(num_blocks)
    tpot_ms = config.objectives.tpot_ms
    scheduler = Scheduler(
        config.scheduler, blocks, config.kv_cache.block_size, tpot_s=None if tpot_ms is None else tpot_ms / 1000
    )
    phases.done("kv_cache")
    progress("warm-up", 0, 1)
    _warm_up(runner, scheduler, dims.vocab_size, max_model_len)
    progress("warm-up", 1, 1)
    phases.done("warm_up")

    eos_ids = frozenset(defaults.eos_token_ids) | frozenset(dims.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        eos_ids |= {tokenizer.eos_token_id}
    info = ModelInfo(
        name=name,
        source=config.source,
        architecture=dims.architecture,
        dtype=str(decoder.dtype).removeprefix("torch."),
        quantization=decoder.quantization,
        max_model_len=max_model_len,
        vocab_size=dims.vocab_size,
        num_parameters=decoder.num_parameters,
        num_blocks=num_blocks,
        block_size=config.kv_cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        eos_token_ids=tuple(sorted(eos_ids)),
        has_chat_template=template is not None,
        fingerprint=_fingerprint(digest, decoder, attention, config.kv_cache.dtype),
        attention=attention,
        memory=memory_plan(
            arena,
            weights_bytes=weights_bytes,
            activations=headroom_bytes(config, dims, itemsize=decoder.dtype.itemsize) - RUNTIME_BYTES,
        ),
        load_s=phases.seconds,
        num_threads=torch.get_num_threads(),
        cores=usable_cores(),
        kernels=compiled.level() if device.type == "cpu" else "",
    )
    limits = Limits(
        vocab_size=dims.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_blocks=num_blocks,
        block_size=config.kv_cache.block_size,
    )
    preparer = Preparer(
        tokenizer,
        template,
        defaults if config.use_generation_config else GenerationDefaults(),
        eos_ids,
        limits,
        config.seed,
    )
    sampler = Sampler(num_tokens)
    speculation = None
    if config.speculation.method != "none":
        guesser = draft.with_cache(config, num_blocks, num_tokens) if draft is not None else None
        # One thread's own time is steadier than the clock's; where several compute it would leave out the others.
        is_alone = device.type == "cpu" and torch.get_num_threads() == 1
        tell_time = clock.computing if is_alone else clock.now
        speculation = Speculation(config, scheduler, max_model_len, guesser, tell_time)
    if kept is not None:
        kept.finish()  # in the background, from now on: before, it would take cores from what must be done
    return Engine(
        info=info, preparer=preparer, runner=runner, scheduler=scheduler, sampler=sampler, speculation=speculation
    )


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
            f"device is {wanted!r}, but this machine has {torch.cuda.device_count()} CUDA devices that torch can use. Use auto or cpu.",
            param="device",
        )
    return device


def _attention(config: ModelConfig, decoder: Decoder, device: torch.device) -> AttentionKind:
    """What attends; ``auto`` settled. Raises ModelLoadError for what does not compute on this device."""
    if config.attention == "auto":
        if device.type == "cuda":
            return "triton" if switch.takes_device(device) else "reference"
        in_bytes = config.kv_cache.dtype == "int8"
        is_native = native_available(decoder.dtype, decoder.config.head_dim, in_bytes=in_bytes)
        return "native" if is_native else "reference"
    runs_on = {"native": "cpu", "triton": "cuda"}.get(config.attention)
    if runs_on is not None and runs_on != device.type:
        raise ModelLoadError(
            f"attention is {config.attention!r}, which computes on {runs_on} only, but the device is {device}. Set attention to auto.",
            param="attention",
        )
    if config.attention == "triton" and not switch.installed():
        raise ModelLoadError(
            "attention is 'triton', but Triton is not installed, which torch's CUDA builds bring. Install it, or set attention to auto.",
            param="attention",
        )
    return config.attention


def _device_load(config: ModelConfig, decoder: Decoder, kind: AttentionKind, device: torch.device) -> DeviceLoad:
    from inferd.engine.cuda.device import CudaDevice
    from inferd.engine.cuda.load import DeviceLoad

    return DeviceLoad(config, decoder, kind, CudaDevice(device))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def _check_tokenizer(tokenizer: Tokenizer, decoder: Decoder, folder: Path) -> None:
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise ModelLoadError(
            f"{folder / 'tokenizer.json'} has {tokenizer.vocab_size} tokens, but the model's embedding in {folder / 'config.json'} "
            f"has vocab_size = {decoder.config.vocab_size}: they do not belong together. Use the tokenizer that came with the checkpoint."
        )


def _warm_up(runner: Runner, scheduler: Scheduler, vocab_size: int, max_model_len: int) -> None:
    """One chunk and one decode step, so that the first request pays for no lazy initialisation."""
    sequence = Sequence(
        request_id="warm-up",
        index=0,
        prompt_ids=[i % vocab_size for i in range(min(32, max_model_len - 1) or 1)],
        sampling=SamplingParams(),
        seed=0,
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


def _digest_of_files(folder: Path) -> bytes:
    """Of small files every byte; of the weights headers and sizes."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.json")):
        digest.update(path.name.encode() + path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name}:{path.stat().st_size}".encode() + file.read(65536))
    return digest.digest()


def _fingerprint(files: bytes, decoder: Decoder, attention: str, kv_dtype: str) -> str:
    """A digest of what decides the answers: the files, number format, kernels."""
    digest = hashlib.blake2b(files, digest_size=6)
    digest.update(f"{decoder.dtype}:{decoder.quantization}:{attention}:{torch.__version__}".encode())
    if kv_dtype != "auto":
        digest.update(f":kv {kv_dtype}".encode())
    if (factors := factors_of(decoder.config)) != "auto":
        digest.update(f":rope {factors}".encode())
    return "fp_" + digest.hexdigest()
