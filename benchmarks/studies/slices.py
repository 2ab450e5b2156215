"""How often the search for subgroups errs, whether its intervals hold, and what it finds.

    python benchmarks/studies/slices.py simulate docs/data
    python benchmarks/studies/slices.py tables docs/data

``simulate`` draws data sets whose probabilities are right but for a planted subgroup, and writes
``slices.csv``, in all processes. ``tables`` makes the tables of ``docs/slices.md``.

Three ways to find subgroups are compared. *search* is :func:`calibrant.find_slices`. *halves*
chooses the 20 strongest subgroups in one half of the examples and tests them in the other, by exact
binomial tests with Holm's correction. *alone* tests every subgroup as if it were the only one.
"""

import argparse
import csv
import math
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from rows import Rows, Table, chosen, read, write_tables
from scipy.special import logit, ndtri, softmax
from scipy.stats import binomtest

from calibrant.show.figures import save_figure
from calibrant.slices import find_slices
from calibrant.slices.examples import Reading, _Outcomes, encode
from calibrant.slices.find import SliceSearch, _open_examples, _sum_tables, search
from calibrant.slices.search import (
    _all_candidates,
    _Candidate,
    _Family,
    _members,
    _strongest,
    _Tables,
)

Array = NDArray[Any]
SIZES = (300, 1000, 5000, 20_000)
LEVEL, DEPTH = 0.9, 2
STRONGEST = 20
NAMES = {
    "even": "P(1) evenly spread",
    "rare": "rare events",
    "sure": "sure of both classes",
    "classes": "five classes",
}
WAYS = ("search", "halves", "alone")
FAULTS = {"none": "calibrated", "shift": "planted shift", "sharp": "planted over-confidence"}


class World(NamedTuple):
    """Metadata, probabilities as claimed and as they are, labels, and the wrong examples."""

    metadata: dict[str, Array]
    claimed: Array  # (n, classes)
    truth: Array
    labels: Array
    wrong: Array


def world(rng: np.random.Generator, kind: str, fault: str, n: int) -> World:
    """Draw a data set; the fault is in a tenth of the examples."""
    metadata = {
        "age": rng.integers(18, 90, n),
        "income": rng.lognormal(10, 1, n).round(-2),
        "site": rng.choice(list("ABCDEF"), n, p=[0.3, 0.25, 0.2, 0.1, 0.1, 0.05]),
        "device": rng.choice(["phone", "tablet", "desk"], n),
    }
    wrong = (metadata["age"] < 47) & (metadata["site"] == "B")
    if kind == "classes":
        logits = 2.5 * rng.normal(size=(n, 5))
    else:
        ends = {"even": (1, 1), "rare": (0.4, 5), "sure": (0.25, 0.25)}[kind]
        odds = logit(np.clip(rng.beta(*ends, n), 1e-6, 1 - 1e-6))
        logits = np.stack([np.zeros(n), odds], 1)
    true = logits.copy()
    if fault == "shift":
        true[wrong, -1] -= 1.0
    elif fault == "sharp":
        true[wrong] *= 0.4
    claimed, truth = (softmax(x, 1) for x in (logits, true))
    labels = (truth.cumsum(1) < rng.uniform(size=(n, 1))).sum(1)
    return World(metadata, claimed, truth, labels, wrong)


class Subgroup(NamedTuple):
    """A subgroup that was named."""

    mask: Array
    gap: float
    true_gap: float


def events(world: World, estimand: str) -> tuple[Array, Array]:
    """Claims and true probabilities of an estimand."""
    if estimand == "binary":
        return world.claimed[:, 1], world.truth[:, 1]
    every, top = np.arange(len(world.labels)), world.claimed.argmax(1)
    return world.claimed[every, top], world.truth[every, top]


def gap(world: World, estimand: str, mask: Array) -> float:
    claimed, truth = events(world, estimand)
    return float((claimed - truth)[mask].mean())


