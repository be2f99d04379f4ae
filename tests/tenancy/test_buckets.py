"""The one law of buckets, and what they tell of the future."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import QuotaExceeded
from inferd.tenancy.buckets import Bucket, Kind
from inferd.tenancy.limiter import Limiter, Quota, Reservation, duration
from inferd.tenancy.principal import Limits

SECONDS = st.floats(0, 90, allow_nan=False)
KINDS = st.sampled_from(("requests", "tokens", "in_flight"))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3), st.integers(0, 400), st.floats(0, 1)),
        st.tuples(st.just("learn"), st.integers(0, 9), st.integers(0, 400), st.floats(0, 1)),
        st.tuples(st.just("settle"), st.integers(0, 9), st.integers(0, 400), st.floats(0, 1)),
        st.tuples(st.just("wait"), st.just(0), st.just(0), SECONDS),
    ),
    max_size=60,
)


def refused(limiter: Limiter, quotas: tuple[Quota, ...], tokens: int, now: float) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        limiter.reserve(quotas, tokens, now)
    assert (caught.value.retry_after_s or 0) > 0
    return caught.value


@given(STEPS, st.integers(1, 500), st.integers(1, 20), st.integers(1, 5))
def test_nothing_ever_exceeds_a_limit(
    steps: list[tuple[str, int, int, float]], tpm: int, rpm: int, at_once: int
) -> None:
    """Whatever is asked, learned, settled and when: tokens used, requests and requests at once stay
    within the tenant's limits, although four keys with limits of their own share it."""
    limiter = Limiter(is_whole=True)
    tenant = Limits(tpm=tpm, rpm=rpm, max_in_flight=at_once)
    limiter.configure({"tenant:t": tenant, **{f"key:{i}": Limits(tpm=2 * tpm) for i in range(4)}}, 0.0)
    now, requests = 0.0, 0
    running: list[tuple[Reservation, int]] = []
    for what, index, tokens, part in steps:
        if what == "wait":
            now += part
        elif what == "ask":
            try:
                taken = limiter.reserve(limiter.quotas_of((f"key:{index}", "tenant:t")), tokens, now)
            except QuotaExceeded:
                pass
            else:
                requests += 1
                running.append((taken, tokens))
        elif running:
            taken, reserved = running[index % len(running)]
            if what == "learn":
                actual = int(reserved * part)
                limiter.reduce(taken, actual, now)
                running[index % len(running)] = (taken, actual)
            else:
                running.remove((taken, reserved))
                actual = int(reserved * part)
                limiter.settle(taken, actual, refund=False, now=now)
        assert len(running) <= at_once
        assert requests <= rpm * (1 + now / 60) + 1e-6
        # One larger than the whole bucket is let in when that is full; what it takes beyond is a debt.
        assert sum(min(reserved, tpm) for _, reserved in running) <= tpm * (1 + now / 60) + 1e-6


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1), SECONDS), min_size=1, max_size=50), st.integers(100, 300)
)
def test_tokens_used_never_exceed_what_the_bucket_held(asks: list[tuple[int, float, float]], tpm: int) -> None:
    """Settled usage alone, however requests overlap: at most one bucket and its refill."""
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(tpm=tpm)}, 0.0)
    now, used = 0.0, 0
    running: list[tuple[Reservation, int]] = []
    for reserve, part, pause in asks:
        now += pause
        try:
            taken = limiter.reserve(limiter.quotas_of(("key:k",)), reserve, now)
        except QuotaExceeded:
            if running:
                first, actual = running.pop(0)
                limiter.settle(first, actual, refund=False, now=now)
                used += actual
        else:
            running.append((taken, int(reserve * part)))
        assert used + sum(actual for _, actual in running) <= tpm * (1 + now / 60) + 1e-6


