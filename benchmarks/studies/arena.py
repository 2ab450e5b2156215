"""Calibrators of this and of other libraries on real models: suites of the arena.

    python benchmarks/studies/arena.py DATA docs/data/arena.csv

DATA is a folder of prediction files with val and test. The suites are ``choices`` and
``smart_networks`` (files of a folder of that name), ``binary``, ``multiclass``, and ``thousand``
from 1000 classes on. Rows that the file has are not computed again. ``--suites`` and ``--seeds``
choose. Peers are installed by ``pip install probmetrics netcal venn-abers``.

    python benchmarks/studies/arena.py --tables docs/data

makes the tables of the documentation, table_arena_*.csv, its figure and the table of the README
from arena.csv in that folder.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks.arena

import numpy as np
from rows import MISSING, Rows, Table, read, write_tables
from scipy.stats import rankdata

from benchmarks.arena.methods import read_methods
from benchmarks.arena.peers import PEERS
from benchmarks.arena.results import run
from benchmarks.arena.statistics import bootstrap, win_rates
from benchmarks.arena.tasks import Task, find_tasks
from benchmarks.arena.views import Scores, View, markdown, scores
from calibrant._core.checks import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OWN = (
    *("none", "ts", "ets", "smart", "sigmoid", "beta", "isotonic", "vector"),
    *("sms", "svs", "rank_gaps", "blend", "top_and_rest", "auto"),
)
OTHERS = (
    *("sklearn:sigmoid", "sklearn:isotonic", "sklearn:temperature"),
    *("probmetrics:temp-scaling", "probmetrics:svs", "probmetrics:sms"),
    *("netcal:TemperatureScaling", "netcal:HistogramBinning"),
)
SPLINE = "spline_logistic:SplineLogistic"
KEPT, KEPT_TITLE = "auto:keep_argmax=true", "auto, keep_argmax=True"
FREE = "auto:keep_argmax=false"
SLOW = (
    *("netcal:LogisticCalibration", "netcal:BetaCalibration"),
    *("probmetrics:ivap", "venn_abers:inductive"),
)
"""Methods of peers that need minutes for a hundred classes, and hours for a thousand."""
METHODS = {
    "binary": (
        *(*OWN, KEPT, "dirichlet", "quadratic", "robust_sigmoid", "venn_abers", *OTHERS, *SLOW),
        *("probmetrics:affine-scaling", "probmetrics:quadratic-scaling", "netcal:BBQ", SPLINE),
    ),
    "multiclass": (*OWN, "dirichlet", KEPT, FREE, *OTHERS),
    "smart_networks": (*OWN, "dirichlet", KEPT, FREE, *OTHERS),
    "choices": (*OWN, "dirichlet", KEPT, FREE, *OTHERS, *SLOW),
    "thousand": (*OWN, KEPT, FREE, *OTHERS),
}
"""Methods of each suite."""
TITLES = {
    "binary": "two classes",
    "multiclass": "3 to 200 classes",
    "smart_networks": "SMART's networks",
    "choices": "multiple choice",
    "thousand": "1000 classes",
}
FOLDERS = ("choices", "smart_networks")
"""Suites that are folders of DATA."""
ON_FRONT = ("binary", "multiclass", "smart_networks", "choices")
"""Suites of the figure and of the README."""
DRAWS = 2000
FIGURE, WIDEST = "_static/arena.svg", 12.0
"""File of the figure, and the percent of log loss where it ends."""
BLUE, ORANGE = "#2f7fb8", "#d9662b"
MARKS = "<!-- arena -->\n", "<!-- end of arena -->\n"
"""Around the table in the README."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", metavar="DATA ROWS")
    parser.add_argument("--suites", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--tables", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if given.tables:
        write_pages(given.tables)
        return
    data, rows = given.paths
    tasks = tasks_by_suite(data)
    for suite in given.suites:
        methods = read_methods(" ".join(METHODS[suite]))
        run(tasks[suite], methods, rows, seeds=given.seeds, progress=say)


def say(done: int, total: int) -> None:
    print(f"\r{done} of {total} trials", end="", file=sys.stderr)


def tasks_by_suite(folder: str) -> dict[str, list[Task]]:
    found: dict[str, list[Task]] = {suite: [] for suite in METHODS}
    for task in find_tasks(folder).tasks:
        place, _, kind = task.suite.rpartition("-")
        many = kind == "multiclass" and task.read().classes >= 1000
        suite = place if place in FOLDERS else "thousand" if many else kind
        found[suite].append(dataclasses.replace(task, suite=suite))
    return found


def write_pages(folder: Path) -> None:
    """Write the tables, the figure, and the table of the README."""
    made = tables(folder)
    write_tables(folder, made)
    figure(made["table_arena_figure"]).savefig(folder.parent / FIGURE, metadata={"Date": None})
    page = folder.parent.parent / "README.md"
    before, _, rest = page.read_text("utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    table = front_table(read(folder / "arena.csv"))
    page.write_text(f"{before}{MARKS[0]}{table}{MARKS[1]}{after}", "utf-8")


def tables(folder: Path) -> dict[str, Table]:
    rows = read(folder / "arena.csv")
    made: dict[str, Table] = {f"table_arena_{name}": leaderboard(rows, name) for name in METHODS}
    made["table_arena_auto"] = auto_against_others(rows)
    made["table_arena_figure"] = beside_default(rows)
    return made


def table_of(rows: Rows, suite: str, metric: str = "nll") -> Scores:
    return scores(rows, metric, suites=[suite], methods=METHODS[suite])


def column(table: Scores, method: str) -> FloatArray:
    """The values of a method on every task."""
    return np.asarray(table.values[:, table.methods.index(method)])


def mean(table: Scores, method: str, digits: int, scale: float = 1.0) -> str:
    """The mean over tasks; a dash if the method failed on one."""
    value = scale * column(table, method).mean()
    return f"{value:.{digits}f}" if np.isfinite(value) else MISSING


def worst(table: Scores, method: str) -> str:
    """The largest value on a task, in percent; a dash if the method failed on one."""
    value = 100 * column(table, method).max()
    return f"{value:.1f}" if np.isfinite(value) else MISSING


def leaderboard(rows: Rows, suite: str) -> Table:
    """Every method of a suite by its mean log loss: means over tasks, ranks and wins."""
    figures = ("nll", "brier", "ece", "accuracy")
    nll, brier, ece, accuracy = (table_of(rows, suite, metric) for metric in figures)
    ranks = dict(zip(nll.methods, rankdata(nll.values, axis=1).mean(0), strict=True))
    wins = bootstrap(win_rates, nll.values, nll.datasets)
    rates = {name: 100 * np.array(rate) for name, *rate in zip(nll.methods, *wins, strict=True)}
    headings = "method", "log loss", "Brier", "ECE %", "worst ECE %", "accuracy %"
    table: list[Sequence[str]] = [(*headings, "mean rank", "wins %")]
    for name in by_loss(nll):
        rate, low, high = rates[name]
        table.append(
            (
                name,
                mean(nll, name, 4),
                mean(brier, name, 4),
                mean(ece, name, 2, 100),
                worst(ece, name),
                mean(accuracy, name, 2, 100),
                f"{ranks[name]:.1f}",
                f"{rate:.0f} [{low:.0f}, {high:.0f}]",
            )
        )
    return table


def by_loss(nll: Scores) -> list[str]:
    """Methods, the one with the lowest mean log loss first."""
    return [nll.methods[i] for i in np.argsort(nll.values.mean(0), kind="stable")]


def auto_against_others(rows: Rows) -> Table:
    """By how much the log loss of auto is lower than that of others, in percent."""
    table: list[Sequence[str]] = [
        ("suite", "method", "against", "models won", "log loss lower by %", "95 % interval")
    ]
    for suite in ON_FRONT:
        nll = table_of(rows, suite)
        for method in ("auto", KEPT):
            ours = column(nll, method)
            for rival in ("none", "ts", *best_single(nll)[:1], *best_of_peers(nll)):
                theirs = column(nll, rival)
                change = change_in_percent(ours, theirs, nll.datasets)
                lower, high, low = (f"{round(-end, 1) + 0.0:.1f}" for end in change)
                won = f"{(ours < theirs).sum()} of {len(ours)}"
                table.append((TITLES[suite], method, rival, won, lower, f"[{low}, {high}]"))
    return table


def best_single(nll: Scores) -> list[str]:
    """Single methods of calibrant, the best first."""
    other = (SPLINE, "auto", KEPT, FREE)
    return [m for m in by_loss(nll) if not (is_peer(m) or m in other)]


def best_of_peers(nll: Scores) -> list[str]:
    """The best method of each peer that did not fail, the best first."""
    best: dict[str, str] = {}
    for method in filter(is_peer, by_loss(nll)):
        if np.isfinite(column(nll, method)).all():
            best.setdefault(method.partition(":")[0], method)
    return list(best.values())


def is_peer(method: str) -> bool:
    library, colon, _ = method.partition(":")
    return bool(colon) and library in PEERS


class Change(NamedTuple):
    """Percent, with the ends of an interval."""

    value: float
    low: float
    high: float


def change_in_percent(ours: FloatArray, theirs: FloatArray, datasets: Sequence[str]) -> Change:
    """By how much a mean over tasks differs, with a 95 % interval of a bootstrap over data sets."""
    names, member = np.unique(datasets, return_inverse=True)
    sums = np.stack([np.bincount(member, weights=values) for values in (ours, theirs)])
    rng = np.random.default_rng(0)
    counts = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), DRAWS)
    drawn = 100 * (np.divide(*(sums @ counts.T)) - 1)
    return Change(100 * (ours.sum() / theirs.sum() - 1), *np.quantile(drawn, [0.025, 0.975]))


