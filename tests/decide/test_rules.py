"""Decision rules decide, count and judge by their definitions."""

import math

import numpy as np
import pytest
import torch
from scipy.special import softmax

from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.tags import TagScaling
from calibrant.decide import ConformalSets, DecisionRule, conformal, threshold
from calibrant.decide.rules import Tally
from tests.support.simulate import drawn, drawn_tags
from tests.support.thresholds import error_threshold

ACCEPT = error_threshold(0.6, 0.5, 0.1, 0.2, 100, 0.25, 0.9)
SETS = ConformalSets(-0.3, "lac", 0.8, 99, 3, 0, 1.2)


@pytest.fixture
def examples(rng):
    logits, labels = drawn(rng, 60, 3)
    labels[::7] = -100
    return logits, labels


@pytest.mark.parametrize("guarantee", [ACCEPT, SETS])
def test_decisions_and_counts_are_those_of_a_loop(guarantee, examples):
    logits, labels = examples
    halved = TemperatureScaling().fit(logits, labels)
    halved._store(temperature_=2.0)
    rule = DecisionRule(guarantee, 3, halved)
    made = rule.decide(logits)
    size = judged = wrong = missed = 0
    for i, (row, label) in enumerate(zip(softmax(logits / 2, -1), labels, strict=True)):
        top = max(range(3), key=lambda k: row[k])
        assert made["predicted"][i] == top
        assert made["confidence"][i] == pytest.approx(row[top], rel=1e-6)
        if guarantee is ACCEPT:
            kept = [top] if row[top] >= 0.6 else []
            assert made["accepted"][i] == bool(kept)
            counts = bool(kept) and label >= 0
        else:
            kept = [k for k in range(3) if row[k] >= 0.3]
            assert np.flatnonzero(made["set"][i]).tolist() == kept
            counts = label >= 0
        size, judged, wrong = (
            size + len(kept),
            judged + counts,
            wrong + (counts and label not in kept),
        )
        missed += not kept and label == top
    known = int((labels >= 0).sum()) if guarantee is ACCEPT else 0
    assert rule.tally(made, labels) == Tally(60, size, judged, wrong, known, missed)
    assert rule.tally(made, None) == Tally(60, size, 0, 0)
    assert 0 < wrong < judged


def test_every_form_of_the_predictions_gives_the_same_decisions(examples):
    logits = examples[0]
    for guarantee in (ACCEPT, SETS):
        rule = DecisionRule(guarantee, 3)
        expected = rule.decide(logits)
        for form in (
            {"logits": torch.from_numpy(logits)},
            {"probs": softmax(logits, -1)},
            {"logits": logits[None]},
        ):
            for name, values in rule.decide(**form).items():
                assert isinstance(values, type(form.get("logits", logits)))
                np.testing.assert_allclose(np.squeeze(values), expected[name], rtol=1e-12)


def test_one_logit_is_two_classes():
    made = DecisionRule(ACCEPT, 2).decide([0.1, -3.0, 3.0])
    assert made["predicted"].tolist() == [1, 0, 1]
    assert made["accepted"].tolist() == [False, True, True]


def test_a_check_of_a_threshold_is_a_binomial_test():
    rule = DecisionRule(ACCEPT, 3)
    expected = sum(math.comb(12, k) * 0.25**k * 0.75 ** (12 - k) for k in range(6, 13))
    assert rule.p_value(Tally(50, 20, 12, 6)) == pytest.approx(expected)
    assert rule.verdict(Tally(50, 20, 12, 6)).startswith("The labels of 12 examples agree")
    assert "contradict the guarantee (p = 0.0" in rule.verdict(Tally(50, 20, 12, 8))
    assert rule.verdict(Tally(50, 20, 0, 0)) == ""


