"""A sequence: tokens known, tokens computed, and the blocks that hold the computed ones.

A step lets ``num_computed`` catch up with ``len(tokens)``. There is no prefill phase and no decode phase.
"""

from __future__ import annotations

from inferd.engine.scheduling.blocks import block_key
from inferd.types import SamplingParams


class Sequence:
    """One answer being generated; a request has ``sampling.width`` of them, or beams.

    ``tokens``: prompt, then output, all known. ``num_computed``: how many have their keys and values in ``blocks``. A
    sequence is sampled when both are equal after a step.
    """

    __slots__ = (
        "arrived_at",
        "blocks",
        "cache_keys",
        "cumulative_logprob",
        "index",
        "is_pinned",
        "is_running",
        "last_step",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_hashed",
        "num_preemptions",
        "num_prompt",
        "num_reached",
        "priority",
        "request_id",
        "salt",
        "sampling",
        "seed",
        "tenant",
        "tokens",
        "use_cache",
        "weight",
    )

    def __init__(
        self,
        *,
        request_id: str,
        index: int,
        prompt_ids: list[int],
        sampling: SamplingParams,
        seed: int,
        salt: bytes = b"",
        tenant: str = "",
        weight: float = 1.0,
        priority: int = 0,
        arrived_at: float = 0.0,
        use_cache: bool = True,
    ) -> None:
        self.request_id = request_id
        self.index = index  # which choice of the request
        self.tokens = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.sampling = sampling
        self.seed = seed
        self.salt = salt
        self.tenant = tenant
        self.weight = weight  # the tenant's share among the tenants of its class
        self.priority = priority
        self.arrived_at = arrived_at
        self.use_cache = use_cache  # False: never read the prefix cache (prompt log-probabilities)
        self.blocks: list[int] = []
        self.num_computed = 0
        self.num_reached = 0  # the most of them, over preemptions; told when it no longer runs
        self.num_cached = 0  # prompt tokens found in the prefix cache at first admission
        self.cache_keys: list[bytes] = []  # key of each full block, a hash chain
        self.num_hashed = 0  # full blocks already entered in the prefix cache
        self.is_running = False
        self.num_preemptions = 0
        self.is_pinned = False  # not displaced any more by sequences of better classes
        self.last_step = 0  # number of the step that computed any of it last
        self.num_charged = 0  # tokens that its tenant has been charged for
        self.cumulative_logprob = 0.0

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def block_key(self, i: int, block_size: int) -> bytes:
        """Key of the ``i``-th full block; the keys before it are computed too. The block size never changes."""
        keys = self.cache_keys
        while len(keys) <= i:
            at = len(keys) * block_size
            keys.append(block_key(keys[-1] if keys else self.salt, self.tokens[at : at + block_size]))
        return keys[i]

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id}/{self.index} known={len(self.tokens)} computed={self.num_computed} "
            f"blocks={len(self.blocks)}>"
        )
