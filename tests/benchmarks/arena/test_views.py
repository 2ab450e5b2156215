"""Views: which rows count, and the tables and files made from them."""

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.arena import views
from benchmarks.arena.__main__ import main
from benchmarks.arena.results import COLUMNS
from benchmarks.arena.statistics import Interval
from benchmarks.arena.views import View, interval_figure, write_view
from tests.support.predictions import predictions, splits


def row(method, task, nll, *, suite="s-binary", seed=0, **others):
    """A row with the columns that views read; a method that failed has no nll."""
    values = {"method": method, "task": task, "suite": suite, "seed": seed, "fingerprint": "f"}
    values |= {"dataset": task[0], "classes": 2, "n_fit": 10, "n_test": 20, "version": "1"}
    if nll is None:
        values["error"] = "bad"
    else:
        values |= {"nll": nll, "brier": 2 * nll, "ece": 0.1, "kuiper": 0.2, "accuracy": 1 - nll}
        values |= {"fit_seconds": 1.25, "apply_seconds": 0.25}
    values |= others
    return {name: str(values.get(name, "")) for name in COLUMNS}


@pytest.fixture
def rows():
    """Three methods on four tasks of three data sets and two suites."""
    values = {"a1": (1, 2, 3), "a2": (1, 3, 2), "b1": (0.2, 0.1, 0.3), "c1": (0.5, 0.5, 0.7)}
    suites = {"c1": "t-multiclass"}
    return [
        row(method, task, nll, suite=suites.get(task, "s-binary"))
        for task, cells in values.items()
        for method, nll in zip(("x", "y", "z"), cells, strict=True)
    ]


def test_the_last_row_about_the_latest_data_counts(rows):
    newer = row("x", "a1", 9.0, version="2")
    table = views.scores([*rows, newer])
    assert table.values[0].tolist() == [9, 2, 3]
    changed = row("x", "a1", 7.0, fingerprint="g")
    table = views.scores([*rows, changed])
    assert [task for _, task in table.tasks] == ["a2", "b1", "c1"]
    assert table.left_out == 1


def test_seeds_are_averaged(rows):
    again = [row("x", "a1", 3.0, seed=1), row("x", "a1", 8.0, seed=2)]
    assert views.scores([*rows, *again]).values[0].tolist() == [4, 2, 3]
    failed = row("x", "a1", None, seed=3)
    assert views.scores([*rows, *again, failed]).values[0].tolist() == [np.inf, 2, 3]


def test_suites_and_methods_are_chosen(rows):
    table = views.scores(rows, suites=["s-binary"], methods=["z", "x"])
    assert table.methods == ["z", "x"]
    np.testing.assert_array_equal(table.values, [[3, 1], [2, 1], [0.3, 0.2]])
    assert table.datasets == ["a", "a", "b"]
    with pytest.raises(ValueError, match="no task has a row of every method"):
        views.scores(rows, methods=["x", "unheard"])
    assert views.scores(rows, "Log-Loss").metric == "nll"
    with pytest.raises(ValueError, match="unknown metric 'nlll': did you mean nll"):
        views.scores(rows, "nlll")


def test_means_are_those_of_suites(rows):
    view = views.means(views.scores([*rows, row("z", "c1", None, suite="t-multiclass")]))
    assert view.headings == (
        "method",
        "s-binary (3)",
        "t-multiclass (1)",
        "mean",
        "failed",
    )
    assert view.lines == [
        ("x", "0.7333", "0.5000", "0.6167", "0"),
        ("y", "1.7000", "0.5000", "1.1000", "0"),
        ("z", "1.7667", "-", "-", "1"),
    ]
    assert view.note == "4 tasks of 3 data sets."


def test_higher_accuracy_is_better(rows):
    table = views.scores(rows, "accuracy")
    assert [line[0] for line in views.means(table).lines] == ["x", "y", "z"]
    assert [line[0] for line in views.win_table(table).lines] == ["x", "y", "z"]
    failed = views.scores([*rows, row("x", "a1", None)], "accuracy")
    assert failed.losses[0, 0] == np.inf


@pytest.mark.parametrize("make", [views.win_table, views.elo_table])
def test_methods_are_listed_from_best_to_worst(rows, make):
    table = views.scores(rows)
    view = make(table)
    assert [line[0] for line in view.lines] == ["x", "y", "z"]
    shown = [float(line[1]) for line in view.lines]
    if make is views.win_table:  # of 8 comparisons, a tie is half a win
        assert shown == [81.2, 56.2, 12.5]
    assert shown == sorted(shown, reverse=True)
    np.testing.assert_allclose(view.drawn.value, shown, atol=0.5)
    assert (view.drawn.low <= view.drawn.value).all()
    assert (view.drawn.value <= view.drawn.high).all()
    assert "4 tasks of 3 data sets" in view.note