def beside_default(rows: Rows) -> Table:
    """By how much the log loss of some methods is above that of auto, for the figure."""
    table: list[Sequence[str]] = [("suite", "method", "log loss above auto, %", "low", "high")]
    for suite in ON_FRONT:
        nll = table_of(rows, suite)
        wanted = {"none", "ts", "auto", KEPT, *best_single(nll)[:3], *best_of_peers(nll)}
        for method in filter(wanted.__contains__, by_loss(nll)):
            ours, theirs = column(nll, "auto"), column(nll, method)
            change = change_in_percent(theirs, ours, nll.datasets)
            table.append((suite, method, *(f"{end:.2f}" for end in change)))
    return table


def figure(table: Table) -> "Figure":
    """Draw the log loss of each method beside that of auto, a panel for each suite."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "arena"  # the same file every time
    drawn = Figure(figsize=(9, 7), layout="constrained")
    for axes, suite in zip(drawn.subplots(2, 2).flat, ON_FRONT, strict=True):
        lines = [line for line in table[1:] if line[0] == suite]
        for place, (_, method, *texts) in enumerate(lines):
            draw_change(axes, place, method, Change(*map(float, texts)))
        axes.set_yticks(range(len(lines)), [label(line[1]) for line in lines])
        axes.set(title=TITLES[suite], xlim=(-WIDEST, WIDEST), ylim=(len(lines) - 0.5, -0.5))
        axes.axvline(0, color=BLUE, lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    drawn.supxlabel(
        "log loss above that of auto, %, with 95 % interval over data sets "
        "(left of the line: better than auto)",
        fontsize="medium",
    )
    handles = [
        drawn.axes[0].plot([], [], "o", color=colour, label=name)[0]
        for name, colour in (("calibrant", BLUE), ("other libraries", ORANGE))
    ]
    drawn.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    return drawn


def label(method: str) -> str:
    return KEPT_TITLE if method == KEPT else method.replace(":", " ")


def draw_change(axes: "Axes", place: int, method: str, change: Change) -> None:
    """Draw one line of the figure; what is off the scale is written at its end."""
    if change.value > WIDEST:
        text = f"+{change.value:.0f} % \N{RIGHTWARDS ARROW}"
        axes.text(WIDEST, place, text, ha="right", va="center")
        return
    colour = ORANGE if is_peer(method) else BLUE
    axes.plot([change.low, change.high], [place, place], color=colour, lw=1.5)
    axes.plot(change.value, place, "o", color=colour)


def front_table(rows: Rows) -> str:
    """The table of the README: figures of the default, and of what it is compared with."""
    lines = []
    for suite in ON_FRONT:
        nll, brier, ece = (table_of(rows, suite, metric) for metric in ("nll", "brier", "ece"))
        peer = best_of_peers(nll)[0]
        methods = ["none", "ts", peer, "auto", KEPT]
        cells = [
            f"{mean(nll, m, 3)} / {mean(brier, m, 3)} / {mean(ece, m, 1, 100)}" for m in methods
        ]
        cells[2] += f" ({label(peer)})"
        lines.append((f"{TITLES[suite]}, {len(nll.tasks)} models", *cells))
    headings = "log loss / Brier / ECE %", "none", "ts", "best peer", "auto", KEPT_TITLE
    return markdown(View("", headings, lines, "")).rstrip("\n") + "\n"


if __name__ == "__main__":
    main()
