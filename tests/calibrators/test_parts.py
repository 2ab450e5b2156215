"""Composed methods, against their parts fitted one after the other."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators import parts
from calibrant.calibrators.affine import StructuredMatrixScaling, StructuredVectorScaling
from calibrant.calibrators.base import Context
from calibrant.calibrators.parts import Blend, MatrixAndTop, TopAndRest
from calibrant.calibrators.rank_gaps import RankGaps
from tests.support.simulate import drawn


def confused(rng, n, classes=4):
    """Logits whose classes are mixed up and preferred, with labels of the truth."""
    truth = 2 * rng.normal(size=(n, classes))
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    return 1.5 * (truth + 0.5 * np.roll(truth, 1, axis=-1) + np.linspace(0, 1, classes)), labels


def both_odds(top, others, logits):
    """Log-odds of the top class by ``blend``, and by the logits of the others, at least chance."""
    at, classes = logits.argmax(-1), logits.shape[1]
    highest = torch.from_numpy(logits.max(-1, keepdims=True))
    by_blend = top._odds(torch.from_numpy(logits) - highest, highest).numpy()[:, 0]
    share = softmax(others, -1)[np.arange(len(at)), at]
    return by_blend, np.maximum(np.log(share / (1 - share)), -np.log(classes - 1))


@pytest.mark.parametrize(("n", "classes"), [(600, 4), (120, 12)])
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_the_top_is_that_of_blend_and_matrix_and_the_rest_that_of_matrix_and_gaps(rng, n, classes):
    logits, labels = confused(rng, n, classes)
    fitted, top = TopAndRest().fit(logits, labels), Blend().fit(logits, labels)
    many = n >= classes**2
    structured = StructuredMatrixScaling if many else StructuredVectorScaling
    matrix = structured().fit(logits, labels)
    gaps = RankGaps().fit(matrix.transform(logits), labels)
    at, rows = logits.argmax(-1), np.arange(n)
    others = gaps.transform(matrix.transform(logits))
    by_blend, by_others = both_odds(top, others, logits)
    weights = fitted.weights_.numpy()
    confidence = expit(weights[0] * by_blend + weights[1] * by_others + weights[2])
    others = softmax(others, -1)
    others[rows, at] = 0
    expected = (1 - confidence)[:, None] * others / others.sum(-1, keepdims=True)
    expected[rows, at] = confidence
    free = expected.argmax(-1) == at  # rows in which nothing is held below the top
    assert 0.5 < free.mean() < 1
    found = fitted.predict_proba(logits)
    np.testing.assert_allclose(found[free], expected[free], atol=2e-4)
    assert (found.argmax(-1) == at).all()
    assert fitted.matrix.weight_.ndim == 1 + many


def test_the_weights_of_the_top_minimise_likelihood_and_calibration_error_near_the_mean(rng):
    """By the definition, example by example, with weights and ten examples for the mean."""
    logits, labels = confused(rng, 300)
    weight = rng.exponential(size=300)
    fitted = TopAndRest().fit(logits, labels, sample_weight=weight)
    others = fitted.gaps.transform(fitted.matrix.transform(logits))
    inputs = np.stack([*both_odds(fitted.top, others, logits), np.ones(300)], axis=1)
    right, share = logits.argmax(-1) == labels, weight / weight.sum()
    centres, start = (np.arange(15) + 0.5) / 15, np.array([0.5, 0.5, 0.0])

    def objective(weights):
        claimed = expit(inputs @ weights)
        kernel = np.exp(-((claimed[:, None] - centres) ** 2) / (2 * 0.05**2))
        part = share[:, None] * kernel / kernel.sum(-1, keepdims=True)
        mass, gap = part.sum(0), part.T @ (claimed - right)
        error = sum(m * (np.hypot(g / m, 1e-3) - 1e-3) for m, g in zip(mass, gap, strict=True))
        likelihood = -share @ np.log(np.where(right, claimed, 1 - claimed))
        return likelihood + error + 10 / 300 * ((weights - start) ** 2).sum()

    found = objective(fitted.weights_.numpy().astype(float))
    least = minimize(objective, start, method="Nelder-Mead").fun
    assert found < least + 1e-3 < objective(start) - 5e-3


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_what_is_taken_for_each_other_gains_what_one_temperature_cannot(rng):
    logits, labels = confused(rng, 4000)
    new, answers = confused(rng, 20_000)
    plain, fitted = Blend().fit(logits, labels), TopAndRest().fit(logits, labels)
    before, after = (m.transform(new) for m in (plain, fitted))
    assert cal.nll(after, answers) < cal.nll(before, answers) - 0.05
    # a class that has to stay on top cannot claim less than chance, however wrong it is
    assert cal.ece(after, answers) < cal.ece(before, answers) + 0.02


def test_the_matrix_predicts_and_blend_says_how_sure(rng):
    logits, labels = confused(rng, 600)
    fitted = MatrixAndTop().fit(logits, labels)
    matrix = StructuredMatrixScaling().fit(logits, labels)
    after = matrix.transform(logits)
    top = Blend().fit(after, labels)
    np.testing.assert_allclose(fitted.predict_proba(logits), top.predict_proba(after), atol=1e-4)
    assert (fitted.transform(logits).argmax(-1) == after.argmax(-1)).all()
    assert (after.argmax(-1) != logits.argmax(-1)).any()


def test_a_part_is_shared_only_if_it_is_the_same(rng):
    checked = examples(*drawn(rng, 300, 4, 2.0))
    context = Context(fitted=[])
    one, again, other = (context.part(Blend(seed=s), checked) for s in (0, 0, 1))
    assert context.fitted == [one, other]
    assert again is not one  # a calibrator that is saved twice has tensors of its own
    logits = rng.normal(size=(50, 4))
    np.testing.assert_array_equal(again.transform(logits), one.transform(logits))
    assert not np.array_equal(other.transform(logits), one.transform(logits))


def test_gaps_of_many_logits_are_learned_from_some(rng, monkeypatch):
    logits, labels = confused(rng, 800)
    labels[::8] = -100
    whole = TopAndRest().fit(logits, labels)
    monkeypatch.setattr(parts, "MAX_GAP_LOGITS", 4 * 500)
    some, other = (TopAndRest(seed=seed).fit(logits, labels) for seed in (0, 1))
    rows = np.sort(np.random.default_rng(0).permutation(700)[:500])
    kept = np.flatnonzero(labels != -100)[rows]
    alone = RankGaps().fit(whole.matrix.transform(logits[kept]), labels[kept])
    np.testing.assert_allclose(some.gaps.factors_, alone.factors_, rtol=1e-4)
    assert not np.allclose(other.gaps.factors_, some.gaps.factors_, rtol=1e-3)
    np.testing.assert_array_equal(some.matrix.weight_, whole.matrix.weight_)  # of all


def test_classes_above_the_top_are_held_below_it_and_its_confidence_stays(rng):
    """What they lose is shared by the others in proportion, as by cutting them one by one."""
    shares = rng.dirichlet(np.full(7, 0.3), size=200)
    confidence = rng.uniform(1 / 8, 0.6, size=200)
    odds = torch.from_numpy(np.log(confidence / (1 - confidence)))[:, None]
    relative = shares * (1 - confidence[:, None]) / confidence[:, None]
    logits = torch.from_numpy(np.log(np.concatenate([np.ones((200, 1)), relative], axis=1)))
    found = parts._below_top(logits, odds).softmax(-1).numpy()
    assert (relative > 1).any(1).sum() > 50
    for share, c, got in zip(shares, confidence, found, strict=True):
        expected = (1 - c) * share
        while (above := expected > c + 1e-12).any():
            held = above | np.isclose(expected, c)
            room = 1 - c - c * held.sum()
            expected = np.where(held, c, room * share / share[~held].sum() if (~held).any() else c)
        assert got[0] == pytest.approx(c, rel=1e-6)
        np.testing.assert_allclose(got[1:], expected, rtol=1e-6, atol=1e-9)
