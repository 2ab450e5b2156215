"""Option bias: correction by calibration beside averages over orders of the options.

    python benchmarks/studies/option_bias.py ask MODEL MMLU logits.npz --limit 300 --shots 1
    python benchmarks/studies/option_bias.py table logits.npz ... > docs/data/option_bias.csv

The first command asks a model questions of MMLU with their options in all four cyclic orders. The
second measures answers from one order, calibrated ones (each question by a fit on other folds),
and averages over the orders, calibrated or not. The last column is the share of answers that would
have to move to another letter for all letters to be chosen as often as they are right.
"""

import argparse
import csv
import sys
import warnings
from pathlib import Path

import numpy as np

import calibrant as cal
from calibrant import llm
from calibrant.llm.answers.choices import (
    PermutedChoices,
    _ask_choices_each,
    _option_orders,
    option_bias,
)
from calibrant.llm.answers.grading import calibrated_choices, read_question_set

FIGURES = ("accuracy", "nll", "ece")


def ask(model: str, questions: str, out: str, limit: int, shots: int) -> None:
    asked = read_question_set(questions, limit=limit, shots=shots)
    network = llm.load_model(model)
    with cal.use(progress=lambda done, total: print(f"{done} of {total}", file=sys.stderr)):
        found = _ask_choices_each(
            *network,
            asked.questions,
            {"": None},
            permutations="cyclic",
            shots=asked.shots,
            batch=4,
        )[""]
    np.savez(out, logits=found.logits, labels=found.labels)


def answers(found: PermutedChoices) -> dict[str, tuple[np.ndarray, int]]:
    """Log-probabilities of the options, and the passes of the model that they take."""
    plain, mean, orders = found.logits[:, 0], found.averaged(), len(found.orders)
    return {
        "one order": (plain, 1),
        "one order, calibrated, answers kept": (calibrated_choices(plain, found.labels, True), 1),
        "one order, calibrated": (calibrated_choices(plain, found.labels), 1),
        f"average over {orders} orders": (mean, orders),
        f"average over {orders} orders, calibrated": (
            calibrated_choices(mean, found.labels),
            orders,
        ),
    }


def table(files: list[str]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(["model", "answers", "passes", "accuracy %", "NLL", "ECE %", "excess %", "p"])
    for file in files:
        with np.load(file) as stored:
            logits, labels = stored["logits"], stored["labels"]
        found = PermutedChoices(logits, labels, _option_orders("cyclic", logits.shape[2]))
        for name, (values, passes) in answers(found).items():
            measured = cal.evaluate(values, labels, metrics=FIGURES)
            right, nll, ece = (measured[figure] for figure in FIGURES)
            bias = option_bias(values, labels)
            cells = [
                f"{100 * right.value:.1f} ({100 * right.low:.1f} to {100 * right.high:.1f})",
                f"{nll.value:.3f} ({nll.low:.3f} to {nll.high:.3f})",
                f"{100 * ece.value:.1f} ({100 * ece.low:.1f} to {100 * ece.high:.1f})",
            ]
            about = [f"{100 * bias.excess:.1f}", f"{bias.p_value:.1g}"]
            writer.writerow([Path(file).stem, name, passes, *cells, *about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    asking = verbs.add_parser("ask")
    for name in ("model", "questions", "out"):
        asking.add_argument(name)
    asking.add_argument("--limit", type=int, default=300)
    asking.add_argument("--shots", type=int, default=1)
    verbs.add_parser("table").add_argument("files", nargs="+")
    options = vars(parser.parse_args())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that are never right
        (ask if options.pop("verb") == "ask" else table)(**options)


if __name__ == "__main__":
    main()
