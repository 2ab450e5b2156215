"""Confidence of answers from token probabilities, against slow definitions."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import binom

import calibrant as cal
from calibrant.llm.answers.confidence import AGGREGATORS, answer_confidence
from calibrant.metrics.ranking import risk_coverage
from calibrant.workflows.evaluate import evaluate
from calibrant.workflows.evaluate_answers import evaluate_answers
from tests.support.markup import charts

SLOW: dict[str, Callable[[list[float]], float]] = {
    "geometric": lambda p: math.prod(x ** (1 / len(p)) for x in p),
    "product": math.prod,
    "arithmetic": lambda p: sum(p) / len(p),
    "first": lambda p: p[0],
    "minimum": min,
}


@pytest.fixture
def answers(rng):
    return [rng.uniform(0.01, 1, size=rng.integers(1, 12)) for _ in range(50)]


def test_every_aggregate_has_a_slow_definition():
    assert SLOW.keys() == {*AGGREGATORS}


@pytest.mark.parametrize("aggregate", SLOW)
def test_confidences_are_those_of_the_definition(aggregate, answers):
    wanted = [SLOW[aggregate](p.tolist()) for p in answers]
    np.testing.assert_allclose(answer_confidence(answers, aggregate), wanted)
    np.testing.assert_allclose(
        answer_confidence([torch.tensor(p) for p in answers], aggregate), wanted
    )


def test_default_is_the_geometric_mean():
    assert answer_confidence([[0.9, 0.4]]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0.5], [], [0.2]], r"answer 1 has no tokens \(1 of 3"),
        ([], "holds no answer"),
        (np.ones(3), r"one array of shape \(3,\): pass a list"),
        (torch.ones(2, 3), r"one array of shape \(2, 3\): pass a list"),
        ([[-0.1, -0.2]], r"np\.exp"),
        ([[0.5, math.nan]], "NaN"),
        ([[1.5]], r"in \[0, 1\]"),
        ([[[0.5]]], r"answer 0 has shape \(1, 1\)"),
    ],
)
def test_bad_answers_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        answer_confidence(given)


# ------------------------------------------------------------------------------------- calibration


def test_values_equal_the_metrics(rng):
    sure = rng.random(700)
    right = rng.random(700) < sure**2
    found = evaluate_answers(sure, right)
    assert found["accuracy"].value == pytest.approx(right.mean())
    assert found["ece"].value == pytest.approx(cal.ece(confidence=sure, outcome=right))
    assert found["brier"].value == pytest.approx(((sure - right) ** 2).mean())
    assert found["auroc"].value == pytest.approx(cal.auroc(confidence=sure, outcome=right))
    assert found["aurc"].value == pytest.approx(cal.aurc(confidence=sure, outcome=right))
    loss = [-math.log(p if y else 1 - p) for p, y in zip(sure, right, strict=True)]
    assert found["nll"].value == pytest.approx(np.mean(loss))
    for e in found.values():
        assert e.low <= e.value <= e.high
    assert found["ece"].low > 0.1  # claims are sure, truths their squares
    assert "700 answers" in str(found)
    assert found.test is not None


def test_confidences_of_zero_and_one():
    found = evaluate_answers([1.0, 1.0, 0.0, 0.5, 0.9], [1, 0, 0, 1, 1])
    assert math.isfinite(found["nll"].value)
    plain = evaluate_answers([0.6, 0.7], [1, 0], level=None)
    assert all(math.isnan(e.low) for e in plain.values())


def test_intervals_cover(rng, monkeypatch):
    """Those that evaluate_answers makes itself; the others are tested with the metrics."""
    once = evaluate(rng.normal(size=300), rng.integers(2, size=300), estimand="binary")
    monkeypatch.setattr(
        "calibrant.workflows.evaluate_answers.evaluate", lambda *args, **options: once
    )
    held = dict.fromkeys(("accuracy", "brier"), 0)
    for _ in range(100):
        sure = rng.uniform(0.2, 0.8, 300)
        right = rng.random(300) < sure
        found = evaluate_answers(sure, right)
        truth = {"accuracy": 0.5, "brier": 0.25 - 0.6**2 / 12}
        for name, value in truth.items():
            held[name] += found[name].low <= value <= found[name].high
    assert min(held.values()) >= binom.ppf(1e-3, 100, 0.9), held


def test_groups_widen_intervals_of_answers_that_depend_on_each_other(rng):
    groups = np.repeat(np.arange(200), 5)
    confidence = np.repeat(rng.random(200), 5)
    right = np.repeat(rng.random(200), 5) < confidence  # the sentences of an answer agree
    alone, grouped = (evaluate_answers(confidence, right, groups=g) for g in (None, groups))
    for name in ("accuracy", "nll", "brier"):
        assert grouped[name].value == pytest.approx(alone[name].value)
        widths = [one[name].high - one[name].low for one in (alone, grouped)]
        assert widths[1] / widths[0] == pytest.approx(5**0.5, rel=0.1)
    assert grouped.describe().startswith("1,000 answers in 200 groups; confidence that the answer")


def test_groups_of_one_answer_each_change_nothing(rng):
    confidence = rng.random(60)
    right = rng.random(60) < confidence
    alone, grouped = (
        evaluate_answers(confidence, right, groups=g) for g in (None, rng.permutation(60))
    )
    assert grouped.metrics == alone.metrics
    with pytest.raises(ValueError, match="groups must have one value for each of 60 answers"):
        evaluate_answers(confidence, right, groups=np.arange(61))


def test_answers_show_risk_and_coverage():
    rng = np.random.default_rng(0)
    confidence = rng.random(3000)
    right = rng.random(3000) < confidence
    evaluation = evaluate_answers(confidence, right, level=None)
    assert evaluation.risk_coverage is not None
    assert np.isnan(evaluation.risk_coverage.low).all()
    evaluation = evaluate_answers(confidence, right, level=0.8)
    curve = evaluation.risk_coverage
    whole = risk_coverage(confidence=confidence, outcome=right, level=0.8)
    assert curve is not None
    assert len(curve.risk) == 200
    for place in (0, 57, -1):  # each point is one of the whole curve
        at = np.flatnonzero(whole.threshold == curve.threshold[place])
        assert whole.risk[at] == curve.risk[place]
        assert whole.high[at] == curve.high[place]
    assert curve.coverage[-1] == 1
    assert curve.risk[-1] == pytest.approx(1 - right.mean())
    risk, reliability = charts(evaluation._repr_html_())
    assert "risk against coverage" in risk.attrib["aria-label"]
    assert "80 % interval at each point" in evaluation._repr_html_()
    assert "Reliability" in reliability.attrib["aria-label"]
