"""Inside a class tenants share by weight, whatever they send."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.tickets import ticket

from inferd.router.ticket import Ticket
from inferd.router.waiting.fair_share import FairShare

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
LARGEST = 50


def take(share: FairShare) -> Ticket | None:
    entry = share.pop(None, True)
    return entry.ticket if entry is not None else None


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("a", "b", "c", "pop", "pop", "leave")), st.integers(0, LARGEST)),
        min_size=20,
        max_size=150,
    )
)
def test_two_tenants_that_both_wait_are_served_by_weight_up_to_one_request_each(steps: list[tuple[str, int]]) -> None:
    """Over every interval in which both have requests waiting: the bound of the module's docstring."""
    share = FairShare()
    waiting: dict[str, deque[Ticket]] = {tenant: deque() for tenant in WEIGHTS}
    entries = {}
    # For each pair: how far the difference of the two went in the present interval, at the least and the most.
    pairs = {("a", "b"): (0.0, 0.0, 0.0), ("a", "c"): (0.0, 0.0, 0.0), ("b", "c"): (0.0, 0.0, 0.0)}
    for number, (what, tokens) in enumerate(steps):
        if what in WEIGHTS:
            new = ticket(number, tenant=what, tokens=tokens, weight=WEIGHTS[what])
            entries[new] = share.push(new)
            waiting[what].append(new)
            continue
        if what == "leave":
            line = waiting["abc"[tokens % 3]]
            if line:
                share.remove(entries[line.pop()])
        elif (popped := take(share)) is not None:
            tenant = popped.request.tenant
            assert waiting[tenant].popleft() is popped
            served = max(1, popped.request.num_tokens) / WEIGHTS[tenant]
            for pair, (now, low, high) in pairs.items():
                now += served * ((pair[0] == tenant) - (pair[1] == tenant))
                low, high = min(low, now), max(high, now)
                # The request that ends a tenant's waiting is part of the interval too.
                assert high - low <= LARGEST / WEIGHTS[pair[0]] + LARGEST / WEIGHTS[pair[1]] + 1e-6
                pairs[pair] = (now, low, high)
        for one, other in pairs:
            if not waiting[one] or not waiting[other]:
                pairs[one, other] = (0.0, 0.0, 0.0)


def serve(share: FairShare, num: int) -> Counter[str]:
    """Requests taken by tenant, each answered by one more of the same."""
    counts: Counter[str] = Counter()
    for number in range(1000, 1000 + num):
        popped = take(share)
        assert popped is not None
        request = popped.request
        counts[request.tenant] += 1
        share.push(ticket(number, tenant=request.tenant, tokens=request.num_tokens, weight=request.weight))
    return counts


def backlog(share: FairShare, tenant: str, num: int, *, tokens: int = 10, weight: float = 1.0, first: int = 0) -> None:
    for number in range(first, first + num):
        share.push(ticket(number, tenant=tenant, tokens=tokens, weight=weight))


def test_tokens_count_and_not_requests() -> None:
    share = FairShare()
    backlog(share, "long", 5, tokens=100)
    backlog(share, "short", 5, tokens=10, first=5)
    counts = serve(share, 110)
    assert counts["short"] == 100


def test_a_tenant_with_three_times_the_weight_gets_three_times_as_much() -> None:
    share = FairShare()
    backlog(share, "light", 5)
    backlog(share, "heavy", 5, weight=3, first=5)
    assert serve(share, 400)["heavy"] == 300


def test_a_thousand_waiting_requests_of_one_tenant_hold_up_another_by_one() -> None:
    share = FairShare()
    backlog(share, "many", 1000)
    serve(share, 50)
    share.push(ticket(5000, tenant="one", tokens=10))
    assert "one" in [taken.request.tenant for taken in (take(share), take(share)) if taken is not None]


def test_silence_earns_no_credit() -> None:
    share = FairShare()
    backlog(share, "steady", 5)
    backlog(share, "silent", 1, first=5)
    for number in range(100, 200):
        popped = take(share)
        assert popped is not None
        backlog(share, "steady", 1, first=number)
    backlog(share, "silent", 50, first=2000)
    assert serve(share, 100)["silent"] in (49, 50, 51)


def test_a_tenant_that_costs_more_than_estimated_pays_later() -> None:
    share = FairShare()
    backlog(share, "liar", 5)
    backlog(share, "honest", 5, first=5)
    counts: Counter[str] = Counter()
    for number in range(100, 500):
        popped = take(share)
        assert popped is not None
        tenant = popped.request.tenant
        counts[tenant] += 40 if tenant == "liar" else 10
        share.push(ticket(number, tenant=tenant, tokens=10))
        if tenant == "liar":
            share.settle(popped.request, 40)
    assert abs(counts["liar"] - counts["honest"]) <= 50


