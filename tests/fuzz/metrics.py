"""Metrics of random examples against their definitions; input that is not legal is refused."""

import math
from typing import Any

import numpy as np

import calibrant as cal
from calibrant.metrics import margins, multilabel, per_class_ece, risk_coverage
from calibrant.metrics.reductions import pairs_from
from calibrant.metrics.smooth import MESH
from tests.fuzz.examples import Examples, exact, in_dtype, random_examples, random_weight
from tests.support import definitions as slow

USUAL = [name for name, metric in cal.METRICS.items() if not metric.on_request]
PAIRED = [name for name in USUAL if name not in ("nll", "brier", "classwise_ece")]
ESTIMANDS = [name for name in PAIRED if name not in ("accuracy", "aurc", "roc_auc")]
ROWS = ["nll", "brier", "classwise_ece", "per_class_ece"]
BINNED = ("ece", "debiased_ece", "ada_ece", "mce", "over_ece", "under_ece")


def check(rng: np.random.Generator) -> None:
    """Compare one metric of one set of examples, in one of the forms of input."""
    kind = rng.integers(20)
    if kind < 6:
        check_pairs(rng)
    elif kind < 9:
        check_probs(rng)
    elif kind < 11:
        check_tags(rng)
    elif kind < 12:
        check_refusals(rng)
    else:
        check_logits(rng)


def chosen(rng: np.random.Generator, names: list[str]) -> str:
    """Name a metric, seldom one whose definition takes long."""
    name = str(rng.choice(names))
    return name if name not in ("smce", "smooth_ece") or rng.random() < 0.2 else "ece"


def close(found: float, expected: float, name: str) -> None:
    same = math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-10)
    assert same or (math.isnan(found) and math.isnan(expected)), (name, found, expected)


def refused(function: Any, *args: Any, **named: Any) -> None:
    try:
        result = function(*args, **named)
    except (ValueError, TypeError):
        return
    raise AssertionError(f"not refused, got {result!r:.200}")


# ------------------------------------------------------------------------------------------ pairs


def random_confidences(rng: np.random.Generator, n: int) -> np.ndarray:
    """Some at edges of bins, next to them, tied, or at the ends."""
    claimed = rng.random(n)
    kind = rng.integers(5)
    if kind == 0:
        claimed = np.round(claimed, int(rng.integers(1, 3)))
    elif kind == 1:
        claimed = rng.choice([0.0, 1.0, 0.5, 1e-300, 1 - 2.0**-53], n)
    elif kind == 2:
        edges = np.round(claimed * 15) / 15
        claimed = np.clip(np.nextafter(edges, rng.choice([-1.0, 2.0], n)), 0, 1)
    elif kind == 3:
        claimed = 1 - claimed * 10.0 ** -rng.integers(0, 17)
    return claimed


def check_pairs(rng: np.random.Generator) -> None:
    n = int(rng.integers(1, 60))
    claimed, weight = random_confidences(rng, n), random_weight(rng, (n,))
    happened = rng.random(n) < rng.choice([0.0, 0.3, 1.0, 2.0]) * claimed
    if weight is not None and not weight.any():
        refused(cal.ece, confidence=claimed, outcome=happened, sample_weight=weight)
        return
    passed = {"confidence": claimed, "outcome": happened, "sample_weight": weight}
    kept = np.ones(n, bool) if weight is None else weight > 0
    mass = np.ones(n) if weight is None else weight
    name = chosen(rng, [*PAIRED, "risk_coverage"])
    compare(rng, name, passed, claimed[kept], happened[kept].astype(float), mass[kept])


def compare(rng: np.random.Generator, name: str, passed: dict[str, Any], *columns: Any) -> None:
    """Compare a metric of pairs with its definition."""
    confidence, outcome, weight = (column.tolist() for column in columns)
    if name == "risk_coverage":
        compare_curve(risk_coverage(**passed), confidence, outcome, weight)
        return
    bins = int(rng.choice([1, 2, 5, 15, 15, 15, 40]))
    options = {"bins": bins} if name in BINNED else {}
    found = cal.METRICS[name].compute(**passed, **options)
    if name == "debiased_ece":
        biased = slow.slow_ece(confidence, outcome, bins=bins, weight=weight)
        assert 0 <= found <= biased + 1e-12, (found, biased)
    elif name == "smooth_ece":
        compare_smooth(found, *columns)
    elif name == "smce":
        assert abs(found - slow.lipschitz_program(*columns)) < 1e-6  # what HiGHS guarantees
    else:
        close(found, defined(name, confidence, outcome, weight, bins), name)