def test_ranks_say_what_cannot_be_told_apart():
    rows = [
        row(method, f"{chr(97 + task)}1", nll)
        for task in range(20)
        for method, nll in (
            ("worst", 3 + task),
            ("best", 1 + task),
            ("near", 1 + task + task % 2 - 0.5),
        )
    ]
    view = views.rank_table(views.scores(rows))
    assert [line[0] for line in view.lines][2] == "worst"
    assert [line[2] for line in view.lines] == ["yes", "yes", ""]
    assert "p = " in view.note
    critical = 2.343 * np.sqrt(3 * 4 / (6 * 20))
    assert view.drawn is not None
    np.testing.assert_allclose(view.drawn.high - view.drawn.low, critical, rtol=1e-3)


def test_calarena_files_of_two_classes(rows, tmp_path):
    redrawn, failed = row("x", "a1", 5.0, seed=1), row("x", "a2", None)
    paths = views.write_calarena([*rows, redrawn, failed, row("ts:o=1", "d/net", 0.5)], tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in paths} == {
        *(f"s-binary/{name}.csv" for name in ("x", "y", "z", "ts-o=1")),
        *(f"t-multiclass/{name}.csv" for name in "xyz"),
    }
    lines = (tmp_path / "s-binary" / "x.csv").read_text().splitlines()
    assert lines == [
        "dataset,model,cal_size,test_size,x_brier,x_logloss,x_kuiper,x_ece-15,x_accuracy,x_time",
        "a,a1,10,20,2,1,0.2,0.1,0,1.5000",
        "b,b1,10,20,0.4,0.2,0.2,0.1,0.8,1.5000",
    ]
    with (tmp_path / "s-binary" / "ts-o=1.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert (line["dataset"], line["model"], line["ts-o=1_logloss"]) == ("d", "net", "0.5")


def test_calarena_files_of_more_classes(tmp_path):
    views.write_calarena([row("x", "c10/net", 0.5, suite="cv-multiclass", classes=10)], tmp_path)
    assert (tmp_path / "cv-multiclass" / "x.csv").read_text() == (
        "dataset,model,cal_size,test_size,n_classes,x_brier,x_logloss,x_ece-15,x_accuracy,x_time\n"
        "c10,net,10,20,10,1.0,0.5,0.1,0.5,1.5000\n"
    )


# Files.

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


def test_means_have_no_figure(tmp_path):
    with pytest.raises(ValueError, match="there is no figure of mean nll: draw wins, ranks or elo"):
        write_view(VIEW._replace(title="Mean nll", drawn=None), tmp_path / "v.png")


# The commands.


def test_commands_measure_tasks_and_show_views(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for seed, name in ((1, "a"), (3, "b")):
        both = splits(val=predictions(seed=seed), test=predictions(seed=seed + 1))
        np.savez(f"data/{name}.npz", **both)
    np.savez("data/plain.npz", **predictions(seed=5))
    words = ["data", "--workers", "1", "--methods", "none,TS,vector"]
    main([*words, "--seeds", "0", "1"])
    out, err = capsys.readouterr()
    assert "plain.npz has no split 'val'" in err
    assert out.startswith("Mean nll\n")
    assert {line.split()[1] for line in out.splitlines()[4:7]} == {"none", "ts", "vector"}
    first = Path("arena.csv").read_text()
    assert len(list(csv.DictReader(first.splitlines()))) == 2 * 2 * 3
    main(words)
    assert Path("arena.csv").read_text() == first
    capsys.readouterr()
    for view, heading in (("wins", "Win rates"), ("ranks", "Mean ranks"), ("elo", "Elo ratings")):
        views.main(["arena.csv", "--view", view])
        out = capsys.readouterr().out
        assert out.startswith(f"{heading} in nll\n")
        assert "2 tasks of 2 data sets" in out
    some = ["--suites", "data-multiclass", "--methods", "ts,none", "--metric", "brier"]
    views.main(["arena.csv", *some, "-o", "wins.md"])
    assert len(Path("wins.md").read_text().splitlines()) == 6
    views.main(["arena.csv", "--view", "ranks", "-o", "ranks.svg"])
    assert Path("ranks.svg").read_text().startswith("<?xml")
    views.main(["arena.csv", "--view", "calarena", "-o", "results"])
    files = {path.name for path in Path("results/data-multiclass").iterdir()}
    assert files == {"none.csv", "ts.csv", "vector.csv"}
    with pytest.raises(SystemExit):
        views.main(["none.csv"])
    assert "none.csv has no rows: python -m benchmarks.arena" in capsys.readouterr().err
