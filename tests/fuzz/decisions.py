"""Thresholds and conformal sets are those of their definitions."""

import math
import warnings
from typing import Any

import numpy as np
from scipy.stats import binom

from calibrant.artifacts.objects import artifact_of, restored
from calibrant.decide import conformal, threshold
from calibrant.decide.conformal_sets import _uniform
from tests.fuzz.examples import random_examples
from tests.fuzz.metrics import random_confidences
from tests.support import definitions as slow


def check(rng: np.random.Generator) -> None:
    """Find one threshold or the sets of one set of examples."""
    kind = rng.random()
    if kind < 0.3:
        check_threshold(rng)
    elif kind < 0.6:
        check_limits(rng)
    else:
        check_sets(rng)


def quiet(function: Any, *args: Any, **named: Any) -> Any:
    """Call without the warnings of too few examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function(*args, **named)


def check_threshold(rng: np.random.Generator) -> None:
    n = int(rng.integers(1, 80))
    confidence = random_confidences(rng, n)
    right = rng.random(n) < rng.choice([0.5, 1.0, 1.5]) * confidence
    max_error = float(rng.choice([0.01, 0.1, 0.2, 0.5, 0.9]))
    certainty = float(rng.choice([0.3, 0.6, 0.95]))
    found = quiet(
        threshold, confidence=confidence, outcome=right, max_error=max_error, certainty=certainty
    )
    expected = slow.slow_threshold(confidence.tolist(), right.tolist(), max_error, certainty)
    assert found.threshold == expected or math.isclose(found.threshold, expected, rel_tol=1e-12)
    accepted = right[confidence >= found.threshold]
    assert found.coverage == len(accepted) / n
    if len(accepted):
        assert math.isclose(found.error, 1 - accepted.mean(), abs_tol=1e-12)
        assert found.bound <= max_error + 1e-9
        assert found.error <= found.bound or certainty < 0.5
    again = restored(artifact_of(found))
    assert str(again) == str(found)  # NaN is not equal to itself


def check_limits(rng: np.random.Generator) -> None:
    """Each limit that is said to hold is that of the confusion matrix, and so is its bound."""
    n = int(rng.integers(1, 200))
    claimed = random_confidences(rng, n)
    truth = rng.random(n) < rng.choice([0.0, 0.5, 1.0, 1.5]) * claimed
    names = rng.permutation(["precision", "recall", "max_fpr", "max_fnr", "max_cost"])
    limits: dict[str, Any] = {
        k: float(rng.uniform(0.05, 0.95)) for k in names[: rng.integers(1, 4)]
    }
    costs = np.array([[0.0, rng.uniform(1, 9)], [rng.uniform(1, 9), 0.5]])
    if "max_cost" in limits or rng.random() < 0.3:
        limits["cost"] = costs
    found = quiet(threshold, confidence=claimed, outcome=truth, **limits, certainty=0.8)
    flagged = claimed >= found.threshold
    counts = [int((flagged == f)[truth == y].sum()) for y in (False, True) for f in (False, True)]
    tn, fp, fn, tp = counts
    shares = {"precision": (tp, fp), "recall": (tp, fn), "fpr": (fp, tn), "fnr": (fn, tp)}
    assert found.coverage == flagged.mean()
    level = 0.2 / len(found.limits)
    for one in found.limits if flagged.any() else ():
        if one.name == "cost":
            assert math.isclose(one.found, np.dot(counts, costs.ravel()) / n, abs_tol=1e-9)
        elif sum(shares[one.name]):
            hits, others = shares[one.name]
            assert one.n == hits + others
            assert math.isclose(one.found, hits / one.n, abs_tol=1e-12)
            side = 1 if one.name in ("precision", "recall") else -1
            if not found.more_labels and found.threshold > 0:
                assert side * (one.bound - one.limit) >= -1e-9
                failed = others if side == 1 else hits
                allowed = 1 - one.limit if side == 1 else one.limit
                assert binom.cdf(failed, one.n, allowed) <= level + 1e-12
    again = restored(artifact_of(found))
    assert str(again) == str(found)


def check_sets(rng: np.random.Generator) -> None:
    examples = random_examples(rng)
    if not (examples.labels != -100).any() or examples.logits.ndim == 1:
        return
    if np.isneginf(examples.logits).all(-1).any():
        return
    score = str(rng.choice(["lac", "aps", "raps"]))
    coverage, seed = float(rng.choice([0.1, 0.5, 0.9])), int(rng.integers(5))
    options: dict[str, Any] = {"coverage": coverage, "score": score, "seed": seed}
    fitted = quiet(conformal, examples.passed, examples.labels, **options)
    kept = examples.labels != -100
    probs = np.array([slow.slow_softmax(row) for row in examples.logits.tolist()])
    parts = _uniform(probs, seed)
    every = [
        [slow.slow_score(row, k, score, part) for k in range(len(row))]
        for row, part in zip(probs.tolist(), parts.tolist(), strict=True)
    ]
    own = sorted(row[y] for row, y in zip(every, examples.labels.tolist(), strict=True) if y >= 0)
    rank = math.ceil((kept.sum() + 1) * coverage - 1e-9)
    limit = own[rank - 1] if rank <= len(own) else math.inf
    members = np.asarray(fitted.sets(examples.passed))
    again = restored(artifact_of(fitted))
    assert again == fitted
    np.testing.assert_array_equal(np.asarray(again.sets(examples.passed)), members)
    slack = 2 * max(1e-6, np.finfo(np.float64).eps, eps_of(examples.passed))
    sure = np.array(every) <= limit
    near = np.array(every) <= limit + 2 * slack * abs(limit) + 1e-15
    assert not (sure & ~members).any(), "a class within the limit is missing"
    assert not (members & ~near).any(), "a class beyond the limit is in a set"
    covered = members[np.arange(len(members)), examples.labels.clip(0)][kept].mean()
    assert covered >= min(1.0, rank / kept.sum()) - 1e-12
    full = np.asarray(fitted.sets(examples.passed, nonempty=True))
    assert full.any(-1).all()
    i = int(rng.integers(len(members)))
    np.testing.assert_array_equal(
        np.asarray(fitted.sets(examples.passed[i : i + 1]))[0], members[i]
    )


def eps_of(values: Any) -> float:
    import torch

    info: Any = torch.finfo if isinstance(values, torch.Tensor) else np.finfo
    return float(info(values.dtype).eps)
