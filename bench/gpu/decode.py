"""Decoding: one sequence against the memory's bandwidth, and many against transformers' continuous batching.

Both through the scheduler, the runner and the sampler of the server, without texts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import torch

from bench.gpu.kernels import seconds, wait
from bench.gpu.result import Result
from bench.gpu.shapes import random_decoder, settings
from inferd.config import KVCacheConfig, ModelConfig, SchedulerConfig
from inferd.engine.cuda.device import Device
from inferd.engine.cuda.load import DeviceLoad
from inferd.engine.cuda.steps import StepsOnDevice
from inferd.engine.model.llama import LlamaDecoder
from inferd.engine.runner import Runner
from inferd.engine.sampler import Sampled, Sampler, SampleRow
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.scheduler import Scheduler
from inferd.engine.scheduling.sequence import Sequence
from inferd.native.kv_cache import KVCache
from inferd.types import SamplingParams

_SIZE = 16


def bandwidth(device: torch.device, num_bytes: int = 8 << 30) -> float:
    """Bytes/s that a copy within the device reads and writes."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = seconds(lambda: target.copy_(source), device, 5)
    return 2 * source.nbytes / took


class Server:
    """An engine without texts: what it is given is tokens, what it tells is how many it made."""

    def __init__(
        self, decoder: LlamaDecoder, device: Device, *, max_seqs: int, longest: int, graphs: bool = True
    ) -> None:
        dims = decoder.config
        per_sequence = -(-longest // _SIZE) + 1
        config = ModelConfig(
            source="random",
            scheduler=SchedulerConfig(max_num_seqs=max_seqs, prefix_caching=False),
            kv_cache=KVCacheConfig(num_blocks=max_seqs * per_sequence + 1, block_size=_SIZE),
            max_model_len=longest,
        )
        num_blocks = max_seqs * per_sequence + 1
        cache = KVCache(
            num_layers=dims.num_layers,
            num_blocks=num_blocks + 1,
            block_size=_SIZE,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            dtype=decoder.dtype,
            device=device.where,
            in_rows=True,
        )
        rows = config.scheduler.max_num_batched_tokens
        steps = (
            DeviceLoad(config, decoder, "triton", device).steps(cache, longest)
            if graphs
            else StepsOnDevice(decoder, cache, "triton", device, max_rows=rows)
        )
        self._runner = Runner(decoder, cache, "triton", device.where, rows, steps)
        self._scheduler = Scheduler(config.scheduler, BlockPool(num_blocks), _SIZE)
        self._sampler = Sampler(dims.vocab_size)
        self._made = 0

    def add(self, prompt: list[int], num_tokens: int) -> Sequence:
        self._made += 1
        sequence = Sequence(
            request_id=str(self._made),
            index=0,
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            seed=0,
            use_cache=False,
        )
        self._scheduler.add(sequence)
        return sequence

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> None:
        step = self._scheduler.schedule()
        ready, rows, at = [], [], 0
        for part in step.slices:
            at += part.count
            if part.catches_up:
                ready.append(part.sequence)
                rows.append(at - 1)
        with torch.inference_mode():
            hidden = self._runner.run(step)
            self._scheduler.commit(step)
            if not ready:
                return
            logits = self._runner.logits(hidden, rows)
            wanted = [SampleRow(s.sampling, [], [], 0, 0) for s in ready]
            drawn = self._sampler.draw(logits, wanted).results
        for sequence, token in zip(ready, drawn, strict=True):
            assert isinstance(token, Sampled), token
            sequence.tokens.append(token.token_id)
            if sequence.num_outputs >= (sequence.sampling.max_tokens or 0):
                self._scheduler.remove(sequence)


def one_sequence(
    shape: dict[str, object],
    device: Device,
    limit: float,
    *,
    quantization: str = "none",
    graphs: bool = True,
    context: int = 500,
    tokens: int = 100,
) -> Result:
    """Tokens/s of one sequence, and its bytes/s against ``limit``: weights that a token needs, and its keys and values."""
    decoder = random_decoder(shape, torch.bfloat16, device.where, quantization)
    server = Server(decoder, device, max_seqs=1, longest=context + tokens + 10, graphs=graphs)
    sequence = server.add([1 + i % 50 for i in range(context)], tokens + 5)
    while sequence.num_outputs < 5:
        server.step()
    wait(device.where)
    began = time.perf_counter()
    while server.has_work:
        server.step()
    wait(device.where)
    each = (time.perf_counter() - began) / tokens
    dims = decoder.config
    kv = (context + tokens // 2) * 2 * dims.num_layers * dims.num_kv_heads * dims.head_dim * 2
    nbytes = decoder.weights_bytes - decoder.embedding.nbytes + kv  # one row of the embedding is read
    name = f"one sequence, {'bf16' if quantization == 'none' else quantization}, {'graphs' if graphs else 'no graphs'}"
    return Result(
        name,
        1 / each,
        "tokens/s",
        of=nbytes / each / limit,
        note=f"{nbytes / each / 1e9:.0f} GB/s, {each * 1e3:.2f} ms",
    )


def tokens_of(
    shape: dict[str, object], device: Device, quantization: str, graphs: bool, tokens: int = 12
) -> tuple[tuple[int, ...], ...]:
    """Three prompts and what follows them, greedily, in float32."""
    torch.manual_seed(0)
    decoder = random_decoder(shape, torch.float32, device.where, quantization)
    server = Server(decoder, device, max_seqs=3, longest=60, graphs=graphs)
    made = [server.add(_prompt(i, 5 + 7 * i), tokens) for i in range(3)]
    while server.has_work:
        server.step()
    return tuple(tuple(sequence.tokens) for sequence in made)


def many_sequences(
    shape: dict[str, object],
    device: Device,
    *,
    count: int = 256,
    prompt: int = 128,
    tokens: int = 128,
    graphs: bool = True,
) -> float:
    """Output tokens/s of ``count`` sequences that come at once."""
    decoder = random_decoder(shape, torch.bfloat16, device.where)
    server = Server(decoder, device, max_seqs=count, longest=prompt + tokens + 10, graphs=graphs)
    for round_tokens in (4, tokens):  # the first compiles and warms up
        for i in range(count):
            server.add(_prompt(i, prompt), round_tokens)
        wait(device.where)
        began = time.perf_counter()
        while server.has_work:
            server.step()
        wait(device.where)
        took = time.perf_counter() - began
    return count * tokens / took


def transformers_many(shape: dict[str, object], device: torch.device, *, count: int, prompt: int, tokens: int) -> float:
    """The same by transformers' continuous batching, with torch's own attention."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in settings(shape).items() if k != "architectures"})  # type: ignore[arg-type]
    torch.set_default_device(device)
    try:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_device("cpu")
    took = 0.0
    for round_tokens in (4, tokens):
        wanted = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=round_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        inputs = [_prompt(i, prompt) for i in range(count)]
        wait(device)
        began = time.perf_counter()
        outputs = model.generate_batch(inputs=inputs, generation_config=wanted)
        wait(device)
        took = time.perf_counter() - began
    made = sum(len(output.generated_tokens) for output in outputs.values())
    assert made == count * tokens, f"transformers made {made} of {count * tokens} tokens"
    return made / took


def _prompt(number: int, length: int) -> list[int]:
    return [1 + (7 * number + 13 * i) % 150 for i in range(length)]


def measure_one(shape: dict[str, object], device: Device, limit: float, **small: int) -> Iterator[Result]:
    for quantization, graphs in (("none", True), ("none", False), ("int8", True), ("fp8", True)):
        found = one_sequence(shape, device, limit, quantization=quantization, graphs=graphs, **small)
        goal = quantization == "none" and graphs
        yield Result(
            found.name, found.value, found.unit, None if not goal else (found.of or 0) >= 0.8, found.of, found.note
        )
        _forget(device.where)


def measure_many(
    shape: dict[str, object], device: Device, *, count: int = 256, prompt: int = 128, tokens: int = 128
) -> Iterator[Result]:
    peer = transformers_many(shape, device.where, count=count, prompt=prompt, tokens=tokens)
    yield Result(f"{count} sequences, transformers", peer, "tokens/s")
    _forget(device.where)
    for graphs in (True, False):
        ours = many_sequences(shape, device, count=count, prompt=prompt, tokens=tokens, graphs=graphs)
        name = f"{count} sequences, {'graphs' if graphs else 'no graphs'}"
        yield Result(name, ours, "tokens/s", ours / peer >= 3 if graphs else None, ours / peer, "of transformers")
        _forget(device.where)


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
