"""Guarantees of gates, kept or broken, on simulated answers whose truth is known.

For each situation, gates are fitted to many samples of graded answers. A guarantee fails if, in
a large sample of new answers, more of the accepted (or verified) ones are wrong than guaranteed;
this may happen in a share of ``1 - certainty`` of the samples. The naive threshold, the lowest one
with few enough errors among the answers it was found with, and guarantees that take turns for
independent answers stand beside it. Other tables are of the drift watch and, with a folder of
graded answers (files SET.MODEL.jsonl), of real answers: gates are fitted to half as many answers
as a file has, drawn from it with replacement, so that the file is the population by which
guarantees are judged. The oracle accepts the most answers by decreasing confidence of which few
enough are wrong.

    python benchmarks/gate.py --answers ANSWERS --runs 200 -o docs/data

writes gate_simulated.csv, gate_drift.csv and gate_answers.csv, the tables of the documentation.
Without a folder they are printed.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import argparse
import csv
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrant.llm import Gate, GateWatch, fit_gate
from calibrant.llm.answers.rows import AnswerRows, read_answers

MAX_ERROR, CERTAINTY, MISSES = 0.1, 0.9, 0.3
Table = Iterator[tuple[str, ...]]
NEW = 60_000
"""New answers, or conversations, by which guarantees are judged."""


class Answers(NamedTuple):
    """Answers, each ``(n,)``; conversations and kinds where a situation has them."""

    confidence: np.ndarray
    correct: np.ndarray
    conversation: np.ndarray
    kind: np.ndarray

    def rows(self, *, with_conversations: bool = True) -> AnswerRows:
        names = ("confidence", "correct", "conversation", "kind")
        columns = zip(*(values.tolist() for values in self), strict=True)
        rows = [dict(zip(names, values, strict=True)) for values in columns]
        if not with_conversations:
            rows = [{**row, "conversation": None} for row in rows]
        return AnswerRows.of(rows)


def plain(confidence: np.ndarray, right: np.ndarray, kind: Any = "all") -> Answers:
    n = len(confidence)
    kinds = np.broadcast_to(np.asarray(kind), n)
    return Answers(confidence, right, np.arange(n), kinds)


def over_confident(rng: np.random.Generator, n: int) -> Answers:
    """Too sure: of confidence c, c² is right."""
    confidence = rng.beta(6, 1, n)
    return plain(confidence, rng.random(n) < confidence**2)


def just_too_bad(rng: np.random.Generator, n: int) -> Answers:
    """10.3 % wrong whatever the confidence."""
    return plain(rng.uniform(0.6, 1, n), rng.random(n) >= 1.03 * MAX_ERROR)


def kinds(rng: np.random.Generator, n: int) -> Answers:
    """Four kinds, one just too bad, two rare."""
    at = rng.choice(4, n, p=[0.5, 0.4, 0.06, 0.04])
    error = np.array([0.02, 1.03 * MAX_ERROR, 0.3, 0.02])[at]
    names = np.array(["easy", "hard", "rare", "odd"])[at]
    return plain(rng.uniform(0.6, 1, n), rng.random(n) >= error, names)


def alike(rng: np.random.Generator, n: int) -> Answers:
    """10 to 20 turns, all right or all wrong, 10.3 % wrong."""
    number = np.repeat(np.arange(n), rng.integers(10, 21, n))
    right = (rng.random(n) >= 1.03 * MAX_ERROR)[number]
    return Answers(rng.uniform(0.6, 1, number.size), right, number, np.full(number.size, "all"))


def related(rng: np.random.Generator, n: int) -> Answers:
    """4 calibrated turns that share their luck."""
    number = np.repeat(np.arange(n), 4)
    confidence = 1 - 0.4 * rng.random(4 * n) ** 2
    return Answers(confidence, rng.random(n)[number] < confidence, number, np.full(4 * n, "all"))


def loss(answers: Answers, chosen: np.ndarray, unit: str) -> float:
    """Share of wrong ones among the chosen answers, as the guarantee counts them."""
    if not chosen.any():
        return 0.0
    if unit == "answer":
        return float((~answers.correct[chosen]).mean())
    turns = np.bincount(answers.conversation, chosen)
    wrong = np.bincount(answers.conversation, chosen & ~answers.correct)
    some = turns > 0
    return float((wrong[some] / turns[some] if unit == "turn" else wrong[some] > 0).mean())


def decisions(gate: Gate, new: Answers) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Accepted and verified answers, for each set of kinds."""
    chance = gate.calibrator.predict(new.confidence)
    accepted, verified = [], []
    for accept, verify, names in gate.bands:
        member = np.ones(len(chance), bool) if names is None else np.isin(new.kind, names)
        accepted.append(member & (chance >= accept.threshold))
        if verify is not None:
            low = (chance < accept.threshold) & (chance >= verify.threshold)
            verified.append(member & low)
    return accepted, verified