def test_a_check_of_sets_rejects_as_often_as_it_says(rng):
    """Scores of continuous data: which of them a set holds is a matter of ranks alone."""
    n, m, times = 30, 25, 4000
    sets = ConformalSets(0.0, "lac", 0.8, n, 3, 0, 3.0)
    rule = DecisionRule(sets, 3)
    limits = np.sort(rng.random((times, n)))[:, math.ceil((n + 1) * 0.8) - 1]
    misses = (rng.random((times, m)) > limits[:, None]).sum(1)
    table = np.array([rule.p_value(Tally(m, m, m, wrong)) for wrong in range(m + 1)])
    for level in (0.05, 0.2, 0.5):
        reached = max(p for p in table if p <= level)  # the number of misses is whole
        assert np.mean(table[misses] <= level) == pytest.approx(reached, abs=0.025)


def test_rules_say_what_they_promise(examples):
    accept, sets = DecisionRule(ACCEPT, 3), DecisionRule(SETS, 3)
    assert accept.promise() == (
        "With 90 % certainty, at most 25 % of the accepted answers are wrong."
    )
    assert "in at least 80 % of cases" in sets.promise()
    assert "at least 0.6000" in accept.instruction()
    with pytest.warns(UserWarning, match="no threshold keeps"):
        none = DecisionRule(threshold(*examples, max_error=0.001), 3)
    assert none.instruction().startswith("No answer is accepted")
    assert none.promise() == ""
    with pytest.warns(UserWarning, match="cannot show a coverage"):
        everything = DecisionRule(conformal(*examples, coverage=0.999), 3)
    assert everything.instruction().startswith("Every set holds all classes")
    assert everything.p_value(Tally(9, 9, 9, 9)) == 1
    assert everything.decide(examples[0])["set"].all()


def test_class_names_stand_for_numbers():
    rule = DecisionRule(SETS, 3, class_names=["cat", "dog", "owl"])
    assert rule.names(np.array([True, False, True])) == "cat, owl"
    assert DecisionRule(SETS, 3).names(np.array([True, False, True])) == "0, 2"


def test_half_precision_makes_no_limit_of_half_precision(rng):
    """A limit of NumPy's float16 could not be saved, and had lost its digits."""
    logits, labels = drawn(rng, 300, 3)
    found = conformal(logits.astype(np.float16), labels)
    assert type(found.limit) is float
    assert found.limit == pytest.approx(conformal(logits, labels).limit, rel=0.01)


def test_what_makes_no_rule_is_refused(rng):
    tags, truth = drawn_tags(rng, 80, np.ones(3), np.zeros(3))
    with pytest.raises(ValueError, match="sets are of 3 classes, got classes=4"):
        DecisionRule(SETS, 4)
    with pytest.raises(ValueError, match="3 class_names are wanted, got 1"):
        DecisionRule(SETS, 3, class_names=["cat"])
    with pytest.raises((TypeError, ValueError), match="tags"):
        DecisionRule(SETS, 3, TagScaling().fit(tags, truth))
    with pytest.raises(ValueError, match="for 3 classes, got 4"):
        DecisionRule(ACCEPT, 3).decide(np.zeros((2, 4)))
    rule = DecisionRule(ACCEPT, 3)
    with pytest.raises(ValueError, match="need as many labels"):
        rule.tally(rule.decide(np.zeros((2, 3))), np.zeros(3, int))
    with pytest.raises(ValueError, match=r"labels"):
        rule.tally(rule.decide(np.zeros((2, 3))), np.array([0, 3]))


def test_figures_as_text_are_percentages():
    accept, sets = DecisionRule(ACCEPT, 3), DecisionRule(SETS, 3)
    assert accept.cells(Tally(2000, 500, 400, 30)) == ("2,000", "500 (25.0 %)", "7.50 %")
    assert sets.cells(Tally(2000, 3000, 400, 30)) == ("2,000", "1.50", "92.50 %")
    assert accept.cells(Tally(2000, 0, 0, 0)) == ("2,000", "0 (0.0 %)", "-")