@given(st.lists(st.integers(1, 120), min_size=1, max_size=20), st.integers(10, 100), st.integers(1, 50))
def test_the_refused_request_passes_when_it_was_told_to_and_not_before(asks: list[int], tpm: int, rpm: int) -> None:
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(tpm=tpm), "tenant:t": Limits(tpm=tpm + 7, rpm=rpm)}, 0.0)
    quotas = limiter.quotas_of(("key:k", "tenant:t"))
    now = 0.0
    for tokens in asks:
        try:
            limiter.reserve(quotas, tokens, now)
        except QuotaExceeded as error:
            wait_s = error.retry_after_s or 0.0
            refused(limiter, quotas, tokens, now + wait_s / 2)
            refused(limiter, quotas, tokens, now + wait_s * 0.99)
            now += wait_s + 1e-6
            limiter.reserve(quotas, tokens, now)


def test_a_request_larger_than_the_bucket_waits_for_a_full_one_and_is_charged_in_full() -> None:
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(tpm=600)}, 0.0)
    quotas = limiter.quotas_of(("key:k",))
    taken = limiter.reserve(quotas, 10_000, 0.0)
    limiter.settle(taken, 1200, refund=False, now=0.0)  # 600 more than the bucket held: a minute's debt
    assert refused(limiter, quotas, 10, 59.0).retry_after_s == pytest.approx(2.0)
    limiter.reserve(quotas, 10, 61.1)


def test_settling_gives_back_what_was_not_used_at_once() -> None:
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(tpm=1000, rpm=2, max_in_flight=1)}, 0.0)
    quotas = limiter.quotas_of(("key:k",))
    for _ in range(2):
        taken = limiter.reserve(quotas, 900, 0.0)
        limiter.reduce(taken, 500, 0.0)
        before = limiter.headers(taken, 0.0)
        limiter.reduce(taken, 800, 0.0)  # a later, larger bound takes nothing again
        assert limiter.headers(taken, 0.0) == before
        limiter.settle(taken, 10, refund=False, now=0.0)
    headers = dict(limiter.headers(taken, 0.0))
    assert headers[b"x-ratelimit-remaining-tokens"] == b"980"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"


def test_a_refusal_of_ours_does_not_count_as_the_clients_request() -> None:
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(rpm=1)}, 0.0)
    quotas = limiter.quotas_of(("key:k",))
    for _ in range(5):
        limiter.settle(limiter.reserve(quotas, 1, 0.0), 0, refund=True, now=0.0)


def test_a_refund_gives_back_the_one_request_that_was_taken() -> None:
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(rpm=5), "tenant:t": Limits(rpm=7)}, 0.0)
    quotas = limiter.quotas_of(("key:k", "tenant:t"))
    taken = [limiter.reserve(quotas, 1, 0.0) for _ in range(4)]
    limiter.settle(taken[0], 0, refund=True, now=0.0)
    limiter.settle(taken[1], 1, refund=False, now=0.0)
    assert {(use.owner, use.used) for use in limiter.use(0.0)} == {("key:k", 3.0), ("tenant:t", 3.0)}
    for _ in range(2):
        limiter.reserve(quotas, 1, 0.0)
    assert refused(limiter, quotas, 1, 0.0).limit == "requests"


def test_a_limit_that_changes_keeps_what_is_in_use() -> None:
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(max_in_flight=2, tpm=100)}, 0.0)
    quotas = limiter.quotas_of(("key:k",))
    taken = [limiter.reserve(quotas, 50, 0.0) for _ in range(2)]
    limiter.configure({"key:k": Limits(max_in_flight=1, tpm=1000)}, 0.0)
    for one in taken:
        assert refused(limiter, quotas, 0, 0.0).limit == "in_flight"
        limiter.settle(one, 50, refund=False, now=0.0)
    limiter.reserve(quotas, 0, 0.0)


