"""The numbers of a report, its sentence, and its page, from pairs that are known."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from inferd.replay.difference import Difference, Flip, TensorDifference, text_difference
from inferd.replay.evaluate import Comparison, EvaluationReport, Failed, PerplexityScore, Score
from inferd.replay.evaluation_page import evaluation_page, sentence
from inferd.replay.page import page
from inferd.replay.replay import Outcome, Pair
from inferd.replay.report import MAX_EXAMPLES, ReplayReport, figures_of, report_of, share
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


def score(model: str, count: int, number: int, *failed: Failed) -> Score:
    passed = share(count, number)
    return Score(model=model, fingerprint="fp", passed=passed, seconds=None, failed=[*failed], by_check={})


def evaluation(**changes: Any) -> EvaluationReport:
    base: dict[str, Any] = {"made_at": "now", "golden": "g.jsonl", "against": "a", "version": "1", "stopped": ""}
    base |= {"min_pass": 0.9, "score": score("m@2", 6, 8), "passes": False}
    return EvaluationReport(**(base | changes))


LOST = Comparison(only_new=11, only_other=22, both=33, neither=44, p=0.0375, is_worse=True, lost=["x"])


def rows_of(document: str) -> list[list[str]]:
    """The text of each cell, row by row."""
    rows = re.findall(r"<tr>(.*?)</tr>", document)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_the_page_of_an_evaluation_has_the_counts_of_both_models_and_their_perplexities() -> None:
    one = PerplexityScore(file="t", value=12.5, standard_error=0.25, num_scored=7000, num_windows=3, context=48)
    both = {"other": score("m@1", 7, 8), "comparison": LOST}
    other = msgspec.structs.replace(one, value=11.5, num_scored=6000)
    document = evaluation_page(evaluation(**both, perplexity=one, other_perplexity=other))
    assert rows_of(document) == [
        ["", "cases"],
        ["only this model", "11"],
        ["only the other", "22"],
        ["both", "33"],
        ["neither", "44"],
        ["model", "perplexity", "error of the mean, nats", "tokens"],
        ["m@2", "12.5", "0.250", "7,000"],
        ["m@1", "11.5", "0.250", "6,000"],
    ]
    assert "p value: 0.0375." in document
    assert [float(width) for width in re.findall(r'<rect x="200"[^>]* width="([^"]*)"', document)] == [525.0, 612.5]
    assert '<line x1="830.0" x2="830.0"' in document, "the bound of 90 % of the width of 700, which begins at 200"
    assert [document.count(f">{percent} %</text>") for percent in ("75", "87.5", "90")] == [1, 1, 1]
    alone = evaluation_page(evaluation())
    assert (rows_of(alone), alone.count("<rect")) == ([], 1)


def test_the_page_of_an_evaluation_escapes_failed_cases_and_says_how_many_it_leaves_out() -> None:
    failed = [Failed(name=f"<b>{number}", line=number, reasons=["a", "<i>"]) for number in range(203)]
    document = evaluation_page(evaluation(score=score("<m>", 0, 203, *failed)))
    head, *rows = rows_of(document)
    assert head == ["name", "line", "why"]
    assert rows == [[f"&lt;b&gt;{number}", f"{number}", "a; &lt;i&gt;"] for number in range(200)]
    assert "<p>3 more are not shown.</p>" in document
    assert "&lt;m&gt;" in document
    few = evaluation_page(evaluation(score=score("m", 0, 200, *failed[:200])))
    assert len(rows_of(few)) == 201
    assert "not shown" not in few


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stopped": "The server is gone."}, ["Not finished: The server is gone. 8 cases were asked."]),
        ({}, ["6 of 8 cases pass (75.0 %, 95 % interval ", "), less than the 90 % that are asked for."]),
        ({"min_pass": 0.75}, ["), at least the 75 % that are asked for."]),
        ({"score": score("m", 0, 0)}, ["0 of 0 cases pass (0.0 %, "]),
        (
            {"comparison": LOST, "other": score("m@1", 7, 8)},
            [" It is worse than m@1: 22 cases are lost and 11 gained (p 0.037)."],
        ),
        (
            {"comparison": msgspec.structs.replace(LOST, is_worse=False), "other": score("m@1", 7, 8)},
            [" It is not shown to be worse than m@1: "],
        ),
    ],
)
def test_the_sentence_of_an_evaluation_says_what_was_found(changes: dict[str, Any], words: list[str]) -> None:
    said = sentence(evaluation(**changes))
    for part in words:
        assert part in said
