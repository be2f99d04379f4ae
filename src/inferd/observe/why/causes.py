"""The causes of a slow call, from its parts, its routing, what is usual, and the calls that ran beside it.

Each rule claims seconds of some parts for one cause. The rules run in the order of ``_RULES``, from the specific to the
general, and no second is claimed twice. Causes that explain a small share of the call, or less than a moment, are
dropped, so that there are none on an idle server. Causes are found when a record is read, not when its call ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from math import isnan
from typing import Final

import msgspec

from inferd.observe.why.pressure import Strain
from inferd.observe.why.record import Numbers, RequestRecord
from inferd.observe.why.usual import Usual, request_size_of
from inferd.observe.why.words import counted, seconds_text
from inferd.types import CLASSES, class_index, class_of

FIRST_SHARE: Final = 0.1
SHARE: Final = 0.05
"""The first cause, and every other one, explains at least these shares of the call's time."""

LEAST_TEXT_S: Final = 0.02
LEAST_PREDICTION_S: Final = 0.005
"""A cause explains at least so many seconds of a generated text, and of a prediction."""

SLOW_SHARE: Final = 0.25
LEAST_SLOW_S: Final = 0.05
"""The same for steps that were slow without evidence of the reason."""

MUCH_TAKEN: Final = 0.1
MUCH_STEAL: Final = 0.05
MUCH_LIMITED: Final = 0.05
"""Shares of the time from which on the machine held the server up."""

OVERSIZED: Final = 4.0
OVERSIZED_BEYOND_HIGH: Final = 2.0
"""An input is oversized at so many times the median size, and the size that nine of ten inputs keep to."""

LONG_PROMPT_TOKENS: Final = 256
LONG_PROMPT: Final = 4.0
"""A neighbour's prompt is long if so many of its tokens were computed, and so many times the usual number."""

_BATCH: Final = CLASSES.index("batch")

_WAITS: Final = frozenset(
    (
        *(
            "load_wait",
            "queue",
            "lost_attempts",
            "hand_over",
            "schedule_wait",
            "prefill_shared",
            "crowding",
            "others_prefill",
        ),
        *("preempted", "recomputed", "slowed", "batch_wait"),
    )
)
"""Parts that an idle server does not have: all of their seconds may have a cause. Of the other parts, only the seconds
beyond what is usual."""

_WORK: Final = ("tokenize", "prefill", "decode", "decode_inputs", "compute", "encode", "send", "admission", "rest")
_STEPS: Final = ("prefill", "prefill_shared", "decode", "crowding", "others_prefill", "recomputed")
_SHARED: Final = ("schedule_wait", "prefill_shared", "crowding", "others_prefill")
_OF_INPUT: Final = ("receive", "tokenize", "prefill", "prefill_shared", "decode_inputs", "compute")

Beside = tuple[RequestRecord, Numbers]


class Cause(msgspec.Struct, frozen=True):
    """Why a call took longer: a name for programs, its seconds, and a sentence."""

    name: str
    seconds: float
    sentence: str


