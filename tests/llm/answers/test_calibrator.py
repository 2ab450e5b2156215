"""Answer calibrators: other implementations, guarantees, files."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from scipy.special import expit, logit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

import calibrant as cal
from calibrant import threshold
from calibrant.llm.answers.calibrator import (
    STAGES,
    AnswerCalibrator,
    cross_validated_answers,
    fit_answers,
)
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.answers.rows import AnswerRows, Source
from calibrant.workflows.evaluate_answers import log_odds
from tests.support.thresholds import error_threshold


@pytest.fixture
def answers(rng):
    return answer_confidence([rng.uniform(0.01, 1, size=rng.integers(1, 12)) for _ in range(50)])


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="geometric, product"):
        answer_confidence([[0.5]], "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sigmoid, beta, isotonic"):
        AnswerCalibrator(stage="spline")  # type: ignore[arg-type]


def succession(prob, n):
    """Laplace's rule of succession: two more answers, one of them right, for n graded ones."""
    return (n * prob + 1) / (n + 2)


def drawn_answers(rng, n, truth):
    """Confidences over all of (0, 1), and outcomes drawn from a curve of their log-odds."""
    sure = rng.beta(1.2, 1.2, n)
    return sure, rng.random(n) < truth(logit(sure))


def test_sigmoid_is_a_logistic_regression_on_both_sides_of_a_half(rng):
    sure, right = drawn_answers(rng, 3000, lambda s: expit(0.6 * s - 1.2))
    fitted = AnswerCalibrator(stage="sigmoid").fit(sure, right)
    other = LogisticRegression(C=np.inf, tol=1e-10).fit(logit(sure)[:, None], right)
    wanted = other.predict_proba(logit(sure)[:, None])[:, 1]
    np.testing.assert_allclose(fitted.predict(sure), succession(wanted, 3000), atol=1e-4)
    np.testing.assert_allclose(fitted.state()["learned"]["line"], [0.6, -1.2], atol=0.15)


def test_beta_is_a_logistic_regression_on_two_logarithms(rng):
    sure, right = drawn_answers(rng, 5000, lambda s: expit(s - 0.5) ** 1.5)
    fitted = AnswerCalibrator(stage="beta").fit(sure, right)
    inputs = np.stack([np.log(sure), -np.log1p(-sure)], 1)
    other = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(inputs, right)
    assert (other.coef_ > 0).all()  # the constraints do not bind
    wanted = succession(other.predict_proba(inputs)[:, 1], 5000)
    np.testing.assert_allclose(fitted.predict(sure), wanted, atol=1e-3)


