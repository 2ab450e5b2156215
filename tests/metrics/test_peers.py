"""Other libraries and slow loops: the same number, or a difference that is understood.

The deviations of other libraries are stated with the numbers that they give (torchmetrics 1.9.0,
relplot 1.0.3, MAPIE 1.6.0). When a test of a deviation fails after an upgrade, the library has
changed: correct the table in docs/metrics.md with it.
"""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

import calibrant as cal
from calibrant._core.binning import fill, uniform_edges
from tests.support.definitions import integrated_ece
from tests.support.named_predictions import (
    TIGHT,
    every,
    pairs_of,
    predictions,
    random_only,
    sample_only,
    weights_and_ties,
    weights_of,
)

SINGLE = 5e-7
"""torchmetrics casts multi-class confidences to float32 and adds them up in float32."""
TOP: dict[str, Any] = {"estimand": "top_label"}
"""What multi-class functions of other libraries measure, also of two classes."""


def quiet_import(name):
    """Import a peer or skip; what it warns of while it is imported is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.fixture
def torchmetrics():
    return quiet_import("torchmetrics.functional.classification")


@pytest.fixture
def sklearn():
    quiet_import("sklearn.calibration")
    quiet_import("sklearn.metrics")
    return quiet_import("sklearn")


@pytest.fixture
def relplot():
    return quiet_import("relplot")


@pytest.fixture
def uncertainty():
    return quiet_import("calibration")


@pytest.fixture
def mapie():
    return quiet_import("mapie.metrics.calibration")


def metric(torchmetrics, scores, labels, **options):
    found = torchmetrics.multiclass_calibration_error(
        torch.as_tensor(scores), torch.as_tensor(labels), num_classes=scores.shape[1], **options
    )
    return float(found)


@random_only
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_equals_torchmetrics_where_no_confidence_rounds_to_one(torchmetrics, name, bins):
    logits, labels = predictions(name)
    expected = metric(torchmetrics, softmax(logits, axis=-1), labels, n_bins=bins)
    found = cal.ece(logits, labels, bins=bins, **TOP)
    assert found == pytest.approx(expected, abs=SINGLE)


@random_only
def test_mce_of_bins_of_any_size_equals_the_max_norm_of_torchmetrics(torchmetrics, name):
    logits, labels = predictions(name)
    expected = metric(torchmetrics, softmax(logits, axis=-1), labels, n_bins=15, norm="max")
    found = cal.mce(logits, labels, min_count=1, **TOP)
    assert found == pytest.approx(expected, abs=2e-6)  # one bin: fewer digits than the mean of all


@sample_only
def test_ece_equals_torchmetrics_on_the_sample_but_for_its_float32_sums(torchmetrics, name):
    """Most of the sample lies in one bin, whose sum in float32 is off by 1e-5 of the whole."""
    logits, labels = predictions(name)
    theirs = metric(torchmetrics, softmax(logits, axis=-1), labels, n_bins=15)
    confidence, outcome = cal.top_label(logits, labels)
    assert cal.ece(confidence=confidence, outcome=outcome) == pytest.approx(theirs, abs=2e-5)
    assert cal.ece(confidence=confidence, outcome=outcome) != pytest.approx(theirs, abs=5e-6)
    # their number again, by adding up one float32 after the other
    single = confidence.astype(np.float32)
    index = np.searchsorted(np.linspace(0, 1, 16, dtype=np.float32), single, side="right") - 1
    total = 0.0
    for b in np.unique(index):
        claimed = np.cumsum(single[index == b], dtype=np.float32)[-1]
        total += abs(float(claimed) - outcome[index == b].sum())
    assert total / outcome.size == pytest.approx(theirs, abs=SINGLE)


def test_float32_sums_of_torchmetrics_drift_in_a_million_examples(torchmetrics):
    """All claim 0.8 and exactly 80 % are right. Calibrant adds up in float64."""
    confidence = torch.full((1_000_000,), 0.8)
    outcome = (torch.arange(1_000_000) % 5 < 4).long()
    theirs = torchmetrics.binary_calibration_error(confidence, outcome, n_bins=15)
    assert float(theirs) == pytest.approx(0.0077, abs=0.002)
    assert cal.ece(confidence=confidence, outcome=outcome) == pytest.approx(
        0, abs=2e-8
    )  # float32 0.8 is not 0.8


def test_torchmetrics_and_relplot_count_a_confidence_of_one_apart(torchmetrics, relplot):
    confidence, outcome = np.array([0.95, 1.0]), np.array([1, 0])
    theirs = torchmetrics.binary_calibration_error(
        torch.tensor(confidence), torch.tensor(outcome), n_bins=10
    )
    assert float(theirs) == pytest.approx(0.525, abs=TIGHT)
    assert relplot.metrics.binnedECE(confidence, outcome, 10) == pytest.approx(0.525, abs=TIGHT)
    assert cal.ece(confidence=confidence, outcome=outcome, bins=10) == pytest.approx(
        0.475, abs=TIGHT
    )


@pytest.mark.parametrize("edge", [0.2, 0.6, 0.7])
def test_torchmetrics_closes_bins_on_the_left(torchmetrics, edge):
    confidence, outcome = np.array([edge - 0.05, edge]), np.array([1, 0])
    theirs = torchmetrics.binary_calibration_error(
        torch.tensor(confidence), torch.tensor(outcome), n_bins=10
    )
    assert float(theirs) == pytest.approx(0.525, abs=TIGHT)
    assert cal.ece(confidence=confidence, outcome=outcome, bins=10) == pytest.approx(
        abs(2 * edge - 0.05 - 1) / 2, abs=TIGHT
    )


def test_torchmetrics_takes_logits_between_zero_and_one_for_probabilities(torchmetrics):
    logits = torch.tensor([[0.9, 0.1], [0.8, 0.3], [0.7, 0.2], [0.2, 0.6]])
    labels = torch.tensor([0, 0, 1, 1])
    assert metric(torchmetrics, logits, labels, n_bins=15) == pytest.approx(0.35, abs=SINGLE)
    assert cal.ece(logits, labels) == pytest.approx(0.239064, abs=1e-6)
    # a fifth row outside [0, 1] changes what the first four mean, and the two agree
    logits = torch.cat([logits, torch.tensor([[9.0, -9.0]])])
    labels = torch.cat([labels, torch.tensor([0])])
    expected = metric(torchmetrics, logits, labels, n_bins=15)
    assert expected == pytest.approx(0.191251, abs=1e-6)
    assert cal.ece(logits, labels) == pytest.approx(expected, abs=SINGLE)


def test_binary_torchmetrics_counts_in_the_dtype_of_its_input(torchmetrics):
    """A float16 count ends at 65504. In float32 the same happens, slowly, from 2**24 on."""
    confidence = torch.full((80_000,), 0.75, dtype=torch.float16)
    outcome = torch.arange(80_000) % 2
    theirs = torchmetrics.binary_calibration_error(confidence, outcome, n_bins=10)
    assert math.isnan(theirs)
    assert cal.ece(confidence=confidence, outcome=outcome, bins=10) == 0.25


@every
def test_the_reliability_curve_has_the_points_of_scikit_learn(sklearn, name):
    confidence, outcome = pairs_of(*predictions(name))
    happened, claimed = sklearn.calibration.calibration_curve(outcome, confidence, n_bins=15)
    filled = fill(confidence, outcome.astype(np.float64), uniform_edges(15))
    used = filled.count > 0
    np.testing.assert_allclose(filled.accuracy[used], happened, atol=TIGHT)
    np.testing.assert_allclose(filled.confidence[used], claimed, atol=TIGHT)


@every
def test_ece_equals_relplot(relplot, name):
    logits, labels = predictions(name)
    expected = relplot.metrics.binnedECE(
        *relplot.multiclass_logits_to_confidences(logits, labels), nbins=10
    )
    found = cal.ece(logits, labels, bins=10)
    assert found == pytest.approx(expected, abs=TIGHT)


@every
def test_ece_equals_uncertainty_calibration(uncertainty, name):
    logits, labels = predictions(name)
    expected = uncertainty.get_ece(softmax(logits, axis=-1), labels, num_bins=10)
    assert cal.ece(logits, labels, bins=10) == pytest.approx(expected, abs=TIGHT)


@random_only
def test_equal_mass_ece_equals_uncertainty_calibration_when_the_bins_divide_the_rows(
    uncertainty, name
):
    logits, labels = predictions(name)
    assert len(labels) % 15 == 0
    expected = uncertainty.get_ece_em(softmax(logits, axis=-1), labels, num_bins=15)
    assert cal.ada_ece(logits, labels, **TOP) == pytest.approx(expected, abs=TIGHT)


def test_equal_mass_bins_of_ties_agree_with_uncertainty_calibration(uncertainty):
    confidence = np.repeat([0.3, 0.7, 0.9], [100, 300, 200])
    outcome = np.random.default_rng(0).random(600) < 0.5
    expected = uncertainty.get_ece_em(confidence, outcome.astype(int), num_bins=15)
    assert cal.ada_ece(confidence=confidence, outcome=outcome) == pytest.approx(expected, abs=TIGHT)


@every
def test_the_default_of_uncertainty_calibration_is_another_quantity(uncertainty, name):
    """It is marginal, L2 and debiased. On the sample: 0.0092, where top-label ECE is 0.0424."""
    logits, labels = predictions(name)
    theirs = uncertainty.get_calibration_error(softmax(logits, axis=-1), labels)
    ours = cal.ece(logits, labels)
    if name == "test":
        assert theirs == pytest.approx(0.00924, abs=1e-5)
        assert ours == pytest.approx(0.04236, abs=1e-5)
    assert abs(theirs - ours) > 0.005


@every
def test_mapie_with_sixteen_bins_is_ece_with_fifteen(mapie, name):
    logits, labels = predictions(name)
    confidence, outcome = pairs_of(logits, labels)
    right, probs = outcome.astype(int), softmax(logits, axis=-1)
    sixteen = mapie.expected_calibration_error(right, probs, num_bins=16)
    fifteen = mapie.expected_calibration_error(right, probs, num_bins=15)
    assert cal.ece(confidence=confidence, outcome=outcome, bins=15) == pytest.approx(
        sixteen, abs=TIGHT
    )
    assert cal.ece(confidence=confidence, outcome=outcome, bins=14) == pytest.approx(
        fifteen, abs=TIGHT
    )


def test_mapie_counts_a_confidence_of_zero_apart(mapie):
    confidence, outcome = np.array([0.0, 0.05]), np.array([1, 0])
    theirs = mapie.expected_calibration_error(outcome, confidence, num_bins=11)
    assert theirs == pytest.approx(0.525, abs=TIGHT)
    assert cal.ece(confidence=confidence, outcome=outcome, bins=10) == pytest.approx(
        0.475, abs=TIGHT
    )


@every
def test_top_label_ece_of_mapie_is_the_plain_mean_over_predicted_classes(mapie, name):
    logits, labels = predictions(name)
    theirs = mapie.top_label_ece(labels, softmax(logits, axis=-1), num_bins=16)
    predicted = logits.argmax(-1)
    found = [cal.ece(logits[predicted == k], labels[predicted == k]) for k in np.unique(predicted)]
    assert np.mean(found) == pytest.approx(theirs, abs=TIGHT)


@every
def test_classwise_ece_equals_the_marginal_errors_of_both_peers(uncertainty, mapie, name):
    logits, labels = predictions(name)
    probs = softmax(logits, axis=-1)
    found = cal.classwise_ece(logits, labels)
    marginal = uncertainty.get_ece(probs, labels, num_bins=15, mode="marginal")
    assert found == pytest.approx(marginal, abs=TIGHT)
    right = (probs.argmax(-1) == labels).astype(int)
    classwise = mapie.expected_calibration_error(
        right, probs, num_bins=16, classwise=True, class_labels=labels
    )
    assert found == pytest.approx(classwise, abs=TIGHT)


@weights_and_ties
def test_nll_equals_log_loss_of_scikit_learn(sklearn, rng, name, weigh, digits):
    logits, labels = predictions(name)
    weight = weights_of(rng, labels.size, weigh)
    expected = sklearn.metrics.log_loss(
        labels,
        softmax(logits, axis=-1),
        labels=np.arange(logits.shape[1]),
        sample_weight=weight,
    )
    assert cal.nll(logits, labels, sample_weight=weight) == pytest.approx(expected, abs=TIGHT)


def test_brier_of_two_classes_is_twice_the_loss_of_scikit_learn(sklearn):
    logits, labels = predictions("2 classes")
    expected = sklearn.metrics.brier_score_loss(labels, softmax(logits, axis=-1)[:, 1])
    assert cal.brier(logits, labels) == pytest.approx(2 * expected, abs=TIGHT)


@weights_and_ties
def test_accuracy_equals_scikit_learn(sklearn, rng, name, weigh, digits):
    logits, labels = predictions(name)
    weight = weights_of(rng, labels.size, weigh)
    expected = sklearn.metrics.accuracy_score(labels, logits.argmax(-1), sample_weight=weight)
    assert cal.accuracy(logits, labels, sample_weight=weight) == pytest.approx(expected, abs=TIGHT)


@weights_and_ties
def test_auroc_equals_scikit_learn(sklearn, rng, name, weigh, digits):
    confidence, outcome = pairs_of(*predictions(name), digits=digits)
    weight = weights_of(rng, outcome.size, weigh)
    expected = sklearn.metrics.roc_auc_score(outcome, confidence, sample_weight=weight)
    assert cal.auroc(confidence=confidence, outcome=outcome, sample_weight=weight) == pytest.approx(
        expected, abs=TIGHT
    )


@pytest.mark.parametrize("digits", [12, 1], ids=["distinct", "ties"])
@pytest.mark.parametrize("sizes", [(500, 300), (7, 90), (40, 1)])
def test_ood_figures_follow_from_the_roc_curve_of_scikit_learn(sklearn, rng, digits, sizes):
    inside = rng.normal(1, 1, sizes[0]).round(digits)
    outside = rng.normal(0, 1, sizes[1]).round(digits)
    known = np.repeat([1, 0], sizes)
    scores = np.concatenate([inside, outside])
    expected = sklearn.metrics.roc_auc_score(known, scores)
    assert cal.metrics.ood_auroc(inside, outside) == pytest.approx(expected, abs=TIGHT)
    false, true, _ = sklearn.metrics.roc_curve(known, scores, drop_intermediate=False)
    assert cal.metrics.fpr95(inside, outside) == pytest.approx(
        false[true >= 0.95 - 1e-9][0], abs=TIGHT
    )


@weights_and_ties
def test_risk_coverage_and_auroc_curves_cross_the_points_of_scikit_learn(
    sklearn, rng, name, weigh, digits
):
    confidence, outcome = pairs_of(*predictions(name), digits=digits)
    weight = weights_of(rng, outcome.size, weigh)
    mass = np.ones(outcome.size) if weight is None else weight
    right, wrong = mass @ outcome, mass @ ~outcome
    false, true, threshold = sklearn.metrics.roc_curve(
        outcome, confidence, sample_weight=weight, drop_intermediate=False
    )
    kept = false * wrong + true * right
    found = cal.metrics.risk_coverage(confidence=confidence, outcome=outcome, sample_weight=weight)
    np.testing.assert_allclose(found.threshold, threshold[1:])
    np.testing.assert_allclose(found.coverage, (kept / (right + wrong))[1:], atol=TIGHT)
    np.testing.assert_allclose(found.risk, (false * wrong)[1:] / kept[1:], atol=1e-10)


def test_aurc_equals_the_selective_accuracy_of_uncertainty_calibration(uncertainty):
    confidence, outcome = pairs_of(*predictions("test"))
    area, _ = uncertainty.get_selective_stats(confidence, outcome)
    assert cal.aurc(confidence=confidence, outcome=outcome) == pytest.approx(1 - area, abs=TIGHT)


@every
def test_ks_is_the_statistic_of_mapie_before_its_scaling(mapie, name):
    """MAPIE parts ties by a relative noise of 1e-8, which also moves the sum by about 1e-8."""
    confidence, outcome = pairs_of(*predictions(name))
    statistic = mapie.kolmogorov_smirnov_statistic(outcome.astype(int), confidence)
    expected = statistic * mapie.length_scale(confidence)
    assert cal.ks(confidence=confidence, outcome=outcome) == pytest.approx(expected, abs=1e-8)


@random_only
def test_smooth_ece_equals_relplot_away_from_the_ends(relplot, name):
    """relplot halts at a bandwidth within 1/1024, on a mesh of 200 points and a floor of density.

    Its own value at two neighbouring bandwidths differs by up to 1/1024, which sets the tolerance.
    """
    confidence, outcome = pairs_of(*predictions(name))
    inner = 0.1 + 0.8 * confidence
    expected = relplot.smECE(inner, outcome.astype(float))
    assert cal.smooth_ece(confidence=inner, outcome=outcome) == pytest.approx(
        expected, abs=1 / 1024
    )


def test_relplot_halves_the_examples_at_confidence_one(relplot):
    """90 right answers at 1.0 and 10 wrong ones at 0.6: the gap is 0.06, relplot 1.0.3 says 0.107.

    Its reflection of the mesh counts the two end points once, every other point twice. With half
    of the 90 the share of the rest is 10 / 55, and 0.6 * 10 / 55 = 0.109.
    """
    confidence = np.repeat([1.0, 0.6], [90, 10])
    outcome = np.repeat([1.0, 0.0], [90, 10])
    assert relplot.smECE(confidence, outcome) == pytest.approx(0.10747, abs=1e-5)
    assert integrated_ece(confidence, outcome, 0.06) == pytest.approx(0.06, abs=1e-6)
    assert cal.smooth_ece(confidence=confidence, outcome=outcome) == pytest.approx(0.06, abs=1e-6)


def test_relplot_overstates_the_smooth_ece_of_the_sample(relplot):
    """For the same reason: the mesh has steps of 1/1000, and 59 % of the sample exceed 0.9999."""
    confidence, outcome = pairs_of(*predictions("test"))
    theirs, width = relplot.smECE(confidence, outcome.astype(float), return_width=True)
    assert theirs == pytest.approx(0.060425, abs=1e-6)
    assert integrated_ece(confidence, outcome, width) == pytest.approx(0.042281, abs=1e-5)
    found = cal.smooth_ece(confidence=confidence, outcome=outcome)
    assert found == pytest.approx(0.042286, abs=1e-6)
    assert integrated_ece(confidence, outcome, found) == pytest.approx(found, abs=1e-5)
