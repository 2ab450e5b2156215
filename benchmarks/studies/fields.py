"""Confidence of the fields of structured answers, before and after maps, with documents held out.

    python benchmarks/studies/fields.py LOG... --tables docs/data

LOG is a file of fields_extracted.py; without one, only the tables are made. Documents are split
into halves twenty times: maps are fitted to the fields of one half and measured on the other.
fields.csv has a row for each model, kind of field and method, means over the splits: the confidence
as it is (``raw``), one map of it for all fields (``one map``), a beta map for each kind by itself
(``map each``), one map of the confidence that tells kinds apart (``kinds``), and that of all
signals of the tokens, too (``all``).

fields_gate.csv has gates with the map of all signals: the half that the map has not seen is halved
again, for the thresholds and for the measure. A ``field`` gate guarantees a share of wrong fields,
a ``document`` gate one of documents in which a field is wrong or missing, among those accepted
whole. ``broken`` is the share of splits with more errors than guaranteed, which may be 5 %, and a
little more because the measure is an estimate itself.

table_fields.csv and table_fields_gate.csv are what the documentation shows, and are printed.
"""

import argparse
import csv
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rows import MISSING, Rows, read, write_tables

from calibrant.llm import documents_of, evaluate_answers, fields_of, fit_gate, read_log
from calibrant.llm.answers.calibrator import fit_answers
from calibrant.llm.answers.rows import AnswerRows
from calibrant.llm.answers.signal_calibrator import _signal_calibrator
from calibrant.llm.answers.signals import signals_of

KINDS = {"payer": None, "due": None, "total": None, "state": ["paid", "open", "cancelled"]}
METHODS = ("raw", "one map", "map each", "kinds", "all")
FIGURES = ("ece", "nll", "auroc")
LIMITS = {"field": (0.1, 0.2, 0.3), "document": (0.3, 0.5)}
SPLITS = 20
Results = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("logs", nargs="*", type=Path)
    parser.add_argument("--tables", type=Path, required=True)
    given = parser.parse_args()
    if given.logs:
        study(given.logs, given.tables)
    made = tables(given.tables)
    write_tables(given.tables, made)
    for lines in made.values():
        for line in lines:
            print("  ".join(f"{cell:>12}" for cell in line))