def test_isotonic_is_that_of_sklearn(rng):
    sure, right = drawn_answers(rng, 800, lambda s: expit(s - 0.5))
    sure = sure.round(2).clip(0.01, 0.99)  # ties
    fitted = AnswerCalibrator(stage="isotonic").fit(sure, right)
    other = IsotonicRegression(out_of_bounds="clip").fit(sure, right)
    wanted = succession(other.predict(sure), 800)
    np.testing.assert_allclose(fitted.predict(sure), wanted, atol=1e-6)
    between = rng.random(200)
    wanted = succession(other.predict(between), 800)
    np.testing.assert_allclose(fitted.predict(between), wanted, atol=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_calibrated_confidences_rise_and_are_right_on_average(stage, rng):
    tokens = [rng.beta(3, 1, size=rng.integers(1, 9)) for _ in range(4000)]
    truth = answer_confidence(tokens) ** 2
    right = rng.random(4000) < truth
    sure = answer_confidence(tokens)
    fitted = AnswerCalibrator(stage=stage).fit(sure[:2000], right[:2000])
    found = fitted.predict(sure[2000:])
    order = np.argsort(truth[2000:])
    assert (np.diff(found[order]) >= -1e-9).all()
    assert np.abs(found - truth[2000:]).mean() < 0.03
    # nothing is certain, so that the likelihood of new answers is finite
    assert 0 < found.min() < found.max() < 1


@pytest.mark.parametrize("stage", STAGES)
def test_no_answer_is_surer_than_the_graded_ones_can_show(stage, rng):
    sure, right = drawn_answers(rng, 60, lambda s: s > 0)  # nothing contradicts any certainty
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = AnswerCalibrator(stage=stage).fit(sure, right)
    ends = fitted.predict([0.0, 1e-9, 1 - 1e-9, 1.0])
    assert ends.min() >= 1 / 62
    assert ends.max() <= 61 / 62
    assert ends[-1] > 0.9
    # a thousand times as many show more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        many = AnswerCalibrator(stage=stage).fit(np.tile(sure, 1000), np.tile(right, 1000))
    assert 61 / 62 < many.predict([1.0])[0] <= 60_001 / 60_002


@pytest.mark.parametrize("stage", ["sigmoid", "beta"])
def test_the_limit_keeps_the_order_and_the_ties(stage, rng):
    sure, right = drawn_answers(rng, 100, lambda s: expit(2 * s))
    fitted = AnswerCalibrator(stage=stage).fit(sure, right)
    new = np.unique(rng.beta(0.5, 0.5, 2000).round(4))
    free = AnswerCalibrator.from_state({**fitted.state(), "least": 0.0})
    assert (np.diff(free.predict(new)) > 0).sum() == (np.diff(fitted.predict(new)) > 0).sum()
    assert (np.diff(fitted.predict(new)) >= 0).all()
    np.testing.assert_allclose(fitted.predict(new), succession(free.predict(new), 100))


def test_tiny_products_keep_their_order():
    sure = 10.0 ** -np.arange(20, 100)
    right = np.arange(80) % 7 < 3 - np.arange(80) // 30
    found = AnswerCalibrator().fit(sure, right, source=Source("product")).predict(sure)
    assert (np.diff(found) < 0).all()


@pytest.mark.filterwarnings("ignore:confident answers are not right")
def test_certain_tokens_have_finite_odds():
    odds = log_odds(np.log(np.array([1.0, 1 - 1e-12, 0.5, 1e-300])))
    assert np.isfinite(odds).all()
    assert odds[0] == pytest.approx(odds[1], abs=1e-6)
    assert odds[2] == 0
    right = np.array([True, True, False, False, True])
    of_tokens = Source("geometric")
    fitted = AnswerCalibrator().fit([1.0, 0.0, 0.5, 0.4, 1.0], right, source=of_tokens)
    assert np.isfinite(fitted.predict([1.0, 0.0])).all()


SAID = np.array([0, 0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 1])


HOW_OFTEN = np.array([0.02, 0.05, 0.1, 0.1, 0.15, 0.25, 0.2, 0.15]) / 1.02


WORTH = np.array([0.15, 0.2, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85])


def said_answers(rng, n):
    """Confidences as models say them, 0 and 1 among them, and outcomes of a known chance."""
    at = rng.choice(8, n, p=HOW_OFTEN)
    return SAID[at], rng.random(n) < WORTH[at]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("zeros", [True, False])
def test_zeros_and_ones_do_not_distort_the_map(stage, zeros, rng):
    off = []
    for _ in range(20):
        sure, right = said_answers(rng, 1000)
        seen = (sure > 0) | zeros
        found = AnswerCalibrator(stage=stage).fit(sure[seen], right[seen]).predict(SAID)
        assert (np.diff(found) >= 0).all()
        off.append(HOW_OFTEN @ np.abs(found - WORTH))
    assert np.mean(off) < (0.04 if stage == "isotonic" else 0.03)  # steps are noisier


def test_zero_and_one_are_replaced_by_halfway_values(rng):
    sure, right = said_answers(rng, 1000)
    fitted = AnswerCalibrator(stage="sigmoid").fit(sure, right)
    assert fitted.limits_ == pytest.approx((0.1, 0.975))
    moved = logit(np.clip(sure, 0.1, 0.975))
    other = LogisticRegression(C=np.inf, tol=1e-10).fit(moved[:, None], right)
    wanted = other.predict_proba(moved[:, None])[:, 1]
    np.testing.assert_allclose(fitted.predict(sure), succession(wanted, 1000), atol=1e-4)
    # values between, which fit has not seen, never fall below their lower neighbours
    assert (np.diff(fitted.predict(np.linspace(0, 1, 2001))) >= 0).all()
    # 0 and 1 that fit has not seen are no more certain than any other
    inner = (sure > 0) & (sure < 1)
    assert AnswerCalibrator().fit(sure[inner], right[inner]).limits_ == fitted.limits_
    # others know no limits
    assert AnswerCalibrator(stage="isotonic").fit(sure, right).limits_ is None
    of_tokens = Source("first")
    assert AnswerCalibrator().fit(sure, right, source=of_tokens).limits_ is None


@pytest.mark.parametrize("stage", STAGES)
def test_zeros_and_ones_alone_are_worth_their_shares(stage, rng):
    sure = (np.arange(300) % 3 > 0).astype(float)
    right = np.where(sure == 1, rng.random(300) < 0.8, rng.random(300) < 0.3)
    fitted = AnswerCalibrator(stage=stage).fit(sure, right)
    low, middle, high = fitted.predict([0, 0.5, 1])
    shares = [succession(right[sure == said].mean(), 300) for said in (0, 1)]
    assert [low, high] == pytest.approx(shares, abs=1e-4)
    assert low < middle < high


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [0, 0.7, 1])
def test_one_confidence_alone_is_worth_its_share(stage, value):
    right = np.arange(200) < 120
    fitted = AnswerCalibrator(stage=stage).fit(np.full(200, value), right)
    found = fitted.predict([0, value, 1])
    assert found[1] == pytest.approx(succession(0.6, 200), abs=1e-4)
    assert 0.1 < found[0] <= found[1] <= found[2] < 0.95


