"""Figures of a monitor have its windows, its e-value and its alarm."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant.show import figures
from tests.show.figures.test_reliability import assert_whole


@pytest.fixture(scope="module")
def report():
    rng, watch = np.random.default_rng(0), cal.Monitor()
    for i in range(12):
        confidence = rng.uniform(0.6, 1, 200)
        right = rng.random(200) < confidence - (0.3 if i > 5 else 0)
        watch.observe(confidence, right, window=i)
    return watch.report()


def test_windows_and_evidence_are_drawn(report):
    figure: Any = report.plot()
    upper, lower = figure.axes
    accuracy, confidence = upper.get_lines()[:2]
    for line, key in ((accuracy, "accuracy"), (confidence, "confidence")):
        np.testing.assert_allclose(line.get_ydata(), [100 * row[key] for row in report.windows])
    evidence, limit = lower.get_lines()[:2]
    expected = np.maximum([row["e_value"] for row in report.windows], 1e-3)
    np.testing.assert_allclose(evidence.get_ydata(), expected)
    np.testing.assert_allclose(limit.get_ydata(), report.limit)
    names = [row["window"] for row in report.windows]
    for ax in (upper, lower):
        assert ax.get_lines()[-1].get_xdata()[0] == names.index(report.alarm.window)
    with figures.look("column"):
        assert_whole(report.plot())


def test_the_band_is_the_interval_of_the_accuracy(report):
    low, high = report.accuracy_intervals(0.9)
    z2 = 1.6448536269514722**2
    for row, *ends in zip(report.windows, low, high, strict=True):
        for end in ends:  # Wilson: (accuracy - p)^2 = z^2 p (1 - p) / n
            gap = (row["accuracy"] - end) ** 2
            assert gap == pytest.approx(z2 * end * (1 - end) / row["n"])


def test_a_monitor_draws_into_axes(report):
    import matplotlib.pyplot as plt

    ax = plt.subplots()[1]
    assert report.plot(ax) is ax
    with pytest.raises(ValueError, match="no labelled examples"):
        cal.Monitor().report().plot()


def test_estimates_are_drawn_with_their_intervals(report):
    nan = float("nan")
    estimates = [(0.8, 0.7, 0.9), (0.6, nan, nan), (nan, nan, nan)] + 9 * [(0.8, 0.75, 0.85)]
    keys = ("estimate", "estimate_low", "estimate_high")
    windows = [
        {**row, "window": f"days/{i}", **dict(zip(keys, estimate, strict=True))}
        for i, (row, estimate) in enumerate(zip(report.windows, estimates, strict=True))
    ]
    upper, lower = replace(report, windows=windows, alarm=None).plot().axes
    lines = {line.get_label(): line for line in upper.get_lines()}
    np.testing.assert_allclose(lines["estimated"].get_xdata(), [0, *range(3, 12)])
    np.testing.assert_allclose(lines["estimated"].get_ydata(), 80)
    np.testing.assert_allclose(lines["estimate withdrawn"].get_ydata(), [60, nan])
    first = next(line for line in upper.get_lines() if list(line.get_xdata()) == [0, 0])
    np.testing.assert_allclose(first.get_ydata(), [70, 90])
    assert lower.get_xticklabels()[0].get_text() == "0"  # without the folder
