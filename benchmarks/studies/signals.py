"""Signals of graded answers: as they are, by maps of their own, and combined.

    python benchmarks/studies/signals.py ANSWERS > docs/data/signals.csv

ANSWERS is a folder of files SET.MODEL.jsonl with the material of each answer (token_probs, samples,
stated, judges or signals) and whether it was right. Each file is split into halves five times;
everything is fitted on the first half and measured on the second. One row for each file and
method, means over the splits: ``raw`` signals, each with a ``beta`` map, the geometric mean also
with Platt's and isotonic maps, ours and those of scikit-learn, and the combinations of the five
aggregates of token probabilities (``aggregates``) and of all signals (``all``): ``combined`` is
SignalCalibrator, ``logistic regression`` is scikit-learn's with its defaults on standardised
log-odds. Raw figures are of the answers that have the signal. Where uqlm and lm-polygraph are
installed, so are their ways to probabilities.

    python benchmarks/studies/signals.py --formulas > docs/data/signals_formulas.csv

compares the formulas of signals with those of uqlm and lm-polygraph on the same material.

    python benchmarks/studies/signals.py --tables docs/data

makes the tables of the documentation from signals.csv and, for the answers of asked.py,
signals_asked.csv in that folder.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import signals_peers as peers
from rows import Rows, read, write_tables
from scipy.special import logit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import calibrant as cal
from calibrant.llm import AnswerCalibrator, SignalCalibrator, answer_confidence, signals_of
from calibrant.llm.answers.confidence import AGGREGATORS
from calibrant.llm.answers.rows import AnswerRows, read_answers
from calibrant.llm.answers.signals import signal_values
from calibrant.workflows.evaluate_answers import SUREST

SPLITS = 5
FIGURES = ("ece", "nll", "brier", "auroc")
COLUMNS = ("set", "model", "n", "accuracy", "signal", "method", *FIGURES)
USUAL, COMBINED = ("geometric", "beta"), ("all", "combined")
"""The default map of answers, which the others are compared with, and that of all signals."""
Table = list[tuple[str, ...]]
Signals = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("answers", nargs="?", type=Path)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--formulas", action="store_true")
    parser.add_argument("--stated-scale", type=float, default=1, help="of numbers without a sign")
    given = parser.parse_args()
    if given.tables:
        write_tables(given.tables, tables(given.tables))
    elif given.formulas:
        csv.writer(sys.stdout, lineterminator="\n").writerows(peers.formulas())
    elif given.answers is None:
        parser.error("a folder of answers is wanted, or --tables FOLDER, or --formulas")
    else:
        study(given.answers, given.stated_scale)


# ---------------------------------------------------------------------------------- the measures


def study(folder: Path, scale: float) -> None:
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for file in sorted(folder.glob("*.jsonl")):
        writer.writerows(measured(file, scale))
        sys.stdout.flush()


def measured(file: Path, scale: float) -> Iterator[dict[str, object]]:
    answers = with_others(read_answers(file))
    answers = signals_of([{"stated_scale": scale, **row} for row in answers.rows])
    right, values = answers.grades(), signal_values(answers)
    name, model = file.stem.split(".", 1)
    about = {"set": name, "model": model, "n": len(right), "accuracy": f"{right.mean():.4f}"}
    runs: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for seed in range(SPLITS):
        first, second = np.array_split(np.random.default_rng(seed).permutation(len(right)), 2)
        train, test = ({n: x[half] for n, x in values.items()} for half in (first, second))
        groups = answers.groups[first]
        for key, chances in predictions(train, right[first], groups, test).items():
            runs[key].append(figures(chances, right[second]))
    for (signal, method), found in runs.items():
        means = {key: f"{statistics.fmean(run[key] for run in found):.4f}" for key in found[0]}
        yield {**about, "signal": signal, "method": method, **means}


def with_others(answers: AnswerRows) -> AnswerRows:
    """Add signals from elsewhere: the entropy of the tokens, and their probabilities with heads."""
    rows = []
    for row in answers.rows:
        more = {
            f"geometric, {head} head": float(answer_confidence([row[f"token_probs_{head}"]])[0])
            for head in ("global", "linear")
            if f"token_probs_{head}" in row
        }
        if row.get("token_entropy"):
            more["entropy"] = float(np.exp(-np.mean(row["token_entropy"])))
        rows.append({**row, "signals": {**more, **row.get("signals", {})}})
    return AnswerRows(answers.places, rows)


def predictions(
    train: Signals, right: np.ndarray, groups: np.ndarray, test: Signals
) -> dict[tuple[str, str], np.ndarray]:
    """Chances of the second half by signal and method, which were fitted to the first half."""
    chances = {(name, "raw"): values for name, values in test.items()}
    chances |= {(name, "beta"): mapped(train[name], right, test[name]) for name in test}
    if "geometric" in test:
        data = train["geometric"], right, test["geometric"]
        chances["geometric", "Platt"] = mapped(*data, "sigmoid")
        chances["geometric", "isotonic"] = mapped(*data, "isotonic")
        curve = IsotonicRegression(out_of_bounds="clip").fit(data[0], right)
        chances["geometric", "isotonic (scikit-learn)"] = curve.predict(data[2])
        chances["geometric", "Platt (scikit-learn)"] = platt(*data)
    sets = {"aggregates": [name for name in AGGREGATORS if name in test], "all": [*test]}
    for title, names in sets.items():
        if len(names) > 1:
            both = [{name: half[name] for name in names} for half in (train, test)]
            fitted = SignalCalibrator().fit(both[0], right, groups=groups)
            chances[title, "combined"] = fitted.predict(both[1])
            if title == "aggregates":
                chances[title, "logistic regression"] = regression(both[0], right, both[1])
    # the others take no missing values
    whole = [n for n in train if not any(np.isnan(half[n]).any() for half in (train, test))]
    both = [{name: half[name] for name in whole} for half in (train, test)]
    for name, rival in peers.rivals().items():
        chances["all", name] = rival(both[0], right, both[1])
    return chances


def mapped(
    train: np.ndarray, right: np.ndarray, test: np.ndarray, stage: str = "beta"
) -> np.ndarray:
    """Chances by a map of one signal; an answer without it has the share of right ones."""
    has, new = ~np.isnan(train), ~np.isnan(test)
    fitted = AnswerCalibrator(stage=stage).fit(train[has], right[has])
    chances = np.full(len(test), right.mean())
    chances[new] = fitted.predict(test[new])
    return chances


def platt(train: np.ndarray, right: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Platt's map of scikit-learn, with his priors, of log-odds."""

    class LogOdds(ClassifierMixin, BaseEstimator):
        """Says how sure an answer is; there is nothing to learn but the classes."""

        def fit(self, _: np.ndarray, right: np.ndarray) -> LogOdds:
            self.classes_ = np.unique(right)
            return self

        def predict(self, confidence: np.ndarray) -> np.ndarray:
            return self.decision_function(confidence) > 0

        def decision_function(self, confidence: np.ndarray) -> np.ndarray:
            return logit(np.clip(confidence[:, 0], SUREST, 1 - SUREST))

    fitted = CalibratedClassifierCV(LogOdds(), method="sigmoid", ensemble=False)
    return np.asarray(fitted.fit(train[:, None], right).predict_proba(test[:, None])[:, 1])


