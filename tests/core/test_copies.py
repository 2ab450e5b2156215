"""Copies of rows are told from rows that honestly repeat."""

import warnings
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, softmax

import calibrant as cal
from calibrant._core.checks import _count_copies, known_rows, warn_of_copies


def drawn(n, classes, seed=0, scale=2.0):
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(n, classes))
    return logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1)


@pytest.mark.parametrize("times", [2, 10])
@pytest.mark.parametrize("how", [np.tile, np.repeat])
def test_examples_that_are_all_repeated(how, times):
    logits, labels = drawn(60, 5)
    rows = how(np.arange(60), times)
    assert _count_copies(logits[rows], labels[rows]) == 60 * (times - 1)


def test_oversampled_examples():
    """Some rows are drawn again and again, as to balance classes."""
    logits, labels = drawn(400, 3)
    rows = np.r_[np.arange(400), np.random.default_rng(1).choice(100, 150)]
    assert _count_copies(logits[rows], labels[rows]) == 150


def test_annotators_of_the_same_examples():
    logits, _ = drawn(60, 5)
    rng = np.random.default_rng(0)
    labels = (logits[None] + rng.gumbel(size=(3, 60, 5))).argmax(-1).reshape(-1)
    assert _count_copies(np.tile(logits, (3, 1)), labels) == 120


def test_a_few_duplicates_hardly_matter():
    logits, labels = drawn(400, 3)
    rows = np.r_[np.arange(400), np.arange(30)]
    assert _count_copies(logits[rows], labels[rows]) == 0


@pytest.mark.parametrize("seed", range(10))
def test_scores_of_few_values_are_honest(seed):
    """Leaves of trees, votes, rounded probabilities, and predictions that never change."""
    logits, labels = drawn(2000, 4, seed)
    rng = np.random.default_rng(seed)
    leaves = drawn(12 + 20 * seed, 4, seed)[0]
    leaf = rng.integers(len(leaves), size=2000)
    right = (leaves[leaf] + rng.gumbel(size=(2000, 4))).argmax(-1)
    assert _count_copies(leaves[leaf], right) == 0
    votes = rng.multinomial(5, softmax(leaves, -1))[leaf] / 5
    assert _count_copies(votes, right) == 0
    for digits in (1, 2, 3):
        assert _count_copies(softmax(logits, -1).round(digits), labels) == 0
    assert _count_copies(np.ones((2000, 4)), labels) == 0
    assert _count_copies(leaves[leaf], np.zeros(2000, int)) == 0  # one label tells nothing


def test_zeros_have_no_sign_and_the_order_of_a_row_counts():
    logits, labels = drawn(60, 4)
    logits[:, 0] = 0
    turned = np.concatenate([logits, np.where(logits == 0, -0.0, logits)])
    assert _count_copies(turned, np.tile(labels, 2)) == 60
    swapped = np.concatenate([logits, logits[:, ::-1]])
    assert _count_copies(swapped, np.tile(labels, 2)) == 0


def test_saturated_probabilities_are_no_copies():
    """Naive Bayes rounds many rows to 1, or so near to it that few numbers are left."""
    odds = 40 * np.random.default_rng(0).normal(size=4000)
    probs, wrong_way = np.asarray(expit(odds)), (odds < 0).astype(int)
    warn_of_copies(probs, wrong_way, probs=True)  # a warning would be an error
    warn_of_copies(np.stack([1 - probs, probs], -1), wrong_way, probs=True)
    copied = np.r_[odds / 20, np.repeat(odds[:20] / 20, 100)]
    repeated: Any = expit(copied)
    with pytest.warns(UserWarning, match="2,000 of the first 6,000 rows are copies"):
        warn_of_copies(repeated, (copied < 0).astype(int), probs=True)


def test_no_rows_have_no_copies():
    assert _count_copies(np.zeros((0, 3)), np.zeros(0, int)) == 0
    warn_of_copies(np.zeros((0, 3)), np.zeros(0, int))


MESSAGE = "540 of the first 600 rows are copies of other rows: .* keep one of each, or name the"


@pytest.fixture
def tiled():
    logits, labels = drawn(60, 5)
    return np.tile(logits, (10, 1)), np.tile(labels, 10)


def test_they_are_told_once_wherever_labels_come_in(tiled, tmp_path):
    np.savez(tmp_path / "p.npz", logits=tiled[0], labels=tiled[1])
    data = {"logits": tiled[0], "labels": tiled[1]}
    calls = {
        "evaluate": lambda: cal.evaluate(*tiled, level=None),
        "evaluate probs": lambda: cal.evaluate(
            probs=softmax(tiled[0], -1), labels=tiled[1], level=None
        ),
        "evaluate a file": lambda: cal.evaluate(tmp_path / "p.npz", level=None),
        "fit": lambda: cal.Auto(candidates=("none", "ts")).fit(*tiled),
        "fit a file": lambda: cal.fit(tmp_path / "p.npz", method="vector"),
        "fit from the table": lambda: cal.fit(data, method="ts"),
        "cross_fit": lambda: cal.cross_fit(data, method="ts", level=None),
        "compare": lambda: cal.compare(data, methods=["none", "ts"], level=None),
    }
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        said = [str(one.message) for one in caught if "copies" in str(one.message)]
        assert len(said) == 1, (name, said)
        assert said[0].startswith(MESSAGE.split(": .*")[0]), name


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_groups_tokens_and_tags_are_left_alone(tiled):
    logits, labels = tiled
    groups = np.tile(np.arange(60), 10)
    cal.TemperatureScaling().fit(logits, labels, groups=groups)  # a warning would be an error
    cal.fit({"logits": logits, "labels": labels}, method="ts", groups=groups)
    cal.TemperatureScaling().fit(logits.reshape(60, 10, 5), labels.reshape(60, 10))
    tags = (logits > 0).astype(int)
    cal.evaluate(logits, tags, estimand="multilabel", level=None)
    with known_rows():
        warn_of_copies(logits, labels)
    with pytest.warns(UserWarning, match=MESSAGE):
        warn_of_copies(logits, labels)
