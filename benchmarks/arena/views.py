"""Views of the arena's rows: tables of means, wins, ranks and Elo, and CalArena's files.

python -m benchmarks.arena.views arena.csv
python -m benchmarks.arena.views arena.csv --view ranks --metric brier -o ranks.png
python -m benchmarks.arena.views arena.csv --view calarena -o results
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.arena import statistics
from benchmarks.arena.methods import split_names
from benchmarks.arena.results import FIGURES, read_rows
from benchmarks.arena.statistics import Interval
from calibrant._core.checks import FloatArray
from calibrant._core.messages import plain_name, unknown_name
from calibrant.metrics.registry import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, str]
HIGHER_IS_BETTER = ("accuracy",)


@dataclass(frozen=True)
class Scores:
    """A metric of every method on every task, the mean over its seeds.

    ``tasks`` are those as (suite, task) on which every method was run, ``datasets`` the data set of
    each, and ``left_out`` is the number of the others. ``values`` (tasks, methods) are infinite
    where a method failed, or -infinite if higher is better.
    """

    metric: str
    tasks: list[tuple[str, str]]
    datasets: list[str]
    methods: list[str]
    values: FloatArray
    left_out: int = 0

    @property
    def losses(self) -> FloatArray:
        """The values such that lower is better."""
        return -self.values if self.metric in HIGHER_IS_BETTER else self.values


class View(NamedTuple):
    """A table with a line of explanation, and what its figure shows if it has one.

    ``drawn`` has a value for each line, with the ends of its interval, and ``axis`` says what they
    are.
    """

    title: str
    headings: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    note: str
    drawn: Interval | None = None
    axis: str = ""


def current_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the last row for each task, method and seed, about the latest state of its task."""
    kept = {tuple(r[name] for name in ("suite", "task", "method", "seed")): r for r in rows}
    latest = {(row["suite"], row["task"]): row["fingerprint"] for row in kept.values()}
    return [r for r in kept.values() if latest[r["suite"], r["task"]] == r["fingerprint"]]


def scores(
    rows: Iterable[Row],
    metric: str = "nll",
    *,
    suites: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
) -> Scores:
    """Return a metric as a table of tasks and methods.

    ``suites`` and ``methods`` choose some. A method that failed with any seed of a task lost it.
    """
    name = METRICS.aliases.get(plain_name(metric), plain_name(metric))
    if name not in FIGURES:
        raise unknown_name("metric", metric, FIGURES)
    failed = -math.inf if name in HIGHER_IS_BETTER else math.inf
    cells: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    datasets: dict[tuple[str, str], str] = {}
    for row in current_rows(rows):
        if row["suite"] in (suites or [row["suite"]]):
            task = row["suite"], row["task"]
            datasets[task] = row["dataset"]
            cells[task][row["method"]].append(float(row[name]) if row[name] else failed)
    names = list(methods or dict.fromkeys(m for cell in cells.values() for m in cell))
    tasks = [task for task, cell in cells.items() if all(method in cell for method in names)]
    if not tasks:
        raise ValueError("no task has a row of every method: choose suites or methods, or run more")
    values = np.array([[np.mean(cells[task][method]) for method in names] for task in tasks])
    chosen = [datasets[task] for task in tasks]
    return Scores(name, tasks, chosen, names, values, len(cells) - len(tasks))


def means(table: Scores) -> View:
    """Return the mean of each suite, and over suites, with the number of failures."""
    members = np.array([suite for suite, _ in table.tasks])
    blocks = {suite: table.values[members == suite] for suite in dict.fromkeys(members.tolist())}
    means = np.stack([block.mean(0) for block in blocks.values()], -1)  # (methods, suites)
    failures = np.isinf(table.values).sum(0)
    total = means.mean(1)
    order = np.argsort(-total if table.metric in HIGHER_IS_BETTER else total, kind="stable")

    def shown(value: float) -> str:
        return f"{value:.4f}" if math.isfinite(value) else "-"

    lines = [
        (table.methods[i], *map(shown, means[i]), shown(total[i]), str(failures[i])) for i in order
    ]
    counted = [f"{suite} ({len(block)})" for suite, block in blocks.items()]
    headings = ("method", *counted, "mean", "failed")
    return View(f"Mean {table.metric}", headings, lines, _tasks_note(table))


def win_table(table: Scores) -> View:
    """Return win rates in percent with intervals, from best to worst."""
    rates = statistics.bootstrap(statistics.win_rates, table.losses, table.datasets)
    note = f"Share of the other methods that a method beats in {table.metric}; a tie is half a win."
    percent = Interval(*(100 * values for values in rates))
    return _interval_view(table, "Win rates", "win rate %", ".1f", percent, note)


def elo_table(table: Scores) -> View:
    """Return Elo ratings with intervals, from best to worst."""
    elo = statistics.bootstrap(statistics.bradley_terry, table.losses, table.datasets, draws=200)
    note = (
        f"Bradley-Terry ratings from the wins in {table.metric}, with mean 1000; 400 points more "
        "are odds of 10 to 1."
    )
    return _interval_view(table, "Elo ratings", "Elo", ".0f", elo, note)


def _interval_view(
    table: Scores, title: str, name: str, form: str, interval: Interval, note: str
) -> View:
    order = np.argsort(-interval.value, kind="stable")
    drawn = Interval(*(values[order] for values in interval))
    texts = ((f"{v:{form}}", f"[{a:{form}}, {b:{form}}]") for v, a, b in zip(*drawn, strict=True))
    lines = [(table.methods[i], *cells) for i, cells in zip(order, texts, strict=True)]
    note = f"{note} 95 % intervals by bootstrap over data sets. {_tasks_note(table)}"
    axis = f"{name}, with 95 % interval over data sets"
    headings = ("method", name, "95 % interval")
    return View(f"{title} in {table.metric}", headings, lines, note, drawn, axis)


