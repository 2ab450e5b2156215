"""The forms of input: logits, probabilities or pairs, and errors for calls that mix them up."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from tests.support.simulate import drawn

OF_SCORES = {"nll", "brier", "classwise_ece"}
"""Metrics for which pairs do not suffice."""

every = pytest.mark.parametrize("name", cal.METRICS)
of_pairs = pytest.mark.parametrize("name", [name for name in cal.METRICS if name not in OF_SCORES])


@pytest.fixture
def data(rng):
    logits, labels = drawn(rng, 300, 4, 1.5)
    labels[::9] = -100
    return logits, labels, rng.exponential(size=300)


@every
def test_probabilities_give_the_value_of_their_logits(data, name):
    logits, labels, weight = data
    probs = torch.tensor(logits).softmax(-1)
    metric = getattr(cal, name)
    expected = metric(logits, labels, sample_weight=weight)
    for form in (probs, probs.numpy(), probs.tolist()):
        found = metric(probs=form, labels=labels, sample_weight=weight)
        assert found == pytest.approx(expected, abs=1e-12)


@of_pairs
def test_pairs_give_the_value_of_the_logits_that_they_come_from(data, name):
    logits, labels, weight = data
    metric, kept = getattr(cal, name), labels != -100
    confidence, outcome = cal.top_label(logits, labels)
    expected = metric(logits, labels, sample_weight=weight)
    found = metric(confidence=confidence, outcome=outcome, sample_weight=weight[kept])
    assert found == pytest.approx(expected, abs=1e-12)


@every
def test_a_metric_is_that_of_an_evaluation_in_every_form(data, name):
    logits, labels, weight = data
    found = cal.evaluate(logits, labels, sample_weight=weight, metrics=[name], level=None)
    value = getattr(cal, name)(logits, labels, sample_weight=weight)
    assert value == pytest.approx(found[name].value, abs=1e-12)


def test_reductions_take_probabilities_too(rng):
    logits, labels = drawn(rng, 50, 2)
    probs = torch.tensor(logits).softmax(-1).numpy()
    metrics = cal.metrics
    for reduce in (cal.top_label, metrics.positive_class):
        np.testing.assert_allclose(
            reduce(probs=probs, labels=labels).confidence, reduce(logits, labels).confidence
        )
    found = metrics.one_vs_rest(probs=probs, labels=labels, k=0)
    np.testing.assert_allclose(found.confidence, probs[:, 0])
    found = metrics.multilabel(probs=probs, labels=np.ones((50, 2), dtype=int))
    np.testing.assert_allclose(found.confidence, probs.ravel())


WRONG_CALLS: dict[str, Any] = {
    "nothing": ({}, "labels are missing"),
    "no labels": ({"logits": [[1.0, 0.0]]}, "labels are missing"),
    "no logits": ({"labels": [0]}, "pass either logits or probs=, got neither"),
    "both": ({"logits": [[1.0, 0.0]], "probs": [[1.0, 0.0]], "labels": [0]}, "got both"),
    "swapped": ({"logits": [0, 1], "labels": [[1.0, 0.0]] * 2}, "logits and labels are swapped"),
    "no outcome": ({"confidence": [0.9]}, "confidence= and outcome= go together"),
    "no confidence": ({"outcome": [1]}, "confidence= and outcome= go together"),
    "labels of pairs": (
        {"confidence": [0.9], "labels": [1]},
        "confidence= and outcome= go together",
    ),
    "three forms": (
        {"logits": [[1.0, 0.0]], "labels": [0], "confidence": [0.9], "outcome": [1]},
        "confidence= and outcome= stand alone",
    ),
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_call_without_exactly_one_form_is_refused(call):
    arguments, message = WRONG_CALLS[call]
    for metric in (cal.ece, cal.auroc, cal.metrics.reliability):
        with pytest.raises(TypeError, match=message):
            metric(**arguments)


@pytest.mark.parametrize("name", sorted(OF_SCORES))
def test_a_metric_for_which_pairs_do_not_suffice_takes_none(name):
    with pytest.raises(TypeError, match="unexpected keyword argument 'confidence'"):
        getattr(cal, name)(confidence=[0.9], outcome=[1])


def test_pairs_are_not_positional():
    """(n,) floats are log-odds, never confidences."""
    assert cal.ece([0.9, 0.6], [1, 0]) == pytest.approx(
        cal.evaluate([0.9, 0.6], [1, 0], level=None)["ece"].value
    )
    assert cal.ece(confidence=[0.9, 0.6], outcome=[1, 0]) == pytest.approx(0.35)


def test_the_negative_log_likelihood_of_floored_probabilities_warns():
    with pytest.warns(UserWarning, match="1 probabilities are exactly 0 and were floored"):
        cal.nll(probs=[[1.0, 0.0]], labels=[0])


def test_probabilities_come_in_by_name_only(rng):
    probs = rng.dirichlet(np.ones(4), 300)
    labels = rng.integers(0, 4, 300)
    as_probs = cal.evaluate(probs=probs, labels=labels, level=None)
    as_logs = cal.evaluate(np.log(probs), labels, level=None)
    with pytest.warns(UserWarning, match="look like probabilities"):  # told, not guessed
        as_logits = cal.evaluate(probs, labels, level=None)
    for name in as_probs:
        assert as_probs[name].value == pytest.approx(as_logs[name].value, abs=1e-9), name
    assert as_probs["nll"].value == pytest.approx(-np.log(probs[np.arange(300), labels]).mean())
    assert abs(as_probs["ece"].value - as_logits["ece"].value) > 0.05


@pytest.mark.parametrize("probs", [[[0.4, 0.7]], [[2.0, -1.0]], [[math.nan, 1.0]], [[5.0, 3.0]]])
def test_probs_that_are_none_are_refused(probs):
    with pytest.raises(ValueError, match="probs must"):
        cal.evaluate(probs=np.array(probs), labels=[0])


def test_a_probability_of_zero_is_floored_with_a_warning():
    probs = np.array([[1.0, 0.0], [0.5, 0.5]], dtype=np.float32)
    with pytest.warns(UserWarning, match="1 probabilities are exactly 0"):
        found = cal.evaluate(probs=probs, labels=[1, 0], level=None)
    assert found["ece"].value == pytest.approx((1 + 0.5) / 2, abs=1e-12)
    floor = float(np.finfo(np.float32).smallest_subnormal) / 2
    assert found["nll"].value == pytest.approx((math.log(2) - math.log(floor)) / 2)


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [
        (torch.float16, 2.0**-25),
        (torch.bfloat16, 2.0**-134),
        (torch.float32, 2.0**-150),
        (torch.float64, math.ulp(0.0)),  # half of which is no number
    ],
)
@pytest.mark.parametrize("column", [False, True])
def test_the_floor_of_a_probability_is_half_the_smallest_number_of_its_dtype(dtype, floor, column):
    probs = torch.tensor([0.0] if column else [[1.0, 0.0]], dtype=dtype)
    with pytest.warns(UserWarning, match="1 probabilities are exactly 0"):
        found = cal.evaluate(probs=probs, labels=[1], metrics=["nll"], level=None)
    assert found["nll"].value == pytest.approx(-math.log(floor))


def test_a_probability_below_the_normal_numbers_is_kept():
    smallest = np.finfo(np.float32).smallest_subnormal
    probs = np.array([[1.0, smallest]], dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cal.evaluate(probs=probs, labels=[1], metrics=["nll"], level=None)
    assert found["nll"].value == pytest.approx(149 * math.log(2))


def test_confidences_that_are_logits_are_refused():
    with pytest.raises(ValueError, match=r"confidence must be in \[0, 1\], got 2"):
        cal.ece(confidence=[2.0, 0.5], outcome=[1, 0])


def test_class_labels_are_not_outcomes():
    with pytest.raises(ValueError, match="outcome must be 0 or 1"):
        cal.ece(confidence=[0.9, 0.5], outcome=[2, 0])


@pytest.mark.parametrize(
    "function",
    [cal.ece, cal.ada_ece, cal.mce, cal.ks, cal.smce, cal.smooth_ece, cal.auroc, cal.aurc],
)
def test_pairs_that_are_not_numbers_are_refused(function):
    with pytest.raises(ValueError, match="confidence must be"):
        function(confidence=[0.5, math.nan], outcome=[1, 0])
    with pytest.raises(ValueError, match="outcome must be"):
        function(confidence=[0.5, 0.5], outcome=[1, math.nan])
    with pytest.raises(ValueError, match="weight must be"):
        function(confidence=[0.5, 0.5], outcome=[1, 0], sample_weight=[1, math.nan])
