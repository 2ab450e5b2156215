"""Confidence of generated answers: rules, second stages and abstention on real graded answers.

    python benchmarks/studies/answers.py ANSWERS > docs/data/answers.csv

ANSWERS is a folder of files SET.MODEL.jsonl with the probabilities of each answer's tokens and
whether it was right. Each file is split into halves twenty times. Every rule of answer_confidence
is measured on the second half, as it is and after a map that was fitted on the first. For
abstention, the map is fitted on a third of the first half, the threshold found with the other two
thirds, and the error of the answers given is counted on the second half. One row for each file,
rule and map: means over the splits, ``sd`` over them. ``over`` is the share of splits in which the
second half shows more errors than allowed, to be compared with the 5 % that are guaranteed for the
population. ``nll`` is the log loss of "right or wrong". Maps of the geometric mean are also fitted
on the first 50, 100 and 200 answers of the first half only: ``fitted``.

    python benchmarks/studies/answers.py --tables docs/data

makes the tables of the documentation, table_answers*.csv, from answers.csv in that folder.
"""

import argparse
import csv
import itertools
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rows import write_tables

import calibrant as cal
from calibrant.llm.answers.calibrator import STAGES, AnswerCalibrator
from calibrant.llm.answers.confidence import AGGREGATORS, answer_confidence
from calibrant.llm.answers.rows import Source, _token_probs_of, read_answers

