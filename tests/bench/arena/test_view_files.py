"""Views as files."""

import numpy as np
import pytest

from calibrant.bench.arena.statistics import Interval
from calibrant.bench.arena.view_files import interval_figure, write_view
from calibrant.bench.arena.views import View

VIEW = View(
    "Win rates",
    ("method", "win rate %", "95 % interval"),
    [("auto", "70.0", "[60.0, 80.0]"), ("ts", "30.0", "[20.0, 45.0]")],
    "Two methods.",
    Interval(np.array([70.0, 30.0]), np.array([60.0, 20.0]), np.array([80.0, 45.0])),
    "win rate %",
)


def test_markdown_and_csv(tmp_path):
    write_view(VIEW, tmp_path / "v.md")
    assert (tmp_path / "v.md").read_text() == (
        "| method | win rate % | 95 % interval |\n|---|---:|---:|\n"
        "| auto | 70.0 | [60.0, 80.0] |\n| ts | 30.0 | [20.0, 45.0] |\n\nTwo methods.\n"
    )
    write_view(VIEW, tmp_path / "v.csv")
    assert (tmp_path / "v.csv").read_text().splitlines()[1] == 'auto,70.0,"[60.0, 80.0]"'


def test_the_figure_shows_values_and_intervals_with_the_best_on_top():
    pytest.importorskip("matplotlib")
    (axes,) = interval_figure(VIEW).axes
    points, _, (bars,) = axes.containers[0]
    np.testing.assert_array_equal(points.get_xdata(), [70, 30])
    ends = [segment[:, 0].tolist() for segment in bars.get_segments()]
    assert ends == [[60, 80], [20, 45]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["auto", "ts"]
    assert axes.yaxis_inverted()
    assert (axes.get_title(), axes.get_xlabel()) == ("Win rates", "win rate %")


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_figures_are_written(tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    write_view(VIEW, tmp_path / f"v.{suffix}")
    assert (tmp_path / f"v.{suffix}").read_bytes().startswith(start)


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"v\.txt: the suffix must be one of \.md, \.csv, \.png"):
        write_view(VIEW, tmp_path / "v.txt")
    with pytest.raises(ValueError, match="there is no figure of mean nll: draw wins, ranks or elo"):
        write_view(VIEW._replace(title="Mean nll", drawn=None), tmp_path / "v.png")
    assert list(tmp_path.iterdir()) == []