def test_a_limit_that_is_taken_away_limits_no_more() -> None:
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(rpm=1, tpm=100)}, 0.0)
    quotas = limiter.quotas_of(("key:k",))
    limiter.reserve(quotas, 10, 0.0)
    assert refused(limiter, quotas, 10, 0.0).limit == "requests"
    limiter.configure({"key:k": Limits(tpm=100)}, 0.0)
    assert [use.kind for use in limiter.use(0.0)] == ["tokens"]
    limiter.reserve(quotas, 10, 0.0)


def test_a_bucket_is_full_again_when_what_it_lacks_has_come() -> None:
    bucket = Bucket("tokens", 60.0, share=1.0, level=20.0, now=0.0)
    assert bucket.full_in_s(0.0) == 40.0
    assert bucket.full_in_s(30.0) == 10.0
    assert bucket.full_in_s(50.0) == 0.0


@given(KINDS, st.floats(0.1, 1.0), st.floats(-1.0, 1.0), st.floats(0.0, 1.5), st.integers(1, 200))
def test_a_share_that_is_released_takes_its_part_of_the_level_along(
    kind: Kind, share: float, part: float, released: float, whole: int
) -> None:
    bucket = Bucket(kind, float(whole), share=share, level=part * share * whole, now=0.0)
    level = bucket.level
    gone, taken = bucket.remove_share(released, 0.0)
    assert bucket.share == pytest.approx(share - gone)
    assert bucket.level == pytest.approx(level - taken)
    assert taken >= 0
    if kind == "in_flight":  # what runs stays
        assert gone == pytest.approx(min(released, share, max(level, 0.0) / whole))
        assert taken == pytest.approx(gone * whole)
    else:
        assert gone == pytest.approx(min(released, share))
        assert taken == pytest.approx(max(level, 0.0) * gone / share)


def test_of_no_share_nothing_can_be_released() -> None:
    bucket = Bucket("tokens", 60.0, share=0.0, level=0.0, now=0.0)
    assert bucket.remove_share(0.5, 0.0) == (0.0, 0.0)


def test_what_is_in_use_becomes_less_with_time() -> None:
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(tpm=60)}, 0.0)
    limiter.reserve(limiter.quotas_of(("key:k",)), 40, 0.0)
    assert [use.used for use in limiter.use(0.0)] == [40.0]
    assert [use.used for use in limiter.use(30.0)] == [10.0]
    assert [use.used for use in limiter.use(90.0)] == [0.0]


def test_the_headers_tell_of_the_tightest_quota_as_it_is_now() -> None:
    limiter = Limiter(is_whole=True)
    limiter.configure({"key:k": Limits(tpm=60), "tenant:t": Limits(tpm=120)}, 0.0)
    taken = limiter.reserve(limiter.quotas_of(("key:k", "tenant:t")), 60, 0.0)
    found = dict(limiter.headers(taken, 30.0))
    assert found == {
        b"x-ratelimit-limit-tokens": b"60",
        b"x-ratelimit-remaining-tokens": b"30",
        b"x-ratelimit-reset-tokens": b"30s",
    }


@pytest.mark.parametrize(("hold_s", "at_once", "wait_s"), [(60.0, 1, 12.8), (60.0, 2, 6.4), (0.0, 20, 0.05)])
def test_a_request_too_many_at_once_waits_for_one_of_those_that_run(hold_s: float, at_once: int, wait_s: float) -> None:
    """``hold_s``: of the one request before; of the moving average it is a fifth, and 1 s is where it begins."""
    limiter = Limiter(is_whole=True)
    began, ended = 100.0, 100.0 + hold_s
    limiter.configure({"key:k": Limits(max_in_flight=at_once)}, began)
    quotas = limiter.quotas_of(("key:k",))
    limiter.settle(limiter.reserve(quotas, 1, began), 1, refund=False, now=ended)
    for _ in range(at_once):
        limiter.reserve(quotas, 1, ended)
    error = refused(limiter, quotas, 1, ended)
    assert error.retry_after_s == pytest.approx(wait_s)
    assert dict(error.headers)[b"retry-after-ms"] == b"%d" % round(wait_s * 1000)


