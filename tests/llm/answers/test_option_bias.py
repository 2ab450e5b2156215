"""Preferences for letters: found by a test, and gone from averages over orders."""

import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import chi2

from calibrant.llm.answers.choices import (
    PermutedChoices,
    _ask_choices_each,
    _option_orders,
    ask_choices,
    option_bias,
)
from calibrant.llm.answers.grading import QuestionSet, grade_questions
from calibrant.llm.answers.questions import Question

QUESTIONS = [
    Question("what is it", ("two",), ("one", "two", "three", "four"), 1),
    Question("is it", ("red",), ("red", "blue", "yes", "no"), 0),
]


def shown(options, preference, orders):
    """Logits of letters, from those of options and a preference for letters."""
    return np.stack([options[:, list(order)] + preference for order in orders], 1)


@pytest.mark.parametrize("permutations", ["cyclic", "all"])
def test_averages_over_orders_have_no_preference(rng, permutations):
    options = rng.normal(size=(50, 4))
    orders = _option_orders(permutations, 4)
    assert len({*orders}) == len(orders) == {"cyclic": 4, "all": 24}[permutations]
    logits = shown(options, [3.0, 0.0, -1.0, 0.5], orders)
    found = PermutedChoices(logits, rng.integers(4, size=50), orders).averaged()
    # what the softmax of each order adds is the same for all options
    np.testing.assert_allclose(found, log_softmax(options, -1), atol=1e-12)


def stuart_maxwell(chosen, right, letters):
    """The test of marginal homogeneity from the table of counts (Stuart 1955)."""
    table = np.zeros((letters, letters))
    for i, j in zip(chosen, right, strict=True):
        table[i, j] += 1
    off = (table.sum(1) - table.sum(0))[:-1]
    covariance = -(table + table.T)
    np.fill_diagonal(covariance, table.sum(0) + table.sum(1) - 2 * np.diag(table))
    statistic = off @ np.linalg.inv(covariance[:-1, :-1]) @ off
    return chi2.sf(statistic, letters - 1)


def test_the_test_is_that_of_stuart_and_maxwell(rng):
    logits = rng.normal(size=(200, 4)) + np.array([0.3, 0, 0, 0])
    labels = rng.integers(4, size=200)
    found = option_bias(logits, labels)
    assert found.p_value == pytest.approx(stuart_maxwell(logits.argmax(-1), labels, 4))
    np.testing.assert_allclose(found.chosen, np.bincount(logits.argmax(-1)) / 200)
    np.testing.assert_allclose(found.right, np.bincount(labels) / 200)
    np.testing.assert_allclose(found.prob, np.exp(log_softmax(logits, -1)).mean(0))
    assert found.excess == pytest.approx(np.maximum(found.chosen - found.right, 0).sum())


def test_a_model_without_a_preference_is_rarely_suspected():
    rejected = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rejected += option_bias(rng.normal(size=(60, 4)), rng.integers(4, size=60)).p_value < 0.05
    assert rejected <= 18


@pytest.mark.parametrize("wrong", [-100, -1, 3])
def test_labels_must_be_options(wrong):
    with pytest.raises(ValueError, match="labels be from 0 to 2, got 3 questions and labels"):
        option_bias(np.eye(3), [0, 1, wrong])
    with pytest.raises(ValueError, match="no NaN"):
        option_bias(np.full((3, 3), np.nan), [0, 1, 2])
    with pytest.raises(ValueError, match="got 0 questions"):
        option_bias(np.empty((0, 3)), np.empty(0, int))


def test_forms_of_the_result(rng):
    found = option_bias(rng.normal(size=(20, 3)), rng.integers(3, size=20))
    assert found.letters == ("A", "B", "C")
    assert "chosen letters of 20 questions" in found.describe()
    assert found.to_dict()["letters"] == ["A", "B", "C"]
    assert "mean probability" in found._repr_html_()
    with pytest.raises(ValueError, match="logits must be"):
        option_bias(np.zeros((3, 2)), np.zeros(2, int))
    with pytest.raises(ValueError, match="permutations must be"):
        _option_orders("some", 4)  # type: ignore[arg-type]


def test_a_model_is_asked_in_every_order(model, tokenizer):
    found, labels = ask_choices(model, tokenizer, QUESTIONS, permutations="cyclic")
    assert labels.tolist() == [1, 0]
    total = np.zeros((2, 4))
    for shift in range(4):
        for i, one in enumerate(QUESTIONS):
            turned = Question(one.text, (), one.choices[shift:] + one.choices[:shift], 0)
            (row,), _ = ask_choices(model, tokenizer, [turned])
            total[i] += np.roll(row, shift)
    np.testing.assert_allclose(found, log_softmax(total / 4, -1), atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of few questions
def test_graded_answers_have_both_forms_and_their_preference(model, tokenizer):
    asked = QuestionSet(QUESTIONS, [], "letters")
    found = grade_questions(model, tokenizer, asked, permutations="all")
    assert [*found] == ["before", "permuted"]
    permuted = _ask_choices_each(model, tokenizer, QUESTIONS, {"": None}, permutations="all")[""]
    claimed = {name: each.answers.confidences()[0] for name, each in found.items()}
    np.testing.assert_allclose(claimed["permuted"], np.exp(permuted.averaged().max(-1)))
    plain = grade_questions(model, tokenizer, asked)["before"]
    np.testing.assert_allclose(claimed["before"], plain.answers.confidences()[0], rtol=1e-5)
    bias = found["before"].option_bias
    assert bias is not None
    assert bias.n == 2
    assert found["permuted"].answers.source().confidence == "letters, permuted"
    with pytest.raises(ValueError, match="permutations is for questions of the form 'letters'"):
        grade_questions(model, tokenizer, QuestionSet(QUESTIONS, [], "texts"), permutations="all")
