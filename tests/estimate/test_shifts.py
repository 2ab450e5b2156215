"""Shifts that are seen without labels: levels, sizes and explanations."""

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from calibrant.estimate.cells import _event_cell, _reduce_rows
from calibrant.estimate.shifts import (
    _binned_shift,
    _feature_shift,
    _find_shifts,
    _label_shift_weights,
    _seen_rows,
)


def softmax_rows(rng, n, *, scale=1.5, bias=0.0):
    logits = scale * rng.normal(size=(n, 4)) + bias * np.eye(4)[0]
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (probs.cumsum(1) > rng.random((n, 1))).argmax(1)
    return _reduce_rows(probs, labels), probs


def seen(rows, weight=None):
    weight = np.ones(rows.event.size) if weight is None else weight
    return _seen_rows(rows, weight, 4, _event_cell(rows, 2.0))


def test_the_test_of_bins_is_that_of_homogeneity():
    new, old = np.array([30.0, 50.0, 20.0]), np.array([400.0, 350.0, 250.0])
    shift = _binned_shift("x", new, old, 100, 1000)
    assert shift.p_value == pytest.approx(chi2_contingency([new, old], correction=False).pvalue)


def test_the_size_is_the_divergence_without_its_noise(rng):
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.full(4, 0.25)
    true = ((p - q) ** 2 / q).sum()
    drawn = (rng.multinomial(400, [p, q]).astype(float) for _ in range(400))
    sizes = [_binned_shift("x", new, old, 400, 400).size for new, old in drawn]
    assert np.mean(sizes) == pytest.approx(true, rel=0.05)


def test_a_visible_shift_is_seen_four_times_in_five(rng):
    n, m, level = 400, 700, 0.005
    old = np.full(12, 1 / 12)
    visible = _binned_shift("x", old, old, n, m).visible(n, m, level)
    tilt = np.linspace(-1, 1, 12)
    new = old * (1 + tilt * np.sqrt(visible / (old * tilt**2).sum()))
    assert ((new - old) ** 2 / old).sum() == pytest.approx(visible)
    runs = 1000
    drawn = ((rng.multinomial(n, new), rng.multinomial(m, old)) for _ in range(runs))
    seen = sum(_binned_shift("x", *pair, n, m).p_value < level for pair in drawn)
    assert seen / runs == pytest.approx(0.8, abs=0.06)  # not exactly: the formula is for n, m large


def test_no_shift_is_seen_at_the_stated_level():
    seen_any, runs = 0, 150
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        views = _find_shifts(*(seen(softmax_rows(rng, 500)[0]) for _ in range(2)), seed=0)
        seen_any += min(s.p_value for s in views) < 0.1 / len(views)
    assert seen_any <= 24  # 15 are expected; more with a probability of 1 %


@pytest.mark.parametrize(
    ("change", "view"), [({"scale": 1.0}, "margin"), ({"bias": 1.0}, "predicted class")]
)
def test_shifts_are_seen(rng, change, view):
    shifts = _find_shifts(
        seen(softmax_rows(rng, 2000, **change)[0]), seen(softmax_rows(rng, 2000)[0]), seed=0
    )
    found = {s.view: s for s in shifts}
    assert set(found) == {"confidence", "margin", "predicted class"}
    assert found[view].p_value < 1e-6
    assert found[view].size > 0.02


def test_features_of_another_shape_of_distribution_are_seen(rng):
    """Means and variances agree, so that only a function that is not linear sees it."""
    old = rng.normal(size=(2000, 3))
    same, other = rng.normal(size=(1500, 3)), rng.choice([-1.0, 1.0], (1500, 3))
    weights = np.ones(1500), np.ones(2000)
    assert _feature_shift(same, old, *weights, 0).p_value > 0.01
    shift = _feature_shift(other, old, *weights, 0)
    assert shift.p_value < 1e-9
    assert shift.size > 0.1


def test_features_that_never_vary_are_left_out(rng):
    old, new = rng.normal(size=(300, 2)), rng.normal(size=(300, 2))
    old[:, 1] = new[:, 1] = 3.0
    assert _feature_shift(new, old, np.ones(300), np.ones(300), 0).p_value > 0.001
    with pytest.raises(ValueError, match="from one layer"):
        _feature_shift(new[:, :1], old, np.ones(300), np.ones(300), 0)


def test_a_label_shift_is_explained_by_weights(rng):
    rows, probs = softmax_rows(rng, 6000, scale=2.5)
    reference, taken = rows.take(np.arange(6000) < 3000), np.arange(6000) >= 3000
    kept = taken & (rng.random(6000) < np.array([1.0, 0.2, 0.2, 0.2])[rows.label])
    shifted = _label_shift_weights(reference, np.ones(3000), probs[kept])
    assert shifted is not None
    prior, ratio = shifted
    assert prior == pytest.approx(np.bincount(rows.label[kept]) / kept.sum(), abs=0.04)
    plain = _find_shifts(seen(rows.take(kept)), seen(reference), seed=0)
    explained = _find_shifts(seen(rows.take(kept)), seen(reference, ratio[reference.label]), seed=0)
    assert max(s.size for s in explained) < 0.1 * max(s.size for s in plain)
    assert _label_shift_weights(reference.take(np.arange(3000) < 39), np.ones(39), probs) is None