class Case:
    """Everything that is known about one call, and the seconds of its parts that no cause has claimed yet.

    ``sees_names``: the reader is the operator. A tenant reads of other tenants classes and counts only.
    """

    def __init__(
        self,
        record: RequestRecord,
        numbers: Numbers,
        usual: Usual,
        strain: Strain,
        beside: Callable[[], Iterable[Beside]],
        *,
        sees_names: bool,
    ) -> None:
        self.record = record
        self.numbers = numbers
        self.usual = usual
        self.strain = strain
        self.sees_names = sees_names
        self.least_s = max(SHARE * numbers.total, LEAST_TEXT_S if record.is_text else LEAST_PREDICTION_S)
        """The seconds that a cause must explain at least."""
        self._beside = beside
        self.seconds = record.seconds(numbers)
        self.left = {
            name: seconds if name in _WAITS else self._beyond_usual(name, seconds)
            for name, seconds in self.seconds.items()
        }
        for part in ("tokenize", "decode_inputs"):
            if part in self.left:
                self.left[part] = max(self.left[part], min(self.waited_at_replica_s, self.seconds[part]))

    @property
    def waited_at_replica_s(self) -> float:
        """Seconds at the replica before it began to read the request, while it read and computed others."""
        numbers = self.numbers
        if isnan(numbers.begun) or isnan(numbers.dispatched):
            return 0.0
        before = self.seconds.get("lost_attempts", 0.0) + self.seconds.get("hand_over", 0.0)
        return max(numbers.begun - numbers.dispatched - before, 0.0)

    def _beyond_usual(self, name: str, seconds: float) -> float:
        return max(seconds - self.usual.parts.get(name, 0.0), 0.0) if self.usual.parts else 0.0

    @cached_property
    def beside(self) -> list[Beside]:
        """The finished calls that were open at the same time, at the same replica."""
        return list(self._beside())

    def during(self, begin_s: float, end_s: float) -> list[Beside]:
        """Those that were at the replica between two times of this call."""
        began = self.numbers.started_at
        return [
            (record, numbers)
            for record, numbers in self.beside
            if not isnan(numbers.dispatched)
            and numbers.started_at + numbers.dispatched < began + end_s
            and numbers.started_at + _end_of(numbers) > began + begin_s
        ]

    def has(self, *parts: str) -> bool:
        """Whether enough is left of some parts for a cause. Rules that read the calls beside this one ask first."""
        return sum([self.left.get(part, 0.0) for part in parts]) >= self.least_s

    def claim(self, *parts: str) -> float:
        """Take what is left of some parts."""
        taken = 0.0
        for part in parts:
            taken += self.left.pop(part, 0.0)
        return taken

    def claim_slowness(self, *parts: str) -> float:
        """Take the slowness of the work on some parts: their share of the seconds by which steps were slower than
        fitted, and of the unusual time between steps.

        A slow step is slow for all of its tokens, and each of its rows costs the loop time.
        """
        whole = sum([self.seconds.get(part, 0.0) for part in _STEPS])
        if whole <= 0:
            return 0.0
        share = min(sum([self.seconds.get(part, 0.0) for part in parts]) / whole, 1.0)
        taken = 0.0
        for part in ("slowed", "rest"):
            seconds = share * self.left.get(part, 0.0)
            if seconds:
                self.left[part] -= seconds
                taken += seconds
        return taken

    def tenant_words(self, tenant: str) -> str:
        """How a sentence names the tenant of another request."""
        if tenant == self.record.tenant:
            return "the same tenant"
        if not self.sees_names:
            return "another tenant"
        return f"tenant {tenant}" if tenant else "clients without a tenant"


def causes_of(case: Case) -> list[Cause]:
    """The causes of a call's time, the one with most seconds first."""
    found = [cause for rule in _RULES if (cause := rule(case)) is not None and cause.seconds >= case.least_s]
    found.sort(key=lambda cause: -cause.seconds)
    return found if found and found[0].seconds >= FIRST_SHARE * case.numbers.total else []


# -- the rules ---------------------------------------------------------------------------------


def _cold_load(case: Case) -> Cause | None:
    seconds = _part_of(case, "load_wait", case.numbers.load)
    return Cause("cold_load", seconds, f"{seconds_text(seconds)} while the model was loaded") if seconds else None


def _worker_restart(case: Case) -> Cause | None:
    numbers = case.numbers
    waited = _part_of(case, "load_wait", numbers.restart)
    lost = case.claim("lost_attempts") if numbers.worker_deaths else 0.0
    if not waited + lost:
        return None
    died = f", with {counted(numbers.worker_deaths, 'worker')} that died" if numbers.worker_deaths else ""
    words = f"{seconds_text(waited + lost)} while no worker computed it{died}"
    return Cause("worker_restart", waited + lost, words)


def _lost_attempt(case: Case) -> Cause | None:
    seconds = case.claim("lost_attempts")
    if not seconds:
        return None
    remote = case.numbers.was_remote
    other = "another server" if remote else "another replica"
    words = f"{seconds_text(seconds)} at a replica that failed, before {other} took it"
    return Cause("failover" if remote else "retry", seconds, f"{words} ({counted(case.numbers.attempts, 'attempt')})")


def _hand_over(case: Case) -> Cause | None:
    seconds = case.claim("hand_over")
    if not seconds:
        return None
    words = f"{seconds_text(seconds)} while another replica computed the prompt ({case.record.hand_over})"
    return Cause("hand_over", seconds, words)


def _preemption(case: Case) -> Cause | None:
    again = case.seconds.get("recomputed", 0.0)
    seconds = case.claim("preempted", "recomputed")
    if not seconds:
        return None
    seconds += case.claim_slowness("recomputed")
    times = case.numbers.preemptions
    often = "once" if times == 1 else f"{times} times"
    also = f", {seconds_text(again)} of it for computing its tokens again" if again >= LEAST_TEXT_S else ""
    return Cause("preemption", seconds, f"{seconds_text(seconds)} preempted {often}{also}")


def _slow_reader(case: Case) -> Cause | None:
    sending = case.seconds.get("send", 0.0)
    if case.numbers.blocked < sending / 2:
        return None
    case.claim("send")
    return Cause("slow_reader", sending, f"{seconds_text(sending)} until the client had read the answer")


