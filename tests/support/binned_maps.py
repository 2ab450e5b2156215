"""Bins of the confidence as slow loops, and fits of calibrators that use them."""

import warnings
from typing import Any

import numpy as np
from scipy.special import expit


def quiet(kind, logits, labels, *, weight=None, **options) -> Any:
    """A fit; what it says about small samples is tested elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**options).fit(logits, labels, sample_weight=weight)


def two_classes(odds):
    """Logits whose second class has these log-odds; it is the top one where they are positive."""
    return np.stack([np.zeros_like(odds), odds], axis=1)


def samples(rng, n, ties=False, slope=0.7):
    """Log-odds of the top class, whether it was right, and weights."""
    odds = rng.gamma(2, 1.5, n)
    odds = np.ceil(2 * odds) / 2 if ties else odds
    return odds, rng.random(n) < expit(slope * odds - 0.3), rng.integers(1, 4, n).astype(float)


def confidence(kind, odds, right, weight=None, at=None, **options):
    """What a fit says about the second class, as a float64 number."""
    fitted = quiet(kind, two_classes(odds), right.astype(int), weight=weight, **options)
    return fitted.predict_proba(two_classes(odds if at is None else at))[:, 1]


def slow_edges(values, weight, bins):
    """Halfway to the next value after the first one at which each share of the weight is full."""
    distinct, total = sorted(set(values)), sum(weight)
    edges = []
    for wanted in range(1, bins):
        so_far = 0.0
        for place, value in enumerate(distinct):
            so_far += sum(w for v, w in zip(values, weight, strict=True) if v == value)
            if so_far >= total * wanted / bins - 1e-9:
                if place + 1 < len(distinct):
                    edges.append((value + distinct[place + 1]) / 2)
                break
    return sorted(set(edges))


def slow_bin(value, edges):
    """Number of the bin (low, high] of a value."""
    for number, edge in enumerate(edges):
        if value <= edge:
            return number
    return len(edges)


def slow_means(values, outcome, weight, edges):
    """Weighted mean of the outcomes in each bin, None where there are none."""
    sums = [[0.0, 0.0] for _ in range(len(edges) + 1)]
    for value, hit, w in zip(values, outcome, weight, strict=True):
        total = sums[slow_bin(value, edges)]
        total[0] += w
        total[1] += w * hit
    return [s / w if w else None for w, s in sums]