def rank_table(table: Scores) -> View:
    """Return mean ranks, from best to worst, and the critical difference.

    In the figure the intervals of two methods overlap unless their ranks differ by more than it.
    """
    ranks = statistics.mean_ranks(table.losses, table.datasets)
    order = np.argsort(ranks.mean, kind="stable")
    mean, half = ranks.mean[order], ranks.critical / 2
    lines = [
        (table.methods[i], f"{rank:.2f}", "yes" if rank - mean[0] < ranks.critical else "")
        for i, rank in zip(order, mean, strict=True)
    ]
    note = (
        f"Ranks in {table.metric}, 1 is best, averaged over data sets. Friedman's test: "
        f"chi-squared {ranks.statistic:.1f}, p = {ranks.p_value:.2g}. Methods whose mean ranks "
        f"differ by less than {ranks.critical:.2f} cannot be told apart (Nemenyi, 5 %). "
        f"{_tasks_note(table)}"
    )
    headings = ("method", "mean rank", "as good as the best")
    drawn = Interval(mean, mean - half, mean + half)
    axis = "mean rank\n(methods differ where bars do not overlap)"
    return View(f"Mean ranks in {table.metric}", headings, lines, note, drawn, axis)


VIEWS: dict[str, Callable[[Scores], View]] = {
    "means": means,
    "wins": win_table,
    "ranks": rank_table,
    "elo": elo_table,
}
"""Tables by name."""


def _tasks_note(table: Scores) -> str:
    text = f"{len(table.tasks)} tasks of {len(set(table.datasets))} data sets."
    if table.left_out:
        text += f" {table.left_out} tasks on which some method was not run are left out."
    return text


def markdown(view: View) -> str:
    """Return a table in Markdown, with its note below."""
    rule = "|".join(["---", *["---:"] * (len(view.headings) - 1)])
    rows = [" | ".join(cells) for cells in (view.headings, *view.lines)]
    head, *body = (f"| {row} |" for row in rows)
    return "\n".join([head, f"|{rule}|", *body, "", view.note, ""])


def interval_figure(view: View) -> Figure:
    """Draw the value of each method as a point with its interval, the best on top."""
    from matplotlib.figure import Figure

    if view.drawn is None:
        raise ValueError(f"there is no figure of {view.title.lower()}: draw wins, ranks or elo")
    value, low, high = view.drawn
    figure = Figure(figsize=(6, 1.2 + 0.28 * len(value)), dpi=150, layout="constrained")
    axes, places = figure.subplots(), np.arange(len(value))
    reach = np.abs(np.stack([low, high]) - value)
    axes.errorbar(value, places, xerr=reach, fmt="o", ms=5, capsize=3, color="#2f7fb8")
    axes.set_yticks(places, [line[0] for line in view.lines])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set(xlabel=view.axis, title=view.title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_view(view: View, path: Path) -> None:
    """Write a view as Markdown, as csv, or else as a figure, by the suffix of the path."""
    if path.suffix == ".md":
        path.write_text(markdown(view), "utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([view.headings, *view.lines])
    else:
        interval_figure(view).savefig(path)


def write_calarena(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Write ``SUITE/METHOD.csv`` for each method in the layout of CalArena's results.

    Only seed 0 counts, the split of the data. As in its results, suites of two classes have a
    column for the Kuiper statistic and none for the number of classes, the others the reverse.
    Failed trials are left out.
    """
    lines: dict[Path, list[dict[str, str]]] = defaultdict(list)
    for row in current_rows(rows):
        if row["seed"] == "0" and not row["error"]:
            name = row["method"].replace(":", "-").replace("/", "-")
            lines[folder / row["suite"] / f"{name}.csv"].append(_calarena_line(row, name))
    for path, group in lines.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, group[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(group)
    return list(lines)


def _calarena_line(row: Row, method: str) -> dict[str, str]:
    dataset, slash, model = row["task"].partition("/")
    line = {"dataset": dataset if slash else row["dataset"], "model": model or row["task"]}
    line |= {"cal_size": row["n_fit"], "test_size": row["n_test"]}
    binary = row["classes"] == "2"
    if not binary:
        line["n_classes"] = row["classes"]
    names = {"brier": "brier", "nll": "logloss", "kuiper": "kuiper", "ece": "ece-15"}
    names["accuracy"] = "accuracy"
    line |= {f"{method}_{to}": row[own] for own, to in names.items() if binary or own != "kuiper"}
    seconds = float(row["fit_seconds"]) + float(row["apply_seconds"])
    return {**line, f"{method}_time": f"{seconds:.4f}"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", help="file of python -m benchmarks.arena")
    parser.add_argument("--view", choices=[*VIEWS, "calarena"], default="wins")
    parser.add_argument("--metric", default="nll", help="the metric to compare by")
    for name in ("suites", "methods"):
        parser.add_argument(f"--{name}", type=split_names, help="with commas between; else all")
    parser.add_argument("-o", "--out", type=Path, help=".md, .csv, .png, .svg, .pdf, or a folder")
    given = parser.parse_args(arguments)
    rows: list[Any] = read_rows(given.results)
    if not rows:
        parser.error(f"{given.results} has no rows: python -m benchmarks.arena writes them")
    if given.view == "calarena":
        if given.out is None:
            parser.error("--view calarena needs a folder: name it with -o")
        write_calarena(rows, given.out)
        return
    table = scores(rows, given.metric, suites=given.suites, methods=given.methods)
    view = VIEWS[given.view](table)
    if given.out is None:
        sys.stdout.write(f"{view.title}\n\n{markdown(view)}")
    else:
        write_view(view, given.out)


if __name__ == "__main__":
    main()
