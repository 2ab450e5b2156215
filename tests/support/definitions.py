"""Definitions written as slow loops, which the tests and the fuzzer compare fast code with."""

import itertools
import math
from itertools import pairwise

import numpy as np
from scipy import optimize

# ------------------------------------------------------------------------------ examples to pairs


def slow_softmax(row):
    """Probabilities of one row of logits; those of masked classes are 0."""
    top = max(row)
    shares = [math.exp(z - top) for z in row]
    total = math.fsum(shares)
    return [share / total for share in shares]


def slow_nll(row, label):
    """Negative log-likelihood of one row of logits, also where the probability underflows."""
    top = max(row)
    return (top - row[label]) + math.log(math.fsum(math.exp(z - top) for z in row))


def slow_brier(probs, label):
    return math.fsum((p - (k == label)) ** 2 for k, p in enumerate(probs))


def slow_mean(values, weight):
    return math.fsum(v * w for v, w in zip(values, weight, strict=True)) / math.fsum(weight)


# ------------------------------------------------------------------------------------------- bins


def slow_index(value, edges):
    """The rule: (lo, hi], and the first bin also holds its lower end."""
    for i, (low, high) in enumerate(pairwise(edges)):
        if low < value <= high or (i == 0 and value == low):
            return i
    raise AssertionError(f"{value} is in no bin")


def slow_gaps(confidence, outcome, weight, index):
    """Number of examples, share of the weight, and share times (confidence - accuracy) by bin."""
    total = math.fsum(weight)
    members: dict[int, list[tuple[float, float, float]]] = {}
    for p, y, w, b in zip(confidence, outcome, weight, index, strict=True):
        members.setdefault(b, []).append((p, y, w))
    return [
        (
            len(rows),
            math.fsum(w for _, _, w in rows) / total,
            math.fsum(w * (p - y) for p, y, w in rows) / total,
        )
        for rows in members.values()
    ]


def equal_width(confidence, bins):
    edges = [i / bins for i in range(bins + 1)]
    return [slow_index(p, edges) for p in confidence]


def slow_ece(confidence, outcome, *, bins=15, weight=None):
    """ECE, one bin after the other."""
    weight = [1.0] * len(confidence) if weight is None else weight
    gaps = slow_gaps(confidence, outcome, weight, equal_width(confidence, bins))
    return math.fsum(abs(gap) for _, _, gap in gaps)


def slow_mce(confidence, outcome, weight, bins):
    """Largest gap of a bin with at least 1 % of the examples, and ten of them."""
    gaps = slow_gaps(confidence, outcome, weight, equal_width(confidence, bins))
    least = max(10, math.ceil(len(confidence) / 100))
    return max((abs(gap) / share for n, share, gap in gaps if n >= least), default=math.nan)


def slow_groups(confidence, bins, weight):
    """The values of each bin: one ends at the first value that brings the mass to its share."""
    total, mass, share, full = math.fsum(weight), 0.0, 1, True
    groups: list[list[float]] = []
    ordered = sorted(zip(confidence, weight, strict=True))
    for value, rows in itertools.groupby(ordered, lambda row: row[0]):
        if full:
            groups.append([])
        groups[-1].append(value)
        mass += math.fsum(w for _, w in rows)
        full = False
        while share < bins and mass >= total * share / bins * (1 - 1e-12):
            share, full = share + 1, True
    return groups


def slow_ada_ece(confidence, outcome, weight, bins):
    groups = slow_groups(confidence, bins, weight)
    index = [next(i for i, group in enumerate(groups) if p in group) for p in confidence]
    return math.fsum(abs(gap) for _, _, gap in slow_gaps(confidence, outcome, weight, index))


# ----------------------------------------------------------------------------------- without bins


def slow_ks(confidence, outcome, weight):
    shares = [w * (p - y) for p, y, w in zip(confidence, outcome, weight, strict=True)]
    running = (
        math.fsum(s for p, s in zip(confidence, shares, strict=True) if p <= t) for t in confidence
    )
    return max(map(abs, running)) / math.fsum(weight)


