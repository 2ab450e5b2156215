"""Labels of a batch against what its predictions claim."""

import numpy as np
import pytest
from scipy.stats import binom

from calibrant.data import as_dataset
from calibrant.estimate.cells import _fill_strata, _make_strata
from calibrant.estimate.performance import _compare_labels
from calibrant.estimate.prediction_summary import _summarise

ALARM = 0.05


def summary(probs, labels, **columns):
    split = as_dataset({"probs": probs, "labels": labels, **columns}).split()
    return _summarise(split, None, threshold=None, labels=True)


def alarms(claimed, n):
    """Numbers of right answers among ``n`` that contradict a claim."""
    probs, right = np.tile([1 - claimed, claimed], (n, 1)), np.arange(n)
    compared = (_compare_labels(summary(probs, (right < k) * 1), None) for k in range(n + 1))
    return [k for k, agreement in enumerate(compared) if agreement.p_value < ALARM]


@pytest.mark.parametrize("n", [1, 2, 5, 20, 60])
@pytest.mark.parametrize("claimed", [0.51, 0.8, 0.95, 0.98, 0.999])
def test_true_claims_are_contradicted_at_the_stated_level(n, claimed):
    """Exactly, also for few labels, and where the accuracy is off by the two points allowed."""
    contradicting = alarms(claimed, n)
    for accuracy in (claimed, claimed - 0.02, min(claimed + 0.02, 1)):
        assert binom.pmf(contradicting, n, accuracy).sum() <= ALARM + 1e-9


def test_false_claims_are_contradicted():
    assert {0, 1, 2, 3} <= set(alarms(0.9, 10))
    contradicting = alarms(0.9, 60)
    assert binom.pmf(contradicting, 60, 0.7).sum() > 0.9


def test_the_noise_of_the_reference_counts():
    """Labels and a reference of the same data, whose confidences are far too high."""
    contradicted, runs = 0, 200
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        claimed = rng.uniform(0.5, 1, 1000)
        labels = (rng.random(1000) < claimed - 0.2).astype(int)
        probs = np.stack([1 - claimed, claimed], 1)
        known, batch = (summary(probs[half], labels[half]) for half in (slice(60), slice(60, None)))
        strata = _fill_strata(_make_strata(known.labelled, two_classes=True), known.labelled)
        assert _compare_labels(batch, None).p_value < 1e-6
        contradicted += _compare_labels(batch, strata).p_value < ALARM
    assert contradicted <= binom.ppf(0.999, runs, ALARM)


def test_selected_labels_stand_for_their_examples():
    """Of nine sure and one doubtful examples, both kinds were labelled alike."""
    probs = np.repeat([[0.1, 0.9], [0.4, 0.6]], 50, axis=0)
    inclusion = np.repeat([1 / 9, 1.0], 50)
    agreement = _compare_labels(
        summary(probs, np.ones(100, int), inclusion_probability=inclusion), None
    )
    assert agreement.claimed == pytest.approx(0.9 * 0.9 + 0.1 * 0.6)
    assert agreement.shown == 1
