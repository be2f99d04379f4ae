"""The states of a rollout, and what each event makes of them. Pure: no clock, no I/O; the time is an argument.

    pending -start-> preparing -the new version is ready-> running -> ... -> promoted
                                                           |     ^
                        the time of the step is over, and  v     |  the guards are passed, or patience is over
                        the guards are not passed     inconclusive
                                                           awaiting_approval -promote-> running

Evidence against the new version, or deaths of its workers, lead from each active state to ``rolled_back``, also while
the rollout is paused. A version that must not serve at all is rolled back from ``promoted``, too. The operator's abort
leads to ``aborted``, and undo leads there from ``promoted``. Too little
evidence leads to no rollback: ``inconclusive`` waits, for a time if the plan limits it.

``Progress`` is all that a rollout knows beside its plan and its counts. It is stored whole at each change, so a server
that is killed continues where it was.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from inferd.errors import InvalidRequest
from inferd.rollout.judge import Verdict, reading_text
from inferd.rollout.plan import Plan

State = Literal[
    "pending",
    "preparing",
    "running",
    "inconclusive",
    "awaiting_approval",
    "promoted",
    "rolled_back",
    "aborted",
]
Command = Literal["start", "pause", "resume", "promote", "promote_full", "abort", "undo"]

STATES: Final[tuple[State, ...]] = get_args(State)
COMMANDS: Final[tuple[Command, ...]] = get_args(Command)
ACTIVE: Final = frozenset(("preparing", "running", "inconclusive", "awaiting_approval"))
"""States in which the rollout is under way."""

JUDGED: Final = frozenset(("running", "inconclusive", "awaiting_approval"))
"""States in which the evidence may withdraw the new version."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rollout is."""

    state: State = "pending"
    share: float = 0.0  # the new version's share of the units
    shadow: float = 0.0  # of the units: those whose requests are copied to the new version
    step: int = -1  # index of the step that is in effect; -1: none yet
    is_paused: bool = False
    since: float = 0.0  # time of the last change, in seconds since the epoch
    spent_s: float = 0.0  # time in this state before the last pause
    run: int = 0  # number of starts; each start counts anew
    plan: str = ""  # digest of the plan that is followed
    registered_new: str = ""  # the new version in the registry, NAME@NUMBER; empty: it is not from there
    reason: str = ""  # of the last change

    def elapsed_s(self, now: float) -> float:
        """The time in this state, without pauses. A clock that went back adds nothing."""
        return self.spent_s + (0.0 if self.is_paused else max(0.0, now - self.since))


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is seen at a time."""

    now: float
    is_ready: bool  # the new version can serve, at every server
    verdict: Verdict = Verdict()
    deaths: int = 0  # of the new version's workers, in this run
    problem: str = ""  # why the new version must not serve, whatever its counts say; empty: nothing


def observed(plan: Plan, progress: Progress, seen: Seen) -> Progress:
    """The progress after a look. The same object: nothing changes."""
    state = progress.state
    if state == "pending" and plan.starts_itself and not progress.is_paused:
        return _started(plan, progress, seen.now, "the configuration starts it")
    if seen.problem and (state in ACTIVE or state == "promoted"):
        return _left(progress, "rolled_back", seen.now, seen.problem)
    if state not in ACTIVE:
        return progress
    if seen.deaths >= plan.max_deaths:
        died = f"{seen.deaths} workers of version {plan.new} died, and {plan.max_deaths} withdraw it"
        return _left(progress, "rolled_back", seen.now, died)
    worse = seen.verdict.worse
    if worse is not None and state in JUDGED:
        return _left(progress, "rolled_back", seen.now, reading_text(worse))
    if progress.is_paused:
        return progress
    if progress.plan != plan.digest:
        return _paused(progress, seen.now, "its plan in the configuration has changed; resume to follow the new one")
    if not seen.is_ready or state == "awaiting_approval":
        return progress
    if state == "preparing":
        return _next(plan, progress, seen.now, f"version {plan.new} is ready")
    step, elapsed_s = plan.steps[progress.step], progress.elapsed_s(seen.now)
    asked = [guard.kind for guard in plan.guards if step.can_prove(guard)]
    if state == "inconclusive":
        if seen.verdict.is_passed(asked):
            return _next(plan, progress, seen.now, "every guard is passed")
        if plan.inconclusive_s is not None and elapsed_s >= plan.inconclusive_s:
            return _next(plan, progress, seen.now, f"the evidence stayed inconclusive for {plan.inconclusive_s:g} s")
        return progress
    if elapsed_s < step.for_s:
        return progress
    if not asked:
        return _next(plan, progress, seen.now, f"{step.for_s:g} s at {_percent(step.share)} are over")
    if seen.verdict.is_passed(asked):
        return _next(plan, progress, seen.now, "every guard is passed")
    waits = "until every guard is passed" if plan.inconclusive_s is None else f"for at most {plan.inconclusive_s:g} s"
    return _moved(progress, "inconclusive", seen.now, f"there is not enough evidence yet; it waits {waits}")


def commanded(plan: Plan, progress: Progress, command: Command, now: float, *, is_ready: bool, why: str) -> Progress:
    """The progress after an operator's command. ``why`` is the operator and the reason. Raises InvalidRequest, where
    the command has no meaning in the state."""
    state = progress.state
    match command:
        case "start":
            if state in ACTIVE:
                raise _refused(plan, progress, command, "It is under way; promote takes it further, and abort ends it.")
            if state == "promoted":
                raise _refused(plan, progress, command, "undo goes back to the stable version.")
            return _started(plan, progress, now, why)
        case "undo":
            if state != "promoted":
                remedy = "abort ends it" if state in ACTIVE else "undo takes a promoted version back; start begins it"
                raise _refused(plan, progress, command, f"{remedy}.")
            return _left(progress, "aborted", now, why)
        case _ if state not in ACTIVE:
            raise _refused(plan, progress, command, "start begins it.")
        case "abort":
            return _left(progress, "aborted", now, why)
        case "pause":
            if progress.is_paused:
                raise _refused(plan, progress, command, "It is paused already; resume continues it.")
            return _paused(progress, now, why)
        case "resume":
            if not progress.is_paused:
                raise _refused(plan, progress, command, "It is not paused.")
            return _resumed(plan, progress, now, why)
    if state == "preparing" or not is_ready:
        raise _refused(plan, progress, command, f"Version {plan.new} is not ready; inferd status says why.")
    if progress.plan != plan.digest:
        raise _refused(plan, progress, command, "Its plan has changed; resume follows the new one.")
    if command == "promote":
        return _next(plan, progress, now, why, is_approved=True)
    return _finished(progress, now, why)


def held(progress: Progress, now: float, why: str) -> Progress:
    """The progress when the change that is due is refused from outside: it pauses, and resume tries again. One that
    begins by itself stays pending, and start tries again."""
    return progress if progress.is_paused else _paused(progress, now, why)


def withdrawn(progress: Progress, now: float, why: str) -> Progress:
    """The progress when the configuration has the rollout no more."""
    return _left(progress, "aborted", now, why) if progress.state in ACTIVE else progress


def _refused(plan: Plan, progress: Progress, command: str, remedy: str) -> InvalidRequest:
    words = f"{progress.state.replace('_', ' ')}{', paused' if progress.is_paused else ''}"
    return InvalidRequest(
        f"The rollout of {plan.model} to version {plan.new} is {words}, so {command.replace('_', ' --')!r} is not "
        f"possible. {remedy}",
        param="command",
        code="rollout_state",
    )


def _started(plan: Plan, progress: Progress, now: float, why: str) -> Progress:
    return Progress(
        state="preparing",
        since=now,
        run=progress.run + 1,
        plan=plan.digest,
        registered_new=plan.registered_new,
        reason=why,
    )


def _next(plan: Plan, progress: Progress, now: float, why: str, *, is_approved: bool = False) -> Progress:
    """The step after the one in effect; after the last step the end."""
    following = progress.step + 1
    if following == len(plan.steps):
        return _finished(progress, now, why)
    step = plan.steps[following]
    if step.needs_approval and not is_approved:
        return _moved(progress, "awaiting_approval", now, f"{why}; {_percent(step.share)} needs an approval")
    return msgspec.structs.replace(
        _moved(progress, "running", now, why), step=following, share=step.share, shadow=step.shadow, is_paused=False
    )


def _finished(progress: Progress, now: float, why: str) -> Progress:
    return msgspec.structs.replace(_moved(progress, "promoted", now, why), share=1.0, shadow=0.0, is_paused=False)


def _left(progress: Progress, state: State, now: float, why: str) -> Progress:
    """The end without the new version: all units are the stable version's."""
    return msgspec.structs.replace(_moved(progress, state, now, why), share=0.0, shadow=0.0, is_paused=False)


def _paused(progress: Progress, now: float, why: str) -> Progress:
    spent_s = progress.elapsed_s(now)
    return msgspec.structs.replace(progress, is_paused=True, spent_s=spent_s, since=now, reason=why)


def _resumed(plan: Plan, progress: Progress, now: float, why: str) -> Progress:
    if progress.plan == plan.digest or progress.step < 0:
        return msgspec.structs.replace(progress, is_paused=False, since=now, plan=plan.digest, reason=why)
    # The new plan is followed from its first step that takes nothing back.
    step = next(index for index, step in enumerate(plan.steps) if step.share >= progress.share)
    return msgspec.structs.replace(
        _moved(progress, "running", now, why),
        step=step,
        share=plan.steps[step].share,
        shadow=plan.steps[step].shadow,
        is_paused=False,
        plan=plan.digest,
    )


def _moved(progress: Progress, state: State, now: float, why: str) -> Progress:
    return msgspec.structs.replace(progress, state=state, since=now, spent_s=0.0, reason=why)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
