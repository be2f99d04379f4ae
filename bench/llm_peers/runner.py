"""One engine in its own process and virtual environment: load, then one wave of equal prompts after another.

    ENV/bin/python bench/llm_peers/runner.py openvino MODEL '[{"prompt": 128, "answer": 64, "clients": 8}]' --threads 2

A wave is ``clients`` random prompts at once, different each time so that no prefix is met again, and every answer has exactly
``answer`` tokens. Prints one JSON object per line: the load's seconds, then each wave's, for a wave of one with the moment of
each token in seconds since its beginning. Imports nothing of inferd's repository.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferd.types import Output, StepStats

VOCABULARY = 16_000  # ids that every tokenizer has
# Prompts, answer's length -> tokens generated, and of a single prompt when each was there, on perf_counter's clock.
Wave = Callable[[list[list[int]], int], tuple[int, list[float]]]
CACHE_GB = 3


def inferd(model: str, quantization: str, threads: int, clients: int) -> Wave:
    from inferd.config import ModelConfig, single_model_config
    from inferd.llm import LLM
    from inferd.types import SamplingParams

    settings: dict[str, object] = {
        "threads": threads,
        "max_model_len": 4352,
        "scheduler": {"max_num_seqs": clients},
        "kv_cache": {"memory_bytes": CACHE_GB * 2**30},
    }
    if quantization != "bf16":
        settings["quantization"] = quantization
    if "speculation" in ModelConfig.__struct_fields__:
        # Random weights repeat themselves, which is easily guessed; the peers do not guess here.
        settings["speculation"] = {"method": "none"}
    (config,) = single_model_config(model, model=settings).models.values()
    llm = LLM(model, config=config, progress=False)
    from inferd.engine.engine import Engine  # with it comes torch: by now it is there

    moments: list[float] = []
    step = Engine.step

    def clocked(self: Engine, now: float) -> tuple[list[Output], StepStats | None]:
        outputs, stats = step(self, now)
        count = sum(len(delta.token_ids) for output in outputs for delta in output.deltas)
        moments.extend([time.perf_counter()] * count)
        return outputs, stats

    Engine.step = clocked  # type: ignore[method-assign]

    def wave(prompts: list[list[int]], answer: int) -> tuple[int, list[float]]:
        moments.clear()
        sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        if len(prompts) == 1:  # only a stream tells each token when it is there
            for _ in llm.stream(list(prompts[0]), sampling):
                pass
            return len(moments), list(moments)
        done = llm.generate(list(prompts), sampling, progress=False)
        return sum(len(one.outputs[0].token_ids) for one in done), []

    return wave


def openvino(model: str, quantization: str, threads: int, clients: int) -> Wave:
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found, unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = max(clients, 64)
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    pipeline = genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)
    config = genai.GenerationConfig()
    config.ignore_eos = True
    config.do_sample = False

    def wave(prompts: list[list[int]], answer: int) -> tuple[int, list[float]]:
        config.max_new_tokens = answer
        ids = np.array(prompts, dtype=np.int64)
        done = pipeline.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), config)
        # In ms of the steady clock, which is perf_counter's, too.
        moments = [moment / 1e3 for moment in done.perf_metrics.raw_metrics.m_new_token_times]
        return sum(len(tokens) for tokens in done.tokens), moments

    return wave


def transformers(model: str, quantization: str, threads: int, clients: int) -> Wave:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(threads)
    # With generate_batch "sdpa" is the attention over its paged cache; the other one without a GPU is "paged|eager".
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")

    def wave(prompts: list[list[int]], answer: int) -> tuple[int, list[float]]:
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        pages = 1 + sum(-(-(len(prompt) + answer) // 64) for prompt in prompts)
        batching = ContinuousBatchingConfig(
            page_size=64,
            num_blocks=pages,
            max_batch_tokens=512,
            max_requests_per_batch=clients,
            safety_margin=0.0,  # there are pages for all: nobody is to wait until another one is done
            allow_block_sharing=False,
            use_cuda_graph=False,
        )
        done = loaded.generate_batch(
            inputs=prompts,
            generation_config=settings,
            continuous_batching_config=batching,
            warmup=False,
            record_timestamps=True,
        )
        outputs = list(done.values())
        return sum(len(output.generated_tokens) for output in outputs), list(outputs[0].timestamps or ())

    return wave


def vllm(model: str, quantization: str, threads: int, clients: int) -> Wave:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    llm = LLM(model, max_model_len=4352, max_num_seqs=max(clients, 64), enable_prefix_caching=False)

    def wave(prompts: list[list[int]], answer: int) -> tuple[int, list[float]]:
        sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        tokens: dict[str, int] = {}  # so far; outputs are cumulative
        moments: list[float] = []
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                tokens[output.request_id] = len(output.outputs[0].token_ids)
                moments += [time.perf_counter()] * (sum(tokens.values()) - len(moments))
        return sum(tokens.values()), moments

    return wave


ENGINES = {"inferd": inferd, "openvino": openvino, "transformers": transformers, "vllm": vllm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("model")
    parser.add_argument("jobs", type=json.loads)
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="after so many no further wave begins")
    options = parser.parse_args()
    began = time.perf_counter()
    most = max(job["clients"] for job in options.jobs)
    wave = ENGINES[options.engine](options.model, options.format, options.threads, most)
    print(json.dumps({"load_s": time.perf_counter() - began}), flush=True)
    draw = random.Random(7)

    def prompts(job: dict[str, int]) -> list[list[int]]:
        return [[draw.randrange(VOCABULARY) for _ in range(job["prompt"])] for _ in range(job["clients"])]

    wave(prompts({"prompt": 16, "clients": 1}), 2)  # first use
    until = time.perf_counter() + options.seconds
    for job in options.jobs:
        if time.perf_counter() > until:
            break
        given = prompts(job)
        began = time.perf_counter()
        tokens, moments = wave(given, job["answer"])
        seconds = time.perf_counter() - began
        if tokens != job["clients"] * job["answer"]:
            sys.exit(f"{options.engine} made {tokens} tokens, {job['clients']} x {job['answer']} were asked for")
        is_single = job["clients"] == 1 and len(moments) == tokens
        print(
            json.dumps({**job, "seconds": seconds, "moments": [m - began for m in moments] if is_single else []}),
            flush=True,
        )


if __name__ == "__main__":
    main()
