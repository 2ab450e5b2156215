"""Figures of decisions draw their curves, the chosen threshold, and the sizes of sets."""

from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant.show import figures
from tests.show.figures.test_reliability import assert_whole, legend
from tests.support.simulate import drawn, drawn_pairs
from tests.support.thresholds import error_threshold


@pytest.fixture
def pairs(rng):
    return dict(zip(("confidence", "outcome"), drawn_pairs(rng, 500, 0.1, low=0.3), strict=True))


def test_the_lines_of_a_risk_coverage_plot_are_ours_no_order_and_the_best(pairs):
    outcome = pairs["outcome"]
    curve = cal.metrics.risk_coverage(**pairs)
    axes: Any = curve.plot(label="by margin")
    ours, flat, best = axes.get_lines()
    np.testing.assert_allclose(ours.get_xdata(), 100 * curve.coverage)
    np.testing.assert_allclose(ours.get_ydata(), 100 * curve.risk)
    wrong = 100 * (~outcome).mean()
    np.testing.assert_allclose(flat.get_ydata(), wrong)
    # an oracle puts every wrong answer last
    oracle = cal.metrics.risk_coverage(
        confidence=outcome * 0.5 + np.linspace(0.1, 0.2, 500), outcome=outcome
    )
    expected = np.interp(best.get_xdata(), 100 * oracle.coverage, 100 * oracle.risk)
    np.testing.assert_allclose(best.get_ydata(), expected, atol=0.2)
    interval = "90 % interval, at each point"
    assert legend(axes) == ["by margin", interval, "no order", "best order"]
    assert axes.get_xlim() == (0, 100)
    assert axes.get_ylim()[0] == 0


def test_several_curves_are_drawn_by_their_names(pairs):
    curve = cal.metrics.risk_coverage(**pairs)
    axes: Any = figures.risk_coverage_plot({"before": curve, "after": curve})
    assert legend(axes) == ["before", "after"]
    assert len({line.get_color() for line in axes.get_lines()}) == 2


def test_a_threshold_close_to_one_is_told_from_it(pairs):
    limit = error_threshold(0.999991, 0.1, 0.0, 0.1, 500, 0.1, 0.95)
    drawn_figure = figures.threshold_plot(cal.metrics.risk_coverage(**pairs), limit=limit)
    assert drawn_figure.axes[0].get_title(loc="left") == "threshold 99.9991 %"
    assert repr(limit).startswith("Threshold(0.99999100: accepts")


def test_a_curve_without_intervals_has_no_band(pairs):
    curve = cal.metrics.risk_coverage(**pairs).without_intervals()
    axes: Any = curve.plot()
    assert legend(axes) == ["by confidence", "no order", "best order"]
    lower: Any = figures.threshold_plot(curve).axes[1]
    assert legend(lower) == ["wrong among these"]
    assert np.isfinite([*axes.get_ylim(), *lower.get_ylim()]).all()


def test_intervals_of_the_risk_are_wilsons(pairs):
    """At the z that 80 % has: roots of (risk - p)^2 = z^2 p (1 - p) / n."""
    curve = cal.metrics.risk_coverage(**pairs, level=0.8)
    z2, n = 1.2815515655446004**2, 500 * curve.coverage
    for end in (curve.low, curve.high):
        np.testing.assert_allclose((curve.risk - end) ** 2, z2 * end * (1 - end) / n, atol=1e-12)
    assert (curve.low <= curve.risk).all()
    assert (curve.risk <= curve.high).all()


@pytest.mark.parametrize("max_error", [0.2, 0.001])
def test_a_threshold_is_marked_in_its_curve(pairs, max_error):
    limit = error_threshold(0.75, 0.6, 0.15, 0.19, 500, max_error, 0.95)
    if max_error < 0.01:
        limit = limit._replace(threshold=np.inf)
    figure: Any = limit.plot(**pairs)
    upper, lower = figure.axes
    curve = cal.metrics.risk_coverage(**pairs)
    answered, wrong = upper.get_lines()[0], lower.get_lines()[0]
    np.testing.assert_allclose(answered.get_ydata(), 100 * curve.coverage)
    np.testing.assert_allclose(wrong.get_ydata(), 100 * curve.risk)
    odds = np.log(curve.threshold / (1 - curve.threshold))
    np.testing.assert_allclose(wrong.get_xdata(), odds)
    title = upper.get_title(loc="left")
    if max_error > 0.01:
        assert title == "threshold 75 %"
        kept = pairs["confidence"] >= 0.75
        answered, error = 100 * kept.mean(), 100 * (1 - pairs["outcome"][kept].mean())
        said = [f"answer {answered:.1f} %", f"error {error:.2f} %"]
        assert [ax.texts[0].get_text() for ax in figure.axes] == said
        point = [[pytest.approx(np.log(3)), pytest.approx(answered)]]
        assert upper.get_lines()[-1].get_xydata().tolist() == point
    else:
        assert title == "no threshold keeps the error at 0.1 %"
    with figures.look("column"):
        assert_whole(limit.plot(**pairs))


@pytest.mark.parametrize("classes", [4, 60])
def test_the_bars_of_sets_are_their_sizes(rng, classes):
    logits, labels = drawn(rng, 400, classes)
    fitted = cal.conformal(logits, labels, coverage=0.8)
    members = fitted.sets(logits)
    sizes = fitted.sizes(logits, labels)
    number = members.sum(1)
    held = members[np.arange(400), labels]
    for size, share, covered in zip(*sizes[:3], strict=True):
        assert share == pytest.approx((number == size).mean())
        assert covered == pytest.approx(((number == size) & held).mean())
    axes: Any = fitted.plot(logits, labels)
    right, missed = axes.containers
    drawn_share = sum(bar.get_height() for bar in [*right, *missed])
    assert drawn_share == pytest.approx(100)
    assert sum(bar.get_height() for bar in missed) == pytest.approx(100 * (1 - held.mean()))
    title = axes.get_legend().get_title().get_text()
    assert f"covered {100 * held.mean():.1f} %, guaranteed 80 %" in title
    assert_whole(axes.figure)
    (unknown,) = fitted.plot(logits).containers
    assert sum(bar.get_height() for bar in unknown) == pytest.approx(100)


@pytest.mark.parametrize(
    "curve",
    [
        *(cal.metrics.reliability, cal.metrics.smooth_reliability, cal.metrics.risk_coverage),
        *(cal.metrics.confidence_histogram, cal.metrics.decision_curve),
    ],
)
def test_results_draw_into_the_axes_they_are_given(pairs, curve):
    plt = pytest.importorskip("matplotlib.pyplot")
    sets = cal.conformal(np.eye(3), [0, 1, 2], coverage=0.5)
    for result in (curve(**pairs), sets.sizes(np.eye(3))):
        _, (left, right) = plt.subplots(1, 2)
        assert result.plot(right) is right
        assert right.has_data()
        assert not left.has_data()
