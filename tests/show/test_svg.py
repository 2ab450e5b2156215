import re
from typing import Any

import numpy as np
import pytest

from calibrant.show.charts import (
    EstimatedWindow,
    Line,
    bar_chart,
    drift_chart,
    estimate_chart,
    forest_chart,
    histogram_chart,
    line_chart,
    reliability_chart,
)
from calibrant.show.charts.axes import Scale
from calibrant.show.style import tick
from tests.support.markup import SVG, charts, check_inert, texts, titles

NAN = float("nan")
HOSTILE = '</title></svg><script>alert("x")</script>'
RELIABILITY: dict[str, Any] = {
    "edges": [0, 0.5, 0.75, 1],
    "confidence": [0.4, NAN, 0.9],
    "accuracy": [0.5, NAN, 0.7],
    "low": [0.3, NAN, NAN],
    "high": [0.7, NAN, NAN],
    "share": [0.2, 0, 0.8],
}
CHARTS = {
    "reliability": reliability_chart(**RELIABILITY, claim=HOSTILE, event=HOSTILE, note=HOSTILE),
    "histogram": histogram_chart([0, 0.5, 1], {HOSTILE: [0.1, NAN]}, x_label=HOSTILE),
    "line": line_chart(
        [
            Line(HOSTILE, [0, NAN, 1], [0.1, 0.2, 0.3], [NAN, 0, 0.2], [0.2, 0.3, 0.4]),
            Line("empty", [], []),
        ],
        x_label=HOSTILE,
        y_label=HOSTILE,
    ),
    "forest": forest_chart(
        [HOSTILE, "b"], [NAN, 2], [NAN, NAN], [1, NAN], label=HOSTILE, reference=1.0
    ),
    "bar": bar_chart([HOSTILE, "b"], [NAN, -1], label=HOSTILE),
    "drift": drift_chart(
        [HOSTILE, "b"], [NAN, 0.0], label=HOSTILE, limit=5, alarm=HOSTILE, log=True
    ),
    "estimates": estimate_chart(
        [
            EstimatedWindow(HOSTILE, 0.9, 0.8, 1.0, NAN),
            EstimatedWindow(HOSTILE, 0.5, NAN, NAN, 0.4),
            EstimatedWindow("not estimated", NAN, NAN, NAN, 0.7),
        ],
        label=HOSTILE,
    ),
    "one window": drift_chart(["a"], [1.0], label="e-value"),
    "nothing": line_chart([], x_label="x", y_label="y"),
    "no bins": reliability_chart([0, 1], [NAN], [NAN], [NAN], [NAN], [0]),
    "no rows": forest_chart([], [], [], [], label="ECE"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_well_formed_and_inert(name):
    (chart,) = charts(CHARTS[name])
    assert chart.tag == f"{SVG}svg"
    assert chart.attrib["role"] == "img"
    assert chart.attrib["aria-label"]
    check_inert(CHARTS[name])


@pytest.mark.parametrize("name", CHARTS)
def test_colours_are_variables_and_coordinates_short(name):
    (chart,) = charts(CHARTS[name])
    for element in chart.iter():
        for key in {"fill", "stroke"} & set(element.attrib):
            assert re.fullmatch(r"none|var\(--cal-\w+\)", element.attrib[key])
        for key in {"x", "y", "cx", "cy", "width", "height", "d"} & set(element.attrib):
            assert not re.search(r"\.\d\d", element.attrib[key])


@pytest.mark.parametrize("name", CHARTS)
def test_nothing_lies_outside_the_view(name):
    (chart,) = charts(CHARTS[name])
    width, height = map(float, chart.attrib["viewBox"].split()[2:])
    for element in chart.iter():
        if element.tag in (f"{SVG}circle", f"{SVG}text"):
            x, y = (float(element.attrib.get(k) or element.attrib[f"c{k}"]) for k in ("x", "y"))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_bins_are_drawn_where_their_numbers_are():
    (chart,) = charts(reliability_chart(**RELIABILITY))
    first, last = [t for t in titles(chart) if "mean" in t]
    assert first == (
        "confidence 0 % to 50 %: mean 40 %, accuracy 50 % (30 % to 70 %); 20 % of the examples"
    )
    assert "accuracy 70 %; 80 %" in last  # without an interval
    dots = [e.attrib for e in chart.iter(f"{SVG}circle")]
    left, top, right, bottom = 46, 86, 376, 386
    for dot, x, y in zip(dots, (0.4, 0.9), (0.5, 0.7), strict=True):
        assert float(dot["cx"]) == pytest.approx(left + x * (right - left), abs=0.06)
        assert float(dot["cy"]) == pytest.approx(bottom - y * (bottom - top), abs=0.06)


def test_bars_of_joined_bins_stand_at_their_mean_confidence():
    edges, means = [0, 0.1, 0.55, 1], [0.05, 0.3, 0.98]
    (chart,) = charts(reliability_chart(edges, means, means, means, means, [0.2, 0.4, 0.4]))
    bars = [e.attrib for e in chart.iter(f"{SVG}rect") if e.attrib.get("fill-opacity") == "0.6"]
    spans = [(float(b["x"]) - 46.5, float(b["width"]) + 1) for b in bars[:3]]
    expected = [(0, 33), (66, 66), (264, 66)]  # all over a narrow bin, and inside a wide one
    assert spans == [pytest.approx(span, abs=0.2) for span in expected]


def test_a_gap_reaches_from_the_accuracy_to_the_confidence():
    (chart,) = charts(reliability_chart(**RELIABILITY))
    gaps = [
        e.attrib for e in chart.iter(f"{SVG}rect") if e.attrib.get("stroke") == "var(--cal-wrong)"
    ]
    *heights, in_legend = (float(gap["height"]) for gap in gaps)
    assert heights == pytest.approx([30, 60], abs=0.06)
    assert in_legend < 10


def test_lines_are_thinned_and_keep_their_ends():
    x = np.linspace(0, 1, 50_000)
    chart = line_chart([Line("a", x, x**2)], x_label="x", y_label="y")
    assert len(chart) < 15_000
    (root,) = charts(chart)
    said = titles(root)
    assert said[1] == "a: x 0 %, y 0 %"
    assert said[-1] == "a: x 100 %, y 100 %"
    (path,) = [e.attrib["d"] for e in root.iter(f"{SVG}path") if e.attrib.get("stroke-width")]
    assert path.count("L") <= 199


def test_forest_rows_have_their_numbers_and_the_chosen_one_a_background():
    chart = forest_chart(
        ["none", "ts"], [0.2, 0.1], [0.15, 0.05], [0.25, 0.15], label="ECE", highlighted="ts"
    )
    (root,) = charts(chart)
    assert "none: ECE 20 % (15 % to 25 %)" in titles(root)
    assert {"none", "ts", "20 %", "10 %"} <= set(texts(root))
    (box,) = root.iter(f"{SVG}rect")
    dots = [e.attrib for e in root.iter(f"{SVG}circle")]
    assert float(box.attrib["y"]) < float(dots[1]["cy"]) < float(box.attrib["y"]) + 24
    assert float(dots[0]["cx"]) > float(dots[1]["cx"])


def test_the_alarm_is_drawn_at_its_window():
    chart = drift_chart(
        ["a", "b", "c"], [1, 10, 100], label="e-value", limit=20, alarm="c", log=True
    )
    (root,) = charts(chart)
    assert texts(root)[-1] == "alarm"
    dots = [float(e.attrib["cx"]) for e in root.iter(f"{SVG}circle")]
    heights = [float(e.attrib["cy"]) for e in root.iter(f"{SVG}circle")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)  # log
    (line,) = [
        e.attrib["d"]
        for e in root.iter(f"{SVG}path")
        if e.attrib.get("stroke") == "var(--cal-bad)" and "stroke-dasharray" not in e.attrib
    ]
    assert line.startswith(f"M{dots[2]:g} ")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 7, [0, 2, 4, 6]), (-0.02, 0.04, [-0.02, 0, 0.02, 0.04])],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert Scale(low, high, 0, 100).ticks() == pytest.approx(expected)