SPLITS = 20
TARGETS = (0.2, 0.3)
SIZES = (50, 100, 200)
ALL = "half"
FIGURES = ("ece", "debiased_ece", "brier", "nll", "auroc")
COLUMNS = (
    *("set", "model", "n", "accuracy", "how", "stage", "fitted"),
    *FIGURES,
    "ece_sd",
    *(f"{name}{100 * t:.0f}" for t in TARGETS for name in ("error", "coverage", "over")),
)
RAW = "none"
Row = dict[str, str]
Table = list[Sequence[str]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("answers", nargs="?", type=Path)
    parser.add_argument("--tables", type=Path)
    given = parser.parse_args()
    if given.tables:
        write_tables(given.tables, tables(given.tables))
        return
    if given.answers is None:
        parser.error("a folder of answers is wanted, or --tables FOLDER")
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for file in sorted(given.answers.glob("*.jsonl")):
        writer.writerows(measured(file))
        sys.stdout.flush()


# ---------------------------------------------------------------------------------- the measures


class Graded(NamedTuple):
    """Token probabilities of answers, and whether each is right."""

    token_probs: list[np.ndarray]
    correct: np.ndarray


def measured(file: Path) -> Iterator[dict[str, object]]:
    (places, rows), (name, model) = read_answers(file), file.stem.split(".", 1)
    probs = [_token_probs_of(row, place) for place, row in zip(places, rows, strict=True)]
    graded = Graded(probs, read_answers(file).grades())
    about = {"set": name, "model": model, "n": len(graded.correct)}
    about["accuracy"] = f"{graded.correct.mean():.4f}"
    for how in AGGREGATORS:
        for stage in (RAW, *STAGES):
            runs = [one_split(graded, how, stage, seed) for seed in range(SPLITS)]
            yield {**about, "how": how, "stage": stage, "fitted": ALL, **summed_up(runs)}
    for size, stage in itertools.product(SIZES, STAGES):
        if size <= len(graded.correct) // 2:
            runs = [few(graded, stage, size, seed) for seed in range(SPLITS)]
            found = {"stage": stage, "fitted": size, **means(runs)}
            yield {**about, "how": "geometric", **found}


def few(graded: Graded, stage: str, size: int, seed: int) -> dict[str, float]:
    """Figures of a map that was fitted on some answers of the first half."""
    order = np.random.default_rng(seed).permutation(len(graded.correct))
    first, test = np.array_split(order, 2)
    mapped = confidences(graded, "geometric", stage, first[:size], test)
    return figures(mapped, graded.correct[test])


def one_split(graded: Graded, how: str, stage: str, seed: int) -> dict[str, float]:
    order = np.random.default_rng(seed).permutation(len(graded.correct))
    first, test = np.array_split(order, 2)
    third = len(first) // 3
    found = figures(confidences(graded, how, stage, first, test), graded.correct[test])
    held, new = (confidences(graded, how, stage, first[:third], x) for x in (first[third:], test))
    for target in TARGETS:
        limit = cal.threshold(
            confidence=held, outcome=graded.correct[first[third:]], max_error=target
        ).threshold
        given = graded.correct[test][new >= limit]
        found[f"given{100 * target:.0f}"] = given.size
        found[f"wrong{100 * target:.0f}"] = int((~given).sum())
    return {**found, "test": test.size}


def confidences(
    graded: Graded, how: str, stage: str, fitted_on: np.ndarray, at: np.ndarray
) -> np.ndarray:
    seen, new = (
        answer_confidence([graded.token_probs[i] for i in some], how) for some in (fitted_on, at)
    )
    if stage == RAW:
        return new
    calibrator = AnswerCalibrator(stage=stage)
    calibrator.fit(seen, graded.correct[fitted_on], source=Source(how))
    return calibrator.predict(new)


def figures(confidence: np.ndarray, correct: np.ndarray) -> dict[str, float]:
    return {
        "ece": cal.ece(confidence=confidence, outcome=correct),
        "debiased_ece": cal.debiased_ece(confidence=confidence, outcome=correct),
        "brier": float(((confidence - correct) ** 2).mean()),
        "nll": -float(
            np.log(np.maximum(np.where(correct, confidence, 1 - confidence), 1e-12)).mean()
        ),
        "auroc": cal.auroc(confidence=confidence, outcome=correct),
    }


def means(runs: list[dict[str, float]]) -> dict[str, str]:
    found = {name: statistics.fmean(run[name] for run in runs) for name in FIGURES}
    return {name: f"{value:.4f}" for name, value in found.items()}


def summed_up(runs: list[dict[str, float]]) -> dict[str, str]:
    found: dict[str, float] = {}
    found["ece_sd"] = statistics.stdev(run["ece"] for run in runs)
    for target in TARGETS:
        end = f"{100 * target:.0f}"
        given, wrong = (np.array([run[name + end] for run in runs]) for name in ("given", "wrong"))
        found["coverage" + end] = given.sum() / sum(run["test"] for run in runs)
        found["error" + end] = wrong.sum() / given.sum() if given.any() else np.nan
        found["over" + end] = (wrong > target * given).mean()
    rest = {name: "" if np.isnan(value) else f"{value:.4f}" for name, value in found.items()}
    return {**means(runs), **rest}


# ------------------------------------------------------------------------------------ the tables


def tables(folder: Path) -> dict[str, Table]:
    with (folder / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        "table_answers": by_rule(rows),
        "table_answers_few": by_size(rows),
        "table_answers_files": by_file(rows),
        "table_answers_abstain": by_target(rows),
    }


def by_rule(rows: list[Row]) -> Table:
    """Means over the files."""
    stages = (RAW, *STAGES)
    table: Table = [
        (
            "rule",
            *(f"ECE %, {stage}" for stage in stages),
            *(f"debiased %, {stage}" for stage in stages),
            *(f"Brier, {stage}" for stage in stages),
            *(f"log loss, {stage}" for stage in stages),
            "AUROC",
        )
    ]
    for how in AGGREGATORS:
        cells = [
            f"{scale * mean(rows, figure, how, stage):.{digits}f}"
            for figure, scale, digits in (
                ("ece", 100, 1),
                ("debiased_ece", 100, 1),
                ("brier", 1, 3),
                ("nll", 1, 3),
            )
            for stage in stages
        ]
        table.append((how, *cells, f"{mean(rows, 'auroc', how, RAW):.3f}"))
    return table


def by_size(rows: list[Row]) -> Table:
    """Means over the files that are large enough for every size."""
    names = ("ECE %", "Brier", "log loss")
    table: Table = [("fitted on", *(f"{name}, {stage}" for name in names for stage in STAGES))]
    large = [row for row in rows if int(row["n"]) >= 2 * max(SIZES)]
    for size in (*map(str, SIZES), ALL):
        cells = [
            f"{scale * mean(large, figure, 'geometric', stage, size):.{digits}f}"
            for figure, scale, digits in (("ece", 100, 1), ("brier", 1, 3), ("nll", 1, 3))
            for stage in STAGES
        ]
        table.append((size if size == ALL else f"{size} answers", *cells))
    return table


def by_file(rows: list[Row]) -> Table:
    """The paper's rule as it is, and the default before and after; ± is over the splits."""
    table: Table = [
        (
            *("set", "model", "n", "right %", "ECE % arithmetic", "ECE % geometric"),
            *("ECE % geometric, beta", "debiased %", "Brier before", "Brier after", "AUROC"),
        )
    ]
    for row in chosen(rows, "geometric", RAW):
        same = [r for r in rows if (r["set"], r["model"]) == (row["set"], row["model"])]
        (paper,) = chosen(same, "arithmetic", RAW)
        (after,) = chosen(same, "geometric", "beta")
        percents = [with_deviation(one) for one in (paper, row, after)]
        percents.append(f"{100 * float(after['debiased_ece']):.1f}")
        table.append(
            (
                *(row["set"], row["model"], row["n"], f"{100 * float(row['accuracy']):.1f}"),
                *percents,
                *(f"{float(x):.3f}" for x in (row["brier"], after["brier"], row["auroc"])),
            )
        )
    return table


def with_deviation(row: Row) -> str:
    return f"{100 * float(row['ece']):.1f}±{100 * float(row['ece_sd']):.1f}"


def by_target(rows: list[Row]) -> Table:
    """Abstention: means over files, errors over those files in which anything is answered."""
    table: Table = [("target", "rule", "map", "answered %", "wrong %", "splits over %", "files")]
    for target in TARGETS:
        end = f"{100 * target:.0f}"
        for how in AGGREGATORS:
            for stage in (RAW, *STAGES):
                some = chosen(rows, how, stage)
                used = [row for row in some if row["error" + end]]
                mass = sum(float(row["coverage" + end]) * int(row["n"]) for row in used)
                wrong = sum(
                    float(r["error" + end]) * float(r["coverage" + end]) * int(r["n"]) for r in used
                )
                over = statistics.fmean(float(row["over" + end]) for row in some)
                table.append(
                    (
                        *(f"{end} %", how, stage),
                        f"{100 * mass / sum(int(row['n']) for row in some):.1f}",
                        f"{100 * wrong / mass:.1f}" if mass else "\N{EN DASH}",
                        f"{100 * over:.1f}",
                        str(len(used)),
                    )
                )
    return table


def chosen(rows: list[Row], how: str, stage: str, fitted: str = ALL) -> list[Row]:
    wanted = (how, stage, fitted)
    return [row for row in rows if (row["how"], row["stage"], row["fitted"]) == wanted]


def mean(rows: list[Row], figure: str, how: str, stage: str, fitted: str = ALL) -> float:
    return statistics.fmean(float(row[figure]) for row in chosen(rows, how, stage, fitted))


if __name__ == "__main__":
    # that no threshold is safe enough is a result here, and so are few right answers
    warnings.filterwarnings("ignore", message="no threshold keeps")
    warnings.filterwarnings("ignore", message="AnswerCalibrator found no optimum")
    warnings.filterwarnings("ignore", message="confident answers are not right more often")
    main()