def test_a_failed_fit_changes_nothing(rng):
    sure, right = said_answers(rng, 300)
    fitted = AnswerCalibrator().fit(sure, right)
    before = fitted.state()
    with pytest.raises(ValueError, match="0 or 1"):
        fitted.fit(np.full(300, 0.5), np.full(300, 2))
    assert fitted.state() == before


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("number", [1, 5, 50])
def test_all_right_or_all_wrong_warns(stage, right, number, answers):
    some = answers[:number]
    with pytest.warns(UserWarning, match="nearly all, are right or wrong"):
        fitted = AnswerCalibrator(stage=stage).fit(some, np.full(number, right))
    found = fitted.predict(some)
    most = succession(1.0, number)
    np.testing.assert_allclose(found if right else 1 - found, most, atol=0.02)


@pytest.mark.filterwarnings("ignore:confident answers are not right")
def test_bad_fits_are_refused(answers):
    fitted = AnswerCalibrator().fit(answers, np.arange(50) % 2)
    for wrong, message in (
        (np.ones(49), r"^correct must have one value for each of 50 answers, got \(49,\)$"),
        (np.ones((50, 1)), r"^correct must have one value for each of 50 answers, got \(50, 1\)$"),
        (np.full(50, 0.5), r"^correct must be 0 or 1 .*, got 0\.5$"),
    ):
        with pytest.raises(ValueError, match=message):
            AnswerCalibrator().fit(answers, wrong)
        with pytest.raises(ValueError, match=message):
            fitted.control(answers, wrong, max_error=0.5)
    with pytest.raises(ValueError, match="nothing to measure"):
        AnswerCalibrator().fit([], [])
    with pytest.raises(ValueError, match="confidence must be"):
        AnswerCalibrator().fit(answers[None] + np.zeros((2, 1)), [1, 0])
    with pytest.raises(ValueError, match="confidence must be"):
        AnswerCalibrator().fit([0.5, 1.5], [1, 0])
    with pytest.raises(RuntimeError, match="call fit"):
        AnswerCalibrator().predict(answers)
    with pytest.raises(RuntimeError, match="call fit"):
        AnswerCalibrator().state()
    with pytest.raises(RuntimeError, match="call control"):
        AnswerCalibrator().fit(answers, np.arange(50) % 2).abstains([0.5])


def test_control_is_the_threshold_of_the_calibrated_confidences(rng):
    sure, right = drawn_answers(rng, 2000, lambda s: expit(s - 0.5))
    fitted = AnswerCalibrator().fit(sure[:500], right[:500])
    found = fitted.control(sure[500:], right[500:], max_error=0.25, certainty=0.9)
    after = fitted.predict(sure[500:])
    assert found == threshold(confidence=after, outcome=right[500:], max_error=0.25, certainty=0.9)
    np.testing.assert_array_equal(fitted.abstains(after), after < found.threshold)
    assert fitted.abstains([found.threshold]).tolist() == [False]
    assert fitted.abstains(torch.tensor([0.0])).tolist() == [True]
    for wrong in (math.nan, -0.1, 1.1):  # NaN is above no threshold, nor below
        with pytest.raises(ValueError, match=r"in \[0, 1\] and not NaN"):
            fitted.abstains([0.5, wrong])
    # another fit is another scale
    with pytest.raises(RuntimeError, match="call control"):
        fitted.fit(sure, right).abstains(after)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("max_error", [None, 0.45, 0.001])
def test_saved_calibrators_come_back(stage, max_error, rng, tmp_path):
    tokens = [rng.beta(3, 1, size=rng.integers(1, 9)) for _ in range(600)]
    right = rng.random(600) < answer_confidence(tokens)
    sure = answer_confidence(tokens, "minimum")
    fitted = AnswerCalibrator(stage=stage).fit(sure[:300], right[:300], source=Source("minimum"))
    if max_error == 0.001:
        with pytest.warns(UserWarning, match="no threshold"):
            fitted.control(sure[300:], right[300:], max_error=max_error)
    elif max_error:
        fitted.control(sure[300:], right[300:], max_error=max_error)
    cal.save(fitted, tmp_path / "answers.json")
    again = cal.load(tmp_path / "answers.json")
    np.testing.assert_array_equal(again.predict(sure), fitted.predict(sure))
    assert str(again.threshold_) == str(fitted.threshold_)  # NaN equals itself here
    assert [p.name for p in tmp_path.iterdir()] == ["answers.json"]


