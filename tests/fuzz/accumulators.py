"""Figures of a stream do not depend on how it was cut into batches, workers and their order."""

import math
from typing import Any

import numpy as np

import calibrant as cal
from tests.fuzz.examples import Examples, random_examples
from tests.support import definitions as slow


def check(rng: np.random.Generator) -> None:
    """Compare batches in several accumulators with one update of everything."""
    tags = rng.random() < 0.15
    examples = random_examples(rng, tags=tags)
    if not examples.legal:
        return
    names = some_metrics(rng, examples)
    options: dict[str, Any] = {
        "bins": int(rng.choice([1, 7, 15])),
        "estimand": "multilabel" if tags else "auto",
        "pairs": any(cal.METRICS[name].needs_pairs for name in names),
        "metrics": names,
        "level": None,
    }
    by = rng.integers(3, size=len(examples.labels)) if rng.random() < 0.3 else None
    whole = cal.Accumulator(**options).update(
        examples.passed, examples.labels, sample_weight=examples.weight, by=by
    )
    workers = [cal.Accumulator(**options) for _ in range(int(rng.integers(1, 4)))]
    for batch in batches(rng, len(examples.labels)):
        workers[rng.integers(len(workers))].update(
            examples.passed[batch],
            examples.labels[batch],
            sample_weight=None if examples.weight is None else examples.weight[batch],
            by=None if by is None else by[batch],
        )
    first, *rest = (workers[i] for i in rng.permutation(len(workers)))
    for other in rest:
        first.merge(other)
    same(first.compute(), whole.compute())
    check_means(whole.compute(), examples)


def some_metrics(rng: np.random.Generator, examples: Examples) -> list[str]:
    """Names of a few metrics that the examples have."""
    binary = examples.rows.shape[1] == 2 and not examples.tags
    names = [name for name, m in cal.METRICS.items() if binary or not m.two_classes_only]
    return [str(name) for name in rng.choice(names, 3, replace=False)]


def batches(rng: np.random.Generator, n: int) -> list[np.ndarray]:
    """A partition of the examples in any order; a batch may be empty."""
    cuts = np.sort(rng.integers(0, n + 1, size=int(rng.integers(0, 5))))
    return np.split(rng.permutation(n), cuts)


def same(found: Any, expected: Any) -> None:
    assert (found.n, found.classes, found.estimand) == (
        expected.n,
        expected.classes,
        expected.estimand,
    )
    assert set(found) == set(expected)
    for name in expected:
        one, other = found[name].value, expected[name].value
        # one bin of many weighs little: its own gap has lost as many digits as its share
        close = math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
        assert close or (math.isnan(one) and math.isnan(other)), (name, one, other)
    assert set(found.by) == set(expected.by)
    for name in expected.by:
        same(found.by[name], expected.by[name])


def check_means(evaluation: Any, examples: Examples) -> None:
    """The mean loss is that of the definition, which has no batches."""
    if "nll" not in evaluation:
        return
    kept, labels = examples.kept, examples.labels.reshape(-1)
    weight = np.ones(labels.size) if examples.weight is None else examples.weight.reshape(-1)
    rows = zip(examples.rows[kept].tolist(), labels[kept].tolist(), strict=True)
    expected = slow.slow_mean([slow.slow_nll(row, y) for row, y in rows], weight[kept])
    assert math.isclose(evaluation["nll"].value, expected, rel_tol=1e-9, abs_tol=1e-10)