def naive(gate: Gate, sample: Answers, new: Answers) -> np.ndarray:
    """New answers above the lowest threshold with few enough errors in the sample itself."""
    chance = gate.calibrator.predict(sample.confidence)
    order = np.argsort(-chance)
    error = np.cumsum(~sample.correct[order]) / np.arange(1, len(order) + 1)
    fine = np.flatnonzero(error <= MAX_ERROR)
    lowest = chance[order[fine[-1]]] if fine.size else np.inf
    return gate.calibrator.predict(new.confidence) >= lowest


class Situation(NamedTuple):
    """What is drawn, how many graded answers or conversations, and the options of the gate."""

    draw: Callable[[np.random.Generator, int], Answers]
    n: int
    options: dict[str, Any]


SITUATIONS = (
    Situation(over_confident, 300, {}),
    Situation(over_confident, 1500, {}),
    Situation(just_too_bad, 300, {}),
    Situation(just_too_bad, 1500, {}),
    Situation(kinds, 1800, {"by_kind": True}),
    Situation(over_confident, 900, {"verifier_misses": MISSES}),
    Situation(alike, 450, {"unit": "turn"}),
    Situation(related, 450, {"unit": "turn"}),
    Situation(alike, 450, {"unit": "conversation"}),
    Situation(related, 450, {"unit": "conversation"}),
)


def measure(situation: Situation, runs: int) -> dict[str, float]:
    """Shares of broken guarantees, and the mean share of accepted answers."""
    draw, n, options = situation
    unit = options.get("unit", "answer")
    new = draw(np.random.default_rng(10**6), NEW)
    broken: dict[str, list[bool]] = {"gate": [], "naive": [], "as answers": []}
    share = []
    for seed in range(runs):
        sample = draw(np.random.default_rng(seed), n)
        terms = {"max_error": MAX_ERROR, "certainty": CERTAINTY, "seed": seed}
        gate = fit_gate(sample.rows(), **terms, **options)
        accepted, verified = decisions(gate, new)
        bad = any(loss(new, chosen, unit) > MAX_ERROR for chosen in accepted)
        bad |= any(MISSES * loss(new, chosen, unit) > MAX_ERROR for chosen in verified)
        broken["gate"].append(bad)
        share.append(sum(chosen.mean() for chosen in accepted))
        groups = [new.kind == name for name in np.unique(new.kind)]
        lowest = naive(gate, sample, new)
        broken["naive"].append(any(loss(new, lowest & g, unit) > MAX_ERROR for g in groups))
        if unit != "answer":
            other = fit_gate(sample.rows(with_conversations=False), **terms)
            chosen = decisions(other, new)[0][0]
            broken["as answers"].append(loss(new, chosen, unit) > MAX_ERROR)
    found = {name: float(np.mean(values)) for name, values in broken.items() if values}
    return {**found, "accepted": float(np.mean(share))}


