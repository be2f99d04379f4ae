"""The Config tree: file < environment < flags. The only reader of all three.

Every field carries its own documentation and limits; ``docs/configuration.md``, the JSON schema and
the command line's flags are derived from these structs. Each room receives only its own section.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

DType = Literal["auto", "float32", "bfloat16", "float16"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: keyword only, immutable, an unknown key is an error."""


class ServerConfig(Section):
    """Where the server listens and how it behaves towards clients."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8000
    max_body_bytes: Annotated[int, Meta(description="Largest request body accepted, in bytes.", ge=1024)] = 16 * 1024 * 1024
    drain_delay_s: Annotated[float, Meta(description="Seconds after SIGTERM during which readiness is already false and requests are still accepted.", ge=0)] = 0.0
    grace_s: Annotated[float, Meta(description="Seconds that requests in flight get to finish at shutdown.", ge=0)] = 30.0
    access_log: Annotated[bool, Meta(description="Write one JSON line per request (never its text).")] = True


class QueueConfig(Section):
    """The bounded queue in front of a model."""

    max_requests: Annotated[int, Meta(description="Requests that may wait for a replica; one more is refused with 503.", ge=0)] = 1024
    timeout_s: Annotated[float, Meta(description="Longest time a request may wait before it is refused with 503.", gt=0)] = 600.0


class SchedulerConfig(Section):
    """How an engine fills its steps."""

    max_num_seqs: Annotated[int, Meta(description="Sequences computed together in one step.", ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, Meta(description="Token budget of one step; also the largest prefill chunk.", ge=1)] = 512
    prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of shared prompt prefixes.")] = True


class KVCacheConfig(Section):
    """The memory that holds keys and values of earlier tokens."""

    memory_bytes: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Size of the KV arena in bytes; unset: enough for max_num_seqs sequences of typical length, within a quarter of free memory.")] = None
    block_size: Annotated[int, Meta(description="Tokens per block.", ge=1, le=256)] = 16
    num_blocks: Annotated[Annotated[int, Meta(ge=2)] | None, Meta(description="Number of blocks; overrides memory_bytes.")] = None


class ModelConfig(Section):
    """One model: where it comes from and how it runs."""

    source: Annotated[str, Meta(description="A folder, a Hugging Face Hub id (optionally id@revision), or 'demo' for the bundled chat model.")]
    replicas: Annotated[int, Meta(description="Copies of the model, each in its own worker process.", ge=1, le=64)] = 1
    dtype: Annotated[DType, Meta(description="Number format of weights and KV cache; auto: the checkpoint's own (float32 where the processor has no fast bfloat16).")] = "auto"
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N.")] = "auto"
    max_model_len: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Longest prompt plus answer in tokens; unset: the checkpoint's own limit.")] = None
    threads: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Compute threads of a replica; unset: the machine's cores shared out among the replicas.")] = None
    attention: Annotated[Literal["auto", "reference", "native"], Meta(description="Attention backend; auto: the native kernels where they are built, else plain torch.")] = "auto"
    chat_template: Annotated[str | None, Meta(description="Path of a Jinja chat template that replaces the checkpoint's own.")] = None
    use_generation_config: Annotated[bool, Meta(description="Take sampling defaults from the checkpoint's generation_config.json.")] = True
    seed: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="Makes requests that bring no seed repeatable from one start to the next; unset: they differ.")] = None
    hang_timeout_s: Annotated[float, Meta(description="A busy replica that completes no step for this long is restarted.", gt=0)] = 60.0
    load_timeout_s: Annotated[float, Meta(description="Longest time for loading before the replica is restarted.", gt=0)] = 1800.0
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    queue: QueueConfig = QueueConfig()


class Config(Section):
    """Everything ``inferd serve`` can be told."""

    server: ServerConfig = ServerConfig()
    models: dict[str, ModelConfig] = {}