@pytest.mark.parametrize("confidence", ["p_true", "first"])
def test_sources_are_kept_and_others_refused(confidence, rng, tmp_path):
    passed, right = drawn_answers(rng, 300, expit)
    source = Source(confidence, "chat", "0123", "none")
    cal.save(AnswerCalibrator().fit(passed, right, source=source), tmp_path / "map")
    fitted = cal.load(tmp_path / "map")
    assert fitted.source_ == source
    fitted.predict(passed[:2], source=source)
    fitted.predict(passed[:2], source=Source(model="0123"))
    for other in (source._replace(confidence="judge"), Source(head="4567")):
        with pytest.raises(ValueError, match=r"not (judge|4567): fit one on answers"):
            fitted.predict(passed[:2], source=other)
    assert fitted.fit(passed, right).source_ == Source()  # a fit forgets the last


@pytest.mark.filterwarnings("ignore:confident answers are not right")
def test_other_states_are_refused(answers):
    state = AnswerCalibrator().fit(answers, np.arange(50) % 2).state()
    json.dumps(state, allow_nan=False)
    for broken in ({**state, "more": 1}, {}, [1, 2]):
        with pytest.raises(ValueError, match="a saved AnswerCalibrator has"):
            AnswerCalibrator.from_state(broken)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a saved AnswerCalibrator has .*line.*, got {'slope'"):
        AnswerCalibrator.from_state({**state, "learned": {"slope": [1.0]}})


THRESHOLD = error_threshold(0.5, 0.5, 0.1, 0.2, 9, 0.25, 0.95)


@pytest.mark.parametrize(
    ("stage", "changed", "message"),
    [
        ("sigmoid", {"learned": None}, "a saved AnswerCalibrator has"),
        ("sigmoid", {"learned": {"line": [1.0]}}, "line must be 2 finite numbers"),
        ("sigmoid", {"learned": {"line": ["a", 1]}}, "could not convert"),
        ("beta", {"learned": {"line": [1.0, 0.0]}}, "line must be 3 finite numbers"),
        ("isotonic", {"learned": {"odds": [], "prob": []}}, "odds must be 1 finite"),
        ("isotonic", {"learned": {"odds": [0, 1], "prob": [0.5]}}, "prob must be 2"),
        ("sigmoid", {"limits": [0.9, 0.1]}, "limits must rise between 0 and 1"),
        ("sigmoid", {"limits": [0.0, 0.5]}, "limits must rise between 0 and 1"),
        ("sigmoid", {"least": 0.5}, r"least must be in \[0, 0.5\), got 0.5"),
        ("sigmoid", {"least": None}, "least must be 1 finite numbers"),
        ("sigmoid", {"source": {"confidence": None}}, "source must have texts"),
        ("sigmoid", {"threshold": [0.5]}, "a threshold has the numbers threshold, coverage"),
    ],
)
@pytest.mark.filterwarnings("ignore:confident answers are not right")
def test_damaged_states_are_refused(stage, changed, message, answers):
    state = AnswerCalibrator(stage=stage).fit(answers, np.arange(50) % 2).state()
    whole = AnswerCalibrator.from_state({**state, "threshold": THRESHOLD.state()})
    assert whole.threshold_ == THRESHOLD
    with pytest.raises(ValueError, match=message):
        AnswerCalibrator.from_state({**state, **changed})


def test_constant_predictions_warn():
    rng = np.random.default_rng(0)
    sure = rng.uniform(0.1, 0.9, 400)
    right = rng.random(400) < 0.6 - 0.4 * sure  # the surer, the more often wrong
    for stage in ("sigmoid", "beta"):
        with pytest.warns(UserWarning, match=r"not right more often .* same chance, 3\d %"):
            AnswerCalibrator(stage=stage).fit(sure, right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AnswerCalibrator().fit(sure, rng.random(400) < sure)
        AnswerCalibrator().fit(np.full(400, 0.5), right)  # nothing to tell apart


@pytest.mark.parametrize("answers", [[[0.5, 0.6], [0.7]], ["yes", "no"]])
def test_confidences_must_be_numbers(answers):
    with pytest.raises(ValueError, match=r"must be .* no numbers .*pass answer_confidence"):
        AnswerCalibrator().fit(answers, np.ones(len(answers)))


@pytest.mark.parametrize("answers", [["yes", "no"], [("text", ["a"], [0.5], 0.5)]])
def test_probabilities_of_tokens_must_be_numbers(answers):
    with pytest.raises(ValueError, match=r"pass \[answer\.probs for answer in answers\]"):
        answer_confidence(answers)


def simulated(rng, n, source):
    """Answers of an over-confident model."""
    sure = rng.uniform(0.05, 0.95, n)
    pairs = zip(sure.tolist(), rng.random(n) < sure**2, strict=True)
    return AnswerRows.of([{"confidence": c, **source.row(), "correct": y} for c, y in pairs])


@pytest.mark.parametrize("source", [Source("geometric", "chat"), Source("judge"), Source()])
def test_maps_of_files_are_those_of_python(rng, source):
    graded = simulated(rng, 400, source)
    fitted = fit_answers(graded, stage="sigmoid")
    confidence = graded.confidences()[0]
    own = AnswerCalibrator(stage="sigmoid").fit(confidence, graded.grades(), source=source)
    np.testing.assert_array_equal(fitted.predict(confidence), own.predict(confidence))
    assert fitted.source_ == source
    rows = AnswerRows(["line 1"], [{"confidence": 0.5, "mine": 1, **({"source": source[0]})}])
    (row,) = fitted.apply(rows)
    chance = own.predict([0.5])[0]
    assert row == {**rows.rows[0], "calibrated": pytest.approx(chance)}


def test_maps_are_applied_to_their_source_only(rng):
    fitted = fit_answers(simulated(rng, 400, Source("geometric", "chat", "0123", "none")))

    def applied(**row):
        (result,) = fitted.apply(AnswerRows(["line 1"], [row]))
        return result["calibrated"]

    stated = applied(confidence=0.3, source="geometric", model="0123")
    assert applied(token_probs=[0.9, 0.1]) == pytest.approx(stated)  # by the aggregate of the map
    for key, value in {"source": "p_true", "prompt": "short, 5 shots", "model": "4"}.items():
        with pytest.raises(ValueError, match=f"not {value}: fit one on answers of the same"):
            applied(**{"confidence": 0.3, "source": "geometric", key: value})
    with pytest.warns(UserWarning, match="do not say where their confidence comes from"):
        assert applied(confidence=0.3) == stated


def test_a_threshold_is_applied(rng):
    graded = simulated(rng, 400, Source("judge"))
    fitted = fit_answers(graded)
    fitted.control(graded.confidences()[0], graded.grades(), max_error=0.4)
    rows = AnswerRows(["a", "b"], [{"confidence": c, "source": "judge"} for c in (0.1, 0.9)])
    assert [row["abstains"] for row in fitted.apply(rows)] == [True, False]


def test_figures_are_of_maps_of_other_answers(rng, monkeypatch):
    graded = simulated(rng, 300, Source("judge"))
    seen = []
    real = AnswerCalibrator.fit

    def spy(self, answers, correct, **options):
        seen.append(set(np.asarray(answers).tolist()))
        return real(self, answers, correct, **options)

    def checked(calibrator, confidence):
        assert not seen[-1] & set(confidence.tolist())
        return predict(calibrator, confidence)

    predict = AnswerCalibrator.predict
    monkeypatch.setattr(AnswerCalibrator, "fit", spy)
    monkeypatch.setattr(AnswerCalibrator, "predict", checked)
    found = cross_validated_answers(graded)
    assert [len(one) for one in seen] == [240] * 5
    assert found["after"]["nll"].value < found["before"]["nll"].value
    few = simulated(rng, 9, Source("judge"))
    assert list(cross_validated_answers(few)) == ["before"]


def test_answers_to_one_question_stay_in_one_fold(rng, monkeypatch):
    graded = simulated(rng, 300, Source("judge"))
    confidence, seen = graded.confidences()[0], []
    for n, row in enumerate(graded.rows):
        row["question"] = f"question {n // 3}"

    def spy(self, answers, correct, **options):
        seen.append({int(np.flatnonzero(confidence == c)[0]) // 3 for c in answers})
        return real(self, answers, correct, **options)

    real = AnswerCalibrator.fit
    monkeypatch.setattr(AnswerCalibrator, "fit", spy)
    found = cross_validated_answers(graded)
    assert [len(questions) for questions in seen] == [80] * 5
    assert found["after"].describe().startswith("300 answers in 100 groups")
    few = AnswerRows.of([{**r, "question": f"{n // 34}"} for n, r in enumerate(graded.rows)])
    assert list(cross_validated_answers(few)) == ["before"]
