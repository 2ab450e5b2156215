"""Diagrams draw the numbers that they are given, and leave the rest of matplotlib alone.

Artists are typed ``Any`` where the stubs of matplotlib are narrower than its objects.
"""

from typing import Any

import numpy as np
import pytest

import calibrant as cal
from tests.support.simulate import drawn, drawn_pairs

plt = pytest.importorskip("matplotlib.pyplot")
from matplotlib.collections import LineCollection  # noqa: E402
from matplotlib.colors import same_color  # noqa: E402
from matplotlib.container import BarContainer, ErrorbarContainer  # noqa: E402

from calibrant import plots  # noqa: E402
from calibrant.retrain import Epoch  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    """Every test begins and ends without figures."""
    plt.close("all")
    yield
    plt.close("all")


@pytest.fixture
def pairs(rng):
    return named(drawn_pairs(rng, 500, 0.1, low=0.3))


def named(pairs):
    return dict(zip(("confidence", "outcome"), pairs, strict=True))


def logits_and_labels():
    return drawn(np.random.default_rng(0), 300, 4, 1.5)


def data(kind):
    """Confidence and outcome of one example, of right ones only, of certain ones."""
    kinds: dict[str, Any] = {
        "usual": drawn_pairs(np.random.default_rng(1), 300, 0.1),
        "one right": ([0.8], [1]),
        "one wrong": ([0.8], [0]),
        "all right": ([0.55, 0.7, 0.9, 0.9], [1, 1, 1, 1]),
        "all wrong": ([0.55, 0.7, 0.9, 0.9], [0, 0, 0, 0]),
        "certain": ([1.0, 1.0, 0.0], [1, 1, 0]),
    }
    return named(kinds[kind])


DRAW: dict[str, Any] = {
    "reliability": lambda p, ax=None: plots.reliability_diagram(cal.metrics.reliability(**p), ax),
    "equal mass": lambda p, ax=None: plots.reliability_diagram(
        cal.metrics.reliability(**p, equal_mass=True), ax
    ),
    "smooth": lambda p, ax=None: plots.smooth_diagram(cal.metrics.smooth_reliability(**p), ax),
    "histogram": lambda p, ax=None: plots.confidence_histogram(
        cal.metrics.confidence_histogram(**p), ax
    ),
    "risk": lambda p, ax=None: plots.risk_coverage_plot(cal.metrics.risk_coverage(**p), ax),
}


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def boxes(container):
    """Left, bottom, width and height of each bar."""
    return np.array([[b.get_x(), b.get_y(), b.get_width(), b.get_height()] for b in container])


# What every diagram does


@pytest.mark.parametrize("name", DRAW)
@pytest.mark.parametrize(
    "kind", ["usual", "one right", "one wrong", "all right", "all wrong", "certain"]
)
def test_every_diagram_is_drawn_for_little_and_one_sided_data(name, kind):
    axes = DRAW[name](data(kind))
    axes.figure.canvas.draw()
    assert axes.get_legend() is not None
    assert axes.get_xlabel()
    assert axes.get_ylabel()


@pytest.mark.parametrize("name", DRAW)
def test_a_diagram_without_axes_is_one_new_figure(pairs, name):
    axes = DRAW[name](pairs)
    assert plt.get_fignums() == [axes.figure.number]


@pytest.mark.parametrize("name", DRAW)
def test_a_diagram_is_drawn_into_the_axes_it_is_given(pairs, name):
    figure, (left, right) = plt.subplots(1, 2)
    plt.sca(left)
    assert DRAW[name](pairs, right) is right
    assert plt.get_fignums() == [figure.number]
    assert not left.has_data()
    assert right.has_data()
    assert plt.gca() is left


@pytest.mark.parametrize("name", DRAW)
@pytest.mark.parametrize(("style", "ink"), [("default", "black"), ("dark_background", "white")])
def test_the_ink_is_that_of_the_style(pairs, name, style, ink):
    with plt.style.context(style):
        axes = DRAW[name](pairs)
        axes.figure.canvas.draw()
        inked = [line for line in axes.get_lines() if same_color(line.get_color(), ink)]
        if name != "histogram":  # which has no line but those of its two colours
            assert inked
        assert same_color(axes.xaxis.label.get_color(), ink)
        for text in axes.get_legend().get_texts():
            assert same_color(text.get_color(), ink)


