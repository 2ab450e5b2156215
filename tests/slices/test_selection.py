"""The few subgroups that are named: score tests against a fitted model, and simple names."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from calibrant.data.metadata import Condition
from calibrant.metrics.intervals import Estimate
from calibrant.slices.examples import Outcomes
from calibrant.slices.selection import Candidate, Overlap, overlap, select


def candidate(*conditions, estimand="binary"):
    gap = Estimate(0.1, 0.05, 0.15)
    return Candidate(conditions, estimand, 100, 100.0, 0.5, 0.4, gap, 5.0)


@pytest.fixture
def examples(rng):
    codes = rng.integers(0, 4, size=(20_000, 2))
    claimed = rng.uniform(0.05, 0.95, 20_000)
    return codes, claimed, np.where(claimed > 0.5, 1.0, -1.0)


def test_overlaps_are_sums_over_members(examples, rng):
    codes, claimed, sign = examples
    happened, weight = rng.integers(0, 2, 20_000).astype(float), rng.uniform(size=20_000)
    ours = [candidate(Condition(0, 0, 2)), candidate(Condition(1, 1, 4), estimand="top_label")]
    result = overlap(ours, Outcomes(claimed, happened, weight, sign), codes)
    member = np.stack([codes[:, 0] < 2, (codes[:, 1] >= 1) * sign], 1)
    np.testing.assert_allclose(result.score, (weight * (happened - claimed)) @ member)
    information = member.T * (weight * claimed * (1 - claimed)) @ member
    np.testing.assert_allclose(result.information, information)
    covariance = member.T * (weight**2 * claimed * (1 - claimed)) @ member
    np.testing.assert_allclose(result.covariance, covariance)


def test_what_others_explain_is_left_out(examples, rng):
    """Only the intersection is off: its parents and its parts follow from it."""
    codes, claimed, sign = examples
    wrong = (codes[:, 0] == 1) & (codes[:, 1] == 2)
    truth = np.where(wrong, claimed / 2, claimed)
    happened = (rng.uniform(size=codes.shape[0]) < truth).astype(float)
    both = (Condition(0, 1, 2), Condition(1, 2, 3))
    ours = [
        candidate(Condition(0, 1, 2)),
        candidate(Condition(1, 2, 3)),
        candidate(*both),
        candidate(Condition(0, 0, 3), Condition(1, 2, 3)),
    ]
    sums = overlap(ours, Outcomes(claimed, happened, np.ones(20_000), sign), codes)
    assert [one.conditions for one in select(ours, sums, 3.5, 10)] == [both]


def test_partial_scores_are_those_of_a_regression(rng):
    """The score left is the residual's, where the chosen ones are regressed out."""
    member = (rng.uniform(size=(4000, 3)) < [0.5, 0.4, 0.3]).astype(float)
    member[:, 1] = np.maximum(member[:, 1], member[:, 0] * (rng.uniform(size=4000) < 0.8))
    residual = rng.normal(size=4000) + 0.3 * member[:, 0] + 0.2 * member[:, 2]
    sums = Overlap(residual @ member, member.T @ member, member.T @ member)
    ours = [candidate(Condition(i, 0, 1)) for i in range(3)]
    first = int(np.argmax(np.abs(sums.score) / np.sqrt(np.diag(sums.information))))
    regression = LinearRegression(fit_intercept=False)
    others = [i for i in range(3) if i != first]
    strength = []
    for i in others:
        given = member[:, [first]]
        left = residual - regression.fit(given, residual).predict(given)
        own = member[:, i] - regression.fit(given, member[:, i]).predict(given)
        strength.append(abs(left @ own) / np.sqrt(own @ own))
    for limit in (0.99 * max(strength), 1.01 * max(strength)):
        chosen = [one.conditions[0].column for one in select(ours, sums, limit, 2)]
        expected = [first, others[int(np.argmax(strength))]] if limit < max(strength) else [first]
        assert chosen == expected


def test_the_simpler_of_two_alike_is_chosen(examples, rng):
    codes, claimed, sign = examples
    truth = np.where(codes[:, 0] == 1, claimed / 2, claimed)
    happened = (rng.uniform(size=codes.shape[0]) < truth).astype(float)
    one, nearly = Condition(0, 1, 2), Condition(1, 0, 4)
    ours = [candidate(one, nearly), candidate(one)]
    sums = overlap(ours, Outcomes(claimed, happened, np.ones(20_000), sign), codes)
    assert [found.conditions for found in select(ours, sums, 3.5, 10)] == [(one,)]


def test_one_of_those_that_are_off_is_always_named(examples, rng):
    """Their exact intervals exclude 0, even where the normal approximation does not reach."""
    codes, claimed, sign = examples
    happened = (rng.uniform(size=20_000) < claimed).astype(float)
    ours = [candidate(Condition(0, 1, 2)), candidate(Condition(1, 2, 3))]
    sums = overlap(ours, Outcomes(claimed, happened, np.ones(20_000), sign), codes)
    assert len(select(ours, sums, 1e6, 10)) == 1
