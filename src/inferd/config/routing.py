"""A model's requests in the router: queue, choice of a replica, circuit breakers, retries, the response cache, and how
many replicas there are by the load (``autoscale/`` decides the number).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from inferd.config.section import Section


class QueueConfig(Section, frozen=True, kw_only=True):
    """The bounded queue in front of a model."""

    max_requests: Annotated[
        int, Meta(description="Requests that may wait for a replica; one more is refused with 503.", ge=0)
    ] = 1024
    max_tokens: Annotated[int, Meta(description="Tokens (prompt and answer, estimated) that may wait.", ge=1)] = (
        16_000_000
    )
    max_bytes: Annotated[int, Meta(description="Bytes of requests that may wait.", ge=1)] = 256 * 1024 * 1024
    max_share_per_tenant: Annotated[
        float,
        Meta(
            description="Part of each of these bounds that one tenant may fill while others have requests waiting.",
            gt=0,
            le=1,
        ),
    ] = 0.5
    max_wait_s: Annotated[
        float,
        Meta(
            description=(
                "Longest time that a request may wait behind others, or twice an answer's time if that is more; a "
                "request that would wait longer is refused with 503. Batch work and requests for a model that loads "
                "may wait for timeout_s."
            ),
            gt=0,
        ),
    ] = 10.0
    timeout_s: Annotated[
        float, Meta(description="Longest time a request may wait for any reason before it is refused with 503.", gt=0)
    ] = 600.0
    aging_every: Annotated[
        int,
        Meta(
            description=(
                "After this many dispatches the class that was served least recently goes first: no class starves."
            ),
            ge=2,
        ),
    ] = 16


class RoutingConfig(Section, frozen=True, kw_only=True):
    """Which of a model's replicas takes a request."""

    prefix_affinity: Annotated[
        bool,
        Meta(
            description="Prefer the replica, local or remote, that has seen the beginning of the prompt, while its "
            "load allows."
        ),
    ] = True
    affinity_slack: Annotated[
        float,
        Meta(description="A preferred replica may have this many times the average outstanding work, plus one.", ge=1),
    ] = 1.5
    slow_start_s: Annotated[
        float, Meta(description="Seconds until a replica that came back has its full share again.", ge=0)
    ] = 10.0
    eject_factor: Annotated[
        float,
        Meta(
            description="A replica that is this many times slower than the median of its peers is ejected; 0: never.",
            ge=0,
        ),
    ] = 3.0
    eject_s: Annotated[float, Meta(description="Seconds that a slow replica is ejected for the first time.", gt=0)] = (
        10.0
    )


class BreakerConfig(Section, frozen=True, kw_only=True):
    """When a failing replica gets no requests, and how it is probed."""

    enabled: Annotated[bool, Meta(description="Whether failures open the breaker.")] = True
    failures: Annotated[int, Meta(description="Failures within window_s that open it.", ge=1)] = 5
    window_s: Annotated[float, Meta(description="Seconds within which failures count.", gt=0)] = 10.0
    cooldown_s: Annotated[float, Meta(description="Seconds before the first probe.", gt=0)] = 5.0
    probes: Annotated[int, Meta(description="Requests let through at the same time to probe.", ge=1)] = 1
    successes: Annotated[int, Meta(description="Probes in a row that close it.", ge=1)] = 2


class RetryConfig(Section, frozen=True, kw_only=True):
    """Retries on other replicas, before any part of an answer was sent."""

    max_attempts: Annotated[
        int,
        Meta(description="Replicas that a request may be sent to, each once; 1: no retries.", ge=1, le=10),
    ] = 3
    budget: Annotated[float, Meta(description="Retries and hedges as a part of live traffic, at most.", ge=0, le=1)] = (
        0.2
    )
    hedge_after_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description=(
                "Send the request to a second replica if the first has not answered for this long; unset: never."
            )
        ),
    ] = None


class ModelCacheConfig(Section, frozen=True, kw_only=True):
    """Whether a model's answers are stored for equal requests."""

    enabled: Annotated[bool, Meta(description="Keep answers of deterministic requests (temperature 0, or a seed).")] = (
        False
    )
    ttl_s: Annotated[float, Meta(description="Seconds that an answer is kept.", gt=0)] = 3600.0
    any_temperature: Annotated[bool, Meta(description="Keep answers of requests that draw at random as well.")] = False


class PlacementConfig(Section, frozen=True, kw_only=True):
    """The machines that may run the model's replicas. What runs is not moved when this changes.

    `placement: ray` is short for `placement: {nodes: ray}`.
    """

    short: ClassVar[str] = "nodes"

    nodes: Annotated[
        Literal["any", "local", "only", "ray"],
        Meta(
            description="any: the server's machine and nodes (inferd node); local: the server's machine alone; only: "
            "nodes alone, and a replica waits until one has joined; ray: machines that the Ray cluster of nodes.ray "
            "finds, and a replica waits until one has room."
        ),
    ] = "any"
    labels: Annotated[
        dict[str, str],
        Meta(
            description="Labels that a node must have, as of inferd node --label zone=a, or of ray start --labels "
            "zone=a with nodes: ray; the server has none."
        ),
    ] = {}
    cores: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Cores that each replica reserves of the Ray cluster; unset: the model's threads, or 1."),
    ] = None


IDLE_AFTER_S = 300.0
"""Seconds without a request after which the last replica stops, where ``min`` is 0 and idle_after_s is unset."""


class ScalingTargetConfig(Section, frozen=True, kw_only=True):
    """What more replicas are started for. Every target counts; the one that needs most replicas decides."""

    queue_ms: Annotated[
        float,
        Meta(description="Milliseconds that requests may wait for a replica.", ge=0.001, le=3_600_000),
    ] = 200.0
    in_flight: Annotated[
        Annotated[float, Meta(ge=0.01)] | None,
        Meta(description="Requests of one replica, in work and waiting; unset: their number does not count."),
    ] = None
    duty: Annotated[
        Annotated[float, Meta(ge=0.01, lt=1)] | None,
        Meta(
            description="Part of what replicas can do that they do. One more replica is started when it was higher for "
            "two minutes, if there are more requests than replicas. Unset (null): it does not count."
        ),
    ] = 0.7


class ScalingConfig(Section, frozen=True, kw_only=True):
    """A number of replicas that follows the load. Without this section the model has ``replicas``."""

    min: Annotated[
        int,
        Meta(description="Fewest replicas. 0: the model is loaded when a request needs it.", ge=0, le=64),
    ] = 1
    max: Annotated[int, Meta(description="Most replicas. Memory and cores are planned for all of them.", ge=1, le=64)]
    spare: Annotated[
        bool | None,
        Meta(
            description="Keep a process without a model whose imports are done, while there are fewer replicas than "
            "max: the next replica starts in it. It takes the memory of the libraries. Unset (null): while the model "
            "has a replica."
        ),
    ] = None
    spare_memory: Annotated[
        bool,
        Meta(
            description="The spare process also holds the memory that the weights of a model that generates will take. "
            "For virtual machines whose host finds memory slowly."
        ),
    ] = False
    target: ScalingTargetConfig = ScalingTargetConfig()
    down_after_s: Annotated[
        float,
        Meta(description="A replica is stopped when fewer were enough for so many seconds.", gt=0, le=86_400),
    ] = 60.0
