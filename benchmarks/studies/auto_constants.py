"""What the constants of auto are worth on suites that had no say in them.

    python benchmarks/studies/auto_constants.py DATA docs/data/auto_constants.csv

DATA is that of the arena. Auto is fitted with every setting of three constants: the divisor of
likelihoods, the factors of penalties that are tried, and the standard errors that a gain of
accuracy takes. A row has the mean figures of a setting on a suite.

    python benchmarks/studies/auto_constants.py --tables docs/data

makes table_auto_constants.csv: for each suite the setting with the lowest log loss on the others
(the mean of its ratios to that of the defaults), and its figures on the suite itself.
"""

import argparse
import csv
import itertools
import os
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks.arena

import numpy as np
import torch
from arena import TITLES, best_of_peers, mean, table_of, tasks_by_suite
from rows import Table, read, write_tables

from benchmarks.arena.results import figures
from benchmarks.arena.tasks import Predictions
from calibrant.calibrators import auto

NAMES = "DOUBT", "PENALTIES", "CLEAR_GAIN_IN_ERRORS"
FIGURES = "nll", "brier", "ece"


class Setting(NamedTuple):
    """Values of the constants ``NAMES``."""

    doubt: float
    penalties: tuple[float, ...]
    clear: float


SETTINGS = [
    Setting(*values)
    for values in itertools.product(
        (1.0, 2.0, 4.0),
        ((1.0,), (1.0, 0.1, 0.01), (1.0, 0.1, 0.01, 0.001, 0.0001)),
        (2.0, 3.0),
    )
]
HEADINGS = (
    *("suite", "likelihoods over", "penalties times", "standard errors", "log loss"),
    *("with the defaults", "ts", "best peer", "ECE %", "worst ECE %"),
)


def texts(setting: Setting) -> tuple[str, ...]:
    """The values as they stand in a row."""
    penalties = " ".join(f"{each:g}" for each in setting.penalties)
    return f"{setting.doubt:g}", penalties, f"{setting.clear:g}"


DEFAULT = texts(Setting(*(getattr(auto, name) for name in NAMES)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", metavar="DATA ROWS")
    parser.add_argument("--suites", nargs="+", default=list(TITLES))
    parser.add_argument("--tables", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if given.tables:
        write_tables(given.tables, tables(given.tables))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data, path = given.paths
    for suite in given.suites:
        append(Path(path), suite, [one_model(task.read()) for task in tasks_by_suite(data)[suite]])


def append(path: Path, suite: str, models: list[np.ndarray]) -> None:
    """Add the rows of a suite: means over models ``(settings, figures)``, and the largest ECE."""
    new, values = not path.exists(), np.stack(models)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(("suite", *Setting._fields, "models", *FIGURES, "worst_ece"))
        for setting, average, most in zip(SETTINGS, values.mean(0), values.max(0), strict=True):
            numbers = (f"{x:.6f}" for x in (*average, most[FIGURES.index("ece")]))
            writer.writerow((suite, *texts(setting), len(models), *numbers))


def one_model(data: Predictions) -> np.ndarray:
    """The figures of auto with each setting ``(settings, figures)`` on the test set of a model."""
    fits, known = Fits(), {}
    result = []
    for setting in SETTINGS:
        fits.install(setting)
        fitted = auto.Auto().fit(data.fit.logits, data.fit.labels)
        key = repr(fitted.get_extra_state() | {"reasons": "", "weights": weights_of(fitted)})
        if key not in known:
            found = figures(fitted.transform(data.test.logits), data.test.labels)
            known[key] = [found[name] for name in FIGURES]
        result.append(known[key])
    return np.array(result)


def weights_of(fitted: auto.Auto) -> list[float]:
    return [each.weight for each in fitted.candidates_]


class Fits:
    """Fits of candidates that settings share, and their predictions for the examples of a fold."""

    fitted, predictions = auto._Data.fitted, auto._Data.predictions

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def install(self, setting: Setting) -> None:
        """Let auto use these constants, and these fits."""
        for name, value in zip(NAMES, setting, strict=True):
            setattr(auto, name, value)
        auto._Data.fitted = lambda data, name, how: self.fit(data, name, how)
        auto._Data.predictions = lambda data, fitted: self.predict(data, fitted)

    def fit(self, data: auto._Data, name: str, how: auto._Options) -> Any:
        used = how if name in auto.PENALISED else how._replace(penalty=1.0)
        key = identity(data), name, used
        if key not in self.known:
            parts = self.known.setdefault(identity(data), [])
            context = data.context._replace(fitted=parts)
            self.known[key] = Fits.fitted(data._replace(context=context), name, used)
        return self.known[key]

    def predict(self, data: auto._Data, fitted: Any) -> Any:
        key = identity(data), id(fitted)  # every fitted one stays
        if key not in self.known:
            self.known[key] = Fits.predictions(data, fitted)
        return self.known[key]


def identity(data: auto._Data) -> tuple[int, float]:
    """Tells the folds of a model apart."""
    return len(data.records), float(data.records.margin @ np.arange(len(data.records)))


def tables(folder: Path) -> dict[str, Table]:
    """For each suite, the setting that others choose, and the log loss with it, beside others."""
    arena = read(folder / "arena.csv")
    rows: dict[str, dict[tuple[str, ...], dict[str, str]]] = defaultdict(dict)
    for row in read(folder / "auto_constants.csv"):
        rows[row["suite"]][tuple(row[name] for name in Setting._fields)] = row
    table: list[tuple[str, ...]] = [HEADINGS]
    for suite, own in rows.items():
        others = [each for name, each in rows.items() if name != suite]
        setting = min(own, key=lambda key: sum(relative_loss(each, key) for each in others))
        row, nll = own[setting], table_of(arena, suite)
        cells = (
            *(f"{float(own[key]['nll']):.4f}" for key in (setting, DEFAULT)),
            *(mean(nll, name, 4) for name in ("ts", best_of_peers(nll)[0])),
            f"{100 * float(row['ece']):.2f}",
            f"{100 * float(row['worst_ece']):.1f}",
        )
        table.append((f"{TITLES[suite]}, {row['models']} models", *setting, *cells))
    return {"table_auto_constants": table}


def relative_loss(rows: dict[tuple[str, ...], dict[str, str]], key: tuple[str, ...]) -> float:
    """The log loss of a setting on a suite, relative to that of the defaults."""
    return float(rows[key]["nll"]) / float(rows[DEFAULT]["nll"])


if __name__ == "__main__":
    main()
