"""A sequence: tokens known, tokens computed, and the blocks that hold the computed ones.

A step lets ``num_computed`` catch up with ``len(tokens)``. There is no prefill phase and no decode phase.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

from inferd.engine.scheduling.blocks import block_key
from inferd.types import SamplingParams

if TYPE_CHECKING:
    from inferd.engine.scheduling.accounting import Account


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Sequence:
    """One answer being generated; a request has ``sampling.width`` of them, or beams.

    ``tokens``: prompt, then output, all known. ``num_computed``: how many have their keys and values in ``blocks``. A
    sequence is sampled when both are equal after a step.
    """

    request_id: str
    index: int  # which choice of the request
    prompt_ids: InitVar[list[int]]
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    sampling: SamplingParams
    seed: int
    salt: bytes = b""
    adapter: object | None = None  # the runner's; its identity is part of the salt. None: the base alone
    tenant: str = ""
    weight: float = 1.0  # the tenant's share among the tenants of its class
    priority: int = 0
    arrived_at: float = 0.0
    use_cache: bool = True  # False: never read the prefix cache (prompt log-probabilities)
    is_copy: bool = False  # of a shadowed request: see ``Scheduler``
    # The first token whose log-probability is wanted, so that the rows from the token before it on must be computed.
    scored_from: int | None = None  # None: only the last row is wanted
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_reached: int = 0  # the most computed tokens, over preemptions; set when it no longer runs
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    cache_keys: list[bytes] = field(default_factory=list)  # key of each full block, a hash chain
    num_hashed: int = 0  # full blocks already entered in the prefix cache
    is_running: bool = False
    num_preemptions: int = 0
    is_pinned: bool = False  # not displaced any more by sequences of better classes
    last_step: int = 0  # number of the step that computed any of it last
    num_charged: int = 0  # tokens that its tenant has been charged for
    cumulative_logprob: float = 0.0
    account: Account | None = None  # of its request's times

    def __post_init__(self, prompt_ids: list[int]) -> None:
        self.tokens = list(prompt_ids)
        self.num_prompt = len(prompt_ids)

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