def regression(train: Signals, right: np.ndarray, test: Signals) -> np.ndarray:
    before, after = (
        logit(np.clip(np.stack([*half.values()], axis=1), SUREST, 1 - SUREST))
        for half in (train, test)
    )
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(before, right)
    return np.asarray(fitted.predict_proba(after)[:, 1])


def figures(confidence: np.ndarray, correct: np.ndarray) -> dict[str, float]:
    has = ~np.isnan(confidence)  # of a raw signal
    confidence, correct = confidence[has], correct[has]
    likelihood = np.maximum(np.where(correct, confidence, 1 - confidence), 1e-12)
    return {
        "ece": cal.ece(confidence=confidence, outcome=correct),
        "nll": -float(np.log(likelihood).mean()),
        "brier": float(((confidence - correct) ** 2).mean()),
        "auroc": cal.auroc(confidence=confidence, outcome=correct),
    }


# ------------------------------------------------------------------------------------ the tables


def tables(folder: Path) -> dict[str, Table]:
    published, asked = read(folder / "signals.csv"), read(folder / "signals_asked.csv")
    return {
        "table_signals": by_method(published),
        "table_signals_files": by_file(published),
        "table_signals_asked": by_method(asked),
    }


def by_method(rows: Rows) -> Table:
    """Means over the files, and the difference to the default map with its interval."""
    headings = ("signal", "method", "ECE %", "log loss", "Brier", "AUROC %", "log loss, less")
    table: Table = [headings]
    reference = by_files(rows, *USUAL)
    for signal, method in dict.fromkeys((row["signal"], row["method"]) for row in rows):
        files = by_files(rows, signal, method)
        mean = {key: statistics.fmean(float(row[key]) for row in files.values()) for key in FIGURES}
        gains = [float(reference[at]["nll"]) - float(row["nll"]) for at, row in files.items()]
        table.append(
            (
                *(signal, method, f"{100 * mean['ece']:.1f}", f"{mean['nll']:.3f}"),
                *(f"{mean['brier']:.3f}", f"{100 * mean['auroc']:.1f}", with_interval(gains)),
            )
        )
    return table


def by_files(rows: Rows, signal: str, method: str) -> dict[tuple[str, str], dict[str, str]]:
    chosen = [row for row in rows if (row["signal"], row["method"]) == (signal, method)]
    return {(row["set"], row["model"]): row for row in chosen}


def with_interval(gains: list[float]) -> str:
    """The mean over the files with a 90 % interval, of files drawn again."""
    rng = np.random.default_rng(0)
    means = rng.choice(gains, size=(4000, len(gains))).mean(1)
    low, high = np.quantile(means, [0.05, 0.95])
    return f"{statistics.fmean(gains):+.3f} ({low:+.3f} to {high:+.3f})"


def by_file(rows: Rows) -> Table:
    """The default map and the combination, file by file."""
    table: Table = [
        (
            *("set", "model", "n", "right %", "AUROC % geometric", "AUROC % combined"),
            *("log loss geometric", "log loss combined"),
        )
    ]
    usual, combined = (by_files(rows, *name) for name in (USUAL, COMBINED))
    for at, row in usual.items():
        both = (row, combined[at])
        table.append(
            (
                *(*at, row["n"], f"{100 * float(row['accuracy']):.1f}"),
                *(f"{100 * float(one['auroc']):.1f}" for one in both),
                *(f"{float(one['nll']):.3f}" for one in both),
            )
        )
    return table


if __name__ == "__main__":
    main()
