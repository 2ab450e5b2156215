"""Calibrators that are updated by a stream, beside the one that was fitted before it began.

    python benchmarks/studies/online.py -o docs/data
    python benchmarks/studies/online.py --tables docs/data

After a fit on 5000 examples, 20,000 come in windows of 500. Each window is predicted before its
labels update the calibrator, and the predictions and labels go to a monitor. The truth is known:
losses are expected ones, of the probabilities from which labels are drawn. The second form writes
the table of ``docs/guarantees.md`` from the rows.
"""

import argparse
import csv
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rows import Table, chosen, read, write_tables
from scipy.special import expit, log_softmax, softmax

import calibrant as cal

Array = NDArray[np.float64]
FIT, LENGTH, WINDOW, HALF_LIVES = 5000, 20_000, 500, (500, 2000)
COLUMNS = ("method", "drift", "half_life", "stream", "better", "gain", "alarm", "frozen_alarm")
DRIFTS = {
    "none": lambda t: np.zeros_like(t),
    "slow": lambda t: t,
    "jump at half": lambda t: np.where(t < 0.5, 0.0, 1.0),
    "back and forth": lambda t: np.sin(2 * np.pi * t) ** 2,
}
"""How far a model has drifted at each time from 0 to 1: from no drift to all of it."""


class Method(NamedTuple):
    """A method, and how it is run."""

    name: str
    classes: int  # 1 stands for log-odds
    streams: int
    calm: int  # streams without a drift, for the share of false alarms
    every: int  # windows between two updates


METHODS = {
    "`ts`": Method("ts", 10, 5, 15, 1),
    "`sigmoid`": Method("sigmoid", 1, 5, 5, 1),
    "`auto`, two classes": Method("auto", 1, 5, 5, 2),
    "`auto`, ten classes": Method("auto", 10, 2, 2, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--tables", type=Path)
    given = parser.parse_args()
    if given.out:
        with (given.out / "online.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for row in stream_rows():
                writer.writerow(row)
                file.flush()
    folder = given.tables or given.out
    if folder is None:
        parser.error("name -o FOLDER, or --tables FOLDER")
    write_tables(folder, tables(folder))


def stream_rows() -> Iterator[dict[str, object]]:
    """Rows of the first stream in all settings, then of the second, and so on."""
    warnings.simplefilter("ignore")
    settings = list(product(METHODS.items(), DRIFTS, HALF_LIVES))
    for stream in range(max(method.calm for method in METHODS.values())):
        for (title, method), drift, half_life in settings:
            if stream < (method.calm if drift == "none" else method.streams):
                row = {"method": title, "drift": drift, "half_life": half_life, "stream": stream}
                yield row | one_stream(method, drift, half_life, stream)


def one_stream(method: Method, drift: str, half_life: float, seed: int) -> dict[str, object]:
    """Share of windows with a smaller loss than frozen, the mean gain, and who raised an alarm."""
    rng = np.random.default_rng([seed, method.classes])
    time = np.linspace(0, 1, LENGTH)
    moved = np.concatenate([np.zeros(FIT), DRIFTS[drift](time)])
    logits, truth, labels = drawn(rng, moved, method.classes)
    kind, first = cal.CALIBRATORS[method.name], slice(FIT)
    frozen = kind().fit(logits[first], labels[first])
    updated = kind().update(logits[first], labels[first], half_life=half_life)
    watches = cal.Monitor(window=WINDOW), cal.Monitor(window=WINDOW)
    losses, waiting = [], FIT
    for number, start in enumerate(range(FIT, len(labels), WINDOW)):
        rows = slice(start, start + WINDOW)
        losses.append([loss(x.transform(logits[rows]), truth[rows]) for x in (updated, frozen)])
        for watch, calibrator in zip(watches, (updated, frozen), strict=True):
            watch.update(probs=calibrator.predict_proba(logits[rows]), labels=labels[rows])
        if (number + 1) % method.every == 0:
            updated.update(logits[waiting : rows.stop], labels[waiting : rows.stop])
            waiting = rows.stop
    gains = np.subtract(*np.transpose(losses)[::-1])
    alarms = (watch.alarm is not None for watch in watches)
    figures = {"better": round(float((gains > 0).mean()), 4), "gain": f"{gains.mean():.6f}"}
    return figures | dict(zip(COLUMNS[-2:], map(int, alarms), strict=True))


def drawn(rng: np.random.Generator, moved: Array, classes: int) -> tuple[Array, Array, Any]:
    """Logits of a model, probabilities of the classes, or of class 1, and labels.

    The model is twice too sure, and four times after all of the drift; with two classes its
    log-odds are also too large by 1 then.
    """
    sharpness, n = 2 * 2**moved, len(moved)
    if classes == 1:
        odds = 2 * rng.normal(size=n) - 1
        return sharpness * odds + moved, expit(odds), (rng.random(n) < expit(odds)).astype(int)
    honest = 2 * rng.normal(size=(n, classes))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    return sharpness[:, None] * honest, softmax(honest, -1), labels


def loss(logits: Array, truth: Array) -> float:
    """Mean log loss that is to be expected of logits."""
    if logits.ndim == 1:
        return float(np.mean(np.logaddexp(0, logits) - truth * logits))
    return float(-(truth * log_softmax(logits, -1)).sum(-1).mean())


def tables(folder: Path) -> dict[str, Table]:
    """Share of windows that updates improve, gains, and alarms."""
    rows = read(folder / "online.csv")
    made = [["method", "drift", "half-life", "streams", "better windows, %"]]
    made[0] += ["alarms, %", "alarms if frozen, %", "gain in log loss x 1000"]
    for title in METHODS:
        for drift in DRIFTS:
            for half_life in map(str, HALF_LIVES):
                own = chosen(rows, method=title, drift=drift, half_life=half_life)
                if not own:
                    continue
                better, gains, *alarms = (
                    np.array([float(row[name]) for row in own]) for name in COLUMNS[4:]
                )
                error = gains.std(ddof=1) / len(own) ** 0.5
                gain = f"{1000 * gains.mean():.2f}±{1000 * error:.2f}"
                shares = (f"{100 * x.mean():.0f}" for x in (better, *alarms))
                made.append([title, drift, half_life, str(len(own)), *shares, gain])
    return {"table_online": made}


if __name__ == "__main__":
    main()
