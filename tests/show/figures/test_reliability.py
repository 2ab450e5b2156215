"""Reliability diagrams draw the numbers that they are given, and leave matplotlib alone.

Artists are typed ``Any`` where the stubs of matplotlib are narrower than its objects.
"""

from typing import Any

import numpy as np
import pytest

import calibrant as cal
from tests.support.simulate import drawn, drawn_pairs

plt = pytest.importorskip("matplotlib.pyplot")
from matplotlib.collections import LineCollection  # noqa: E402
from matplotlib.colors import same_color, to_hex  # noqa: E402
from matplotlib.container import BarContainer, ErrorbarContainer  # noqa: E402

from calibrant.show import figures  # noqa: E402
from calibrant.show.style import DARK, LIGHT  # noqa: E402


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
    "reliability": lambda p, ax=None: figures.reliability_diagram(cal.metrics.reliability(**p), ax),
    "equal mass": lambda p, ax=None: figures.reliability_diagram(
        cal.metrics.reliability(**p, equal_mass=True), ax
    ),
    "smooth": lambda p, ax=None: figures.smooth_diagram(cal.metrics.smooth_reliability(**p), ax),
    "histogram": lambda p, ax=None: figures.confidence_histogram(
        cal.metrics.confidence_histogram(**p), ax
    ),
    "decisions": lambda p, ax=None: figures.decision_curve_plot(
        cal.metrics.decision_curve(**p), ax
    ),
    "risk": lambda p, ax=None: figures.risk_coverage_plot(cal.metrics.risk_coverage(**p), ax),
}


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def title_of(axes):
    """Title of the legend."""
    return axes.get_legend().get_title().get_text()


def name_of(axes):
    """Title of a panel, without the error below it."""
    return axes.get_title(loc="left").partition("\nECE")[0]


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
@pytest.mark.parametrize(("style", "colours"), [("default", LIGHT), ("dark_background", DARK)])
def test_the_colours_suit_the_paper_of_the_style(pairs, name, style, colours):
    with plt.style.context(style):
        axes = DRAW[name](pairs)
        given = DRAW[name](pairs, plt.subplots()[1])
    for one in (axes, given):  # also where the style is no longer in use
        assert same_color(one.xaxis.label.get_color(), colours.ink)
        for text in one.get_legend().get_texts():
            assert same_color(text.get_color(), colours.ink)
        shown = {to_hex(line.get_color()) for line in one.get_lines()}
        assert shown <= {colours.ink, colours.muted, colours.right, colours.wrong}


@pytest.mark.parametrize("name", DRAW)
def test_drawing_changes_no_setting_of_matplotlib(pairs, name):
    before = dict(plt.rcParams)
    DRAW[name](pairs).figure.canvas.draw()
    assert dict(plt.rcParams) == before


# Each diagram


@pytest.mark.parametrize("size", ["column", "page", "talk"])
@pytest.mark.parametrize("name", DRAW)
def test_nothing_is_clipped_at_any_size(pairs, name, size):
    with figures.look(size):
        axes = DRAW[name](pairs)
    assert_whole(axes.figure)
    assert axes.figure.get_figwidth() == {"column": 3.3, "page": 4.2, "talk": 7.0}[size]


def assert_whole(figure):
    """Everything that is drawn lies inside the figure."""
    figure.canvas.draw()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert box.x0 > -0.01
    assert box.y0 > -0.01
    assert box.x1 < width + 0.01
    assert box.y1 < height + 0.01


@pytest.mark.parametrize("size", ["column", "page"])
@pytest.mark.parametrize("name", ["reliability", "smooth"])
def test_a_legend_hides_nothing_of_a_new_figure(pairs, name, size):
    with figures.look(size):
        axes = DRAW[name](pairs)
    axes.figure.canvas.draw()
    drawn = axes.get_legend().get_window_extent()
    assert drawn.y1 < axes.xaxis.label.get_window_extent().y0 < axes.get_window_extent().y0
    assert_whole(axes.figure)


def test_a_reliability_diagram_takes_pairs_an_evaluation_or_a_curve(rng):
    logits, labels = logits_and_labels()
    heights = []
    for data in (
        cal.metrics.reliability(logits, labels),
        cal.evaluate(logits, labels, metrics=["ece"], level=None),
        cal.top_label(logits, labels),
    ):
        axes: Any = figures.reliability_diagram(data)
        heights.append(boxes(next(c for c in axes.containers if isinstance(c, BarContainer)))[:, 3])
    np.testing.assert_allclose(heights[1], heights[0])
    np.testing.assert_allclose(heights[2], heights[0])
    with pytest.raises(TypeError, match=r"got ndarray: pass calibrant.metrics.reliability\("):
        figures.reliability_diagram(*cal.top_label(logits, labels))  # type: ignore[arg-type]