def defined(
    name: str, confidence: list[float], outcome: list[float], weight: list[float], bins: int
) -> Any:
    pairs = confidence, outcome, weight
    if name in ("ece", "over_ece", "under_ece"):
        index = slow.equal_width(confidence, bins)
        gaps = [gap for _, _, gap in slow.slow_gaps(*pairs, index)]
        sign = {"ece": 0, "over_ece": 1, "under_ece": -1}[name]
        return math.fsum(max(sign * gap, 0) if sign else abs(gap) for gap in gaps)
    if name == "ada_ece":
        return slow.slow_ada_ece(*pairs, bins)
    if name == "mce":
        return slow.slow_mce(*pairs, bins)
    if name == "accuracy":
        return slow.slow_mean(outcome, weight)
    if name == "ks":
        return slow.slow_ks(*pairs)
    return slow.slow_aurc(*pairs) if name == "aurc" else slow.slow_auroc(*pairs)


def compare_smooth(found: float, *columns: Any) -> None:
    """The value is the width at which it is the value, up to the mesh."""
    confidence, outcome, weight = columns
    residual = np.average(np.abs(confidence - outcome), weights=weight)
    assert 0 <= found <= 1.05 * residual + 1e-9, (found, residual)
    if found > 0.01:
        expected = slow.integrated_ece(confidence, outcome, found, weight)
        # every residual moves by up to half a cell, which changes a Gaussian by so much
        moved = residual * 0.8 * (0.5 / MESH) / found
        assert abs(found - expected) < moved + 2e-4, (found, expected)


def compare_curve(curve: Any, confidence: Any, outcome: Any, weight: Any) -> None:
    assert curve.threshold.tolist() == sorted(set(confidence), reverse=True)
    total = math.fsum(weight)
    for threshold, coverage, risk in zip(*curve[:3], strict=True):
        kept = [
            (y, w) for p, y, w in zip(confidence, outcome, weight, strict=True) if p >= threshold
        ]
        close(coverage, math.fsum(w for _, w in kept) / total, "coverage")
        close(risk, 1 - slow.slow_mean(*zip(*kept, strict=True)), "risk")


# ----------------------------------------------------------------------------------------- logits


def check_logits(rng: np.random.Generator) -> None:
    """One metric of logits, of which only labelled rows count."""
    examples = random_examples(rng)
    if examples.logits.ndim == 2 and rng.random() < 0.1:
        ignored = ~examples.kept
        examples.logits[ignored] = np.nan
        examples.passed[ignored] = np.nan
    passed = {"labels": examples.labels, "sample_weight": examples.weight}
    two = examples.rows.shape[1] == 2
    names = [*PAIRED, *ROWS] if two else [n for n in [*PAIRED, *ROWS] if n != "roc_auc"]
    name = chosen(rng, names)
    if not examples.legal:
        refused(
            per_class_ece if name == "per_class_ece" else cal.METRICS[name].compute,
            examples.passed,
            **passed,
        )
        return
    rows, labels, weight = counted(examples)
    probs = [slow.slow_softmax(row) for row in rows.tolist()]
    if name in ("nll", "brier"):
        losses = [
            slow.slow_nll(row, y) if name == "nll" else slow.slow_brier(p, y)
            for row, p, y in zip(rows.tolist(), probs, labels, strict=True)
        ]
        found = cal.METRICS[name].compute(examples.passed, **passed)
        close(found, slow.slow_mean(losses, weight), name)
    elif name in ROWS:
        check_classes(
            rng, name, {"logits": examples.passed, **passed}, np.array(probs), labels, weight
        )
    else:
        check_reduced(
            rng,
            name,
            {"logits": examples.passed, **passed},
            np.array(probs),
            rows.argmax(-1),
            labels,
            weight,
        )
    if rng.random() < 0.1 and np.isfinite(examples.logits).all():
        expected = [sorted(row)[-1] - sorted(row)[-2] for row in examples.rows.tolist()]
        np.testing.assert_allclose(margins(examples.passed), expected, rtol=1e-6, atol=1e-12)


