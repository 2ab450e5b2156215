"""Metrics of the order of confidences, and their standard errors, against slow definitions."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import t

import calibrant as cal
from calibrant.metrics.ranking import aurc_with_error, auroc_with_error
from tests.support.named_predictions import TIGHT, pairs_of, predictions
from tests.support.simulate import drawn, drawn_pairs


def slow_aurc(wrong):
    return np.mean([np.mean(wrong[: k + 1]) for k in range(len(wrong))])


@pytest.mark.parametrize("name", ["3 classes, few rows", "100 classes"])
def test_aurc_equals_a_loop_over_coverages(name):
    confidence, outcome = pairs_of(*predictions(name))
    expected = slow_aurc(~outcome[np.argsort(-confidence)])
    assert cal.aurc(confidence=confidence, outcome=outcome) == pytest.approx(expected, abs=TIGHT)


def test_aurc_of_ties_is_the_mean_over_all_their_orders():
    confidence = np.array([0.9, 0.7, 0.7, 0.7, 0.4, 0.4])
    outcome = np.array([1, 1, 0, 0, 1, 0], dtype=bool)
    orders = [
        [0, *middle, *last]
        for middle in itertools.permutations([1, 2, 3])
        for last in itertools.permutations([4, 5])
    ]
    expected = np.mean([slow_aurc(~outcome[order]) for order in orders])
    assert cal.aurc(confidence=confidence, outcome=outcome) == pytest.approx(expected, abs=TIGHT)
    assert cal.aurc(confidence=confidence[::-1], outcome=outcome[::-1]) == pytest.approx(
        expected, abs=TIGHT
    )


def test_risk_and_coverage_are_those_of_every_threshold(rng):
    confidence, outcome = drawn_pairs(rng, 700, 0.1, low=0.2)
    confidence = confidence.round(2)
    weight = rng.exponential(size=700)
    found = cal.metrics.risk_coverage(confidence=confidence, outcome=outcome, sample_weight=weight)
    assert found.threshold.tolist() == sorted(set(confidence), reverse=True)
    for threshold, coverage, risk in zip(*found[:3], strict=True):
        kept = confidence >= threshold
        assert coverage == pytest.approx(weight[kept].sum() / weight.sum())
        assert risk == pytest.approx(np.average(~outcome[kept], weights=weight[kept]))


def test_fpr95_is_the_share_accepted_at_the_largest_threshold_that_keeps_95_percent(rng):
    inside, outside = rng.normal(1, 1, 37), rng.normal(0, 1, 50)
    keeps = [t for t in inside if (inside >= t).mean() >= 0.95]
    assert cal.metrics.fpr95(inside, outside) == (outside >= max(keeps)).mean()
    assert cal.metrics.fpr95([5.0], [6.0]) == 1
    assert cal.metrics.ood_auroc([math.inf, 1.0], [-math.inf, 1.0]) == 0.875


# Standard errors


WITH_ERROR = {"auroc": auroc_with_error, "aurc": aurc_with_error}


@pytest.mark.parametrize("name", ["auroc", "aurc"])
@pytest.mark.parametrize("digits", [12, 0], ids=["distinct", "ties"])
def test_the_standard_error_of_a_rank_statistic_is_that_of_the_jackknife(rng, name, digits):
    odds = rng.normal(1, 1.5, 250).round(digits)
    labels = (rng.random(250) < 1 / (1 + np.exp(-odds))).astype(int)
    metric = {"auroc": cal.auroc, "aurc": cal.aurc}[name]
    confidence, outcome = cal.metrics.positive_class(odds, labels)
    found = WITH_ERROR[name](confidence, outcome.astype(float), None)
    assert found.value == pytest.approx(metric(confidence=confidence, outcome=outcome), abs=1e-12)
    left_out = [
        metric(confidence=np.delete(confidence, i), outcome=np.delete(outcome, i))
        for i in range(len(outcome))
    ]
    jackknife = np.sqrt(249 / 250 * (np.subtract(left_out, np.mean(left_out)) ** 2).sum())
    assert found.deviation == pytest.approx(jackknife, rel=0.015)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("name", ["auroc", "aurc"])
def test_the_interval_of_a_rank_statistic_is_of_students_kind_on_the_logit_scale(rng, name, weigh):
    logits, labels = drawn(rng, 60, 4)
    weight = rng.exponential(size=60) if weigh else np.ones(60)
    found = cal.evaluate(logits, labels, sample_weight=weight, metrics=[name], level=0.8)[name]
    confidence, outcome = cal.top_label(logits, labels)
    value, deviation, freedom = WITH_ERROR[name](confidence, outcome.astype(float), weight)
    wrong, right = (w.sum() ** 2 / (w**2).sum() for w in (weight[~outcome], weight[outcome]))
    assert freedom == pytest.approx((min(wrong, right) if name == "auroc" else wrong) - 1)
    assert found.value == pytest.approx(value)
    centre, slope = math.log(value / (1 - value)), value * (1 - value)
    reach = t.ppf(0.9, freedom) * deviation / slope
    ends = [math.log(x / (1 - x)) for x in found[1:]]
    assert ends == pytest.approx([centre - reach, centre + reach])


@pytest.mark.parametrize("weigh", [False, True])
def test_the_standard_error_of_auroc_is_that_of_delong(rng, weigh):
    """Every pair of a yes and a no is compared; the variances divide by their number less one."""
    claimed, happened = drawn_pairs(rng, 80)
    claimed = claimed.round(1)
    weight = rng.exponential(size=80) if weigh else np.ones(80)
    yes, no = claimed[happened], claimed[~happened]
    above = (yes[:, None] > no) + (yes[:, None] == no) / 2
    share_yes, share_no = (w / w.sum() for w in (weight[happened], weight[~happened]))
    value = share_yes @ above @ share_no
    variance = 0.0
    for share, placed in ((share_yes, above @ share_no), (share_no, share_yes @ above)):
        worth = 1 / (share**2).sum()
        variance += (share**2 @ (placed - value) ** 2) * worth / (worth - 1)
    found = auroc_with_error(claimed, happened.astype(float), weight)
    assert found[:2] == pytest.approx((value, math.sqrt(variance)))


@pytest.mark.parametrize("name", ["auroc", "aurc"])
def test_a_rank_statistic_of_one_wrong_answer_has_no_interval(name):
    confidence = np.linspace(0.6, 0.9, 20)
    odds, wrong = np.log(confidence / (1 - confidence)), np.arange(20) == 7
    logits = np.stack([odds, np.zeros(20)], axis=-1)
    found = cal.evaluate(logits, wrong.astype(int), metrics=[name])[name]
    assert 0 < found.value < 1
    assert all(math.isnan(x) for x in found[1:])


def test_the_area_of_one_confidence_is_as_uncertain_as_its_error_rate():
    """Where all tie, AURC is the error rate, 30 of 100: a deviation of 0.046."""
    happened = (np.arange(100) < 70).astype(float)
    found = aurc_with_error(np.full(100, 0.9), happened, None)
    assert found.value == pytest.approx(0.3)
    assert found.deviation == pytest.approx(math.sqrt(0.3 * 0.7 / 100), rel=0.02)