def lipschitz_program(confidence, outcome, weight=None):
    """Maximise the mean of phi(p) (p - y) over 1-Lipschitz phi into [-1, 1], with HiGHS."""
    weight = np.ones(len(confidence)) if weight is None else weight
    position, group = np.unique(confidence, return_inverse=True)
    residual = np.bincount(group, weight * (confidence - outcome)) / weight.sum()
    step = np.diff(np.eye(position.size), axis=0)
    found = optimize.linprog(
        -residual,
        A_ub=np.concatenate([step, -step]),
        b_ub=np.concatenate([np.diff(position)] * 2),
        bounds=(-1, 1),
        method="highs",
    )
    assert found.fun is not None, found.message
    return -found.fun


def integrated_ece(confidence, outcome, width, weight=None, mesh=1000):
    """Integrate the residuals smoothed by a Gaussian of this width, reflected at 0 and 1."""
    weight = np.ones(len(confidence)) if weight is None else weight
    share = weight * (confidence - outcome) / weight.sum()
    t = (np.arange(mesh) + 0.5) / mesh
    smooth = np.zeros(mesh)
    for p, r in zip(np.array_split(confidence, 20), np.array_split(share, 20), strict=True):
        for sign, k in itertools.product((1, -1), range(-3, 4)):
            distance = t - (sign * p[:, None] + 2 * k)
            smooth += r @ np.exp(-((distance / width) ** 2) / 2)
    return np.abs(smooth).mean() / (width * math.sqrt(2 * math.pi))


# ---------------------------------------------------------------------------------------- ranking


def slow_auroc(confidence, outcome, weight):
    """Share of the pairs of an event and a non-event in the right order; ties count half."""
    rows = list(zip(confidence, outcome, weight, strict=True))
    events, others = ([(p, w) for p, y, w in rows if y == side] for side in (1, 0))
    if not (events and others):
        return math.nan
    won = math.fsum(v * w * ((p > q) + 0.5 * (p == q)) for p, v in events for q, w in others)
    return won / math.fsum(w for _, w in events) / math.fsum(w for _, w in others)


def slow_aurc(confidence, outcome, weight):
    """Mean error rate among the most confident; tied examples have their mean weight and error."""
    rows = sorted(zip(confidence, outcome, weight, strict=True), reverse=True)
    kept, wrong, terms = 0.0, 0.0, []
    for _, tied in itertools.groupby(rows, lambda row: row[0]):
        group = list(tied)
        mass = math.fsum(w for _, _, w in group) / len(group)
        failed = math.fsum(w for _, y, w in group if not y) / len(group)
        for _ in group:
            kept, wrong = kept + mass, wrong + failed
            terms.append(mass * wrong / kept)
    return math.fsum(terms) / kept


# -------------------------------------------------------------------------------------- decisions


def slow_threshold(confidence, right, max_error, level):
    """The definition, one threshold after another, with sums for probabilities."""
    middle = math.log((1 - max_error) / max_error) - 0.05
    steps = range(70, -10 * max(0, math.ceil(middle + 7)) - 1, -1)
    grid = [1 / (1 + math.exp(-middle - i / 10)) for i in steps]
    total = sum(3.0 ** -abs(i // 10) for i in steps if i % 10 == 0)
    shares = [3.0 ** -abs(i // 10) / total if i % 10 == 0 else 0.0 for i in steps]
    found, carried = math.inf, 0.0
    for t, share in zip([*grid, 0.0], [*shares, 0.0], strict=True):
        taken = [bool(r) for c, r in zip(confidence, right, strict=True) if c >= t]
        m, k = len(taken), taken.count(False)
        terms = [math.comb(m, j) * max_error**j * (1 - max_error) ** (m - j) for j in range(k + 1)]
        have = carried + (1 - level) * share
        passes = m > 0 and have > 0 and math.fsum(terms) <= have
        found, carried = (t, have) if passes else (found, 0.0)
    return found


def slow_score(row, label, score, part):
    """Score of one class of one row, in words: everything before it, and a part of it, less 1."""
    if score == "lac":
        return -row[label]
    order = sorted(range(len(row)), key=lambda k: (-row[k], k))
    rank = order.index(label)
    before = [row[k] for k in order[:rank]]
    found = math.fsum([*before, part * row[label], *(-p for p in row)])  # exact, if tiny
    return found + (0.01 * max(0, rank + 1 - 5) if score == "raps" else 0)