def counted(examples: Examples) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Rows, labels and weights of the examples that count."""
    kept, labels = examples.kept, examples.labels.reshape(-1)
    mass = np.ones(labels.size) if examples.weight is None else examples.weight.reshape(-1)
    return examples.rows[kept], labels[kept].tolist(), mass[kept]


def check_reduced(
    rng: np.random.Generator,
    name: str,
    passed: dict[str, Any],
    probs: np.ndarray,
    top: np.ndarray,
    labels: list[int],
    weight: np.ndarray,
) -> None:
    """Compare the pairs of a reduction, then a metric of these, since edges part last digits."""
    estimand = "binary" if name == "roc_auc" else "top_label"
    if name in ESTIMANDS:
        estimand = str(rng.choice(["auto", "top_label", "binary"][: 2 + (probs.shape[1] == 2)]))
    options = {"estimand": estimand} if name in ESTIMANDS else {}
    two = estimand == "binary" or (estimand == "auto" and probs.shape[1] == 2)
    at = np.ones_like(top) if two else top
    pairs = pairs_from(**passed, estimand=estimand)  # type: ignore[arg-type]
    same_digits(pairs.confidence, probs[np.arange(len(at)), at], exactly="probs" in passed)
    np.testing.assert_array_equal(pairs.outcome, at == np.array(labels))
    compare(rng, name, {**passed, **options}, pairs.confidence, pairs.outcome, weight)


def same_digits(found: np.ndarray, expected: Any, exactly: bool) -> None:
    np.testing.assert_allclose(found, expected, rtol=0 if exactly else 1e-12, atol=1e-300)


def check_classes(
    rng: np.random.Generator,
    name: str,
    passed: dict[str, Any],
    probs: np.ndarray,
    labels: list[int],
    weight: np.ndarray,
) -> None:
    """Class-wise errors, from pairs that are compared too."""
    bins, least = int(rng.choice([1, 5, 15])), float(rng.choice([0.0, 0.0, 0.05, 0.4]))
    options: dict[str, Any] = {"bins": bins, "threshold": least}
    unweighted = {key: value for key, value in passed.items() if key != "sample_weight"}
    if passed["sample_weight"] is not None:  # one_vs_rest takes none
        unweighted["labels"] = np.where(passed["sample_weight"] > 0, passed["labels"], -100)
    errors, shares = [], []
    for k in range(probs.shape[1]):
        claimed, happened = cal.metrics.one_vs_rest(**unweighted, k=k)
        same_digits(claimed, probs[:, k], exactly="probs" in passed)
        np.testing.assert_array_equal(happened, np.array(labels) == k)
        at = claimed > least if least else np.ones(len(claimed), bool)
        mass = weight[at].tolist()
        pairs = claimed[at].tolist(), happened[at].tolist()
        errors.append(slow.slow_ece(*pairs, bins=bins, weight=mass) if mass else math.nan)
        shares.append(math.fsum(weight[happened]) if mass else 0.0)
    if name == "per_class_ece":
        found = per_class_ece(**passed, **options)
        np.testing.assert_allclose(found, errors, rtol=1e-9, atol=1e-10)
        return
    options["average"] = average = str(rng.choice(["mean", "prevalence"]))
    if average == "mean":
        shares = [float(not math.isnan(error)) for error in errors]
    terms = [e * s for e, s in zip(errors, shares, strict=True) if s]
    expected = math.fsum(terms) / math.fsum(shares) if terms else math.nan
    close(cal.classwise_ece(**passed, **options), expected, name)


# ------------------------------------------------------------------------------ probabilities, tags


def check_probs(rng: np.random.Generator) -> None:
    """Probabilities count as they are stated, ties and edges included."""
    examples = random_examples(rng, masks=False)
    stated = np.array([slow.slow_softmax(row) for row in examples.rows.tolist()])
    if rng.random() < 0.5:
        stated = rng.multinomial(10, stated / stated.sum(-1, keepdims=True)) / 10
    one = examples.logits.ndim == 1
    probs = in_dtype(rng, stated[:, 1] if one else stated, str(rng.choice(["float64", "float32"])))
    passed = {"probs": probs, "labels": examples.labels, "sample_weight": examples.weight}
    kept, held = examples.kept, exact(probs)
    if not kept.any():
        refused(cal.ece, **passed)
        return
    rows = (np.stack([1 - held, held], -1) if one else held)[kept]
    _, labels, weight = counted(examples)
    two = rows.shape[1] == 2
    name = chosen(rng, [n for n in [*PAIRED, *ROWS] if two or n != "roc_auc"])
    if name in ("nll", "brier"):
        losses = [
            -math.log(max(row[y], math.exp(-100))) if name == "nll" else slow.slow_brier(row, y)
            for row, y in zip(rows.tolist(), labels, strict=True)
        ]
        close(cal.METRICS[name].compute(**passed), slow.slow_mean(losses, weight), name)
    elif name in ROWS:
        check_classes(rng, name, passed, rows, labels, weight)
    else:
        check_reduced(rng, name, passed, rows, rows.argmax(-1), labels, weight)


def check_tags(rng: np.random.Generator) -> None:
    """Each cell is a problem of its own."""
    examples = random_examples(rng, tags=True, masks=False)
    name = chosen(rng, ESTIMANDS)
    passed: dict[str, Any] = {"labels": examples.labels, "estimand": "multilabel"}
    if not examples.kept.any() or not examples.legal:
        refused(cal.METRICS[name].compute, examples.passed, **passed, sample_weight=examples.weight)
        return
    rows, labels, weight = counted(examples)
    unweighted = examples._replace(weight=None)
    if unweighted.legal:
        everything = multilabel(examples.passed, examples.labels)
        expected = [slow.slow_softmax(row)[1] for row in counted(unweighted)[0].tolist()]
        same_digits(everything.confidence, expected, exactly=False)
    passed["sample_weight"] = examples.weight
    pairs = pairs_from(examples.passed, **passed)
    same_digits(pairs.confidence, [slow.slow_softmax(row)[1] for row in rows.tolist()], False)
    np.testing.assert_array_equal(pairs.outcome, np.array(labels) == 1)
    compare(
        rng, name, {"logits": examples.passed, **passed}, pairs.confidence, pairs.outcome, weight
    )


# --------------------------------------------------------------------------------------- refusals


def check_refusals(rng: np.random.Generator) -> None:
    """Examples with one thing wrong are refused by every metric."""
    examples = random_examples(rng, masks=False)
    logits, labels = np.array(examples.logits), examples.labels.clip(0)
    weight, probs = np.ones(len(labels)), None
    at, kind = int(rng.integers(len(labels))), rng.integers(8)
    if kind == 0:
        logits[at] = rng.choice([np.nan, np.inf])
    elif kind == 1:
        labels[at] = rng.choice([-1, -99, examples.rows.shape[1], 2**40])
    elif kind == 2:
        weight[at] = rng.choice([-1.0, np.nan, np.inf, 1e101, -0.5])
    elif kind == 3:
        labels = labels[:-1]
    elif kind == 4:
        labels = labels + 0.5
    elif kind == 5:
        logits = logits.astype(object) if rng.random() < 0.5 else logits.astype(complex)
    elif kind == 6:
        logits[at] = -np.inf
        if logits.ndim == 1:
            labels[at] = 1
    else:
        probs = np.full(examples.rows.shape, 1 / examples.rows.shape[1])
        probs[at, 0] = rng.choice([-0.1, 0.9, np.nan, 2.0])
    name = str(rng.choice([n for n in USUAL if n != "roc_auc"]))
    form = {"logits": logits} if probs is None else {"probs": probs}
    refused(cal.METRICS[name].compute, **form, labels=labels, sample_weight=weight)
