"""How a generating model is computed: the scheduler's steps, the KV cache, speculation."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inferd.config.section import Section


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """How an engine fills its steps."""

    max_num_seqs: Annotated[int, Meta(description="Sequences computed together in one step.", ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(description="Token budget of one step; also the largest prefill chunk.", ge=1)
    ] = 512
    prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of shared prompt prefixes.")] = True


class ParallelConfig(Section, frozen=True, kw_only=True):
    """One replica from several processes (ranks), each with a share of the weights and of the KV cache."""

    tensor: Annotated[
        int, Meta(description="Ranks that divide each layer, by heads and by inner columns.", ge=1, le=64)
    ] = 1
    pipeline: Annotated[int, Meta(description="Stages of consecutive layers, one after the other.", ge=1, le=64)] = 1
    machines: Annotated[
        int,
        Meta(
            description="Machines over which the ranks are spread, in equal numbers: this one and nodes that join at "
            "nodes.listen (docs/parallel.md). 1: all are on the machine of the worker. Where parallel is left "
            "out, nodes can join and this machine does not hold one replica, the fewest machines that do are taken.",
            ge=1,
            le=64,
        ),
    ] = 1

    @property
    def per_machine(self) -> int:
        """Ranks on each machine; neighbours are on one."""
        return self.count // self.machines

    @property
    def count(self) -> int:
        """Ranks of a replica."""
        return self.tensor * self.pipeline

    @property
    def text(self) -> str:
        """The layout in words; empty: one process."""
        if self.count == 1:
            return ""
        spread = f" on {self.machines} machines" if self.machines > 1 else ""
        return f"{self.count} ranks (tensor {self.tensor} x pipeline {self.pipeline}){spread}"


class KVCacheConfig(Section, frozen=True, kw_only=True):
    """The memory that holds keys and values of earlier tokens."""

    memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Size of the KV arena in bytes; unset: enough for max_num_seqs sequences of typical length, "
            "within a quarter of free memory."
        ),
    ] = None
    block_size: Annotated[int, Meta(description="Tokens per block.", ge=1, le=256)] = 16
    num_blocks: Annotated[
        Annotated[int, Meta(ge=2)] | None, Meta(description="Number of blocks; overrides memory_bytes.")
    ] = None
    dtype: Annotated[
        Literal["auto", "int8"],
        Meta(
            description="Number format of keys and values. auto: the model's; int8: 8-bit integers with scales, which "
            "take about half the memory (docs/quantisation.md)."
        ),
    ] = "auto"


class RolesConfig(Section, frozen=True, kw_only=True):
    """Replicas that compute prompts, and others that compute answers (disaggregated prefill)."""

    prefill: Annotated[
        int, Meta(description="Replicas that compute prompts and hand their KV blocks over.", ge=1, le=32)
    ] = 1
    decode: Annotated[
        int, Meta(description="Replicas that compute answers, and prompts that are not worth a hand-over.", ge=1, le=32)
    ] = 1
    min_tokens: Annotated[
        int,
        Meta(
            description="Tokens of a prompt, without its cached beginning, from which a hand-over is considered.", ge=1
        ),
    ] = 256


class SpeculationConfig(Section, frozen=True, kw_only=True):
    """Speculative decoding: guessed tokens are computed together with the last one, and never change an answer."""

    method: Annotated[
        Literal["auto", "none", "prompt_lookup", "draft"],
        Meta(
            description=(
                "Source of guesses. auto: the text itself, and the draft model if there is one; prompt_lookup or "
                "draft: only that source; none: no guesses. Guesses are made only while they measurably pay."
            )
        ),
    ] = "auto"
    draft: Annotated[
        str | None,
        Meta(description="A smaller model with the same tokenizer: a folder, a Hugging Face Hub id, or 'demo-draft'."),
    ] = None
    max_tokens: Annotated[int, Meta(description="Most tokens guessed for one sequence in one step.", ge=1, le=64)] = 16


class WatermarkConfig(Section, frozen=True, kw_only=True):
    """A watermark in what a model writes, which the key's holder can detect (docs/watermarks.md)."""

    key_file: Annotated[
        str, Meta(description="File with the secret key: one whole number from 1 to 9223372036854775807.", min_length=1)
    ]
    apply: Annotated[
        Literal["always", "requested"],
        Meta(description="always: in every answer; requested: in those whose request has `watermark: true`."),
    ] = "always"
    greenlist_ratio: Annotated[
        float, Meta(description="Part of the vocabulary that is preferred after each token.", gt=0, lt=1)
    ] = 0.25
    bias: Annotated[
        float,
        Meta(
            description="What is added to the logits of the preferred tokens: more is detected in shorter texts.",
            gt=0,
            le=20,
        ),
    ] = 2.0


class ObjectivesConfig(Section, frozen=True, kw_only=True):
    """Objectives of a model.

    Requests that meet them are counted on /metrics, and `inferd alerts` writes their alerts. Availability is an
    objective when its fraction is set, the others when their milliseconds are.
    """

    availability: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(
            description=(
                "Fraction of requests that are answered: 0.999. Errors and refusals of the server count against it; "
                "requests with an error of the client or above a quota, and cancelled ones, do not count."
            )
        ),
    ] = None
    ttft_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Time from a request's arrival to its first token."),
    ] = None
    ttft_fraction: Annotated[
        float, Meta(description="Fraction of requests whose first token is in time.", gt=0, lt=1)
    ] = 0.95
    tpot_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description=(
                "Time per output token: prompts are computed in chunks that keep it for running answers; unset: as "
                "fast as possible."
            )
        ),
    ] = None
    tpot_fraction: Annotated[
        float, Meta(description="Fraction of answers whose mean time per output token is kept.", gt=0, lt=1)
    ] = 0.95
    total_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Time from a request's arrival to the end of its answer."),
    ] = None
    total_fraction: Annotated[
        float, Meta(description="Fraction of requests whose answer ends in time.", gt=0, lt=1)
    ] = 0.95
