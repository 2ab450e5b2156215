"""Views of the arena's rows: tables of means, wins, ranks and Elo, and CalArena's files."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import FloatArray
from calibrant._core.messages import plain_name, unknown_name
from calibrant.bench.arena import statistics
from calibrant.bench.arena.results import FIGURES
from calibrant.bench.arena.statistics import Interval
from calibrant.metrics.registry import METRICS

Row = Mapping[str, str]
HIGHER_IS_BETTER = ("accuracy",)


@dataclass(frozen=True)
class Scores:
    """A metric of every method on every task, the mean over its seeds.

    Attributes
    ----------
    metric : str
    tasks : list of (suite, task)
        Those on which every method was run.
    datasets : list of str
        Data set of each task.
    methods : list of str
    values : (tasks, methods) array
        Infinite where a method failed, or -infinite if higher is better.
    left_out : int
        Number of tasks on which some method was not run.
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

    def of_suite(self, suite: str) -> FloatArray:
        """Values of the tasks of one suite."""
        return self.values[[task[0] == suite for task in self.tasks]]

    @property
    def suites(self) -> list[str]:
        """Suites of the tasks, in their order."""
        return list(dict.fromkeys(suite for suite, _ in self.tasks))


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
    blocks = [table.of_suite(suite) for suite in table.suites]
    means = np.stack([block.mean(0) for block in blocks], -1)  # (methods, suites)
    failures = np.isinf(table.values).sum(0)
    total = means.mean(1)
    order = np.argsort(-total if table.metric in HIGHER_IS_BETTER else total, kind="stable")
    counted = [f"{suite} ({len(block)})" for suite, block in zip(table.suites, blocks, strict=True)]
    lines = [
        (table.methods[i], *map(_figure, means[i]), _figure(total[i]), str(failures[i]))
        for i in order
    ]
    headings = ("method", *counted, "mean", "failed")
    return View(f"Mean {table.metric}", headings, lines, _tasks_note(table))


def win_table(table: Scores) -> View:
    """Return win rates in percent with intervals, from best to worst."""
    rates = statistics.win_rate_interval(table.losses, table.datasets)
    note = f"Share of the other methods that a method beats in {table.metric}; a tie is half a win."
    percent = Interval(*(100 * values for values in rates))
    return _interval_view(table, "Win rates", ("win rate %", ".1f"), percent, note)


def elo_table(table: Scores) -> View:
    """Return Elo ratings with intervals, from best to worst."""
    ratings = statistics.elo_interval(table.losses, table.datasets, draws=200)
    note = (
        f"Bradley-Terry ratings from the wins in {table.metric}, with mean 1000; 400 points more "
        "are odds of 10 to 1."
    )
    return _interval_view(table, "Elo ratings", ("Elo", ".0f"), ratings, note)


def _interval_view(
    table: Scores, title: str, column: tuple[str, str], found: Interval, note: str
) -> View:
    name, form = column
    order = np.argsort(-found.value, kind="stable")
    drawn = Interval(*(values[order] for values in found))
    texts = ((f"{v:{form}}", f"[{a:{form}}, {b:{form}}]") for v, a, b in zip(*drawn, strict=True))
    lines = [(table.methods[i], *cells) for i, cells in zip(order, texts, strict=True)]
    note = f"{note} 95 % intervals by bootstrap over data sets. {_tasks_note(table)}"
    axis = f"{name}, with 95 % interval over data sets"
    return View(
        f"{title} in {table.metric}", ("method", name, "95 % interval"), lines, note, drawn, axis
    )


def rank_table(table: Scores) -> View:
    """Return mean ranks, from best to worst, and the critical difference.

    In the figure the intervals of two methods overlap unless their ranks differ by more than it.
    """
    ranks = statistics.mean_ranks(table.losses, table.datasets)
    order = np.argsort(ranks.mean, kind="stable")
    mean, half = ranks.mean[order], ranks.critical / 2
    close = ["yes" if rank - mean[0] < ranks.critical else "" for rank in mean]
    lines = [
        (table.methods[i], f"{rank:.2f}", text)
        for i, rank, text in zip(order, mean, close, strict=True)
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


def _figure(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "-"


def _tasks_note(table: Scores) -> str:
    text = f"{len(table.tasks)} tasks of {len(set(table.datasets))} data sets."
    if table.left_out:
        text += f" {table.left_out} tasks on which some method was not run are left out."
    return text


def markdown(view: View) -> str:
    """Return a table in Markdown, with its note below.

    >>> print(markdown(View("Elo", ("method", "Elo"), [("ts", "1000")], "One task.")))
    | method | Elo |
    |---|---:|
    | ts | 1000 |
    <BLANKLINE>
    One task.
    <BLANKLINE>
    """
    rule = "|".join(["---", *["---:"] * (len(view.headings) - 1)])
    rows = [" | ".join(cells) for cells in (view.headings, *view.lines)]
    head, *body = (f"| {row} |" for row in rows)
    return "\n".join([head, f"|{rule}|", *body, "", view.note, ""])


def write_calarena(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Write ``SUITE/METHOD.csv`` for each method in the layout of CalArena's results.

    Only seed 0 counts, the split of the data. As in its results, suites of two classes have a
    column for the Kuiper statistic and none for the number of classes, the others the reverse.
    Failed trials are left out.
    """
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in current_rows(rows):
        if row["seed"] == "0" and not row["error"]:
            groups[row["suite"], row["method"]].append(row)
    return [_write_method(folder / suite, method, r) for (suite, method), r in groups.items()]


def _write_method(folder: Path, method: str, rows: Sequence[Row]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = method.replace(":", "-").replace("/", "-")
    path = folder / f"{name}.csv"
    lines = [_calarena_line(row, name) for row in rows]
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return path


def _calarena_line(row: Row, method: str) -> dict[str, str]:
    dataset, slash, model = row["task"].partition("/")
    line = {"dataset": dataset if slash else row["dataset"], "model": model or row["task"]}
    line |= {"cal_size": row["n_fit"], "test_size": row["n_test"]}
    binary = row["classes"] == "2"
    if not binary:
        line["n_classes"] = row["classes"]
    names = {"brier": "brier", "nll": "logloss", "kuiper": "kuiper", "ece": "ece-15"}
    names = {**names, "accuracy": "accuracy"}
    line |= {f"{method}_{to}": row[own] for own, to in names.items() if binary or own != "kuiper"}
    seconds = float(row["fit_seconds"]) + float(row["apply_seconds"])
    return {**line, f"{method}_time": f"{seconds:.4f}"}
