"""Maps of P(y = 1), held against scikit-learn, slow definitions and known truths."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import expit

from calibrant._core.chunks import examples
from calibrant.calibrators.confidence_maps import (
    MAX_MEAN_ODDS,
    BetaCalibration,
    QuadraticScaling,
    RobustSigmoid,
    SigmoidScaling,
    SplineCalibration,
    VennAbers,
    _labelled_one,
)
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.histogram import BBQ, HistogramBinning, ScalingBinning
from calibrant.calibrators.isotonic import IsotonicCalibration
from calibrant.calibrators.logpartition import tabulate
from tests.support.binned_maps import quiet

ONLY_TWO: list[Any] = [QuadraticScaling, RobustSigmoid, VennAbers]
OPTIONAL: list[Any] = [
    *(SigmoidScaling, BetaCalibration, SplineCalibration),
    *(HistogramBinning, BBQ, ScalingBinning, IsotonicCalibration),
]
"""Methods that keep the predicted class of two classes only on wish."""


def biased(rng, n, offset=-2.0, scale=2.0):
    """Log-odds, labels of class 1 that are rarer than these say, and its true probability."""
    odds = scale * rng.normal(size=n)
    truth = expit(odds + offset)
    return odds, (rng.random(n) < truth).astype(int), truth


def two_columns(odds):
    return np.stack([odds / 3, odds / 3 + odds], axis=1)


@pytest.mark.parametrize("kind", [*OPTIONAL, *ONLY_TWO])
def test_an_offset_of_the_log_odds_is_undone(rng, kind):
    odds, labels, truth = biased(rng, 20_000)
    found = kind().fit(odds, labels).predict_proba(odds)
    assert found.mean() == pytest.approx(labels.mean(), abs=0.01)
    assert np.abs(found - truth).mean() < 0.03
    assert (found > 0.5).mean() < (odds > 0).mean() - 0.2


@pytest.mark.parametrize("kind", OPTIONAL)
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.filterwarnings("ignore:.*parameters for")
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_the_predicted_class_is_kept_on_wish_and_for_more_classes(rng, kind, columns):
    odds, labels, _ = biased(rng, 600)
    logits = odds if columns == 1 else two_columns(odds)
    three = 2 * rng.normal(size=(600, 3))
    for keep, of_two, of_three in ((None, False, True), (True, True, True), (False, False, False)):
        fitted = kind(keep_argmax=keep)
        assert fitted.keeps_argmax is fitted.monotone is of_three  # as for more classes
        fitted.fit(logits, labels)
        assert fitted.keeps_argmax is fitted.monotone is of_two
        found = fitted.transform(logits)
        changed = (found if columns == 1 else found[:, 1] - found[:, 0]) * odds < 0
        assert changed.any() != of_two
        fitted.fit(three, three.argmax(-1) * (rng.random(600) < 0.8))
        assert fitted.keeps_argmax is fitted.monotone is of_three


@pytest.mark.parametrize("kind", [SigmoidScaling, BetaCalibration, SplineCalibration, BBQ])
def test_one_map_serves_the_top_class_of_two_on_wish(rng, kind):
    """As for more classes, the confidence says how often the predicted class is right."""
    odds, labels, _ = biased(rng, 3000, offset=0.0)
    swapped = np.where(odds > 0, labels, 1 - labels)
    kept = kind(keep_argmax=True).fit(odds, labels).predict_proba(odds)
    above = kind(keep_argmax=True).fit(np.abs(odds), swapped).predict_proba(np.abs(odds))
    np.testing.assert_allclose(np.where(odds > 0, kept, 1 - kept), above, atol=1e-6)


@pytest.mark.parametrize("kind", [*OPTIONAL[:-1], *ONLY_TWO])
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.filterwarnings("ignore:.*(parameters for|not alike)")
def test_predictions_from_records_are_those_of_the_map(rng, kind, columns):
    odds, labels, _ = biased(rng, 400, scale=6.0)
    odds[::3] = np.round(odds[::3])
    odds[:4] = [0.0, 200.0, -200.0, 0.0]
    labels[:4] = [0, 1, 1, 1]
    logits = odds if columns == 1 else two_columns(odds)
    fitted = kind().fit(logits, labels)
    predictions = fitted.predict_records(tabulate(examples(logits, labels)))
    found = fitted.predict_proba(logits)
    one = found if columns == 1 else found[:, 1]
    np.testing.assert_allclose(predictions.confidence, np.where(odds > 0, one, 1 - one), atol=1e-5)
    assert (predictions.confidence < 0.5).any()
    own = np.where(labels == 1, one, 1 - one)
    likely = own > 1e-6  # the others have no digits left
    np.testing.assert_allclose(predictions.nll[likely], -np.log(own[likely]), rtol=1e-4, atol=1e-5)


def test_a_masked_class_stays_impossible(rng):
    odds, labels, _ = biased(rng, 400)
    logits = two_columns(odds)
    logits[:2] = [[0.0, -np.inf], [-np.inf, 0.0]]
    labels[:2] = [0, 1]
    for kind in [*OPTIONAL, *ONLY_TWO]:
        fitted = quiet(kind, logits, labels)
        np.testing.assert_array_equal(fitted.predict_proba(logits[:2]), [[1, 0], [0, 1]])
        if fitted.fits_records:
            predictions = fitted.predict_records(tabulate(examples(logits, labels)))
            np.testing.assert_array_equal(predictions.nll[:2], 0)


# Logistic regressions on two functions of the log-odds


def objective(line, columns, labels, weight, start, ridge):
    odds = columns @ line[:2] + line[2]
    nll = np.average(np.logaddexp(0, np.where(labels == 1, -odds, odds)), weights=weight)
    return nll + np.sum(np.array(ridge) * (line[:2] - start) ** 2) / len(labels)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("n", [60, 2000])
def test_the_quadratic_is_the_likeliest_with_its_ridge(rng, n, weigh):
    odds, labels, _ = biased(rng, n, scale=5.0)
    weight = rng.exponential(size=n) if weigh else np.ones(n)
    x = np.clip(odds, -10, 10)
    setting = np.stack([x**2, x], axis=1), labels, weight, [0, 1], [100, 1]
    fitted = quiet(QuadraticScaling, odds, labels, weight=weight)
    other = optimize.minimize(objective, [0, 1, 0], args=setting, tol=1e-12)
    np.testing.assert_allclose(fitted.line_, other.x, rtol=2e-3, atol=2e-4)
    expected = expit(setting[0] @ fitted.line_.numpy()[:2] + float(fitted.line_[2]))
    np.testing.assert_allclose(fitted.predict_proba(odds), expected, atol=1e-6)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("n", [60, 2000])
def test_the_robust_sigmoid_is_the_likeliest_with_its_ridge(rng, n, weigh):
    truth, labels, _ = biased(rng, n, scale=2.0)
    odds, weight = np.sinh(truth), rng.exponential(size=n) if weigh else np.ones(n)
    x = np.clip(odds, -30, 30)
    setting = np.stack([x - np.arcsinh(x), np.arcsinh(x)], 1), labels, weight, [1, 1], [1, 1]
    fitted = quiet(RobustSigmoid, odds, labels, weight=weight)
    bounds = [(0, 20), (0, 20), (-40, 40)]
    options: Any = {"ftol": 1e-14, "gtol": 1e-10}
    other = optimize.minimize(
        *(objective, [1, 1, 0], setting), method="L-BFGS-B", bounds=bounds, options=options
    )
    np.testing.assert_allclose(fitted.line_, other.x, rtol=2e-3, atol=5e-4)
    expected = expit(setting[0] @ fitted.line_.numpy()[:2] + float(fitted.line_[2]))
    np.testing.assert_allclose(fitted.predict_proba(odds), expected, atol=1e-6)


def test_normal_log_odds_of_two_variances_have_a_quadratic_truth(rng):
    labels = (rng.random(40_000) < 0.3).astype(int)
    odds = np.where(labels == 1, rng.normal(1, 2, 40_000), rng.normal(-1, 1, 40_000))
    # log N(x; 1, 2) - log N(x; -1, 1) + log(3 / 7)
    line = [3 / 8, 5 / 4, 3 / 8 - np.log(2) + np.log(3 / 7)]
    fitted = QuadraticScaling().fit(odds, labels)
    np.testing.assert_allclose(fitted.line_, line, atol=0.06)


def test_saturated_scores_do_not_mislead(rng):
    """Half of the scores are thirty times as large, and say no more for that."""
    odds, labels, truth = biased(rng, 20_000, offset=-1.0)
    saturated = np.where(rng.random(20_000) < 0.5, np.clip(30 * odds, -30, 30), odds)
    errors = {
        kind: np.abs(kind().fit(saturated, labels).predict_proba(saturated) - truth).mean()
        for kind in (SigmoidScaling, RobustSigmoid)
    }
    assert errors[RobustSigmoid] < 0.85 * errors[SigmoidScaling]


def test_the_robust_sigmoid_never_falls(rng):
    odds = rng.normal(size=500) * 5
    labels = (rng.random(500) < expit(-odds)).astype(int)
    with pytest.warns(UserWarning, match="higher where y = 0"):
        fitted = RobustSigmoid().fit(odds, labels)
    assert (np.diff(fitted.predict_proba(np.linspace(-50, 50, 999))) >= -1e-7).all()


@pytest.mark.parametrize("kind", [SigmoidScaling, BetaCalibration, QuadraticScaling, RobustSigmoid])
def test_labels_of_one_class_end_at_the_bounds_and_say_so(rng, kind):
    odds = rng.normal(size=300)
    with told(), pytest.warns(UserWarning, match="stopped at its bounds; are all of them right"):
        fitted = kind().fit(odds, np.ones(300, int))
    found = fitted.predict_proba(odds)
    assert (found > 0.99).all()
    assert np.isfinite(fitted.transform(odds)).all()
    assert np.abs(fitted.transform(odds)).max() < 5 * MAX_MEAN_ODDS


@pytest.mark.parametrize("kind", [QuadraticScaling, RobustSigmoid])
def test_separable_classes_have_an_optimum_with_a_ridge(rng, kind):
    odds = rng.normal(size=300)
    fitted = kind().fit(odds, (odds > 0.5).astype(int))
    assert fitted.line_.abs().max() < 30
    assert ((fitted.predict_proba(odds) > 0.5) == (odds > 0.5)).mean() > 0.98


# Venn-Abers


def isotonic_value(odds, labels, weight, at, label):
    """Isotonic regression at a new example of weight 1 with that label."""
    x, y, w = np.append(odds, at), np.append(labels, label), np.append(weight, 1.0)
    values, group = np.unique(x, return_inverse=True)
    mass = np.bincount(group, w)
    mean = np.bincount(group, w * y) / mass
    fitted = optimize.isotonic_regression(mean, weights=mass).x
    return fitted[np.searchsorted(values, at)]


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("digits", [0, 1, 6])
def test_bounds_are_isotonic_regressions_with_the_example_in_either_class(rng, digits, weigh):
    for _ in range(15):
        n = int(rng.integers(1, 40))
        odds = np.round(2 * rng.normal(size=n), digits).astype("float32")
        labels = (rng.random(n) < expit(odds - 1)).astype(int)
        weight = rng.exponential(size=n) + 0.01 if weigh else np.ones(n)
        fitted = quiet(VennAbers, odds, labels, weight=weight)
        at = np.concatenate([odds, odds + np.float32(0.003), [-50.0, 50.0]]).astype("float32")
        low, high = fitted.predict_bounds(at)
        share = weight / weight.mean()
        for label, bounds in ((0, low), (1, high)):
            expected = [isotonic_value(odds, labels, share, x, label) for x in at]
            np.testing.assert_allclose(bounds, expected, atol=1e-6)
        expected = high / (1 - low + high)
        np.testing.assert_allclose(fitted.predict_proba(at), expected, atol=1e-6)


def test_another_library_has_the_same_bounds(rng):
    theirs = pytest.importorskip("venn_abers")
    odds, labels, _ = biased(rng, 500)
    odds, at = odds.astype("float32").astype(float), 2 * rng.normal(size=200)
    at = at.astype("float32").astype(float)
    other = theirs.VennAbers()
    other.fit(np.stack([expit(-odds), expit(odds)], axis=1), labels)
    probs, bounds = other.predict_proba(np.stack([expit(-at), expit(at)], axis=1))
    fitted = VennAbers().fit(odds, labels)
    np.testing.assert_allclose(fitted.predict_proba(at), probs[:, 1], atol=1e-6)
    np.testing.assert_allclose(np.stack(fitted.predict_bounds(at), axis=1), bounds, atol=1e-6)


def test_one_more_hit_is_a_max_of_min_of_means(rng):
    for _ in range(60):
        m = int(rng.integers(1, 9))
        hits, more = rng.integers(0, 4, m).astype(float), rng.integers(1, 4, m)
        mass, found = hits + more, _labelled_one(hits, hits + more)
        for i in range(m):
            value = max(
                min(
                    (1 + hits[a : b + 1].sum()) / (1 + mass[a : b + 1].sum())
                    if a <= i <= b
                    else hits[a : b + 1].sum() / mass[a : b + 1].sum()
                    for b in range(i, m)
                )
                for a in range(i + 1)
            )
            assert found[i] == pytest.approx(value)


def test_bounds_have_the_form_of_the_rows(rng):
    odds, labels, _ = biased(rng, 300)
    one, two = VennAbers().fit(odds, labels), VennAbers().fit(two_columns(odds), labels)
    low, high = one.predict_bounds(odds.reshape(100, 3))
    assert low.shape == high.shape == (100, 3)
    assert (low <= high).all()
    pair = two.predict_bounds(torch.from_numpy(two_columns(odds)))
    assert all(isinstance(part, torch.Tensor) for part in pair)
    np.testing.assert_allclose(pair[0], low.reshape(-1), atol=1e-6)
    np.testing.assert_allclose(pair[1], high.reshape(-1), atol=1e-6)
    with pytest.raises(ValueError, match="row 0 has NaN"):
        one.predict_bounds([np.nan])
    with pytest.raises(RuntimeError, match="is not fitted"):
        VennAbers().predict_bounds([0.0])


def test_it_never_claims_certainty(rng):
    odds = rng.normal(size=100)
    fitted = quiet(VennAbers, odds, (odds > 0).astype(int))
    found = fitted.predict_proba(np.array([-1e6, -40.0, 40.0, 1e6]))
    assert found.min() > 0.005
    assert found.max() < 0.995


@pytest.mark.parametrize("kind", ONLY_TWO)
def test_more_classes_are_refused_with_a_remedy(rng, kind):
    message = f"{kind.__name__} is for two classes, got 4: use a method for any number"
    with pytest.raises(ValueError, match=message):
        kind().fit(rng.normal(size=(200, 4)), rng.integers(0, 4, 200))