def test_the_largest_request_that_a_share_was_too_small_for_is_remembered() -> None:
    bucket = Bucket("tokens", 60.0, share=0.5, level=0.0, now=0.0)
    for amount in (20.0, 50.0, 40.0):
        assert bucket.shortage(amount, 0.0) == amount
    assert bucket.need == 50.0


def test_a_debt_without_a_share_has_no_time_until_it_is_paid() -> None:
    assert Bucket("tokens", 60.0, share=0.0, level=-5.0, now=0.0).full_in_s(0.0) == 0.0


def test_a_limit_that_was_taken_away_does_not_come_back_with_the_next_one() -> None:
    limiter = Limiter()
    limiter.configure({"key:k": Limits(rpm=1)}, 0.0)
    limiter.publish()
    limiter.configure({"key:k": Limits(tpm=1)}, 0.0)
    limiter.publish()
    assert [use.kind for use in limiter.use(0.0)] == ["tokens"]


def test_time_that_goes_back_refills_nothing() -> None:
    bucket = Bucket("tokens", 60.0, share=1.0, level=0.0, now=1000.0)
    bucket.refill(900.0)
    assert bucket.level == 0.0
    bucket.refill(1001.0)
    assert bucket.level == 1.0


def test_durations_are_written_as_openai_writes_them() -> None:
    assert [duration(s) for s in (0, 0.02, 0.9991, 1.5, 60, 360, 3723.25)] == [
        b"0ms",
        b"20ms",
        b"1s",
        b"1.5s",
        b"1m0s",
        b"6m0s",
        b"1h2m3.25s",
    ]


Done = Callable[[Bucket, float, float], object]
DEEDS: dict[str, Done] = {
    "lacks": lambda bucket, amount, now: bucket.shortage(amount, now),
    "take": lambda bucket, amount, now: bucket.withdraw(amount, now),
    "give": lambda bucket, amount, now: bucket.credit(amount, now),
    "full": lambda bucket, amount, now: bucket.full_in_s(now),
    "grow": lambda bucket, amount, now: bucket.add_share(0.25, amount, now),
    "shrink": lambda bucket, amount, now: bucket.remove_share(0.25, now)[1],
    "configure": lambda bucket, amount, now: bucket.configure(amount, now),
}


@pytest.mark.parametrize("deed", DEEDS)
@given(KINDS, st.floats(0.1, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 30.0), st.integers(1, 200))
def test_whatever_is_done_to_a_bucket_counts_the_time_until_then(
    deed: str, kind: Kind, share: float, part: float, seconds: float, amount: int
) -> None:
    """A bucket that was looked at just before is as one that was not."""
    found = []
    now = 5.0 + seconds
    for is_looked_at in (True, False):
        bucket = Bucket(kind, 100.0, share=share, level=part * share * 100.0, now=5.0)
        if is_looked_at:
            bucket.refill(now)
        said = DEEDS[deed](bucket, float(amount), now)
        then = (said or 0.0, bucket.level, bucket.share, bucket.whole, bucket.at)
        bucket.refill(now + 1.0)
        found.append((*then, bucket.level))
    assert found[0] == pytest.approx(found[1])


@given(KINDS, st.integers(1, 200), st.integers(1, 200), st.floats(-2.0, 1.0))
def test_another_limit_leaves_what_is_in_use_in_use_and_no_more_than_it_holds(
    kind: Kind, before: int, after: int, part: float
) -> None:
    bucket = Bucket(kind, float(before), share=1.0, level=part * before, now=0.0)
    used = bucket.capacity - bucket.level
    bucket.configure(float(after), 0.0)
    assert bucket.capacity == after
    if kind == "in_flight":
        assert bucket.capacity - bucket.level == pytest.approx(used)
    else:
        assert bucket.level == pytest.approx(min(part * before, after))
