"""Hints: the mistake that was made is named, and sound data are left alone."""

import numpy as np
import pytest

import calibrant as cal


def drawn(n, classes, scale, rng):
    logits = scale * rng.normal(size=(n, classes))
    return logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1)


def said(logits, labels, **options):
    """The hint, which must stand in what is printed."""
    evaluation = cal.evaluate(logits, labels, level=None, **options)
    assert evaluation.hint() in str(evaluation)
    return evaluation.hint()


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_labels_in_another_order(classes):
    rng = np.random.default_rng(classes)
    logits, labels = drawn(3000, classes, 4.0, rng)
    assert said(logits, labels) == ""
    message = "labels are in the order of the rows, count from 0, and number the classes"
    assert message in said(logits, rng.permutation(labels))


def test_labels_that_are_off_by_one_or_swapped():
    rng = np.random.default_rng(0)
    logits, labels = drawn(3000, 10, 6.0, rng)
    assert "no better than that of guessing (10" in said(logits, (labels + 1) % 10)
    logits, labels = drawn(3000, 2, 4.0, rng)
    assert "higher where y = 0 (ROC AUC" in said(logits, 1 - labels)
    odds = logits[:, 1] - logits[:, 0]
    assert "class 1 is the second column" in said(odds, 1 - labels)


@pytest.mark.parametrize("classes", [2, 10])
def test_training_set(classes):
    rng = np.random.default_rng(0)
    logits = 30 * rng.normal(size=(1000, classes))
    logits[np.arange(1000), logits.argmax(-1)] += 20
    message = "use held-out examples if the model was trained on these, and the true labels if"
    assert message in said(logits, logits.argmax(-1))
    assert message in said(logits / 100, logits.argmax(-1))  # however sure it is


def test_training_set_with_few_mistakes():
    """A model that is nearly always right, and nearly sure of it, has hardly seen new examples."""
    rng = np.random.default_rng(0)
    logits, labels = drawn(3000, 3, 0.0, rng)
    logits[np.arange(3000), labels] += 7
    labels[:4] = (labels[:4] + 1) % 3
    assert "99.87 % of the predictions are right" in said(logits, labels)
    labels[4:8] = (labels[4:8] + 1) % 3
    assert said(logits, labels) == ""


def test_labels_of_uneven_classes_in_another_order():
    """Guesses of a frequent class are often right: chance is not one of so many classes."""
    rng = np.random.default_rng(0)
    logits = 4 * rng.normal(size=(3000, 5)) + [6, 3, 0, 0, 0]
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    assert said(logits, labels) == ""
    shuffled = rng.permutation(labels)
    agreeing = sum((logits.argmax(-1) == k).mean() * (labels == k).mean() for k in range(5))
    assert (logits.argmax(-1) == shuffled).mean() > 0.3 > 1 / 5
    found = said(logits, shuffled)
    chance = float(found.split("guessing (")[1].split(" %")[0]) / 100
    assert chance == pytest.approx(agreeing, abs=0.02)


def test_weak_models_are_not_mistaken_for_mistakes():
    """A model that is right more often than chance, and far too sure, is no mistake."""
    rng = np.random.default_rng(0)
    for repeat in range(40):
        n, classes = (200, 1000, 5000)[repeat % 3], (3, 5, 10)[repeat % 3]
        logits = rng.normal(size=(n, classes))
        labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
        assert said(5 * logits, labels) == ""


def test_sound_data_are_left_alone():
    """Good, weak, useless, rare and over-confident models have no hint; nor have few examples."""
    rng = np.random.default_rng(0)
    for repeat in range(20):
        classes = (2, 3, 10)[repeat % 3]
        logits, labels = drawn(500, classes, rng.uniform(0.0, 5.0), rng)
        assert said(logits, labels) == ""
        assert said(rng.uniform(0.5, 2.0) * logits, labels) == ""
        assert said(0 * logits, labels) == ""
    rare = rng.normal(size=2000) - 3
    assert said(rare, (rng.uniform(size=2000) < 1 / (1 + np.exp(-rare))).astype(int)) == ""
    constant = np.full(2000, -2.0)
    assert said(constant, (rng.uniform(size=2000) < 0.12).astype(int)) == ""
    assert said(4 * rng.normal(size=(50, 3)), rng.integers(3, size=50)) == ""
    tags = 4 * rng.normal(size=(500, 3))
    assert said(tags, rng.integers(2, size=(500, 3)), estimand="multilabel") == ""
