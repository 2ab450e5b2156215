"""Forest plots have a row for each method, in order, with its interval."""

from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant.metrics import Estimate
from calibrant.show import figures
from tests.show.figures.test_reliability import assert_whole
from tests.support.simulate import drawn

ROWS = {"ts": Estimate(0.01, 0.005, 0.02), "none": Estimate(0.05), "bad": Estimate(np.nan)}


def test_rows_are_points_with_their_intervals():
    axes: Any = figures.forest_plot(ROWS, title="ECE", best=["ts"], chosen="ts", level=0.9)
    interval, first, second, reference = axes.get_lines()
    np.testing.assert_allclose(interval.get_xydata(), [[0.5, 0.0], [2.0, 0.0]])
    np.testing.assert_allclose(first.get_xydata(), [[1, 0]])
    np.testing.assert_allclose(second.get_xydata(), [[5, 1]])
    np.testing.assert_allclose(reference.get_xdata(), 5)
    assert first.get_markerfacecolor() == first.get_color() != second.get_markerfacecolor()
    names = axes.get_yticklabels()
    assert [name.get_text() for name in names] == list(ROWS)
    assert [name.get_fontweight() for name in names] == ["bold", "normal", "normal"]
    assert axes.get_xlabel() == "ECE (%), 90 % interval"
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # from top to bottom


def test_there_must_be_a_row():
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.forest_plot({}, title="ECE")


def test_a_comparison_is_drawn_from_good_to_bad(rng):
    logits, labels = drawn(rng, 200, 3)
    comparison = cal.compare({"logits": 4 * logits, "labels": labels}, methods=["none", "ts"])
    figure: Any = comparison.plot()
    left, right = figure.axes
    order = [name.get_text() for name in left.get_yticklabels()]
    values = [100 * comparison.measured[name]["ece"].value for name in order]
    assert values == sorted(values)
    points = [line for line in left.get_lines() if line.get_marker() == "o"]
    np.testing.assert_allclose([line.get_xdata()[0] for line in points], values)
    points = [line for line in right.get_lines() if line.get_marker() == "o"]
    expected = [comparison.measured[name]["nll"].value for name in order]
    np.testing.assert_allclose([line.get_xdata()[0] for line in points], expected)
    assert right.get_xlabel() == "NLL, 90 % interval"
    with figures.look("column"):
        assert_whole(comparison.plot())
    accuracy: Any = comparison.plot(metrics=["accuracy"])  # higher is better
    values = [line.get_xdata()[0] for line in accuracy.get_lines() if line.get_marker() == "o"]
    assert values == sorted(values, reverse=True)