def _batch_job(case: Case) -> Cause | None:
    """Requests of the class batch take the places at the replica, and a share of its steps."""
    numbers = case.numbers
    if class_index(numbers.priority) == _BATCH or not case.has(*_SHARED, "queue"):
        return None
    others = case.during(0.0, numbers.total)
    jobs = [other for _, other in others if class_index(other.priority) == _BATCH]
    worse = numbers.ahead - numbers.ahead_of_class
    if len(jobs) < 2 or 2 * len(jobs) < len(others):
        return None
    seconds = case.claim_slowness(*_SHARED[1:]) + case.claim(*_SHARED)
    if worse >= numbers.ahead_of_class:
        seconds += case.claim("queue")
    if not seconds:
        return None
    return Cause("batch_job", seconds, f"{seconds_text(seconds)} beside {counted(len(jobs), 'request')} of class batch")


def _queue(case: Case) -> Cause | None:
    if not case.has("queue", "schedule_wait"):
        return None
    seconds = case.claim("queue", "schedule_wait")
    numbers, took = case.numbers, seconds_text(seconds)
    ahead, tenant, of_tenant = numbers.ahead_of_class, case.record.ahead_tenant, numbers.ahead_of_tenant
    if not ahead:
        waited_until = numbers.dispatched if isnan(numbers.scheduled) else numbers.scheduled
        tenants = Counter(record.tenant for record, _ in case.during(numbers.submitted, waited_until))
        tenant, of_tenant = tenants.most_common(1)[0] if tenants else ("", 0)
        ahead = tenants.total()
    if not ahead:
        return Cause("queue", seconds, f"{took} in the queue, while every place at the replicas was taken")
    if 2 * of_tenant < ahead:
        return Cause("queue", seconds, f"{took} in the queue behind {counted(ahead, 'request')} of several tenants")
    rank = f"class {class_of(numbers.priority)}"
    words = f"{took} in the queue behind {counted(of_tenant, 'request')} of {case.tenant_words(tenant)} ({rank})"
    return Cause("queue" if tenant == case.record.tenant else "queue_other_tenant", seconds, words)


def _long_neighbour_prefill(case: Case) -> Cause | None:
    if not case.has("schedule_wait", "prefill_shared", "others_prefill"):
        return None
    numbers, usual = case.numbers, case.usual.size
    began = numbers.started_at
    begin_s = numbers.tokenized if not isnan(numbers.tokenized) else numbers.dispatched
    prompts = [
        other.computed_tokens
        for _, other in case.during(begin_s, _end_of(numbers))
        if not isnan(other.scheduled)
        and other.started_at + other.scheduled < began + _end_of(numbers)
        and other.started_at + _first_of(other) > began + begin_s
    ]
    longest = max(prompts, default=0)
    if longest < max(LONG_PROMPT_TOKENS, LONG_PROMPT * (usual or 0.0)) or 2 * longest < sum(prompts):
        return None
    parts = ("schedule_wait", "prefill_shared", "others_prefill")
    seconds = case.claim_slowness(*parts[1:]) + case.claim(*parts)
    tokens = f" of {longest:,} tokens" if case.sees_names else ""
    words = f"{seconds_text(seconds)} while a long prompt{tokens} of another request was computed"
    return Cause("long_neighbour_prefill", seconds, words)


def _cache_miss(case: Case) -> Cause | None:
    numbers, usual = case.numbers, case.usual.cached_share
    if not numbers.prompt_tokens or usual is None:
        return None
    share = numbers.cached_tokens / numbers.prompt_tokens
    if usual < 0.3 or share > usual / 2:
        return None
    prefill = case.seconds.get("prefill", 0.0)
    seconds = max(case.claim("prefill"), prefill * (usual - share) / (1 - share))
    words = f"{seconds_text(seconds)} computing a prompt that the prefix cache usually has"
    return Cause("cache_miss", seconds, f"{words} ({share:.0%} of its tokens were cached, {usual:.0%} are usual)")


def _oversized_input(case: Case) -> Cause | None:
    is_text, numbers, usual = case.record.is_text, case.numbers, case.usual
    size, typical, high = request_size_of(is_text, numbers), usual.size, usual.high_size
    if not typical or high is None or size < max(OVERSIZED * typical, OVERSIZED_BEYOND_HIGH * high):
        return None
    if not any(part in case.left for part in _OF_INPUT):
        return None
    beyond = 1 - typical / size
    seconds = sum(case.seconds.get(part, 0.0) * beyond for part in _OF_INPUT if part in case.left)
    case.claim(*_OF_INPUT)
    unit = "tokens" if is_text else "bytes"
    words = f"{seconds_text(seconds)} for an input of {size:,} {unit}, where {typical:,.0f} are usual"
    return Cause("oversized_input", seconds, words)


