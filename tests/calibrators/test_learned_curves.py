"""Temperatures and changes of confidence along the margin: numbers, bounds and figures."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

from calibrant.calibrators.learned_curves import (
    MarginChange,
    MarginTemperature,
    margin_bounds,
    margin_change,
    margin_temperature,
)
from calibrant.calibrators.scaling import EnsembleTemperatureScaling, Identity, TemperatureScaling
from calibrant.calibrators.smart import SMART
from tests.support.networks import at_rate
from tests.support.simulate import drawn


@pytest.fixture(scope="module")
def data():
    """Over-confident logits, some rows with one possible class."""
    rng = np.random.default_rng(2)
    logits, labels = drawn(rng, 400, 5, 2.0, scale=4.0)
    logits[::40] = -np.inf
    logits[::40, 2] = 1.0
    labels[::40] = 2
    return logits, labels


@pytest.fixture(scope="module")
def smart(data):
    with at_rate(0.02):
        return SMART(steps=80).fit(*data)


def groups_of(logits, count):
    """Rows in order of their margins, cut into groups whose sizes differ by one at most."""
    margin = [np.sort(row)[-1] - np.sort(row)[-2] for row in logits]
    order = sorted((m, i) for i, m in enumerate(margin) if m < np.inf)
    size, larger = divmod(len(order), count)
    parts, at = [], 0
    for part in range(count):
        end = at + size + (part < larger)
        parts.append([i for _, i in order[at:end]])
        at = end
    assert at == len(order)
    return np.array(margin), parts


# Numbers


@pytest.mark.parametrize("groups", [1, 7, 30])
def test_temperatures_are_the_quantiles_of_groups_by_margin(data, smart, groups):
    logits = data[0]
    found = margin_temperature(smart, logits, bins=groups)
    margin, parts = groups_of(logits, groups)
    temperature = smart.temperature(logits)
    np.testing.assert_allclose(found.margin, [margin[p].mean() for p in parts])
    for values, share in ((found.temperature, 50), (found.low, 5), (found.high, 95)):
        np.testing.assert_allclose(values, [np.percentile(temperature[p], share) for p in parts])
    assert np.ptp(found.temperature) > 0.05 or groups == 1
    assert (found.low <= found.temperature).all()
    assert (found.temperature <= found.high).all()


@pytest.mark.parametrize("groups", [1, 7, 30])
@pytest.mark.parametrize("kind", [TemperatureScaling, EnsembleTemperatureScaling, None])
def test_changes_are_the_means_of_groups_by_margin(data, smart, groups, kind):
    logits, labels = data
    fitted = smart if kind is None else kind().fit(logits, labels)
    found = margin_change(fitted, logits, bins=groups)
    margin, parts = groups_of(logits, groups)
    change = fitted.predict_proba(logits).max(-1) - softmax(logits, -1).max(-1)
    np.testing.assert_allclose(found.margin, [margin[p].mean() for p in parts])
    np.testing.assert_allclose(found.change, [change[p].mean() for p in parts], atol=1e-12)
    assert (found.change < 0).all()  # less sure than before


def test_doing_nothing_changes_nothing(data):
    found = margin_change(Identity().fit(*data), data[0])
    np.testing.assert_array_equal(found.change, 0)
    assert (margin_temperature(Identity().fit(*data), data[0]).high == 1).all()


@pytest.mark.parametrize("curve", [margin_temperature, margin_change])
def test_there_are_thirty_groups_and_no_more_than_rows(smart, data, curve):
    assert len(curve(smart, data[0])[0]) == 30
    assert len(curve(smart, data[0][1:8])[0]) == 7
    for groups in (0, -1):
        with pytest.raises(ValueError, match=f"bins must be at least 1, got {groups}"):
            curve(smart, data[0], bins=groups)


@pytest.mark.parametrize("curve", [margin_temperature, margin_change])
def test_tokens_are_rows_and_tensors_are_arrays(smart, data, curve):
    expected = curve(smart, data[0], bins=5)
    for same in (data[0].reshape(20, 20, 5), torch.from_numpy(data[0])):
        for column, wanted in zip(curve(smart, same, bins=5), expected, strict=True):
            assert isinstance(column, np.ndarray)
            np.testing.assert_allclose(column, wanted, rtol=1e-12)
    half = curve(smart, data[0].astype(np.float16), bins=5)
    for column, wanted in zip(half, expected, strict=True):
        np.testing.assert_allclose(column, wanted, rtol=0.02, atol=1e-3)


def test_curves_of_log_odds(rng):
    odds = 3 * rng.normal(size=300)
    labels = (rng.random(300) < expit(odds / 2)).astype(int)
    fitted = TemperatureScaling().fit(odds, labels)
    size, one = np.sort(np.abs(odds)), float(fitted.temperature_)
    curve = margin_temperature(fitted, odds, bins=3)
    np.testing.assert_allclose(curve.temperature, one, rtol=1e-6)
    np.testing.assert_allclose(curve.margin, [part.mean() for part in np.array_split(size, 3)])
    change = np.array_split(expit(size / one) - expit(size), 3)
    expected = [part.mean() for part in change]
    np.testing.assert_allclose(margin_change(fitted, odds, bins=3).change, expected, atol=1e-6)


@pytest.mark.parametrize("curve", [margin_temperature, margin_change])
def test_rows_without_a_margin_have_no_groups(smart, data, curve):
    found = curve(smart, data[0][::40], bins=3)
    assert len(found.margin) == 0


def temperature_for(row, confidence):
    """The temperature that gives the top of a row a confidence, by bisection."""
    low, high = 1e-6, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        if softmax(row / middle).max() > confidence:
            low = middle
        else:
            high = middle
    return middle


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_the_temperature_lies_within_the_bounds_whatever_the_other_classes(rng, classes):
    for _ in range(60):
        margin, confidence = rng.exponential(3), rng.uniform(1.02 / classes, 0.99)
        others = -margin - rng.exponential(rng.choice([0.1, 5.0]), size=classes - 2)
        found = temperature_for(np.array([0.0, -margin, *others]), confidence)
        low, high = margin_bounds([margin], confidence, classes)
        assert low[0] * (1 - 1e-9) <= found <= high[0] * (1 + 1e-9)
        if classes == 2 and confidence > 0.5:
            assert low[0] == pytest.approx(high[0], rel=1e-12)


@pytest.mark.parametrize("confidence", [0.3, 0.5, 0.6, 0.95])
def test_both_bounds_are_attained(confidence):
    low, high = margin_bounds([2.0], confidence, classes=8)
    crowd = np.array([0.0] + [-2.0] * 7)
    assert temperature_for(crowd, confidence) == pytest.approx(low[0], rel=1e-6)
    if confidence > 0.5:
        alone = np.array([0.0, -2.0] + [-1e12] * 6)
        assert temperature_for(alone, confidence) == pytest.approx(high[0], rel=1e-6)
    else:
        assert high[0] == math.inf


def test_bounds_grow_with_the_margin_at_one_ratio():
    margin = np.array([1.0, 2.0, 10.0])
    low, high = margin_bounds(margin, [0.8, 0.8, 0.8], classes=10)
    np.testing.assert_allclose(high / low, math.log(36) / math.log(4))
    np.testing.assert_allclose(low, margin * low[0])
    each = margin_bounds(torch.tensor([1.0, 1.0]), [0.6, 0.9], classes=10)
    assert each.low[0] > each.low[1]
    assert each.high[0] > each.high[1]


def test_bounds_without_a_margin():
    low, high = margin_bounds([0.0, 0.0], [0.7, 0.4], classes=10)
    assert (*low, *high) == (0, 0, 0, math.inf)


def test_bounds_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="margin must not be negative, got -2"):
        margin_bounds([1.0, -2.0], 0.5, classes=4)
    for confidence in (0.25, 0.1, 1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="confidence must lie between 1/4 and 1, got"):
            margin_bounds([1.0, 2.0], [0.5, confidence], classes=4)


# Plots


@pytest.fixture
def plt():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    yield plt
    plt.close("all")


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def saved(axes, tmp_path):
    """Pixels of the saved picture."""
    from matplotlib.image import imread

    path = tmp_path / "plot.png"
    axes.figure.savefig(path)
    return imread(path)


@pytest.fixture
def curve():
    margin = np.array([0.5, 2.0, 6.0])
    temperature = np.array([2.0, 1.5, 0.9])
    return MarginTemperature(margin, temperature, temperature - 0.2, temperature + 0.3)


def test_the_temperature_plot_draws_its_curve(plt, curve, tmp_path):
    from calibrant.show import figures

    axes: Any = figures.temperature_plot(curve)
    line, level = axes.get_lines()
    np.testing.assert_array_equal(line.get_xydata(), np.stack([curve.margin, curve.temperature], 1))
    assert list(level.get_ydata()) == [1, 1]
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    for ends in (curve.low, curve.high):
        for point in zip(curve.margin, ends, strict=True):
            assert (np.abs(corners - point).max(-1) < 1e-9).any()
    assert axes.get_xlabel() == "margin of the top two logits"
    assert axes.get_ylabel() == "temperature"
    assert legend(axes) == ["temperature", "nine tenths of the examples", "unchanged"]
    assert legend(figures.temperature_plot(curve, label="SMART"))[0] == "SMART"
    assert np.ptp(saved(axes, tmp_path)) > 0.5


def test_the_adjustment_plot_draws_a_line_for_each_method(plt, tmp_path):
    from calibrant.show import figures

    margin = np.array([1.0, 3.0])
    changes = {
        name: MarginChange(margin, np.array([-0.1, 0.02 * i]))
        for i, name in enumerate(["ts", "smart", "odds", "blend", "auto"])
    }
    axes: Any = figures.adjustment_plot(changes)
    level, *lines = axes.get_lines()
    assert list(level.get_ydata()) == [0, 0]
    for line, curve in zip(lines, changes.values(), strict=True):
        np.testing.assert_allclose(line.get_xdata(), margin)
        np.testing.assert_allclose(line.get_ydata(), 100 * curve.change)
    assert len({line.get_linestyle() for line in lines}) == 4  # also without colours
    assert len({line.get_color() for line in lines}) == 5
    assert legend(axes) == list(changes)
    assert axes.get_xlabel() == "margin of the top two logits"
    assert axes.get_ylabel() == "change of confidence (points)"
    assert np.ptp(saved(axes, tmp_path)) > 0.5


def test_plots_go_into_the_axes_they_are_given(plt, curve):
    from calibrant.show import figures

    figure, (left, right) = plt.subplots(1, 2)
    assert figures.temperature_plot(curve, left) is left
    assert figures.adjustment_plot({"ts": MarginChange(curve.margin, curve.low)}, right) is right
    assert plt.get_fignums() == [figure.number]
    assert left.has_data()
    assert right.has_data()