def test_ticks_of_a_logarithm_are_powers():
    assert Scale(0.5, 2e6, 0, 1, log=True).ticks() == [1, 100, 1e4, 1e6]


def test_ticks_drop_zeros_but_not_those_of_whole_numbers():
    assert [tick("{:.2f} %".format, v) for v in (2, 2.5, 10)] == ["2 %", "2.5 %", "10 %"]
    assert tick("{:.0f}".format, 100) == "100"


def test_estimates_are_bars_crosses_and_measured_dashes():
    (chart,) = charts(CHARTS["estimates"])
    *names, one, other, third, fourth = titles(chart)
    assert not names
    assert one.endswith("90 % (80 % to 100 %)")
    assert other.endswith("50 %, guarantee withdrawn")
    assert third.endswith("40 %")
    assert fourth == f"not estimated: measured {HOSTILE} 70 %"
    assert [text for text in texts(chart) if text in KINDS] == KINDS
    (measured,) = charts(estimate_chart([EstimatedWindow("a", NAN, NAN, NAN, 1.0)], label="x"))
    assert [text for text in texts(measured) if text in KINDS] == ["measured"]
    shown = [float(text.removesuffix(" %")) for text in texts(measured) if text.endswith(" %")]
    assert max(shown) == 100
    assert min(shown) >= 90


KINDS = ["estimated", "withdrawn", "measured"]