def simulate(out: Path, repeats: int) -> None:
    cases = list(product(NAMES, FAULTS, SIZES))[::-1]  # the largest first
    with ProcessPoolExecutor() as pool:
        rows = [row for case in pool.map(partial(figures, repeats), cases) for row in case]
    with (out / "slices.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def figures(repeats: int, case: tuple[str, str, int]) -> list[dict[str, object]]:
    """Means over data sets, a row for each way."""
    kind, fault, n = case
    results = []
    for seed in range(repeats):
        data = world(np.random.default_rng([seed, n]), kind, fault, n)
        results.append(ways(data, seed))
    print(*case, flush=True)
    return [
        {
            **{"kind": kind, "fault": fault, "n": n, "way": way, "repeats": repeats},
            **dict(
                zip(
                    Outcome._fields,
                    np.mean([result[way] for result in results], 0).round(4),
                    strict=True,
                )
            ),
        }
        for way in WAYS
    ]


class Outcome(NamedTuple):
    """What became of one search."""

    any_false: float
    false_rate: float
    held: float  # 1 if all intervals hold
    found: float  # 1 if a subgroup was named that shares half of its examples with the wrong ones
    named: float


def ways(data: World, seed: int) -> dict[str, Outcome]:
    split, names = _open_examples(
        None, data.labels, data.claimed, data.metadata, None, None, None, None
    )
    reading = Reading(names, split.classes)
    found = search(split, reading, seed=seed, level=LEVEL)
    codes = codes_of(found.reading, data)
    named = [subgroup(data, codes, one) for one in found.named]
    tables = _sum_tables(split, found.reading, DEPTH)
    held, alone = every_interval(found, tables, data, codes)
    return {
        "search": outcome(data, named, held),
        "halves": outcome(data, confirmed(data, seed), math.nan),
        "alone": alone,
    }


def every_interval(
    found: SliceSearch, tables: _Tables, data: World, codes: Array
) -> tuple[float, Outcome]:
    """Whether all intervals hold, and the outcome of testing each subgroup alone."""
    family = _Family.of(found.reading.columns)
    first = found.reading.estimands[0]
    sign = np.where(data.claimed.argmax(1) == 1, 1.0, -1.0)
    sign = sign if first == "binary" else np.ones(len(sign))
    truth = _Tables.empty(found.reading.columns, found.reading.estimands, DEPTH)
    truth.add(_Outcomes(*events(data, first), np.ones(len(sign)), sign), codes)
    held, false, named = True, 0, 0
    both = (_all_candidates(each, family, found.result.min_size) for each in (tables, truth))
    for ours, true in zip(*both, strict=True):
        low, high = ours.intervals(found.result.critical)
        held &= bool(((true.gap >= low - 1e-9) & (true.gap <= high + 1e-9)).all())
        low, high = ours.intervals(float(-ndtri((1 - LEVEL) / 2)))
        shown = (low > 0) | (high < 0)
        named += int(shown.sum())
        false += int((shown & is_false(ours.gap, true.gap)).sum())
    alone = Outcome(float(false > 0), false / max(1, named), math.nan, math.nan, float(named))
    return float(held), alone


def is_false(named: Array, true: Array) -> Array:
    return np.asarray((np.abs(true) < 1e-12) | (np.sign(true) != np.sign(named)))


def outcome(data: World, named: list[Subgroup], held: float) -> Outcome:
    gaps = np.array([(one.gap, one.true_gap) for one in named]).reshape(-1, 2)
    false = is_false(*gaps.T)
    shared = [(s.mask & data.wrong).sum() / (s.mask | data.wrong).sum() for s in named]
    found = float(max(shared, default=0.0) >= 0.5)
    return Outcome(
        float(false.any()), float(false.sum()) / max(1, len(named)), held, found, float(len(named))
    )


def codes_of(reading: Reading, data: World) -> Array:
    values = {**data.metadata, **reading._predictions(data.claimed)}
    return encode(reading.columns, values, len(data.labels))


def subgroup(data: World, codes: Array, one: _Candidate) -> Subgroup:
    mask = _members(one.conditions, codes)
    return Subgroup(mask, one.gap.value, gap(data, one.estimand, mask))


def confirmed(data: World, seed: int) -> list[Subgroup]:
    """Choose in one half, test in the other."""
    half = np.random.default_rng(seed).permutation(len(data.labels)) % 2 == 0
    first = World(
        {name: values[half] for name, values in data.metadata.items()},
        *(x[half] for x in data[1:]),
    )
    split, names = _open_examples(
        None, first.labels, first.claimed, first.metadata, None, None, None, None
    )
    found = search(split, Reading(names, split.classes), seed=seed)
    family = _Family.of(found.reading.columns)
    tables = _sum_tables(split, found.reading, DEPTH)
    best = [
        one
        for candidates in _all_candidates(tables, family, found.result.min_size)
        if candidates.columns
        for one in _strongest(candidates, family, *candidates.intervals(0.0))
    ]
    best.sort(key=lambda one: -one.strength)
    codes, tested = codes_of(found.reading, data), []
    for one in best[:STRONGEST]:
        mask = _members(one.conditions, codes) & ~half
        tested.append((p_value(data, one.estimand, mask), one))
    named = []
    for rank, (p, one) in enumerate(sorted(tested, key=lambda pair: pair[0])):
        if p > (1 - LEVEL) / (len(tested) - rank):
            break
        named.append(subgroup(data, codes, one))
    return named


def p_value(data: World, estimand: str, mask: Array) -> float:
    """Exact binomial test of the mean claim; valid, and cautious, for unequal claims."""
    if not mask.any():
        return 1.0
    claimed, _ = events(data, estimand)
    top = data.claimed.argmax(1)
    happened = data.labels == (1 if estimand == "binary" else top)
    count = int(mask.sum())
    return float(binomtest(int(happened[mask].sum()), count, float(claimed[mask].mean())).pvalue)


# ------------------------------------------------------------------------------------------ tables
def tables(folder: Path) -> dict[str, Table]:
    rows = read(folder / "slices.csv")
    return {"table_slices_false": false_table(rows), "table_slices_found": found_table(rows)}


def false_table(rows: Rows) -> Table:
    headings = ("predictions", "examples", "all hold", *(f"{w}, any false" for w in WAYS))
    lines = [headings]
    for kind, title in NAMES.items():
        for n in SIZES:
            ours = chosen(rows, kind=kind, n=str(n))
            held = min(float(r["held"]) for r in ours if r["way"] == "search")
            worst = [max(float(r["any_false"]) for r in ours if r["way"] == way) for way in WAYS]
            lines.append((title, f"{n:,}", percent(held), *map(percent, worst)))
    return lines


def found_table(rows: Rows) -> Table:
    lines = [("predictions", "fault", "way", *(f"n = {n:,}" for n in SIZES))]
    for kind, title in NAMES.items():
        for fault in list(FAULTS)[1:]:
            for way in WAYS[:2]:
                each = [
                    percent(
                        float(chosen(rows, kind=kind, fault=fault, way=way, n=str(n))[0]["found"])
                    )
                    for n in SIZES
                ]
                lines.append((title, FAULTS[fault], way, *each))
    return lines


def draw(path: Path) -> None:
    """Draw what is found in one data set with a planted shift."""
    data = world(np.random.default_rng(4), "even", "shift", 8000)
    found = find_slices(probs=data.claimed, labels=data.labels, metadata=data.metadata)
    save_figure(found.plot(), path)


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("simulate", "tables"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    if options.step == "simulate":
        simulate(options.folder, options.repeats)
    else:
        write_tables(options.folder, tables(options.folder))
        draw(options.folder.parent / "_static" / "slices.svg")


if __name__ == "__main__":
    main()
