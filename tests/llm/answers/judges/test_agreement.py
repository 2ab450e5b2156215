"""Agreement of judges and people, against scikit-learn and simulated truths."""

import math

import numpy as np
import pytest

from calibrant.llm.answers.judges.biases import agreement

sklearn_metrics = pytest.importorskip("sklearn.metrics")


def drawn(rng, n, *, noise=1.5):
    right = rng.random(n) < 0.6
    return np.clip(np.round(5.5 + 3 * (right - 0.5) + noise * rng.normal(size=n)), 1, 10), right


def test_values_are_those_of_scikit_learn(rng):
    scores, right = drawn(rng, 300)
    weight = rng.uniform(0.5, 3, size=300)
    found = agreement(scores, right, cut=6, sample_weight=weight)
    given = {"sample_weight": weight}
    assert found.raw.value == pytest.approx(
        sklearn_metrics.accuracy_score(right, scores >= 6, **given)
    )
    assert found.kappa.value == pytest.approx(
        sklearn_metrics.cohen_kappa_score(right, scores >= 6, **given)
    )
    assert found.auroc.value == pytest.approx(sklearn_metrics.roc_auc_score(right, scores, **given))
    assert found.n == 300
    table = sklearn_metrics.confusion_matrix(right, scores >= 6, normalize="true", **given)
    assert (found.lenient, found.strict) == pytest.approx((table[0, 1], table[1, 0]))


def test_intervals_contain_kappa():
    scores, right = drawn(np.random.default_rng(0), 400_000)
    truth = sklearn_metrics.cohen_kappa_score(right, scores >= 6)
    hits = 0
    for seed in range(200):
        found = agreement(*drawn(np.random.default_rng(seed), 80), cut=6).kappa
        hits += found.low <= truth <= found.high
    assert 168 <= hits <= 192  # 180 expected


def test_perfect_and_constant_verdicts():
    same = agreement([1, 0, 1, 0], [1, 0, 1, 0])
    assert (same.raw.value, same.kappa.value) == (1, 1)
    assert math.isnan(same.kappa.low)
    assert same.raw.low < 1
    constant = agreement([1, 1, 1], [1, 1, 1])
    assert math.isnan(constant.kappa.value)
    assert math.isnan(constant.auroc.value)
    assert math.isnan(constant.lenient)
    assert constant.strict == 0


def test_grades_from_a_half_on_count_as_right():
    assert agreement([1, 0], [0.5, 0.49]).raw.value == 1


def test_each_score_needs_a_label():
    with pytest.raises(ValueError, match="human must have 2 labels, got 1"):
        agreement([1, 0], [1])