def measure_file(file: Path, max_error: float, runs: int) -> dict[str, float]:
    """Shares of accepted answers and broken guarantees, of gates for the answers of a file."""
    graded = read_answers(file)
    confidence, right = graded.confidences()[0], graded.grades()
    order = np.argsort(-confidence, kind="stable")
    error = np.cumsum(~right[order]) / np.arange(1, len(order) + 1)
    fine = np.flatnonzero(error <= max_error)
    accepted, broken = [], []
    for seed in range(runs):
        at = np.random.default_rng(seed).integers(0, len(right), len(right) // 2)
        rows = AnswerRows.of(
            [{"confidence": float(confidence[i]), "correct": bool(right[i])} for i in at]
        )
        gate = fit_gate(rows, max_error=max_error, certainty=0.95)
        above = gate.calibrator.predict(confidence) >= gate.bands[0].accept.threshold
        accepted.append(above.mean())
        broken.append(bool(above.any()) and (~right[above]).mean() > max_error)
    oracle = (fine[-1] + 1) / len(order) if fine.size else 0.0
    return {
        "oracle": oracle,
        "accepted": float(np.mean(accepted)),
        "broken": float(np.mean(broken)),
    }


def alarms(n: int, runs: int) -> dict[str, float]:
    """Share of false alarms, and answers until an alarm, for references of n graded answers."""
    found: dict[str, list[float]] = {"false": [], "confidences": [], "grades": []}
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        gate = fit_gate(over_confident(rng, n).rows(), max_error=0.3)
        watch = GateWatch(gate)
        calm = over_confident(rng, 3000)
        chance = gate.calibrator.predict(calm.confidence)
        watch.note(chance)
        watch.observe(chance, calm.correct)
        found["false"].append(bool(watch.withdrawn))
        found["confidences"].append(delay(gate, rng, confidence=True))
        found["grades"].append(delay(gate, rng, confidence=False))
    rate = float(np.mean(found.pop("false")))
    return {"false": rate, **{name: float(np.median(values)) for name, values in found.items()}}


def delay(gate: Gate, rng: np.random.Generator, *, confidence: bool) -> float:
    """Answers until an alarm, if they become harder or, at equal confidence, worse."""
    watch = GateWatch(gate)
    for step in range(50, 6001, 50):
        sure = rng.beta(3, 1, 50) if confidence else rng.beta(6, 1, 50)
        chance = gate.calibrator.predict(sure)
        if confidence:
            watch.note(chance)
        else:
            watch.observe(chance, rng.random(50) < sure**4)
        if watch.withdrawn:
            return float(step)
    return float("inf")


def simulated(runs: int) -> Table:
    headings = ("simulated answers", "graded", "gate for", "broken", "naive", "as answers")
    yield (*headings, "accepted")
    for situation in SITUATIONS:
        found = {name: percent(value) for name, value in measure(situation, runs).items()}
        options = ", ".join(f"{name}={value}" for name, value in situation.options.items())
        about = ((situation.draw.__doc__ or "").rstrip("."), str(situation.n), options or "answers")
        yield *about, *(found.get(name, "") for name in ("gate", "naive", "as answers", "accepted"))


def drift(runs: int) -> Table:
    yield "graded", "false alarms", "answers until an alarm", "grades until an alarm"
    for n in (300, 1000, 3000):
        found = alarms(n, runs)
        delays = (found["confidences"], found["grades"])
        cells = ("more than 6,000" if np.isinf(each) else f"{each:,.0f}" for each in delays)
        yield f"{n:,}", percent(found["false"]), *cells


def real(folder: Path, runs: int) -> Table:
    yield "answers", "largest error", "oracle", "accepted", "broken"
    for file in sorted(folder.glob("*.jsonl")):
        for max_error in (0.1, 0.2, 0.3):
            found = measure_file(file, max_error, runs)
            if found["oracle"] >= 0.05:
                yield file.stem.replace(".", ", ", 1), str(max_error), *map(percent, found.values())


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of gates that accept nothing
    tables = {"simulated": simulated(given.runs), "drift": drift(max(given.runs // 5, 1))}
    if given.answers:
        tables["answers"] = real(given.answers, given.runs)
    for name, rows in tables.items():
        with (
            (given.out / f"gate_{name}.csv").open("w")
            if given.out
            else nullcontext(sys.stdout) as stream
        ):
            writer = csv.writer(stream, lineterminator="\n")
            for row in rows:
                writer.writerow(row)
                stream.flush()


if __name__ == "__main__":
    main()