def test_a_tenant_that_costs_less_than_estimated_gets_the_rest_back() -> None:
    share = FairShare()
    backlog(share, "careful", 5, tokens=100)
    backlog(share, "exact", 5, tokens=10, first=5)
    counts: Counter[str] = Counter()
    in_flight: deque[Ticket] = deque()
    for number in range(100, 1100):
        popped = take(share)
        assert popped is not None
        tenant = popped.request.tenant
        counts[tenant] += 10
        share.push(ticket(number, tenant=tenant, tokens=popped.request.num_tokens))
        in_flight.append(popped)
        if len(in_flight) > 8:
            share.settle(in_flight.popleft().request, 10)
    assert abs(counts["careful"] - counts["exact"]) <= 9 * 100


def test_a_newcomer_is_served_soon_although_others_got_much_back() -> None:
    share = FairShare()
    backlog(share, "old", 50, tokens=1000)
    for taken in [take(share) for _ in range(30)]:
        assert taken is not None
        share.settle(taken.request, 10)
    share.push(ticket(500, tenant="new", tokens=1000))
    assert "new" in [taken.request.tenant for taken in (take(share), take(share)) if taken is not None]


def test_what_comes_back_goes_first_and_is_not_paid_for_again() -> None:
    share = FairShare()
    backlog(share, "a", 2, tokens=100)
    backlog(share, "b", 2, tokens=100, first=2)
    first = take(share)
    assert first is not None
    share.push(first)
    assert [taken.number for taken in iter(lambda: take(share), None)] == [0, 2, 1, 3]


def test_waiting_for_a_certain_replica_earns_no_credit() -> None:
    share = FairShare()
    backlog(share, "eu", 100)
    backlog(share, "us", 100, first=100)
    for _ in range(50):
        entry = share.pop(lambda waiting: waiting.request.tenant == "us", True)
        assert entry is not None
        assert entry.ticket.request.tenant == "us"
    assert serve(share, 40)["eu"] in (19, 20, 21)


def test_tenants_without_waiting_requests_are_not_counted_ahead_of_a_newcomer() -> None:
    share = FairShare()
    for number in range(5):
        share.push(ticket(number, tenant=f"gone-{number}", tokens=10))
        assert take(share) is not None
    for number in range(5, 15):
        share.push(ticket(number, tenant="here", tokens=10))
    assert share.num_ahead(ticket(15, tenant="new", tokens=10).request) == 1


def test_turns_that_became_invalid_are_cleared_away_and_the_valid_ones_are_kept() -> None:
    share = FairShare()
    first = ticket(0, tenant="first", tokens=10)
    share.push(first)
    for number in range(1, 1000):  # each leaves a turn behind the first tenant's
        share.remove(share.push(ticket(number, tenant="gone", tokens=10)))
        assert len(share._heap) < 100
    last = ticket(1000, tenant="last", tokens=10)
    share.push(last)
    assert [take(share), take(share), take(share)] == [first, last, None]


def test_tenants_that_left_are_forgotten_but_for_what_they_owe() -> None:
    share = FairShare()
    for number in range(20_000):
        share.push(ticket(number, tenant=str(number), tokens=10))
        assert take(share) is not None
    assert len(share._flows) < 200


def test_of_many_tenants_that_owe_those_are_remembered_that_owe_most() -> None:
    share = FairShare()
    owed = {str(number): 2 + number * 7919 % 20_000 for number in range(20_000)}
    for number, (tenant, tokens) in enumerate(owed.items()):
        share.settle(ticket(number, tenant=tenant, tokens=1).request, tokens)
    assert len(share._flows) < 10_000
    share.push(ticket(2, tenant="new", tokens=1))
    share.push(ticket(1, tenant=max(owed, key=owed.__getitem__), tokens=1))
    served = take(share)
    assert served is not None
    assert served.request.tenant == "new"


@given(
    st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), st.booleans()), max_size=60),
    st.sampled_from(sorted(WEIGHTS)),
)
def test_no_more_are_served_before_a_newcomer_than_are_counted_ahead_of_it(
    steps: list[tuple[str, bool]], newcomer: str
) -> None:
    """Of requests that cost alike, with nothing owed: where all that wait came in one busy time."""
    share = FairShare()
    for number, (tenant, leaves) in enumerate(steps):
        entry = share.push(ticket(number, tenant=tenant, tokens=10, weight=WEIGHTS[tenant]))
        if leaves:
            share.remove(entry)
    new = ticket(len(steps), tenant=newcomer, tokens=10, weight=WEIGHTS[newcomer])
    ahead = share.num_ahead(new.request)
    assert ahead <= share.num_live
    share.push(new)
    served = 0
    while (taken := take(share)) is not new:
        assert taken is not None
        served += 1
    assert served <= ahead
