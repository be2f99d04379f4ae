"""The numbers of a report, its sentence, and its page, from pairs that are known."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.replay.difference import Difference, Flip, TensorDifference, text_difference
from inferd.replay.page import page
from inferd.replay.replay import Outcome, Pair
from inferd.replay.report import MAX_EXAMPLES, ReplayReport, figures_of, report_of
from inferd.replay.statistics import mcnemar, upper_bound, wilcoxon, wilson
from inferd.replay.verdict import verdict_of

EQUAL = Difference(is_equal=True)


def pair(number: int = 0, difference: Difference | None = EQUAL, **changes: Any) -> Pair:
    base: dict[str, Any] = {"is_same_version": False, "is_batched": False, "is_random": False, "before_s": 0.1}
    return Pair(request_id=f"r{number}", route="/v1/x", difference=difference, **(base | {"after_s": 0.2} | changes))


def report(*pairs: Pair, stopped: str = "") -> ReplayReport:
    outcome = Outcome(pairs=list(pairs), stopped=stopped, fingerprints={"m": ["fp_2", "fp_1", ""]})
    return report_of(outcome, made_at="now", source="a", against="b", version="1", skipped={"redacted": 2})


def flipped(before: str, after: str) -> Difference:
    return Difference(is_equal=False, flips=(Flip(before, after),), num_labels=1)


def test_labels_have_a_table_with_both_directions_and_a_bound() -> None:
    flips = [flipped("cat", "dog")] * 7 + [flipped("dog", "cat")] + [Difference(is_equal=True, num_labels=1)] * 12
    found = report(*map(pair, range(20), flips)).labels
    assert found is not None
    assert (found.number, found.flips, found.upper) == (20, 8, upper_bound(8, 20))
    assert [(one.before, one.after, one.count, one.back, one.p) for one in found.table] == [
        ("cat", "dog", 7, 1, mcnemar(7, 1)),
        ("dog", "cat", 1, 7, mcnemar(1, 7)),
    ]
    assert report(pair()).labels is None


def test_counts_and_shares_leave_out_what_is_random_or_failed() -> None:
    text = Difference(is_equal=False, texts=(text_difference("t", "abcd", "abXd"),))
    found = report(
        pair(0),
        pair(1, text),
        pair(2, text, is_random=True),
        pair(3, None, error="500: broken"),
        pair(4, None, was_error="400: bad"),
    )
    assert (found.asked, found.random, found.failed, found.repaired, found.broken) == (5, 1, 1, 1, 0)
    assert (found.equal.count, found.equal.number) == (1, 2)
    assert (found.equal.low, found.equal.high) == wilson(1, 2)
    assert found.errors == {"500: broken": 1}
    assert found.texts.distance is not None
    assert (found.texts.number, found.texts.distance.most) == (1, 1.0)
    (route,) = found.routes
    assert (route.equal, route.different, route.random, route.failed) == (1, 2, 1, 1)
    assert [one.request_id for one in found.examples] == ["r1", "r3", "r4"]


def test_durations_and_tokens_are_compared_in_pairs() -> None:
    pairs = [
        pair(number, before_s=0.1 + number, after_s=0.1 + 2 * number, usage_before=(3, 5), usage_after=(3, 5 + number))
        for number in range(4)
    ]
    found = report(*pairs)
    assert found.latency is not None
    assert found.answer_tokens is not None
    assert found.latency.difference_p50 == pytest.approx(1.5)
    assert found.latency.p == wilcoxon([0.0, 1.0, 2.0, 3.0])
    assert (found.tokens_before, found.tokens_after) == ((12, 20), (12, 26))


def test_tensors_are_summed_up_by_name_over_the_places_in_lists() -> None:
    def tensor(place: int, size: float) -> Difference:
        one = TensorDifference(
            name=f"data[{place}].embedding", number=8, number_different=2, max_abs=size, ulps=(0.0, 1.0, 2.0, size)
        )
        return Difference(is_equal=False, tensors=(one,))

    (found,) = report(pair(0, tensor(0, 3.0)), pair(1, tensor(1, 5.0))).tensors
    assert (found.name, found.number, found.number_different, found.max_abs) == ("data.embedding", 2, 4, 5.0)
    assert found.ulps is not None
    assert found.ulps.most == 5.0


@pytest.mark.parametrize(
    ("pairs", "stopped", "mood", "words"),
    [
        ([], "", "bad", "Nothing was asked"),
        ([pair()], "The server is gone.", "bad", "Not finished: The server is gone."),
        ([pair(is_same_version=True)], "", "good", "The fingerprints are equal"),
        ([pair(0, is_same_version=True), pair(1)], "", "good", "The fingerprints of 1 pairs are equal"),
        ([pair()], "", "good", "1 of 1 answers are equal"),
        ([pair(0, Difference(is_equal=False))], "", "mixed", "0 of 1 answers are equal"),
        ([pair(0, Difference(is_equal=False), is_same_version=True)], "", "bad", "differ although the fingerprints"),
        (
            [pair(0, Difference(is_equal=False), is_same_version=True, is_batched=True)],
            "",
            "mixed",
            "may depend on the batch",
        ),
        ([pair(0, None, error="x")], "", "bad", "that were answered before failed"),
    ],
)
def test_the_sentence_says_what_was_found(pairs: list[Pair], stopped: str, mood: str, words: str) -> None:
    said, found = verdict_of(report(*pairs, stopped=stopped))
    assert words in said
    assert found == mood


def test_the_page_escapes_texts_of_answers_and_loads_nothing() -> None:
    evil = "<script>alert(1)</script><img src=http://evil.example/x>"
    text = Difference(is_equal=False, texts=(text_difference(evil, "a" + evil, "b" + evil),), flips=(Flip(evil, "b"),))
    broken = pair(1, text, is_same_version=True)
    document = page(report(pair(0, None, error=evil), broken, pair(2, flipped(evil, "x"))))
    for word in ("<script", "<img", "<link", "@import", "url("):
        assert word not in document
    assert "&lt;script&gt;" in document
    assert document.count("should be equal") == 1


def test_examples_are_bounded_and_figures_have_no_texts() -> None:
    text = Difference(is_equal=False, texts=(text_difference("t", "secret", "other"),))
    found = report(*[pair(number, text) for number in range(MAX_EXAMPLES + 5)])
    assert (len(found.examples), found.num_examples_left_out) == (MAX_EXAMPLES, 5)
    assert "secret" in repr(found)
    assert "secret" not in repr(figures_of(found))