@pytest.mark.parametrize("equal_mass", [False, True])
def test_the_bars_of_a_reliability_diagram_are_the_curve(pairs, equal_mass):
    curve = cal.metrics.reliability(**pairs, bins=10, equal_mass=equal_mass)
    axes: Any = figures.reliability_diagram(curve, label="model A")
    seen = np.isfinite(curve.accuracy)
    left, width = curve.edges[:-1][seen], np.diff(curve.edges)[seen]
    bars, gaps, _shares = (c for c in axes.containers if isinstance(c, BarContainer))
    expected = [left, np.zeros(seen.sum()), width, curve.accuracy[seen]]
    np.testing.assert_allclose(boxes(bars), np.transpose(expected))
    expected[1:4] = [curve.accuracy[seen], width, (curve.confidence - curve.accuracy)[seen]]
    np.testing.assert_allclose(boxes(gaps), np.transpose(expected))
    others = ["gap to confidence", "90 % interval"]
    assert legend(axes) == ["model A", *others]
    assert legend(figures.reliability_diagram(curve)) == ["accuracy", *others]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("confidence", "accuracy")
    assert axes.get_xlim() == (0, 1)


def test_the_whiskers_of_a_reliability_diagram_are_the_interval(pairs):
    curve = cal.metrics.reliability(**pairs, bins=10)
    axes: Any = figures.reliability_diagram(curve)
    seen = np.isfinite(curve.accuracy)
    (errors,) = (c for c in axes.containers if isinstance(c, ErrorbarContainer))
    points, _, (whiskers,) = errors
    assert points is not None
    np.testing.assert_allclose(points.get_xdata(), curve.confidence[seen])
    np.testing.assert_allclose(points.get_ydata(), curve.accuracy[seen])
    ends = np.array(whiskers.get_segments())[:, :, 1]
    np.testing.assert_allclose(ends, np.stack([curve.low, curve.high], 1)[seen])


def test_above_a_reliability_diagram_is_the_share_per_bin(pairs):
    curve = cal.metrics.reliability(**pairs, bins=10)
    axes: Any = figures.reliability_diagram(curve)
    shares = shares_of(axes)
    np.testing.assert_allclose(shares[:, 3], 0.14 * curve.share / curve.share.max())
    np.testing.assert_allclose(shares[:, 0], curve.edges[:-1])
    np.testing.assert_allclose(shares[:, 1], 1.04)
    assert axes.texts[0].get_text() == f"{100 * curve.share.max():.0f} %"


def shares_of(axes):
    """Boxes of the shares, which are drawn last."""
    return boxes([c for c in axes.containers if isinstance(c, BarContainer)][-1])


def test_the_error_stands_in_the_diagram_with_its_interval():
    logits, labels = logits_and_labels()
    evaluation = cal.evaluate(logits, labels, metrics=["ece"])
    value, low, high = (100 * x for x in evaluation["ece"])
    assert (
        title_of(figures.reliability_diagram(evaluation))
        == f"ECE {value:.2f} % [{low:.2f}, {high:.2f}]"
    )
    curve = cal.metrics.reliability(logits, labels)
    assert title_of(curve.plot()) == f"ECE {value:.2f} %"
    adaptive = cal.metrics.reliability(logits, labels, equal_mass=True)
    error = 100 * cal.ada_ece(logits, labels)
    assert title_of(figures.reliability_diagram(adaptive)) == f"adaptive ECE {error:.2f} %"


def test_without_a_level_there_are_no_whiskers():
    evaluation = cal.evaluate(*logits_and_labels(), metrics=["ece"], level=None)
    axes: Any = evaluation.plot()
    assert not [c for c in axes.containers if isinstance(c, ErrorbarContainer)]
    assert legend(axes) == ["accuracy", "gap to confidence"]
    assert "[" not in axes.get_legend().get_title().get_text()


def test_diagrams_side_by_side_have_one_scale(rng):
    logits, labels = drawn(rng, 600, 3)
    evaluation = cal.evaluate(logits, labels, metrics=["ece"], by=np.arange(600) % 5)
    figure: Any = evaluation.plot(most=3)
    assert len(figure.axes) == 4
    parts = [evaluation, *list(evaluation.by.values())[:3]]
    most = max(part.reliability().share.max() for part in parts)
    for ax, part in zip(figure.axes, parts, strict=True):
        shares = shares_of(ax)[:, 3]
        np.testing.assert_allclose(shares, 0.14 * part.reliability().share / most)
    names = ["all", *list(evaluation.by)[:3]]
    for ax, name, part in zip(figure.axes, names, parts, strict=True):
        ece = f"ECE {100 * part['ece'].value:.2f} %"
        assert ax.get_title(loc="left").startswith(f"{name} (n = {part.n:,})\n{ece}")
        assert ax.get_title(loc="left").endswith("]")
    (below,) = figure.legends
    assert [t.get_text() for t in below.get_texts()] == [
        *("accuracy", "gap to confidence", "90 % interval")
    ]
    assert_whole(figure)
    with figures.look("column"):
        assert_whole(evaluation.plot())
    single: Any = evaluation.plot(plt.subplots()[1])  # all examples only
    assert len(single.figure.axes) == 1


