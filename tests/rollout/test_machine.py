"""The states of a rollout: every state with every event, and what holds on every way through them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.rollout.evidence import Count
from inferd.rollout.judge import Reading, Verdict
from inferd.rollout.machine import (
    ACTIVE,
    COMMANDS,
    JUDGED,
    STATES,
    Command,
    Progress,
    Seen,
    commanded,
    observed,
    withdrawn,
)
from inferd.rollout.plan import Guard, GuardKind, Plan, Step

PLAN = Plan(
    model="churn",
    stable="1",
    new="2",
    steps=(Step(share=0.05, for_s=10), Step(share=0.25, for_s=10), Step(share=1.0, for_s=10)),
    guards=(Guard(kind="errors", max_ratio=2.0),),
    inconclusive_s=100.0,
)
OTHER_PLAN = msgspec.structs.replace(PLAN, alpha=0.02)
NOW = 1000.0
LIMIT = math.log(100)


def verdict(against: float = 0.0, in_favour: float = 0.0) -> Verdict:
    return Verdict(
        readings=(
            Reading(
                guard="errors",
                bad=Count(1, 2),
                units=Count(30, 40),
                against=against,
                against_limit=LIMIT,
                in_favour=in_favour,
                in_favour_limit=LIMIT,
            ),
        )
    )


UNSURE, WORSE, PASSED = verdict(), verdict(against=LIMIT), verdict(in_favour=LIMIT)


def seen(verdict: Verdict = UNSURE, *, after_s: float = 1.0, is_ready: bool = True, deaths: int = 0) -> Seen:
    return Seen(now=NOW + after_s, is_ready=is_ready, verdict=verdict, deaths=deaths)


EVENTS: dict[str, Seen | Command] = {command: command for command in COMMANDS} | {
    "early": seen(),
    "early passed": seen(PASSED),
    "late": seen(after_s=10),
    "late passed": seen(PASSED, after_s=10),
    "very late": seen(after_s=100),
    "passed unready": seen(PASSED, after_s=100, is_ready=False),
    "worse": seen(WORSE),
    "deaths": seen(deaths=3),
    "rejected": Seen(now=NOW + 1, is_ready=False, problem="it was rejected"),
}

# . the same   ! refused   z paused   c continues   P preparing   R the next step   I inconclusive   F promoted
# B rolled back   X aborted                                       A awaiting an approval
#                                        promote  abort          early passed     late passed    unready  deaths
#                    start pause resume promote  _full     undo  early    late           very late   worse   rejected
TABLE = """
pending                P     !     !       !      !     !    !     .    .    .    .    .        .     .    .     .
preparing              !     z     !       !      !     X    !     R    R    R    R    R        .     R    B     B
preparing paused       !     !     c       !      !     X    !     .    .    .    .    .        .     .    B     B
running                !     z     !       R      F     X    !     .    .    I    R    I        .     B    B     B
running paused         !     !     c       R      F     X    !     .    .    .    .    .        .     B    B     B
inconclusive           !     z     !       R      F     X    !     .    R    .    R    R        .     B    B     B
inconclusive paused    !     !     c       R      F     X    !     .    .    .    .    .        .     B    B     B
awaiting_approval      !     z     !       R      F     X    !     .    .    .    .    .        .     B    B     B
awaiting_approval paused  !  !     c       R      F     X    !     .    .    .    .    .        .     B    B     B
promoted               !     !     !       !      !     !    X     .    .    .    .    .        .     .    .     B
rolled_back            P     !     !       !      !     !    !     .    .    .    .    .        .     .    .     .
aborted                P     !     !       !      !     !    !     .    .    .    .    .        .     .    .     .
"""


def at(state: str, *, is_paused: bool = False) -> Progress:
    step = -1 if state in ("pending", "preparing") else 0
    share = {"promoted": 1.0, "running": 0.05, "inconclusive": 0.05, "awaiting_approval": 0.05}.get(state, 0.0)
    return Progress(state=state, share=share, step=step, is_paused=is_paused, since=NOW, run=1, plan=PLAN.digest)  # type: ignore[arg-type]


def applied(
    progress: Progress, event: Seen | Command, plan: Plan = PLAN, *, now: float = NOW + 1, is_ready: bool = True
) -> Progress:
    if isinstance(event, Seen):
        return observed(plan, progress, event)
    return commanded(plan, progress, event, now, is_ready=is_ready, why="operator")


def rows() -> Iterator[tuple[str, bool, str, str]]:
    for line in TABLE.strip().splitlines():
        name, *words = line.split()
        is_paused = words[0] == "paused"
        letters = words[1:] if is_paused else words
        assert len(letters) == len(EVENTS), line
        for event, letter in zip(EVENTS, letters, strict=True):
            yield name, is_paused, event, letter


def test_the_table_has_every_state_with_every_event() -> None:
    assert {(state, paused) for state, paused, _, _ in rows()} == {(state, False) for state in STATES} | {
        (state, True) for state in ACTIVE
    }


@pytest.mark.parametrize(("state", "is_paused", "event", "letter"), list(rows()))
def test_each_state_with_each_event(state: str, is_paused: bool, event: str, letter: str) -> None:
    before = at(state, is_paused=is_paused)
    if letter == "!":
        with pytest.raises(InvalidRequest, match=state.replace("_", " ")) as refused:
            applied(before, EVENTS[event])
        assert refused.value.param == "command"
        return
    after = applied(before, EVENTS[event])
    if letter == ".":
        assert after is before
        return
    expected = {"P": "preparing", "R": "running", "I": "inconclusive", "F": "promoted", "B": "rolled_back"}
    assert after.state == expected.get(letter, "aborted" if letter == "X" else state)
    assert after.is_paused == (letter == "z")
    assert after.reason
    match letter:
        case "P":
            assert (after.run, after.step, after.share) == (before.run + 1, -1, 0.0)
        case "R":
            assert (after.step, after.share) == (before.step + 1, PLAN.steps[before.step + 1].share)
        case "F":
            assert after.share == 1.0
        case "B" | "X":
            assert after.share == 0.0
        case _:
            assert (after.step, after.share, after.run) == (before.step, before.share, before.run)


@pytest.mark.parametrize("state", STATES)
def test_a_rollout_that_the_configuration_has_no_more_ends_if_it_is_under_way(state: str) -> None:
    before = at(state)
    after = withdrawn(before, NOW, "the configuration has another one")
    assert after == before if state not in ACTIVE else (after.state, after.share) == ("aborted", 0.0)


def reachable(plan: Plan) -> dict[Progress, list[tuple[str, Progress]]]:
    """Every progress that any events lead to, with what each event makes of it. Every event happens at one time after
    the last one, so times differ by what they mean alone."""

    def settled(progress: Progress) -> Progress:
        return msgspec.structs.replace(progress, since=NOW, spent_s=0.0, reason="", run=min(progress.run, 2))

    found: dict[Progress, list[tuple[str, Progress]]] = {}
    new = [Progress()]
    while new:
        progress = new.pop()
        ways = found[progress] = []
        for name, event in EVENTS.items():
            for is_ready in (True, False):
                try:
                    after = settled(applied(progress, event, plan, is_ready=is_ready))
                except InvalidRequest:
                    continue
                ways.append((name, after))
                if after not in found:
                    found[after] = []
                    new.append(after)
    return found


PLANS = {
    "canary": PLAN,
    "approved": msgspec.structs.replace(
        PLAN, steps=tuple(msgspec.structs.replace(step, needs_approval=True) for step in PLAN.steps)
    ),
    "blue and green": msgspec.structs.replace(PLAN, steps=(Step(share=0.0), Step(share=1.0, for_s=60))),
    "shadow": msgspec.structs.replace(
        PLAN,
        steps=(Step(share=0.0, shadow=1.0, for_s=10), Step(share=0.05, shadow=0.5, for_s=10), Step(share=1.0)),
        guards=(Guard(kind="errors", max_ratio=2.0), Guard(kind="differs", max_fraction=0.02)),
    ),
    "replacement": msgspec.structs.replace(PLAN, steps=(Step(share=1.0),), guards=(), starts_itself=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_holds_on_every_way(name: str) -> None:
    plan = PLANS[name]
    ways = reachable(plan)
    assert {progress.state for progress in ways} >= {"promoted", "rolled_back", "aborted", "preparing"}
    for progress, ended in ways.items():
        if progress.state in ("pending", "preparing", "rolled_back", "aborted"):
            assert progress.share == 0.0, "the new version serves before it is ready, or after its end"
        elif progress.state == "promoted":
            assert progress.share == 1.0
        elif progress.step >= 0:
            assert progress.share == plan.steps[progress.step].share
            assert progress.shadow == plan.steps[progress.step].shadow
        if progress.state not in JUDGED:
            assert progress.shadow == 0.0, "requests are copied before the new version is ready, or after its end"
        for event, after in ended:
            if event in ("early", "early passed", "late", "late passed", "very late", "passed unready"):
                assert after.state != "rolled_back" or progress.state == "rolled_back", "without evidence"
            if event == "passed unready" and progress.state != "pending":
                assert after == progress, "a step ends while the new version cannot serve"
            if event == "worse" and progress.state in JUDGED:
                assert after.state == "rolled_back", progress
            if event == "deaths" and progress.state in ACTIVE:
                assert after.state == "rolled_back", progress
            if event == "promote":
                assert after.state == "promoted" or after.step == progress.step + 1, (
                    "an operator's promote is an approval"
                )
            if progress.is_paused and after.share > progress.share:
                assert event in ("promote", "promote_full"), "a paused rollout goes on by itself"
            if after.state == "running" and after.step > 0 and plan.steps[after.step].needs_approval:
                assert event == "promote" or after.step == progress.step, "without an approval"
    for progress in ways:
        assert _can_reach(ways, progress, "promoted"), progress
        assert _can_reach(ways, progress, "aborted"), progress


def _can_reach(ways: dict[Progress, list[tuple[str, Progress]]], start: Progress, state: str) -> bool:
    known, new = {start}, [start]
    while new:
        progress = new.pop()
        if progress.state == state:
            return True
        for _, after in ways[progress]:
            if after not in known:
                known.add(after)
                new.append(after)
    return False


# -- a server that is killed ------------------------------------------------------------------

TICKS = 60


def outcome(plan: Plan, seen_at: Callable[[int], Seen], commands: dict[int, Command], lost: set[int]) -> Progress:
    """The end of a rollout whose server begins anew at each tick, with what is stored alone. In the ticks ``lost`` it
    is killed after it has decided and before that is stored; a command without an answer is given again."""
    stored, given_again = msgspec.json.encode(Progress()), None
    for tick in range(TICKS):
        found, command = seen_at(tick), commands.get(tick, given_again)
        progress = msgspec.json.decode(stored, type=Progress)
        if command is not None:
            with contextlib.suppress(InvalidRequest):
                progress = commanded(plan, progress, command, found.now, is_ready=found.is_ready, why="operator")
        progress = observed(plan, progress, found)
        given_again = command if tick in lost else None
        if tick not in lost:
            stored = msgspec.json.encode(progress)
    return msgspec.json.decode(stored, type=Progress)


def alive(plan: Plan, seen_at: Callable[[int], Seen], commands: dict[int, Command]) -> Progress:
    """The end of a rollout whose server is never killed."""
    progress = Progress()
    for tick in range(TICKS):
        found = seen_at(tick)
        command = commands.get(tick)
        if command is not None:
            with contextlib.suppress(InvalidRequest):
                progress = commanded(plan, progress, command, found.now, is_ready=found.is_ready, why="operator")
        progress = observed(plan, progress, found)
    return progress


@given(
    st.sampled_from(list(PLANS.values())),
    st.lists(
        st.builds(
            lambda verdict, is_ready, deaths: (verdict, is_ready, deaths),
            st.sampled_from([UNSURE, PASSED, PASSED, WORSE]),
            st.booleans(),
            st.sampled_from([0, 0, 0, 3]),
        ),
        min_size=TICKS,
        max_size=TICKS,
    ),
    st.dictionaries(st.integers(1, 30), st.sampled_from(COMMANDS), max_size=6),
)
def test_what_is_stored_is_all_that_a_rollout_knows(
    plan: Plan, world: list[tuple[Verdict, bool, int]], commands: dict[int, Command]
) -> None:
    def seen_at(tick: int) -> Seen:
        verdict, is_ready, deaths = world[tick]
        return Seen(now=NOW + 7 * tick, is_ready=is_ready, verdict=verdict, deaths=deaths)

    given_commands: dict[int, Command] = {0: "start", **commands}
    assert outcome(plan, seen_at, given_commands, set()) == alive(plan, seen_at, given_commands)


@given(
    st.sampled_from(list(PLANS.values())),
    st.sampled_from([UNSURE, PASSED, WORSE]),
    st.sampled_from([0, 3]),
    st.sets(st.integers(0, 30)),
)
def test_a_server_that_is_killed_at_any_transitions_comes_to_the_same_end(
    plan: Plan, verdict: Verdict, deaths: int, lost: set[int]
) -> None:
    """As long as what is true of the versions does not change meanwhile."""

    def seen_at(tick: int) -> Seen:
        return Seen(now=NOW + 40.0 * tick, is_ready=True, verdict=verdict, deaths=deaths)

    expected = alive(plan, seen_at, {0: "start"})
    assert outcome(plan, seen_at, {0: "start"}, lost).state == expected.state


def test_the_clock_of_a_step_stands_still_while_it_is_paused() -> None:
    progress = applied(at("running"), "pause", now=NOW + 4)
    assert progress.elapsed_s(NOW + 500) == 4.0
    progress = applied(progress, "resume", now=NOW + 500)
    assert observed(PLAN, progress, Seen(now=NOW + 505, is_ready=True, verdict=PASSED)) is progress
    assert observed(PLAN, progress, Seen(now=NOW + 506, is_ready=True, verdict=PASSED)).step == 1


def test_a_clock_that_goes_back_ends_no_step() -> None:
    assert observed(PLAN, at("running"), Seen(now=NOW - 9999, is_ready=True, verdict=PASSED)) == at("running")


def test_a_clock_that_goes_back_takes_no_time_from_a_step() -> None:
    paused = applied(at("running"), "pause", now=NOW + 4)
    resumed = applied(paused, "resume", now=NOW + 500)
    assert resumed.elapsed_s(NOW) == 4.0
    assert applied(resumed, "pause", now=NOW).spent_s == 4.0


def test_a_changed_plan_pauses_and_is_followed_from_its_first_step_that_takes_nothing_back() -> None:
    plan = msgspec.structs.replace(PLAN, steps=(Step(share=0.01), Step(share=0.1, for_s=60), Step(share=1.0)))
    paused = observed(plan, at("running"), seen())
    assert (paused.state, paused.share, paused.is_paused) == ("running", 0.05, True)
    assert "changed" in paused.reason
    assert observed(plan, paused, seen(after_s=500)) is paused
    with pytest.raises(InvalidRequest, match="resume"):
        applied(paused, "promote", plan)
    resumed = applied(paused, "resume", plan)
    assert (resumed.state, resumed.step, resumed.share, resumed.plan) == ("running", 1, 0.1, plan.digest)


def test_a_changed_plan_with_the_same_steps_begins_the_step_in_effect_anew() -> None:
    for step, share in enumerate((0.05, 0.25, 1.0)):
        progress = msgspec.structs.replace(at("running", is_paused=True), step=step, share=share, spent_s=9.0)
        resumed = applied(progress, "resume", OTHER_PLAN)
        assert (resumed.state, resumed.step, resumed.share, resumed.spent_s) == ("running", step, share, 0.0)


def test_a_plan_that_changes_before_the_first_step_is_followed_from_its_beginning() -> None:
    """The new version may not be ready yet."""
    resumed = applied(at("preparing", is_paused=True), "resume", OTHER_PLAN, is_ready=False)
    assert (resumed.state, resumed.step, resumed.share) == ("preparing", -1, 0.0)
    assert (resumed.plan, resumed.is_paused) == (OTHER_PLAN.digest, False)


def test_without_patience_a_rollout_without_evidence_waits_for_its_operator() -> None:
    plan = msgspec.structs.replace(PLAN, inconclusive_s=None)
    progress = msgspec.structs.replace(at("inconclusive"), plan=plan.digest)
    assert observed(plan, progress, seen(after_s=1e9)) is progress
    assert applied(progress, "promote", plan).step == 1


def test_a_version_that_cannot_serve_is_not_promoted_by_command() -> None:
    commands: tuple[Command, ...] = ("promote", "promote_full")
    for command in commands:
        with pytest.raises(InvalidRequest, match="not ready"):
            applied(at("running"), command, is_ready=False)


def test_a_step_asks_for_the_guards_that_can_have_evidence_in_it() -> None:
    """A shadow step for those of copies alone, and a step without copies for the others."""
    steps = (Step(share=0.0, shadow=1.0, for_s=10), Step(share=0.05, for_s=10), Step(share=1.0))
    guards = (Guard(kind="errors", max_ratio=2.0), Guard(kind="differs", max_fraction=0.02))
    plan = msgspec.structs.replace(PLAN, steps=steps, guards=guards)

    def reading(guard: GuardKind, is_passed: bool) -> Reading:
        (found,) = (PASSED if is_passed else UNSURE).readings
        return msgspec.structs.replace(found, guard=guard)

    def after(step: int, errors: bool, differs: bool) -> str:
        progress = msgspec.structs.replace(at("running"), plan=plan.digest, step=step, share=steps[step].share)
        verdict = Verdict(readings=(reading("errors", errors), reading("differs", differs)))
        found = observed(plan, progress, seen(verdict, after_s=10))
        return f"{found.state} {found.step}"

    assert [after(0, False, differs) for differs in (False, True)] == ["inconclusive 0", "running 1"]
    assert [after(1, errors, False) for errors in (False, True)] == ["inconclusive 1", "running 2"]
    worse = Verdict(readings=(reading("errors", True), msgspec.structs.replace(WORSE.readings[0], guard="differs")))
    progress = msgspec.structs.replace(at("running"), plan=plan.digest, share=0.0, shadow=1.0)
    found = observed(plan, progress, seen(worse))
    assert (found.state, found.shadow) == ("rolled_back", 0.0)
    assert "differs: 2 of 40 copied units" in found.reason


def test_a_rollback_says_the_numbers() -> None:
    reason = observed(PLAN, at("running"), seen(WORSE)).reason
    assert "errors: 2 of 40 units with the new version, 1 of 30 with the stable one" in reason
    assert "evidence against it 100 of 100" in reason