def study(logs: list[Path], folder: Path) -> None:
    warnings.simplefilter("ignore")  # of answers that are left out, and of gates that accept none
    measured: Results = []
    gates: Results = []
    for log in logs:
        whole = read_log(log)
        fields = signals_of(fields_of(whole, kinds=KINDS, skip_bad=True))
        count = len({row["question"] for row in fields.rows})
        print(f"{log.stem}: {len(whole.answers.rows)} answers, {count} of them JSON", flush=True)
        measured += figures(log.stem, fields)
        gates += promises(log.stem, fields)
    for name, rows in (("fields", measured), ("fields_gate", gates)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


# ---------------------------------------------------------------------------------- the measures


def splits(fields: AnswerRows, parts: int) -> Iterator[list[AnswerRows]]:
    """Yield the fields of random parts of the documents."""
    names = sorted({row["question"] for row in fields.rows})
    for seed in range(SPLITS):
        order = np.random.default_rng(seed).permutation(len(names))
        part = dict(zip(names, (order % parts).tolist(), strict=True))
        yield [
            fields.where(np.array([part[row["question"]] == n for row in fields.rows]))
            for n in range(parts)
        ]


def figures(model: str, fields: AnswerRows) -> Iterator[dict[str, Any]]:
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for train, test in splits(fields, 2):
        kinds = np.array([row["kind"] for row in test.rows])
        right = test.grades()
        for method, chances in predictions(train, test).items():
            for kind in (*KINDS, "all"):
                some = (kinds == kind) | (kind == "all")
                measured = evaluate_answers(chances[some], right[some], level=None)
                for figure in FIGURES:
                    found[kind, method, figure].append(measured[figure].value)
    for kind in (*KINDS, "all"):
        some = [row for row in fields.rows if kind in (row["kind"], "all")]
        about = {"model": model, "kind": kind, "fields": len(some)}
        about["right"] = f"{statistics.fmean(row['correct'] for row in some):.4f}"
        for method in METHODS:
            values = {f: f"{statistics.fmean(found[kind, method, f]):.5f}" for f in FIGURES}
            yield {**about, "method": method, **values}


def predictions(train: AnswerRows, test: AnswerRows) -> dict[str, np.ndarray]:
    """Chances of the fields of the second half, by maps of the first."""
    kinds = [f"kind:{kind}" for kind in KINDS]
    raw = np.array([row["confidence"] for row in test.rows])
    each = np.empty_like(raw)
    for kind in KINDS:
        of_train, of_test = (
            part.where(np.array([row["kind"] == kind for row in part.rows]))
            for part in (train, test)
        )
        chosen = np.array([row["kind"] == kind for row in test.rows])
        each[chosen] = chances(fit_answers(of_train), of_test)
    return {
        "raw": raw,
        "one map": chances(fit_answers(train), test),
        "map each": each,
        "kinds": chances(_signal_calibrator(train, ["field product", *kinds]), test),
        "all": chances(_signal_calibrator(train), test),
    }


def chances(fitted: Any, test: AnswerRows) -> np.ndarray:
    return fitted.predict_rows(test)


def promises(model: str, fields: AnswerRows) -> Iterator[dict[str, Any]]:
    found: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    for *train, find, test in splits(fields, 4):
        fitted = _signal_calibrator(AnswerRows.of([row for part in train for row in part.rows]))
        of_find, of_test = (
            documents_of(AnswerRows.of(fitted.apply(part))) for part in (find, test)
        )
        of_documents = fit_answers(of_find, stage="sigmoid")  # which keeps the order
        for limit in LIMITS["field"]:
            gate = fit_gate(find, max_error=limit, unit="turn", calibrator=fitted)
            found["field", limit].append(outcome(gate, test))
        for limit in LIMITS["document"]:
            gate = fit_gate(of_find, max_error=limit, calibrator=of_documents)
            found["document", limit].append(outcome(gate, of_test))
    for (unit, limit), pairs in found.items():
        share = statistics.fmean(accepted for accepted, _ in pairs)
        wrong = statistics.fmean(wrong for _, wrong in pairs)
        # of all accepted ones of all splits
        error = wrong / share if share else float("nan")
        broken = statistics.fmean(w > limit * a for a, w in pairs)
        yield {
            **{"model": model, "unit": unit, "limit": limit, "accepted": f"{share:.4f}"},
            **{"error": f"{error:.4f}", "broken": f"{broken:.2f}"},
        }


def outcome(gate: Any, test: AnswerRows) -> tuple[float, float]:
    """The shares of answers that are accepted, and that are accepted and wrong."""
    accepted = np.array([one.verdict == "accept" for one in gate.check(test)])
    return float(accepted.mean()), float((accepted & ~test.grades()).mean())


# ---------------------------------------------------------------------------------- the tables


def tables(folder: Path) -> dict[str, list[list[str]]]:
    return {
        "table_fields": table(read(folder / "fields.csv")),
        "table_fields_gate": gate_table(read(folder / "fields_gate.csv")),
    }


def table(rows: Rows) -> list[list[str]]:
    heads = ["texts for", "field", "right %", "", *METHODS]
    lines = [heads]
    names = {"ece": ("ECE %", 100, 1), "nll": ("log loss", 1, 3), "auroc": ("AUROC %", 100, 1)}
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in rows):
        some = [row for row in rows if (row["model"], row["kind"]) == (model, kind)]
        for figure, (name, scale, digits) in names.items():
            cells = [number(scale * float(row[figure]), digits) for row in some]
            lines.append([model, kind, f"{100 * float(some[0]['right']):.1f}", name, *cells])
    return lines


def gate_table(rows: Rows) -> list[list[str]]:
    heads = ["texts for", "accepted are", "limit", "accepted", "wrong among them", "broken"]
    return [heads] + [
        [row["model"], f"{row['unit']}s", f"{100 * float(row['limit']):.0f} %"]
        + [number(100 * float(row[key]), 1, " %") for key in ("accepted", "error")]
        + [f"{100 * float(row['broken']):.0f} %"]
        for row in rows
    ]


def number(value: float, digits: int, unit: str = "") -> str:
    return MISSING if math.isnan(value) else f"{value:.{digits}f}{unit}"


if __name__ == "__main__":
    main()