@pytest.mark.parametrize("name", DRAW)
def test_drawing_changes_no_setting_of_matplotlib(pairs, name):
    before = dict(plt.rcParams)
    DRAW[name](pairs).figure.canvas.draw()
    assert dict(plt.rcParams) == before


# Each diagram


def test_a_reliability_diagram_takes_pairs_an_evaluation_or_a_curve(rng):
    logits, labels = logits_and_labels()
    heights = []
    for data in (
        cal.metrics.reliability(logits, labels),
        cal.evaluate(logits, labels, metrics=["ece"], level=None),
        cal.top_label(logits, labels),
    ):
        axes: Any = plots.reliability_diagram(data)
        heights.append(boxes(next(c for c in axes.containers if isinstance(c, BarContainer)))[:, 3])
    np.testing.assert_allclose(heights[1], heights[0])
    np.testing.assert_allclose(heights[2], heights[0])
    with pytest.raises(TypeError, match=r"got ndarray: pass calibrant.metrics.reliability\("):
        plots.reliability_diagram(*cal.top_label(logits, labels))  # type: ignore[arg-type]


@pytest.mark.parametrize("equal_mass", [False, True])
def test_the_bars_of_a_reliability_diagram_are_the_curve(pairs, equal_mass):
    curve = cal.metrics.reliability(**pairs, bins=10, equal_mass=equal_mass)
    axes: Any = plots.reliability_diagram(curve, label="model A")
    seen = np.isfinite(curve.accuracy)
    left, width = curve.edges[:-1][seen], np.diff(curve.edges)[seen]
    bars, gaps = (c for c in axes.containers if isinstance(c, BarContainer))
    expected = [left, np.zeros(seen.sum()), width, curve.accuracy[seen]]
    np.testing.assert_allclose(boxes(bars), np.transpose(expected))
    expected[1:4] = [curve.accuracy[seen], width, (curve.confidence - curve.accuracy)[seen]]
    np.testing.assert_allclose(boxes(gaps), np.transpose(expected))
    assert legend(axes) == ["model A", "gap to confidence"]
    assert legend(plots.reliability_diagram(curve)) == ["accuracy", "gap to confidence"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("confidence", "accuracy")
    assert axes.get_xlim() == axes.get_ylim() == (0, 1)


def test_the_whiskers_of_a_reliability_diagram_are_the_interval(pairs):
    curve = cal.metrics.reliability(**pairs, bins=10)
    axes: Any = plots.reliability_diagram(curve)
    seen = np.isfinite(curve.accuracy)
    (errors,) = (c for c in axes.containers if isinstance(c, ErrorbarContainer))
    points, _, (whiskers,) = errors
    assert points is not None
    np.testing.assert_allclose(points.get_xdata(), curve.confidence[seen])
    np.testing.assert_allclose(points.get_ydata(), curve.accuracy[seen])
    ends = np.array(whiskers.get_segments())[:, :, 1]
    np.testing.assert_allclose(ends, np.stack([curve.low, curve.high], 1)[seen])


def test_the_strip_above_a_reliability_diagram_is_the_share_per_bin(pairs):
    curve = cal.metrics.reliability(**pairs, bins=10)
    axes: Any = plots.reliability_diagram(curve)
    (strip,) = axes.child_axes
    (bars,) = strip.containers
    np.testing.assert_allclose(boxes(bars)[:, 3], 100 * curve.share)
    np.testing.assert_allclose(boxes(bars)[:, 0], curve.edges[:-1])
    assert [t.get_text() for t in strip.get_yticklabels()] == [f"{100 * curve.share.max():.0f} %"]
    strip.figure.canvas.draw()
    assert strip.get_xlim() == axes.get_xlim()


@pytest.mark.parametrize("name", ["reliability", "smooth"])
def test_the_diagonal_is_where_confidence_equals_accuracy(pairs, name):
    axes = DRAW[name](pairs)
    dashed = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert len(dashed) == 1
    np.testing.assert_array_equal(dashed[0].get_xydata(), [[0, 0], [1, 1]])


def test_the_line_of_a_smooth_diagram_is_the_curve_where_there_are_examples(pairs):
    curve = cal.metrics.smooth_reliability(**pairs, points=128)
    axes: Any = plots.smooth_diagram(curve, label="model A")
    line: Any = next(c for c in axes.collections if isinstance(c, LineCollection))
    seen = curve.density > curve.density.max() / 1000
    assert not seen.all()
    points = np.stack([curve.confidence, curve.accuracy], -1)
    drawn_points = np.array(line.get_segments())
    both = seen[:-1] & seen[1:]
    np.testing.assert_allclose(drawn_points[:, 0], points[:-1][both])
    np.testing.assert_allclose(drawn_points[:, 1], points[1:][both])
    widths = np.asarray(line.get_linewidths())
    density = curve.density[:-1][both]
    assert (np.argsort(widths, kind="stable") == np.argsort(density, kind="stable")).all()
    band = next(c for c in axes.collections if c is not line)
    corners = band.get_paths()[0].vertices
    for edge in (curve.low, curve.high):
        wanted = np.stack([curve.confidence, edge], -1)[seen]
        near = np.abs(corners[None] - wanted[:, None]).max(-1).min(1)
        np.testing.assert_allclose(near, 0, atol=1e-9)
    assert legend(axes) == ["band", "model A"]


def test_the_steps_of_a_histogram_are_the_shares_in_percent(pairs):
    shares = cal.metrics.confidence_histogram(**pairs, bins=12)
    axes: Any = plots.confidence_histogram(shares)
    steps = [patch.get_data() for patch in axes.patches]
    assert len(steps) == 4
    for step, expected in zip(steps, np.repeat([shares.right, shares.wrong], 2, 0), strict=True):
        np.testing.assert_allclose(step.values, 100 * expected)
        np.testing.assert_array_equal(step.edges, shares.edges)
    assert legend(axes) == ["right", "wrong"]
    assert axes.get_yscale() == "log"


def test_the_lines_of_a_risk_coverage_plot_are_ours_no_order_and_the_best(pairs):
    outcome = pairs["outcome"]
    curve = cal.metrics.risk_coverage(**pairs)
    axes: Any = plots.risk_coverage_plot(curve, label="by margin")
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
    assert legend(axes) == ["by margin", "no order", "best order"]
    assert axes.get_xlim() == (0, 100)
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize("count", [1, 3])
def test_margin_diagrams_show_a_diagram_for_each_group(count):
    groups = cal.metrics.reliability_by_margin(*logits_and_labels(), margin_bins=count)
    figure: Any = plots.margin_diagrams(groups)
    figure.canvas.draw()
    assert plt.get_fignums() == [figure.number]
    assert len(figure.axes) == count
    for group, axes in zip(groups, figure.axes, strict=True):
        bars = next(c for c in axes.containers if isinstance(c, BarContainer))
        seen = np.isfinite(group.reliability.accuracy)
        np.testing.assert_allclose(boxes(bars)[:, 3], group.reliability.accuracy[seen])
        title = axes.child_axes[0].get_title()
        assert title == f"margin {group.low:.1f} to {group.high:.1f}"
    assert [axes.get_legend() is not None for axes in figure.axes] == [True] + [False] * (count - 1)


def test_a_diagram_can_be_saved(tmp_path, pairs):
    figure: Any = plots.reliability_diagram(cal.metrics.reliability(**pairs)).figure
    for suffix in ("png", "svg", "pdf"):
        figure.savefig(tmp_path / f"diagram.{suffix}")
        assert (tmp_path / f"diagram.{suffix}").stat().st_size > 1000


def test_the_gate_is_drawn_as_shares_of_the_examples_by_epoch():
    log = [
        {"epoch": 1, "gate_positive": 0.7, "gate_flips": float("nan"), "smoothing_lowered": 0.5},
        {"epoch": 2, "gate_positive": 0.9, "gate_flips": 0.2, "smoothing_lowered": 0.75},
    ]
    axes: Any = plots.gate_plot(log)
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert drawn["gate at +1"] == pytest.approx([70, 90])
    assert drawn["gate changed"][1] == pytest.approx(20)
    assert drawn["smoothing lowered"] == pytest.approx([50, 75])
    assert axes.lines[0].get_xdata().tolist() == [1, 2]
    with pytest.raises(ValueError, match="must be of a training with FeDLaS"):
        plots.gate_plot([{"epoch": 1, "loss": 0.5}])


def test_the_history_of_maccal_is_drawn_by_epoch():
    history = [Epoch(0.9, 0.99, 0.94, 0.1), Epoch(0.8, 0.95, 0.94, 0.2)]
    axes: Any = plots.keep_plot(history)
    drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
    np.testing.assert_allclose(drawn["keep-rate q"], [90, 80])
    np.testing.assert_allclose(drawn["confidence"], [99, 95])
    np.testing.assert_allclose(drawn["accuracy"], [94, 94])
    assert list(axes.lines[0].get_xdata()) == [1, 2]