def test_names_are_drawn_as_they_are(rng):
    hostile = ["$\\frac{", "_hidden", "$a$ & <b>", "red \x1b[31m", "x" * 500, "", "ß∑→"]
    curve = cal.metrics.reliability(confidence=[0.9, 0.8], outcome=[1, 0])
    figure = figures.reliability_diagrams(dict.fromkeys(hostile, curve))
    titles = [name_of(ax) for ax in figure.axes]
    assert titles[0] == "\\$\\frac{"
    assert titles[2] == "\\$a\\$ & <b>"
    assert "\x1b" not in titles[3]
    assert max(map(len, titles)) <= 28
    assert_whole(figure)
    axes = figures.reliability_diagram(curve, label="_model $A$")
    assert legend(axes)[0] == " _model \\$A\\$"


def test_class_diagrams_show_the_worst_classes_first(rng):
    logits, labels = drawn(rng, 500, 12)
    curves = cal.metrics.reliability_by_class(logits, labels, bins=10)
    errors = cal.metrics.per_class_ece(logits, labels, bins=10)
    assert [c.number for c in curves] == np.argsort(-errors).tolist()
    np.testing.assert_allclose([c.reliability.ece.value for c in curves], np.sort(errors)[::-1])
    worst = curves[0]
    probability = np.exp(logits - logits.max(1, keepdims=True))
    probability /= probability.sum(1, keepdims=True)
    expected = cal.metrics.reliability(
        confidence=probability[:, worst.number], outcome=labels == worst.number, bins=10
    )
    for ours, theirs in zip(worst.reliability[:6], expected[:6], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    names = [f"name {k}" for k in range(12)]
    figure: Any = figures.class_diagrams(curves, names=names, most=4)
    titles = [name_of(ax) for ax in figure.axes]
    assert titles == [f"name {c.number}" for c in curves[:4]]
    assert figure.axes[-1].get_xlabel() == "P(class)"
    same = figures.class_diagrams(curves, names=["bird"] * 12, most=2)
    assert name_of(same.axes[1]) == f"bird ({curves[1].number})"


@pytest.mark.parametrize("name", ["reliability", "smooth"])
def test_the_diagonal_is_where_confidence_equals_accuracy(pairs, name):
    axes = DRAW[name](pairs)
    dashed: Any = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert len(dashed) == 1
    np.testing.assert_array_equal(dashed[0].get_xydata(), [[0, 0], [1, 1]])


def test_the_line_of_a_smooth_diagram_is_the_curve_where_there_are_examples(pairs):
    curve = cal.metrics.smooth_reliability(**pairs, points=128)
    axes: Any = figures.smooth_diagram(curve, label="model A")
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
    band = axes.collections[0]
    corners = band.get_paths()[0].vertices
    for edge in (curve.low, curve.high):
        wanted = np.stack([curve.confidence, edge], -1)[seen]
        near = np.abs(corners[None] - wanted[:, None]).max(-1).min(1)
        np.testing.assert_allclose(near, 0, atol=1e-9)
    assert legend(axes) == ["model A", "90 % band, at each point"]
    level = cal.metrics.smooth_reliability(**pairs, level=0.5).plot()
    assert legend(level)[1] == "50 % band, at each point"


def test_the_steps_of_a_histogram_are_the_shares_in_percent(pairs):
    shares = cal.metrics.confidence_histogram(**pairs, bins=12)
    axes: Any = figures.confidence_histogram(shares)
    steps = [patch.get_data() for patch in axes.patches]
    assert len(steps) == 4
    for step, expected in zip(steps, np.repeat([shares.right, shares.wrong], 2, 0), strict=True):
        np.testing.assert_allclose(step.values, 100 * expected)
        np.testing.assert_array_equal(step.edges, shares.edges)
    accuracy, confidence = (100 * np.mean(pairs[key]) for key in ("outcome", "confidence"))
    lines = [f"accuracy {accuracy:.1f} %", f"mean confidence {confidence:.1f} %"]
    assert legend(axes) == ["right", "wrong", *lines]
    assert axes.get_yscale() == "log"


@pytest.mark.parametrize("count", [1, 3])
def test_margin_diagrams_show_a_diagram_for_each_group(count):
    groups = cal.metrics.reliability_by_margin(*logits_and_labels(), margin_bins=count)
    figure: Any = figures.margin_diagrams(groups)
    figure.canvas.draw()
    assert plt.get_fignums() == [figure.number]
    assert len(figure.axes) == count
    for group, axes in zip(groups, figure.axes, strict=True):
        bars = next(c for c in axes.containers if isinstance(c, BarContainer))
        seen = np.isfinite(group.reliability.accuracy)
        np.testing.assert_allclose(boxes(bars)[:, 3], group.reliability.accuracy[seen])
        title = name_of(axes)
        assert title == f"margin {group.low:.1f} to {group.high:.1f}"


def test_titles_of_panels_are_cut_to_their_width(pairs):
    curve = cal.metrics.reliability(**pairs)
    with figures.look("column"):
        figure: Any = figures.reliability_diagrams(
            {"M" * 24: curve, "a$x$ (n = 12,345,678,901)": curve}
        )
    assert_whole(figure)
    first, second = (ax._left_title.get_window_extent() for ax in figure.axes)
    assert first.x1 < second.x0
    assert name_of(figure.axes[0]).endswith("M…")