def _tokenizer_storm(case: Case) -> Cause | None:
    numbers = case.numbers
    if not case.has("tokenize") or isnan(numbers.tokenized):
        return None
    began = numbers.started_at
    crowd = [
        other
        for _, other in case.during(numbers.dispatched, numbers.tokenized)
        if not isnan(other.tokenized) and other.started_at + other.tokenized > began + numbers.dispatched
    ]
    if len(crowd) < 2:
        return None
    seconds = case.claim("tokenize")
    words = f"{seconds_text(seconds)} until it was tokenized, beside {counted(len(crowd), 'other prompt')}"
    return Cause("tokenizer_storm", seconds, words)


def _throttled_device(case: Case) -> Cause | None:
    if not case.strain.throttled:
        return None
    seconds = case.claim("slowed", *_WORK)
    words = f"{seconds_text(seconds)} in steps that were slower than usual: the device was throttled"
    return Cause("throttled_device", seconds, f"{words} ({', '.join(case.strain.throttled)})")


def _stolen_cpu(case: Case) -> Cause | None:
    strain = case.strain
    reasons = [
        f"{what} for {share:.0%} of the time"
        for share, much, what in (
            (strain.taken_share, MUCH_TAKEN, "other processes ran on its cores"),
            (strain.steal_share, MUCH_STEAL, "the hypervisor gave its cores to other machines"),
            (strain.limited_share, MUCH_LIMITED, "the limit of processor time of its control group held it"),
        )
        if share >= much
    ]
    if not reasons:
        return None
    seconds = case.claim("slowed", "schedule_wait", *_WORK)
    words = f"{seconds_text(seconds)} in steps that were slower than usual: {', '.join(reasons)}"
    return Cause("stolen_cpu", seconds, words)


def _batch_window(case: Case) -> Cause | None:
    """A prediction waits for its batch: for more requests, or for the batches before it."""
    waited = case.claim("batch_wait") + (case.claim("decode_inputs") if case.numbers.behind else 0.0)
    behind = min(case.numbers.behind, waited)
    if not waited:
        return None
    if behind > waited / 2:
        return Cause("crowding", waited, f"{seconds_text(waited)} while batches of other requests were computed")
    window = waited - behind
    return Cause("batch_window", window, f"{seconds_text(window)} waiting for more requests for its batch")


def _slow_upload(case: Case) -> Cause | None:
    seconds = case.claim("receive")
    return Cause("slow_upload", seconds, f"{seconds_text(seconds)} until the client had sent the request")


def _crowding(case: Case) -> Cause | None:
    if not case.has(*_SHARED):
        return None
    seconds = case.claim_slowness(*[part for part in _SHARED[1:] if part in case.left]) + case.claim(*_SHARED)
    others = len(case.during(case.numbers.dispatched, _end_of(case.numbers)))
    words = f"{seconds_text(seconds)} for sharing the steps with {counted(others, 'other request')}"
    return Cause("crowding", seconds, words)


def _slow_steps(case: Case) -> Cause | None:
    seconds = case.claim("slowed", "compute", "prefill", "decode")
    if seconds < max(SLOW_SHARE * case.numbers.total, LEAST_SLOW_S):
        return None
    words = f"{seconds_text(seconds)} in steps that were slower than usual, for no reason that the server can see"
    return Cause("slow_steps", seconds, words)


_RULES: Final[tuple[Callable[[Case], Cause | None], ...]] = (
    _cold_load,
    _worker_restart,
    _lost_attempt,
    _hand_over,
    _preemption,
    _slow_reader,
    _batch_job,
    _long_neighbour_prefill,
    _queue,
    _cache_miss,
    _oversized_input,
    _tokenizer_storm,
    _throttled_device,
    _stolen_cpu,
    _batch_window,
    _slow_upload,
    _crowding,
    _slow_steps,
)

NAMES: Final = (
    *("cold_load", "worker_restart", "failover", "retry", "preemption", "slow_reader", "batch_job"),
    *("queue_other_tenant", "queue", "cache_miss", "oversized_input", "long_neighbour_prefill", "tokenizer_storm"),
    *("throttled_device", "stolen_cpu", "batch_window", "slow_upload", "crowding", "slow_steps"),
)
"""The names of all causes."""


def _part_of(case: Case, part: str, seconds: float) -> float:
    """Claim some of a part's seconds; what remains may have another cause."""
    taken = min(case.left.get(part, 0.0), seconds)
    if taken:
        case.left[part] -= taken
    return taken


def _first_of(numbers: Numbers) -> float:
    return numbers.total if isnan(numbers.first_token) else numbers.first_token


def _end_of(numbers: Numbers) -> float:
    return numbers.total if isnan(numbers.finished) else numbers.finished
