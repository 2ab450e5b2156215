"""Answers, top-k bounds, choices and question files: slow definitions and known truths."""

import json
import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import expit, logit, softmax
from scipy.stats import binom
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

import calibrant as cal
from calibrant import threshold
from calibrant.llm.answers.calibrator import STAGES, AnswerCalibrator, log_odds
from calibrant.llm.answers.choices import (
    choice_logits,
    choice_logits_from_likelihoods,
    choice_logits_from_top,
    choice_sets,
    choice_tokens,
    p_true,
)
from calibrant.llm.answers.confidence import AGGREGATORS, answer_confidence
from calibrant.llm.answers.questions import (
    Question,
    choice_prompt,
    exact_match,
    first_line,
    normalised,
    read_answers,
    read_mmlu,
    read_questions,
    read_truthfulqa,
    short_prompt,
    subset,
)
from calibrant.llm.answers.topk import log_partition_bounds, top_confidence, top_logprobs


def most(times, chance):
    """Number of events of a chance that is exceeded once in ten thousand runs."""
    return int(binom.ppf(0.9999, times, chance))


# ----------------------------------------------------------------------------- tokens to an answer

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


def test_every_rule_has_a_slow_definition():
    assert SLOW.keys() == AGGREGATORS.keys()


@pytest.mark.parametrize("how", SLOW)
def test_confidence_is_that_of_the_definition_in_every_layout(how, answers, rng):
    wanted = [SLOW[how](p.tolist()) for p in answers]
    np.testing.assert_allclose(answer_confidence(answers, how), wanted)
    np.testing.assert_allclose(answer_confidence([torch.tensor(p) for p in answers], how), wanted)

    width = max(map(len, answers))
    padded, mask = np.full((50, width), np.nan), np.zeros((50, width), dtype=bool)
    for i, p in enumerate(answers):
        skipped = int(rng.integers(width - len(p) + 1))  # padding on either side
        padded[i, skipped : skipped + len(p)] = p
        mask[i, skipped : skipped + len(p)] = True
    np.testing.assert_allclose(answer_confidence(padded, how, mask=mask), wanted)
    tensors = torch.tensor(padded), torch.tensor(mask)
    np.testing.assert_allclose(answer_confidence(tensors[0], how, mask=tensors[1]), wanted)

    names = rng.permutation(1000)[:50]
    flat = np.concatenate([answers[i] for i in np.argsort(names)])
    ids = np.repeat(np.sort(names), [len(answers[i]) for i in np.argsort(names)])
    by_name = np.asarray(wanted)[np.argsort(names)]
    np.testing.assert_allclose(answer_confidence(flat, how, documents=ids), by_name)
    # answers that come mixed, each in the order of its tokens
    mixed = np.argsort(rng.random(len(ids)))
    mixed = np.concatenate([np.sort(mixed[: len(ids) // 2]), np.sort(mixed[len(ids) // 2 :])])
    order = {d: iter(np.flatnonzero(ids == d)) for d in np.unique(ids)}
    at = [next(order[d]) for d in ids[mixed]]
    np.testing.assert_allclose(answer_confidence(flat[at], how, documents=ids[mixed]), by_name)


def test_default_is_the_geometric_mean():
    assert answer_confidence([[0.9, 0.4]]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("given", "layout", "message"),
    [
        ([[0.5], [], [0.2]], {}, r"answer 1 has no tokens \(1 of 3"),
        ([], {}, "holds no answer"),
        (np.ones((2, 3)), {"mask": [[True, False, False], [False] * 3]}, "answer 1 has no tokens"),
        (np.ones((2, 3)), {"mask": np.ones((3, 2), dtype=bool)}, r"\(2, 3\) and \(3, 2\)"),
        (np.ones(3), {"documents": [0, 1]}, r"\(3,\) and \(2,\)"),
        (np.ones(3), {"documents": [0, 1, 1], "mask": np.ones(3, dtype=bool)}, "not both"),
        (np.ones(3), {}, "say which tokens"),
        ([[-0.1, -0.2]], {}, r"np\.exp"),
        ([[0.5, math.nan]], {}, "NaN"),
        ([[1.5]], {}, r"in \[0, 1\]"),
        ([[[0.5]]], {}, r"got shape \(1, 1\) for answer 0"),
    ],
)
def test_bad_answers_are_refused(given, layout, message):
    with pytest.raises(ValueError, match=message):
        answer_confidence(given, **layout)


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="geometric, product"):
        answer_confidence([[0.5]], "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="geometric, product"):
        AnswerCalibrator("median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sigmoid, beta, isotonic"):
        AnswerCalibrator(stage="spline")  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- second stage


def drawn_answers(rng, n, truth):
    """Confidences over all of (0, 1), and outcomes drawn from a curve of their log-odds."""
    sure = rng.beta(1.2, 1.2, n)
    return sure, rng.random(n) < truth(logit(sure))


def test_sigmoid_is_a_logistic_regression_on_both_sides_of_a_half(rng):
    sure, right = drawn_answers(rng, 3000, lambda s: expit(0.6 * s - 1.2))
    fitted = AnswerCalibrator(None).fit(sure, right)
    other = LogisticRegression(C=np.inf, tol=1e-10).fit(logit(sure)[:, None], right)
    wanted = other.predict_proba(logit(sure)[:, None])[:, 1]
    np.testing.assert_allclose(fitted.predict(sure), wanted, atol=1e-4)
    np.testing.assert_allclose(fitted.state()["learned"]["line"], [0.6, -1.2], atol=0.15)


def test_beta_is_a_logistic_regression_on_two_logarithms(rng):
    sure, right = drawn_answers(rng, 5000, lambda s: expit(s - 0.5) ** 1.5)
    fitted = AnswerCalibrator(None, stage="beta").fit(sure, right)
    inputs = np.stack([np.log(sure), -np.log1p(-sure)], 1)
    other = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(inputs, right)
    assert (other.coef_ > 0).all()  # the constraints do not bind
    np.testing.assert_allclose(fitted.predict(sure), other.predict_proba(inputs)[:, 1], atol=1e-3)


def test_isotonic_is_that_of_sklearn(rng):
    sure, right = drawn_answers(rng, 800, lambda s: expit(s - 0.5))
    sure = sure.round(2).clip(0.01, 0.99)  # ties
    fitted = AnswerCalibrator(None, stage="isotonic").fit(sure, right)
    other = IsotonicRegression(out_of_bounds="clip").fit(sure, right)
    least = 0.5 / 800
    wanted = np.clip(other.predict(sure), least, 1 - least)
    np.testing.assert_allclose(fitted.predict(sure), wanted, atol=1e-6)
    between = rng.random(200)
    wanted = np.clip(other.predict(between), least, 1 - least)
    np.testing.assert_allclose(fitted.predict(between), wanted, atol=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_calibrated_confidences_rise_and_are_right_on_average(stage, rng):
    tokens = [rng.beta(3, 1, size=rng.integers(1, 9)) for _ in range(4000)]
    truth = answer_confidence(tokens) ** 2
    right = rng.random(4000) < truth
    fitted = AnswerCalibrator(stage=stage).fit(tokens[:2000], right[:2000])
    found = fitted.predict(tokens[2000:])
    order = np.argsort(truth[2000:])
    assert (np.diff(found[order]) >= -1e-9).all()
    assert np.abs(found - truth[2000:]).mean() < 0.03
    # nothing is certain, so that the likelihood of new answers is finite
    assert 0 < found.min() < found.max() < 1


@pytest.mark.parametrize("stage", STAGES)
def test_layouts_of_tokens_are_passed_on(stage, rng, answers):
    right = rng.random(50) < 0.5
    flat = np.concatenate(answers)
    documents = np.repeat(np.arange(50), [len(p) for p in answers])
    one = AnswerCalibrator(stage=stage).fit(answers, right)
    two = AnswerCalibrator(stage=stage).fit(flat, right, documents=documents)
    np.testing.assert_array_equal(one.predict(answers), two.predict(flat, documents=documents))


def test_long_products_keep_their_order_where_floats_underflow():
    tokens = [np.full(m, 0.1) for m in range(100, 900, 10)]
    assert answer_confidence(tokens, "product")[-1] == 0
    right = np.arange(80) % 7 < 3 - np.arange(80) // 30
    found = AnswerCalibrator("product").fit(tokens, right).predict(tokens)
    assert (np.diff(found) < 0).all()


@pytest.mark.filterwarnings("ignore:surer answers are not right")
def test_certain_tokens_have_finite_odds():
    odds = log_odds(np.log(np.array([1.0, 1 - 1e-12, 0.5, 1e-300])))
    assert np.isfinite(odds).all()
    assert odds[0] == pytest.approx(odds[1], abs=1e-6)
    assert odds[2] == 0
    right = np.array([True, True, False, False, True])
    fitted = AnswerCalibrator().fit([[1.0, 1.0], [0.0], [0.5], [0.4], [1.0]], right)
    assert np.isfinite(fitted.predict([[1.0], [0.0]])).all()


SAID = np.array([0, 0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 1])
HOW_OFTEN = np.array([0.02, 0.05, 0.1, 0.1, 0.15, 0.25, 0.2, 0.15]) / 1.02
WORTH = np.array([0.15, 0.2, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85])


def said_answers(rng, n):
    """Confidences as models say them, 0 and 1 among them, and outcomes of a known chance."""
    at = rng.choice(8, n, p=HOW_OFTEN)
    return SAID[at], rng.random(n) < WORTH[at]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("zeros", [True, False])
def test_confidences_of_zero_and_one_do_not_bend_the_map(stage, zeros, rng):
    off = []
    for _ in range(20):
        sure, right = said_answers(rng, 1000)
        seen = (sure > 0) | zeros
        found = AnswerCalibrator(None, stage=stage).fit(sure[seen], right[seen]).predict(SAID)
        assert (np.diff(found) >= 0).all()
        off.append(HOW_OFTEN @ np.abs(found - WORTH))
    assert np.mean(off) < (0.04 if stage == "isotonic" else 0.03)  # steps are noisier


def test_zero_and_one_are_taken_for_values_halfway_to_the_next(rng):
    sure, right = said_answers(rng, 1000)
    fitted = AnswerCalibrator(None).fit(sure, right)
    assert fitted.limits_ == pytest.approx((0.1, 0.975))
    moved = logit(np.clip(sure, 0.1, 0.975))
    other = LogisticRegression(C=np.inf, tol=1e-10).fit(moved[:, None], right)
    wanted = other.predict_proba(moved[:, None])[:, 1]
    np.testing.assert_allclose(fitted.predict(sure), wanted, atol=1e-4)
    # values between, which fit has not seen, never fall below their lower neighbours
    assert (np.diff(fitted.predict(np.linspace(0, 1, 2001))) >= 0).all()
    # 0 and 1 that fit has not seen are no more certain than any other
    inner = (sure > 0) & (sure < 1)
    assert AnswerCalibrator(None).fit(sure[inner], right[inner]).limits_ == fitted.limits_
    # others know no limits
    assert AnswerCalibrator(None, stage="isotonic").fit(sure, right).limits_ is None
    assert AnswerCalibrator("first").fit(list(sure[:, None]), right).limits_ is None


@pytest.mark.parametrize("stage", STAGES)
def test_zeros_and_ones_alone_are_worth_their_shares(stage, rng):
    sure = (np.arange(300) % 3 > 0).astype(float)
    right = np.where(sure == 1, rng.random(300) < 0.8, rng.random(300) < 0.3)
    fitted = AnswerCalibrator(None, stage=stage).fit(sure, right)
    low, middle, high = fitted.predict([0, 0.5, 1])
    shares = [right[sure == 0].mean(), right[sure == 1].mean()]
    assert [low, high] == pytest.approx(shares, abs=1e-4)
    assert low < middle < high


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [0, 0.7, 1])
def test_one_confidence_alone_is_worth_its_share(stage, value):
    right = np.arange(200) < 120
    fitted = AnswerCalibrator(None, stage=stage).fit(np.full(200, value), right)
    found = fitted.predict([0, value, 1])
    assert found[1] == pytest.approx(0.6, abs=1e-4)
    assert 0.1 < found[0] <= found[1] <= found[2] < 0.95


def test_a_failed_fit_changes_nothing(rng):
    sure, right = said_answers(rng, 300)
    fitted = AnswerCalibrator(None).fit(sure, right)
    before = fitted.state()
    with pytest.raises(ValueError, match="0 or 1"):
        fitted.fit(np.full(300, 0.5), np.full(300, 2))
    assert fitted.state() == before


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("number", [1, 5, 50])
def test_all_right_or_all_wrong_warns(stage, right, number, answers):
    some = answers[:number]
    with pytest.warns(UserWarning, match="all of them right, or all wrong"):
        fitted = AnswerCalibrator(stage=stage).fit(some, np.full(number, right))
    found = fitted.predict(some)
    assert ((found >= 0.75) if right else (found <= 0.25)).all()


@pytest.mark.parametrize("stage", STAGES)
def test_few_all_right_confidences_warn(stage):
    with pytest.warns(UserWarning, match="all of them right, or all wrong"):
        AnswerCalibrator(None, stage=stage).fit(np.linspace(0.6, 0.9, 5), np.ones(5))


@pytest.mark.filterwarnings("ignore:surer answers are not right")
def test_bad_fits_are_refused(answers):
    with pytest.raises(ValueError, match="each of 50 answers"):
        AnswerCalibrator().fit(answers, np.ones(49))
    with pytest.raises(ValueError, match="0 or 1"):
        AnswerCalibrator().fit(answers, np.full(50, 0.5))
    with pytest.raises(ValueError, match="confidences"):
        AnswerCalibrator(None).fit(answers[0][None] + np.zeros((2, 1)), [1, 0])
    with pytest.raises(ValueError, match="confidences"):
        AnswerCalibrator(None).fit([0.5, 1.5], [1, 0])
    with pytest.raises(RuntimeError, match="call fit"):
        AnswerCalibrator().predict(answers)
    with pytest.raises(RuntimeError, match="call fit"):
        AnswerCalibrator().state()
    with pytest.raises(RuntimeError, match="call control"):
        AnswerCalibrator().fit(answers, np.arange(50) % 2).abstains([0.5])


# ----------------------------------------------------------------------------------- abstention


def test_control_is_the_threshold_of_the_calibrated_confidences(rng):
    sure, right = drawn_answers(rng, 2000, lambda s: expit(s - 0.5))
    fitted = AnswerCalibrator(None).fit(sure[:500], right[:500])
    found = fitted.control(sure[500:], right[500:], max_error=0.25, level=0.9)
    after = fitted.predict(sure[500:])
    assert found == threshold(after, right[500:], max_error=0.25, level=0.9)
    np.testing.assert_array_equal(fitted.abstains(after), after < found.threshold)
    assert fitted.abstains([found.threshold]).tolist() == [False]
    assert fitted.abstains(torch.tensor([0.0])).tolist() == [True]
    for wrong in (math.nan, -0.1, 1.1):  # NaN is above no threshold, nor below
        with pytest.raises(ValueError, match="NaN, negative or larger"):
            fitted.abstains([0.5, wrong])
    # another fit is another scale
    with pytest.raises(RuntimeError, match="call control"):
        fitted.fit(sure, right).abstains(after)


def test_wrong_answers_stay_below_the_target_as_often_as_promised(rng):
    target, delta, times = 0.25, 0.1, 300
    population = rng.beta(1.2, 1.2, 20_000)
    chance = expit(1.2 * logit(population) - 0.4)
    failed = given = 0
    for _ in range(times):
        sure, right = drawn_answers(rng, 600, lambda s: expit(1.2 * s - 0.4))
        fitted = AnswerCalibrator(None).fit(sure[:150], right[:150])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where none is safe, none is given
            fitted.control(sure[150:], right[150:], max_error=target, level=1 - delta)
        kept = ~fitted.abstains(fitted.predict(population))
        given += bool(kept.any())
        failed += bool(kept.any() and 1 - chance[kept].mean() > target)
    assert failed <= most(times, delta)
    assert given > 0.9 * times


@pytest.mark.parametrize("stage", STAGES)
def test_zeros_and_ones_leave_the_guarantee_and_cost_no_answers(stage, rng):
    target, delta, times = 0.25, 0.1, 200
    failed, given = 0, []
    for _ in range(times):
        sure, right = said_answers(rng, 4000)
        fitted = AnswerCalibrator(None, stage=stage).fit(sure[:500], right[:500])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where none is safe, none is given
            fitted.control(sure[500:], right[500:], max_error=target, level=1 - delta)
        kept = ~fitted.abstains(fitted.predict(SAID))
        assert (np.diff(kept.astype(int)) >= 0).all()  # what is surer is answered first
        failed += bool(kept.any() and HOW_OFTEN[kept] @ (WORTH[kept] - 1 + target) < 0)
        given.append(HOW_OFTEN[kept].sum())
    assert failed <= most(times, delta)
    assert np.mean(given) > 0.3  # 1 and 0.95, with 20.7 % wrong; 0.9 would make it 28 %


# --------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("stage", STAGES)
def test_limits_are_saved_and_files_without_them_still_load(stage, rng, tmp_path):
    sure, right = said_answers(rng, 500)
    fitted = AnswerCalibrator(None, stage=stage).fit(sure, right)
    cal.save(fitted, tmp_path / "new.json")
    again = cal.load(tmp_path / "new.json")
    assert again.limits_ == fitted.limits_
    np.testing.assert_array_equal(again.predict(SAID), fitted.predict(SAID))
    # the map of an older file was fitted to confidences as they are
    line = {"sigmoid": [0.1, 0.2], "beta": [0.1, 0.3, 0.2]}.get(stage)
    old = {**fitted.state(), "learned": {"line": line}} if line else fitted.state()
    del old["limits"]
    (tmp_path / "old.json").write_text(json.dumps({"format": 1, **old}))
    found = cal.load(tmp_path / "old.json").predict([0, 0.5, 1])
    if stage == "sigmoid":
        ends = [log_odds(np.log([np.finfo(np.float32).tiny]))[0], 0, log_odds(np.zeros(1))[0]]
        np.testing.assert_allclose(found, expit(0.1 * np.array(ends) + 0.2), rtol=1e-6)
    assert found[0] < found[1] < found[2]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("max_error", [None, 0.45, 0.001])
def test_saved_calibrators_come_back(stage, max_error, rng, tmp_path):
    tokens = [rng.beta(3, 1, size=rng.integers(1, 9)) for _ in range(600)]
    right = rng.random(600) < answer_confidence(tokens)
    fitted = AnswerCalibrator("minimum", stage=stage).fit(tokens[:300], right[:300])
    if max_error == 0.001:
        with pytest.warns(UserWarning, match="no threshold"):
            fitted.control(tokens[300:], right[300:], max_error=max_error)
    elif max_error:
        fitted.control(tokens[300:], right[300:], max_error=max_error)
    cal.save(fitted, tmp_path / "answers.json")
    again = cal.load(tmp_path / "answers.json")
    np.testing.assert_array_equal(again.predict(tokens), fitted.predict(tokens))
    assert str(again.threshold_) == str(fitted.threshold_)  # NaN equals itself here
    assert [p.name for p in tmp_path.iterdir()] == ["answers.json"]


@pytest.mark.filterwarnings("ignore:surer answers are not right")
def test_other_states_are_refused(answers):
    state = AnswerCalibrator().fit(answers, np.arange(50) % 2).state()
    json.dumps(state, allow_nan=False)
    for broken in ({**state, "more": 1}, {}, [1, 2]):
        with pytest.raises(ValueError, match="an answer calibrator has"):
            AnswerCalibrator.from_state(broken)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sigmoid has the learned values line, got slope"):
        AnswerCalibrator.from_state({**state, "learned": {"slope": [1.0]}})


THRESHOLD = {"threshold": 0.5, "coverage": 0.5, "error": 0.1, "bound": 0.2, "n": 9}


@pytest.mark.parametrize(
    ("stage", "changed", "message"),
    [
        ("sigmoid", {"learned": None}, "sigmoid has the learned values line, got None"),
        ("sigmoid", {"learned": {}}, "line, got none"),
        ("sigmoid", {"learned": {"line": [1.0]}}, "line of sigmoid must be 2 finite numbers"),
        ("sigmoid", {"learned": {"line": [1.0, 0.0, 0.0]}}, "must be 2 finite numbers"),
        ("sigmoid", {"learned": {"line": [1.0, None]}}, "must be 2 finite numbers"),
        ("sigmoid", {"learned": {"line": 1.0}}, "must be 2 finite numbers"),
        ("sigmoid", {"learned": {"line": ["a", 1]}}, "are no numbers"),
        ("sigmoid", {"learned": {"line": {"a": 1}}}, "are no numbers"),
        ("beta", {"learned": {"line": [1.0, 0.0]}}, "line of beta must be 3 finite numbers"),
        ("isotonic", {"learned": {"odds": [], "prob": []}}, "odds of isotonic must be 1 finite"),
        ("isotonic", {"learned": {"odds": [0, 1], "prob": [0.5]}}, "prob of isotonic must be 2"),
        ("sigmoid", {"limits": 0.5}, "limits must be two rising numbers"),
        ("sigmoid", {"limits": [0.5]}, "limits must be two rising numbers"),
        ("sigmoid", {"limits": [0.9, 0.1]}, "limits must be two rising numbers"),
        ("sigmoid", {"limits": [0.0, 0.5]}, "limits must be two rising numbers between 0 and 1"),
        ("sigmoid", {"limits": [0.1, math.nan]}, "limits must be two rising numbers"),
        ("sigmoid", {"limits": ["a", 0.5]}, "limits must be two rising numbers"),
        ("sigmoid", {"threshold": [0.5]}, "a threshold has the numbers threshold, coverage"),
        ("sigmoid", {"threshold": {"threshold": 0.5}}, "a threshold has the numbers"),
        ("sigmoid", {"threshold": {**THRESHOLD, "n": None}}, "a threshold has the numbers"),
        ("sigmoid", {"threshold": {**THRESHOLD, "threshold": math.nan}}, "has the numbers"),
        ("sigmoid", {"threshold": {**THRESHOLD, "threshold": "0.5"}}, "has the numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:surer answers are not right")
def test_damaged_states_are_refused(stage, changed, message, answers):
    state = AnswerCalibrator(stage=stage).fit(answers, np.arange(50) % 2).state()
    whole = AnswerCalibrator.from_state({**state, "threshold": THRESHOLD})
    assert whole.threshold_ == tuple(THRESHOLD.values())
    with pytest.raises(ValueError, match=message):
        AnswerCalibrator.from_state({**state, **changed})


# ------------------------------------------------------------------------------------------ top k


def full_distributions(rng, n, vocabulary):
    """Peaked, flat and heavy-tailed rows of log-probabilities, the largest first."""
    scale = rng.uniform(0.1, 6, size=(n, 1))
    logits = scale * np.where(rng.random((n, 1)) < 0.5, 1, -1) * rng.gumbel(size=(n, vocabulary))
    return -np.sort(-np.log(softmax(logits, -1)), axis=1)


@pytest.mark.parametrize("temperature", [0.4, 0.8, 1.0, 1.3, 2.0, 5.0])
@pytest.mark.parametrize("k", [1, 3, 20])
def test_bounds_hold_for_full_distributions(rng, temperature, k):
    logs = full_distributions(rng, 500, 300)
    truth = softmax(logs / temperature, -1)[:, 0]
    found = top_confidence(logs[:, :k], temperature, vocabulary=300, rounding=1e-14)
    assert (found.low <= truth + 1e-12).all()
    assert (truth <= found.high + 1e-12).all()
    np.testing.assert_allclose(found.middle, (found.low + found.high) / 2)
    shown = softmax(logs[:, :k] / temperature, -1)[:, 0]
    assert (shown >= found.high - 1e-12).all()  # renormalising is too sure
    # single precision is within the default
    rough = top_confidence(logs[:, :k].astype(np.float32), temperature, vocabulary=300)
    assert ((rough.low <= truth + 1e-5) & (truth <= rough.high + 1e-5)).all()
    if temperature == 1:
        np.testing.assert_allclose(found.low, np.exp(logs[:, 0]))
        np.testing.assert_allclose(found.high, np.exp(logs[:, 0]))


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.0, 1.5, 5.0])
@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("digits", [1, 2, 4])
def test_bounds_hold_for_rounded_log_probabilities(rng, temperature, k, digits):
    logs = full_distributions(rng, 500, 60)
    truth = softmax(logs / temperature, -1)[:, 0]
    sums = np.log(np.exp(logs / temperature).sum(1))
    options = {"vocabulary": 60, "rounding": 0.5 * 10**-digits}
    shown = logs[:, :k].round(digits)
    found = top_confidence(shown, temperature, **options)
    assert ((found.low <= truth + 1e-12) & (truth <= found.high + 1e-12)).all()
    assert ((found.low <= found.middle) & (found.middle <= found.high) & (found.high <= 1)).all()
    low, high = log_partition_bounds(top_logprobs(shown, rounding=0.05), 1 / temperature, **options)
    assert ((low <= sums + 1e-12) & (sums <= high + 1e-12)).all()
    if k == 60:  # then a difference of two log-probabilities is off by twice the rounding
        widest = np.tanh(10**-digits / temperature / 2)
        assert (found.high - found.low <= widest + 1e-12).all()


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.5, 5.0])
def test_hidden_tokens_may_exceed_the_least_shown_by_its_rounding(temperature):
    for equal in range(2, 60):  # so many tokens share everything, others are impossible
        shown = np.log([[1 / equal]]).round(1)
        logs = top_logprobs(shown, rounding=0.05)
        low, high = log_partition_bounds(logs, 1 / temperature, vocabulary=60, rounding=0.05)
        truth = (1 - 1 / temperature) * np.log(equal)
        assert low[0] - 1e-12 <= truth <= high[0] + 1e-12


def test_high_is_at_most_one_and_not_below_low(rng):
    for logs in ([[0.0]], [[-1e-9, -30.0]], np.log1p(-rng.exponential(1e-7, (2000, 1)))):
        for temperature in (0.05, 0.2, 1.0, 20.0):
            found = top_confidence(np.asarray(logs), temperature, vocabulary=1000)
            assert (found.low <= found.high).all()
            assert found.high.max() <= 1


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_bounds_are_reached(temperature):
    shown, vocabulary = np.array([0.4, 0.15, 0.1]), 40
    equal = np.append(shown, np.full(37, 0.35 / 37))
    packed = np.concatenate([shown, [0.1, 0.1, 0.1, 0.05], np.zeros(33)])
    ends = [p[0] ** (1 / temperature) / (p ** (1 / temperature)).sum() for p in (equal, packed)]
    found = top_confidence(np.log(shown)[None], temperature, vocabulary=vocabulary, rounding=0)
    np.testing.assert_allclose([found.low[0], found.high[0]], sorted(ends))


def test_all_tokens_shown_leave_nothing_open(rng):
    logs = full_distributions(rng, 20, 30)
    found = top_confidence(logs, 1.8, vocabulary=30)
    truth = softmax(logs / 1.8, -1)[:, 0]
    # what rounding leaves of the sum is spread over no tokens
    np.testing.assert_allclose(found.low, truth, atol=1e-6)
    np.testing.assert_allclose(found.high, truth, atol=1e-6)


def test_a_drawn_token_beside_the_likeliest_does_not_tighten_the_bounds_wrongly(rng):
    logs = full_distributions(rng, 300, 200)
    shown = np.column_stack([logs[:, :5], logs[:, 60]])  # five likeliest and one that was drawn
    truth = softmax(logs / 1.5, -1)[:, 0]
    found = top_confidence(shown, 1.5, vocabulary=200, k=5)
    assert ((found.low <= truth + 1e-12) & (truth <= found.high + 1e-12)).all()
    wrong = top_confidence(shown, 1.5, vocabulary=200)
    assert not (truth <= wrong.high + 1e-12).all()


def test_each_position_may_have_a_temperature(rng):
    logs = full_distributions(rng, 4, 100)[:, :5]
    several = top_confidence(logs, [0.5, 1.0, 2.0, 3.0], vocabulary=100)
    for i, temperature in enumerate((0.5, 1.0, 2.0, 3.0)):
        one = top_confidence(logs[i : i + 1], temperature, vocabulary=100)
        np.testing.assert_allclose([x[i] for x in several], [x[0] for x in one])


def test_forms_of_top_logprobs_agree():
    rows = [{" Paris": -0.3, "Lyon": -2.0, "\ufffd": -3.0}, {"a": -0.1}]
    entries = [
        {
            "token": "x",
            "logprob": -9.0,
            "top_logprobs": [{"token": t, "logprob": v} for t, v in row.items()],
        }
        for row in rows
    ]
    array = np.array([[-2.0, -0.3, -3.0], [-0.1, -np.inf, -np.inf]])
    for form in (rows, entries, array, torch.tensor(array)):
        np.testing.assert_array_equal(top_logprobs(form), -np.sort(-array, axis=1))
    low, high = log_partition_bounds(top_logprobs(rows), 1.0, vocabulary=9)
    np.testing.assert_allclose(low, 0, atol=2e-6)
    np.testing.assert_allclose(high, 0, atol=2e-6)


@pytest.mark.parametrize(
    ("top", "options", "message"),
    [
        ([[2.0, 1.0]], {}, "not logits"),
        ([[0.004]], {}, "rounded by more than 1e-06"),
        ([[0.007]], {"rounding": 0.005}, "sum to 1.007"),
        ([[-np.inf, -np.inf]], {}, "at least one per position"),
        ([[np.nan, -1.0]], {}, "natural"),
        ([-1.0, -2.0], {}, r"got shape \(2,\)"),
        ([{}], {}, "got shape"),
        ([[-1.0, -2.0]], {"temperature": 0.0}, "above 0"),
        ([[-1.0, -2.0]], {"temperature": [1.0, 2.0]}, "each of 1 positions"),
        ([[-1.0, -2.0]], {"vocabulary": 1}, "2 tokens are shown"),
        ([[-1.0, -2.0]], {"k": 0}, "k must be at least 1"),
    ],
)
def test_bad_top_logprobs_are_refused(top, options, message):
    with pytest.raises(ValueError, match=message):
        top_confidence(top, **{"temperature": 1.5, "vocabulary": 100, **options})


# ---------------------------------------------------------------------------------------- choices


class Words:
    """A tokenizer of a few words; everything else is letters of three each."""

    unk_token_id = 0
    known = ("?", " A", " B", " C", " D", "A", "B", " True", " False")

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        if text in self.known:
            return [self.known.index(text)]
        return [100 + i for i in range(-(-len(text) // 3))]

    def decode(self, tokens):
        return "|".join(map(str, tokens))


def test_tokens_of_choices():
    assert choice_tokens(Words()) == [1, 2, 3, 4]
    assert choice_tokens(Words(), ("A", "B"), prefix="") == [5, 6]
    with pytest.raises(ValueError, match="with the prefix ' ' choice 'Lima' is 2 tokens"):
        choice_tokens(Words(), ("A", "Lima"), prefix=" ")
    with pytest.raises(ValueError, match=r"prefix ' ' choice 'Lima' .*prefix '' choice 'Lima' is"):
        choice_tokens(Words(), ("A", "Lima"))
    with pytest.raises(ValueError, match="no token of its own for 'x', 'y'"):
        choice_tokens(Words(), ("x", "y"))
    with pytest.raises(ValueError, match="no token of its own"):
        choice_tokens(Words(), ("?", "A"), prefix="")


def sentencepiece(*, doubled):
    """A tokenizer of letters with or without a blank before them.

    With ``doubled`` it puts a blank before every text, as that of Llama 2, even before a blank.
    """
    made = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["<unk>", "\u2581", *"ABCD", *(f"\u2581{letter}" for letter in "ABCD")]
    merges = [("\u2581", letter) for letter in "ABCD"]
    vocabulary = {word: number for number, word in enumerate(words)}
    plain = made.Tokenizer(made.models.BPE(vocabulary, merges, unk_token="<unk>"))
    plain.pre_tokenizer = made.pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    if doubled:
        plain.normalizer = made.normalizers.Prepend("\u2581")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")


def test_letters_after_a_blank_that_the_tokenizer_puts_itself():
    llama = sentencepiece(doubled=True)
    assert choice_tokens(llama) == choice_tokens(llama, prefix="") == [6, 7, 8, 9]
    # what follows a prompt is the same token
    assert llama.encode("D: A", add_special_tokens=False)[-1] == 6
    with pytest.raises(ValueError, match=r"with the prefix ' ' choice 'A' is 2 tokens"):
        choice_tokens(llama, prefix=" ")
    with pytest.raises(ValueError, match=r"prefix ' ' choice 'AB' .*, and with the prefix '' "):
        choice_tokens(llama, ("AB", "C"))


def test_a_blank_goes_before_nothing():
    plain = sentencepiece(doubled=False)
    assert choice_tokens(plain) == choice_tokens(plain, prefix=" ") == [6, 7, 8, 9]
    assert choice_tokens(plain, prefix="") == [2, 3, 4, 5]


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_choices_are_a_softmax_over_their_tokens(kind, rng):
    logits = 3 * rng.normal(size=(6, 20))
    found = choice_logits(kind(logits), [7, 3, 11])
    for row, got in zip(logits, found, strict=True):
        total = sum(math.exp(row[t]) for t in (7, 3, 11))
        np.testing.assert_allclose(np.exp(got), [math.exp(row[t]) / total for t in (7, 3, 11)])


def test_whole_choices_by_likelihood():
    sums, lengths = np.array([[-3.0, -8.0, -2.0]]), np.array([3, 4, 1])
    plain = np.exp(choice_logits_from_likelihoods(sums))[0]
    np.testing.assert_allclose(plain, np.exp(sums[0]) / np.exp(sums[0]).sum())
    scaled = np.exp(choice_logits_from_likelihoods(sums, lengths))[0]
    wanted = np.array([math.exp(-1), math.exp(-2), math.exp(-2)])
    np.testing.assert_allclose(scaled, wanted / wanted.sum())


def test_choices_of_a_service_are_renormalised():
    shown = [
        {"A": -1.0, " A": -2.0, "B": -3.0, "The": -0.9},
        {"A": -4.0, "B": -0.1},
    ]
    found = np.exp(choice_logits_from_top(shown, ("A", "B")))
    first = math.exp(-1) + math.exp(-2)
    np.testing.assert_allclose(found[0, 0], first / (first + math.exp(-3)))
    np.testing.assert_allclose(found[1, 0], math.exp(-4) / (math.exp(-4) + math.exp(-0.1)))
    with pytest.raises(ValueError, match="choice 'C' is not among the 4 tokens shown for question"):
        choice_logits_from_top(shown, ("A", "C"))


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_p_true_is_a_share_of_two_sets(kind, rng):
    logits = 3 * rng.normal(size=(5, 12))
    yes, no = np.exp(logits[:, [1, 4]]).sum(1), np.exp(logits[:, [2, 3, 9]]).sum(1)
    np.testing.assert_allclose(p_true(kind(logits), [1, 4], [2, 3, 9]), yes / (yes + no))


def test_bad_choices_are_refused():
    logits = np.zeros((2, 5))
    with pytest.raises(ValueError, match="another model's tokenizer"):
        choice_logits(logits, [1, 5])
    with pytest.raises(ValueError, match="two choices or more"):
        choice_logits(logits, [1])
    with pytest.raises(ValueError, match="masked"):
        choice_logits(np.full((1, 3), -np.inf), [0, 1])
    with pytest.raises(ValueError, match="another model's tokenizer"):
        p_true(logits, [1], [-1])
    with pytest.raises(ValueError, match="share none"):
        p_true(logits, [1, 2], [2])
    with pytest.raises(ValueError, match="share none"):
        p_true(logits, [1], np.zeros(0, dtype=int))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 0"):
        choice_logits_from_likelihoods([[1.0, -2.0]])
    with pytest.raises(ValueError, match="two choices or more"):
        choice_logits_from_likelihoods([[-1.0]])
    with pytest.raises(ValueError, match="without tokens"):
        choice_logits_from_likelihoods([[-1.0, -2.0]], [1, 0])


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_choice_sets_hold_the_right_choice_as_often_as_asked(score, rng):
    inside = 0.0
    for _ in range(60):
        scores = 2 * rng.normal(size=(700, 4))
        labels = (scores + rng.gumbel(size=scores.shape)).argmax(-1)
        fitted = choice_sets(1.7 * scores[:200], labels[:200], coverage=0.85, score=score)
        sets = fitted.sets(softmax(1.7 * scores[200:], -1))
        inside += sets[np.arange(500), labels[200:]].mean() / 60
    # between 0.85 and 0.85 + 1/201, and the noise of 30,000 questions and 60 limits
    assert 0.84 < inside < 0.865


@pytest.mark.parametrize("gap", [5, 40, 80])
def test_choice_sets_of_whole_texts_are_those_of_their_log_probabilities(gap, rng):
    """Log-likelihoods of texts are tens of nats apart: 1e-40 and 1e-30 are not the same."""
    likelihoods, answers = -300 + gap * rng.normal(size=(1200, 4)), rng.integers(4, size=1200)
    likelihoods[np.arange(1200), answers] += 0.9 * gap
    logits = choice_logits_from_likelihoods(np.minimum(likelihoods, -0.1))
    sets = choice_sets(logits[:600], answers[:600]).sets(softmax(logits[600:], -1))
    limit = np.sort(-logits[np.arange(600), answers[:600]])[math.ceil(601 * 0.9) - 1]
    assert np.array_equal(sets, -logits[600:] <= limit + 1e-5)
    assert sets.sum(-1).mean() < 3.2


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([0.1, 0.2, 0.3], r"choice_scores must be \(n, choices\) .*, got \(3,\)"),
        ([[0.1], [0.2], [0.3]], r"two choices or more, got \(3, 1\)"),
        ([[0.0, 1.0], [np.nan, 1.0], [0.0, 1.0]], "logits must be finite.*row 1 has NaN"),
        ([[0.0, 1.0], [0.0, 1.0], [-np.inf, -np.inf]], "row 2 has -inf in every class"),
        ([[0.0, np.inf], [0.0, 1.0], [0.0, 1.0]], r"row 0 has \+inf"),
    ],
)
def test_choice_sets_refuse_what_are_no_logits(scores, message):
    with pytest.raises(ValueError, match=message):
        choice_sets(scores, [0, 1, 0], coverage=0.5)


# -------------------------------------------------------------------------------------- questions


def squad_normalise(text):
    """The steps of the official script of SQuAD 1.1, in its order."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@pytest.mark.parametrize(
    ("answer", "references", "right"),
    [
        ("The Beatles", ["beatles"], True),
        (" An apple a day.\nQuestion: next?", ["apple day"], True),
        ("\n\n42 ", ["forty-two", "42"], True),
        ("U.S.A.", ["USA"], True),
        ("theatre", ["atre"], False),
        ("Lima, Peru", ["Lima"], False),
        ("", [""], False),
        ("the", ["a"], False),
        ("42", [], False),
    ],
)
def test_exact_match(answer, references, right):
    assert exact_match(answer, references) is right
    slow = squad_normalise(answer.strip().split("\n")[0])
    assert normalised(first_line(answer)) == slow
    assert right == (slow != "" and slow in map(squad_normalise, references))


def test_one_reference_must_be_a_list():
    with pytest.raises(TypeError, match=r"pass \[reference\]"):
        exact_match("a", "abc")


def test_mmlu_files(tmp_path):
    head = "question,choice0,choice1,choice2,choice3,answer\n"
    (tmp_path / "high_school_maths_test.csv").write_text(f'{head}"1, 2 or 3?",a,b,c,d,2\n')
    (tmp_path / "high_school_maths_dev.csv").write_text(f"{head}dev?,a,b,c,d,0\n")
    (found,) = read_mmlu(tmp_path)
    assert found == Question("1, 2 or 3?", ("c",), tuple("abcd"), 2, "high_school_maths")
    assert read_mmlu(tmp_path, "dev")[0].text == "dev?"
    with pytest.raises(FileNotFoundError, match=r"SUBJECT_val\.csv"):
        read_mmlu(tmp_path, "val")
    for text, message in (
        (f"{head}q,a,b,c,d,B\n", "row 1 has the answer 'B'"),
        (f"{head}q,a,b\n", "row 1 has fewer columns"),
        ("q,a,b,c,d,A\n", "has no column answer, choice0"),
    ):
        (tmp_path / "bad_test.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_mmlu(tmp_path)


def test_text_and_truthfulqa_files(tmp_path):
    path = tmp_path / "qa.txt"
    path.write_text("who?\nme; you\n\nwhere?\nhere\n\nwho?\nhe\n", "utf-8")  # no last empty line
    assert read_questions(path) == [
        Question("who?", ("me; you", "he")),
        Question("where?", ("here",)),
    ]
    assert read_questions(path, separator="; ")[0].references == ("me", "you", "he")
    path.write_text("who?\nme\nyou\n\n", "utf-8")
    with pytest.raises(ValueError, match="line 1 begins a block of 3 lines"):
        read_questions(path)
    path = tmp_path / "TruthfulQA.csv"
    path.write_text(
        "\ufeffType,Category,Question,Best Answer,Correct Answers,Incorrect Answers\n"
        'x,Law,Why?,Because,"So; Because; ","Not, so"\n',
        "utf-8",
    )
    assert read_truthfulqa(path) == [Question("Why?", ("Because", "So"), subject="Law")]


def test_prompts_are_of_the_usual_form():
    shot = Question("Red?", ("no",), ("yes", "no"), 1, "colour_theory")
    asked = Question("Blue?", ("yes",), (" yes", "no"), 0, "colour_theory")
    assert choice_prompt(asked, [shot]) == (
        "The following are multiple choice questions (with answers) about colour theory.\n\n"
        "Question: Red?\nA. yes\nB. no\nAnswer: B\n\n"
        "Question: Blue?\nA. yes\nB. no\nAnswer:"
    )
    assert short_prompt(asked, [shot]) == ("Question: Red?\nAnswer: no\n\nQuestion: Blue?\nAnswer:")
    with pytest.raises(ValueError, match="use short_prompt"):
        choice_prompt(Question("Open?", ("yes",)))


def test_subsets_are_drawn_by_seed():
    questions = [Question(str(i), ()) for i in range(40)]
    found = subset(questions, 10, seed=3)
    assert found == subset(questions, 10, seed=3) != subset(questions, 10, seed=4)
    assert [int(q.text) for q in found] == sorted({int(q.text) for q in found})
    assert subset(questions, 99) == questions
    counts = Counter(q.text for seed in range(400) for q in subset(questions, 10, seed=seed))
    assert len(counts) == 40
    assert max(counts.values()) < 100 + 5 * math.sqrt(75)
    with pytest.raises(ValueError, match="at least 1"):
        subset(questions, 0)


def test_graded_answers(tmp_path):
    path = tmp_path / "set.model.jsonl"
    row = {"question": "q", "answer": "a", "token_probs": [0.5, 0.0], "correct": True}
    path.write_text(f"{json.dumps(row)}\n{json.dumps({**row, 'correct': False})}\n")
    found = read_answers(path)
    assert found.correct.tolist() == [True, False]
    assert found.token_probs[0].tolist() == [0.5, 2.5e-7]
    raw = {**row, "question": "a\u2028b\x85c", "answer": "d\u2029e"}
    lines = [json.dumps(raw, ensure_ascii=False), "", " ", json.dumps(row)]
    path.write_text("\n".join(lines), "utf-8")
    found = read_answers(path)
    assert found.questions == ["a\u2028b\x85c", "q"]
    assert found.answers == ["d\u2029e", "a"]
    path.write_text("\n" + json.dumps(row) + "\n\n{", "utf-8")
    with pytest.raises(ValueError, match="line 4 is not JSON"):
        read_answers(path)
    for text, message in (
        ("{", "line 1 is not JSON"),
        ("[]", "must be an object"),
        (json.dumps({**row, "token_probs": []}), "an answer without tokens"),
        (json.dumps({"question": "q"}), "no answer, correct, token_probs"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_answers(path)


def test_tokens_that_a_service_says_are_not_there():
    """Some write -9999 for a probability of nothing."""
    found = top_confidence([{"a": -0.1, "b": -9999.0}], 1.5, vocabulary=50_000)
    wanted = top_confidence([{"a": -0.1}], 1.5, vocabulary=50_000)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted)


def test_a_file_without_questions(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.txt has no question"):
        read_questions(tmp_path / "empty.txt")


def test_a_map_that_tells_no_answers_apart_says_so():
    rng = np.random.default_rng(0)
    sure = rng.uniform(0.1, 0.9, 400)
    right = rng.random(400) < 0.6 - 0.4 * sure  # the surer, the more often wrong
    for stage in ("sigmoid", "beta"):
        with pytest.warns(UserWarning, match=r"not right more often .* same chance, 3\d %"):
            AnswerCalibrator(None, stage=stage).fit(sure, right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AnswerCalibrator(None).fit(sure, rng.random(400) < sure)
        AnswerCalibrator(None).fit(np.full(400, 0.5), right)  # nothing to tell apart


@pytest.mark.parametrize(
    ("how", "answers", "message"),
    [
        (None, [[0.5, 0.6], [0.7]], "are confidences .* what is none"),
        (None, ["yes", "no"], "are confidences .* what is none"),
        ("geometric", ["yes", "no"], r"pass \[answer\.probs for answer in answers\]"),
        (
            "geometric",
            [("text", ["a"], [0.5], 0.5)],
            r"pass \[answer\.probs for answer in answers\]",
        ),
    ],
)
def test_answers_that_are_no_numbers(how, answers, message):
    with pytest.raises(ValueError, match=message):
        AnswerCalibrator(how).fit(answers, np.ones(len(answers)))
