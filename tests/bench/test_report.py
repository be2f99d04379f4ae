"""The reports' arithmetic and pictures."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from bench.chart import Line, bars, lines, log_ticks, ticks
from bench.report import Figure, markdown, ratio
from hypothesis import given
from hypothesis import strategies as st

POSITIVE = st.floats(1e-3, 1e6)


def test_a_figure_is_its_median_with_its_extremes() -> None:
    figure = Figure((12.0, 10.0, 14.0))
    assert (figure.median, figure.spread) == (12.0, 4.0 / 12.0)
    assert str(figure) == "12.0 (10.0-14.0)"
    assert str(Figure((0.5,))) == "0.50"
    assert Figure((0.0,)).spread == 0.0
    with pytest.raises(ValueError, match="at least one"):
        Figure(())


def test_a_ratio_is_to_the_best_of_the_others() -> None:
    ours, others = Figure((20.0,)), [Figure((10.0,)), Figure((16.0, 15.0, 17.0))]
    assert ratio(ours, others) == 1.25
    assert ratio(ours, others, lower_is_better=True) == 0.5
    assert ratio(ours, []) is None


@given(POSITIVE, st.lists(POSITIVE, min_size=1, max_size=4))
def test_a_ratio_of_at_least_one_means_that_no_peer_is_better(ours: float, others: list[float]) -> None:
    figures = [Figure((other,)) for other in others]
    more, less = ratio(Figure((ours,)), figures), ratio(Figure((ours,)), figures, lower_is_better=True)
    assert more is not None
    assert less is not None
    assert (more >= 1.0) == (ours >= max(others))
    assert (less >= 1.0) == (ours <= min(others))


def test_a_table_has_a_cell_for_every_column() -> None:
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    with pytest.raises(ValueError, match="1 cells, but the head has 2"):
        markdown(["a", "b"], [["1"]])


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_enclose_what_they_are_for(low: float, span: float) -> None:
    found = ticks(low, low + span)
    slack = 1e-6 * (abs(low) + span)
    assert found[0] <= low + slack
    assert found[-1] >= low + span - slack
    assert 2 <= len(found) <= 9


def test_logarithmic_ticks_are_round() -> None:
    assert log_ticks(1, 30) == [1, 2, 5, 10, 20]


@pytest.mark.parametrize("is_log", [False, True])
def test_pictures_are_well_formed_and_name_what_they_show(is_log: bool) -> None:
    picture = lines(
        [Line("a < b", [1, 10, 100], [3, 2, 1]), Line("point", [5], [2], joined=False)],
        title="t & u",
        x_label="x",
        y_label="y",
        log_x=is_log,
        log_y=is_log,
    )
    texts = [node.text for node in ElementTree.fromstring(picture).iter() if node.text]
    assert {"a < b", "point", "t & u", "x", "y"} <= set(texts)
    circles = [node for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("circle")]
    assert len(circles) == 4


def test_a_taller_bar_is_a_larger_value_and_none_is_a_gap() -> None:
    root = ElementTree.fromstring(bars(["g", "h"], [("s", [1.0, 3.0]), ("t", [2.0, None])], title="", y_label=""))
    background, *plot = [node.attrib["height"] for node in root.iter() if node.tag.endswith("rect")]
    assert background == "100%"
    one, two, three = sorted(float(height) for height in plot[:-2])  # the legend's are the last
    assert two == pytest.approx(2 * one, abs=0.2)
    assert three == pytest.approx(3 * one, abs=0.2)
    with pytest.raises(ValueError, match="has no bars"):
        bars(["g"], [("s", [None])], title="x", y_label="")
