"""Scores of judges, top tokens and options."""

import math

import numpy as np
import pytest

from calibrant.llm.answers.signals import (
    judge_score,
    option_confidence,
    top_token_confidence,
    vote_share,
)


def test_scores_are_linear_between_the_worst_and_the_best():
    assert [judge_score(x, (1, 5)) for x in (1, 2, 5)] == [0, 0.25, 1]
    assert judge_score(2, (5, 1)) == 0.75  # 1 is the best
    assert judge_score(-3, (-5, 5)) == pytest.approx(0.2)


@pytest.mark.parametrize("score", [0, 11, math.nan, math.inf, True])
def test_scores_off_the_scale_are_refused(score):
    with pytest.raises(ValueError, match="from 1 to 10"):
        judge_score(score, (1, 10))


@pytest.mark.parametrize("scale", [(1, 1), (0, math.inf), (math.nan, 1)])
def test_scales_have_two_ends(scale):
    with pytest.raises(ValueError, match="two different numbers"):
        judge_score(1, scale)


def test_votes_are_counted():
    assert vote_share(["yes", "No", " TIE "]) == 0.5
    assert vote_share(["correct"]) == 1
    with pytest.raises(ValueError, match="list of yes"):
        vote_share([])
    with pytest.raises(ValueError, match="list of yes"):
        vote_share("yes")
    with pytest.raises(ValueError, match="got 'maybe'"):
        vote_share(["yes", "maybe"])


def test_options_have_a_probability_and_a_margin():
    first, margin = option_confidence(np.log([0.2, 0.7, 0.1]) + 5)
    assert [first, margin] == pytest.approx([0.7, 0.5])
    assert option_confidence([0.0, -np.inf]) == (1, 1)
    for logits in ([1.0], [1.0, np.nan], [1.0, np.inf], [[1.0, 2.0]], [-np.inf, -np.inf]):
        with pytest.raises(ValueError, match="option logits"):
            option_confidence(logits)


def drawn_positions(rng, count, vocabulary):
    return rng.dirichlet(np.full(vocabulary, 0.3), size=count)


def entropy(probs):
    return -sum(p * math.log(p) for p in probs if p)


def shown(probs, k):
    return [{str(i): math.log(row[i]) for i in np.argsort(-row)[:k]} for row in probs]


def test_top_tokens_bound_the_entropy_of_all():
    rng = np.random.default_rng(0)
    for _ in range(20):
        probs = drawn_positions(rng, 3, 30)
        truth = math.exp(-np.mean([entropy(row) for row in probs]))
        low = top_token_confidence(shown(probs, 5), vocabulary=30)
        middle = top_token_confidence(shown(probs, 5), vocabulary=30, bound="middle")
        high = 2 * middle["top_entropy"] - low["top_entropy"]
        assert low["top_entropy"] <= truth <= high
        top = np.sort(probs)[:, ::-1]
        assert low["top_probability"] == pytest.approx(math.exp(np.log(top[:, 0]).mean()))
        assert low["top_margin"] == pytest.approx((top[:, 0] - top[:, 1]).mean())
        assert middle["top_margin"] == low["top_margin"]


def test_both_bounds_of_the_entropy_are_reached():
    packed, equal = [0.5, 0.2, 0.2, 0.1], [0.5, 0.2, 0.1, 0.1, 0.1]
    for probs, end in ((packed, 1), (equal, 0)):
        top, size = shown(np.array([probs]), 2), len(probs)
        low = top_token_confidence(top, vocabulary=size)["top_entropy"]
        middle = top_token_confidence(top, vocabulary=size, bound="middle")["top_entropy"]
        assert (low, 2 * middle - low)[end] == pytest.approx(math.exp(-entropy(probs)))


def test_the_entropy_is_exact_if_nothing_is_hidden():
    probs = drawn_positions(np.random.default_rng(1), 2, 6)
    truth = math.exp(-np.mean([entropy(row) for row in probs]))
    for bound in ("low", "middle"):
        found = top_token_confidence(shown(probs, 6), vocabulary=6, bound=bound)
        assert found["top_entropy"] == pytest.approx(truth)


def test_a_position_with_one_token_has_no_margin():
    found = top_token_confidence([{"a": -0.1, "b": -3.0}, {"c": -0.2}])
    assert {*found} == {"top_probability", "top_entropy"}


@pytest.mark.parametrize("bad", [math.nan, 0.3, math.inf])
def test_log_probabilities_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="position 1 of top must have natural logarithms"):
        top_token_confidence([{"a": -0.1}, {"a": bad, "b": -1.0}])


def test_the_vocabulary_holds_what_is_shown():
    with pytest.raises(ValueError, match="vocabulary is 1, but 2"):
        top_token_confidence([{"a": -0.5, "b": -1.0}], vocabulary=1)
