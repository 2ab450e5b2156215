"""Maps of several signals: what they keep, refuse and store."""

import json

import numpy as np
import pytest
from scipy.special import expit, logit
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import calibrant as cal
from calibrant.llm import AnswerCalibrator, SignalCalibrator
from calibrant.llm.answers.calibrator import _folds
from calibrant.llm.answers.rows import AnswerRows, Source
from calibrant.llm.answers.signal_calibrator import Regression, fit_signals
from calibrant.show import box
from calibrant.workflows.evaluate_answers import evaluate_answers

N = 900


def simulated(seed=0, n=N):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, n))
    right = rng.random(n) < expit(1.2 * x[0] + 1.2 * x[1])
    signals = dict(zip(("stated", "agreement", "judge:gpt-x"), expit(x), strict=True))
    return signals, right


@pytest.fixture(scope="module")
def fitted():
    return SignalCalibrator(stage="sigmoid").fit(*simulated(), source=Source("", "chat", "0a1b"))


def test_the_chance_is_that_of_the_signals_together(fitted):
    signals, right = simulated(1, 4000)
    found = fitted.predict(signals)
    x = np.log([signals[name] / (1 - signals[name]) for name in ("stated", "agreement")])
    assert np.abs(found - expit(1.2 * x.sum(0))).mean() < 0.03
    assert found.mean() == pytest.approx(right.mean(), abs=0.03)


def test_the_regression_is_that_of_scikit_learn():
    signals, right = simulated(n=300)
    values = np.stack([*signals.values(), signals["stated"] ** 2], axis=1)
    found = Regression.fit(values, right)
    scaled = StandardScaler().fit_transform(logit(values))  # no value is 0 or 1
    reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(scaled, right)
    np.testing.assert_allclose(found.weights, reference.coef_[0], atol=1e-5)
    np.testing.assert_allclose(found.offset, reference.intercept_, atol=1e-5)
    np.testing.assert_allclose(found.score(values), reference.predict_proba(scaled)[:, 1], 1e-5)


def test_missing_signals_have_a_weight_of_their_own():
    signals, right = simulated(n=2000)
    lacking = right & (np.arange(2000) % 2 == 0)  # that it is missing tells that it is right
    values = np.where(lacking, np.nan, signals["stated"])
    fitted = SignalCalibrator().fit({"stated": values, "noise": signals["judge:gpt-x"]}, right)
    assert fitted.regression_ is not None
    assert fitted.regression_.absent[0] > 1
    assert fitted.regression_.absent[1] == 0
    chances = fitted.predict({"stated": [np.nan, 0.5], "noise": [0.5, 0.5]})
    assert chances[0] > 0.9 > chances[1]


def test_the_map_is_fitted_to_scores_of_other_folds():
    rng = np.random.default_rng(0)
    noise = dict(zip("abcdefghijkl", rng.random((12, 120)), strict=True))
    right = rng.random(120) < 0.5
    fitted = SignalCalibrator(stage="sigmoid").fit(noise, right)
    assert fitted.regression_ is not None
    scores = fitted.regression_.score(np.stack([*noise.values()], axis=1))
    assert np.ptp(scores) > 0.5  # noise is fitted, and the held-out scores tell that it is noise
    assert np.ptp(fitted.predict(noise)) < 0.1


def test_shares_of_nothing_and_all_do_not_outweigh_the_others():
    rng = np.random.default_rng(0)
    chance = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0], 2000)
    right = rng.random(2000) < 0.2 + 0.6 * chance
    found = SignalCalibrator(stage="sigmoid").fit({"agreement": chance}, right)
    shares = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(found.predict({"agreement": shares}), 0.2 + 0.6 * shares, atol=0.06)


def test_groups_stay_in_one_fold():
    groups = np.arange(60) // 3
    for train, test in _folds(groups):
        assert len(train) + len(test) == 60
        assert not {*groups[train]} & {*groups[test]}


def test_answers_that_lack_signals_get_a_chance(fitted):
    nothing = [np.nan] * 4
    values = {
        "stated": [0.9, np.nan, 0.9, np.nan],
        "agreement": [0.9, 0.9, np.nan, np.nan],
        "judge:gpt-x": nothing,
    }
    both, *one, none = fitted.predict(values)
    assert both > max(one) > min(one) > none
    assert none == pytest.approx(simulated()[1].mean(), abs=0.05)


def test_the_map_needs_its_signals_and_no_others(fitted):
    signals, _ = simulated()
    more = {**signals, "length": np.full(N, np.nan)}
    np.testing.assert_array_equal(fitted.predict(more), fitted.predict(signals))
    del more["stated"]
    with pytest.raises(ValueError, match="stated is not there, got agreement, judge:gpt-x, length"):
        fitted.predict(more)


def test_other_models_prompts_and_heads_are_refused(fitted):
    signals, _ = simulated()
    fitted.predict(signals, source=Source("p_true", "chat", "0a1b", "none"))
    for other, message in (
        (Source("", "plain", "0a1b"), "prompt chat, not plain"),
        (Source("", "chat", "ffff"), "model 0a1b, not ffff"),
    ):
        with pytest.raises(ValueError, match=message):
            fitted.predict(signals, source=other)


def test_maps_come_back_from_files(fitted, tmp_path):
    signals, right = simulated(2)
    again = SignalCalibrator.from_state(json.loads(json.dumps(fitted.state())))
    limit = again.control(signals, right, max_error=0.3)
    cal.save(again, tmp_path / "map")
    loaded = cal.load(tmp_path / "map", SignalCalibrator)
    assert loaded.state() == again.state()
    assert loaded.threshold_ == limit
    assert loaded.source_ == fitted.source_
    signals["stated"][:50] = np.nan
    found = loaded.predict(signals)
    np.testing.assert_array_equal(found, fitted.predict(signals))
    np.testing.assert_array_equal(loaded.abstains(found), found < limit.threshold)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("names", ["a", "a", "b"], "different texts"),
        ("names", ["a"], "coverage must be 1 finite numbers"),
        ("names", None, "different texts"),
        ("regression", None, "a saved Regression has"),
        ("regression", {}, "a saved Regression has"),
        ("coverage", [1, 1], "coverage must be 3"),
        ("stage", "cubic", "stage"),
    ],
)
def test_damaged_states_are_refused(fitted, part, value, message):
    with pytest.raises(ValueError, match=message):
        SignalCalibrator.from_state({**fitted.state(), part: value})


def test_parts_of_damaged_states_are_refused(fitted):
    state, (signals, right) = fitted.state(), simulated()
    beta = AnswerCalibrator(stage="beta").fit(signals["stated"], right)
    with pytest.raises(ValueError, match="the map must be a sigmoid"):
        SignalCalibrator.from_state({**state, "map": beta.state()})
    for change, message in (
        ({"scale": [0.0, 1.0, 1.0]}, "scale must be above 0"),
        ({"low": [0.0, 0.1, 0.1]}, "low and high rise between 0 and 1"),
        ({"weights": ["x", 1.0, 1.0]}, "could not convert"),
        ({"offset": [np.nan]}, "offset must be 1 finite numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            SignalCalibrator.from_state({**state, "regression": {**state["regression"], **change}})
    with pytest.raises(ValueError, match="a saved SignalCalibrator has"):
        SignalCalibrator.from_state({})


@pytest.mark.parametrize(
    ("signals", "error", "message"),
    [
        ({}, TypeError, "arrays by name"),
        ([0.5], TypeError, "arrays by name"),
        ({"a": [0.5, 90.0]}, ValueError, r"signal a must be in \[0, 1\] or NaN, got 90"),
        ({"a": [0.5, np.inf]}, ValueError, "got inf"),
        ({"a": [0.5, 0.5], "b": [0.5]}, ValueError, r"signal b must be \(2,\)"),
        ({"a": [[0.5, 0.5]]}, ValueError, "signal a must be"),
    ],
)
def test_what_is_no_signal_is_refused(signals, error, message):
    with pytest.raises(error, match=message):
        SignalCalibrator().fit(signals, [0, 1])


def test_outcomes_and_groups_fit_the_answers():
    signals, right = simulated(n=20)
    with pytest.raises(ValueError, match="one value for each of 20 answers"):
        SignalCalibrator().fit(signals, right[:5])
    with pytest.raises(ValueError, match="groups must have one value"):
        SignalCalibrator().fit(signals, right, groups=[0, 1])


def test_few_or_equal_answers_are_said_to_be_too_few():
    signals, _ = simulated(n=40)
    with pytest.warns(UserWarning, match="40 answers, 40 of them right, are too few"):
        fitted = SignalCalibrator().fit(signals, np.ones(40))
    assert fitted.map_ is None
    assert (fitted.predict(signals) < 1).all()


def test_few_wrong_answers_do_not_show_that_others_are_surely_right():
    rng = np.random.default_rng(0)
    sure, right = rng.uniform(0.9, 1, 200), np.arange(200) >= 4
    with pytest.warns(UserWarning, match="too few to calibrate"):
        fitted = SignalCalibrator().fit({"a": np.where(right, sure, 0.01), "b": sure}, right)
    assert fitted.map_ is None
    assert fitted.regression_ is not None
    chances = fitted.predict({"a": [0.01, 1.0], "b": [0.9, 1.0]})
    assert 1 / 202 < chances[0] < 0.5 < chances[1] < 201 / 202
    plain = fitted.regression_.score(np.array([[0.01, 0.9], [1.0, 1.0]]))
    np.testing.assert_allclose(chances, (200 * plain + 1) / 202)


def test_unfitted_maps_say_so():
    empty = SignalCalibrator()
    with pytest.raises(RuntimeError, match="not fitted"):
        empty.predict({"a": [0.5]})
    with pytest.raises(RuntimeError, match="no threshold"):
        empty.abstains([0.5])
    with pytest.raises(ValueError, match="stage"):
        SignalCalibrator(stage="cubic")  # type: ignore[arg-type]


def test_weights_are_shown(fitted):
    (table,) = box(fitted).tables()
    assert table.headings == ("signal", "answers", "weight")
    assert [row[:2] for row in table.rows] == [(name, "100 %") for name in simulated()[0]]
    assert [row[2] for row in table.rows] == [f"{w:.2f}" for w in fitted.regression_.weights]


def signal_rows(count):
    rng = np.random.default_rng(0)
    chances = rng.random(count)
    return AnswerRows(
        [f"line {n}" for n in range(count)],
        [
            {"signals": {"judge:x": None if n % 5 == 0 else p}, "correct": bool(rng.random() < p)}
            for n, p in enumerate(chances.tolist())
        ],
    )


def test_signals_are_fitted_measured_and_applied():
    answers = signal_rows(300)
    result = fit_signals(answers, stage="sigmoid", level=None)
    assert result.together is result.alone["judge:x"]  # there is one signal
    assert result.calibrator.coverage_ == {"judge:x": 0.8}
    assert result.raw["judge:x"].n == 240
    assert result.alone["judge:x"].n == 300
    signals = {"judge:x": np.array([r["signals"]["judge:x"] for r in answers.rows], float)}
    right = answers.grades()
    assert result.alone["judge:x"]["auroc"].value < cal.auroc(
        confidence=signals["judge:x"][~np.isnan(signals["judge:x"])],
        outcome=right[~np.isnan(signals["judge:x"])],
    )
    limit = result.calibrator.control(signals, right, max_error=0.4)
    rows = result.calibrator.apply(answers)
    for row, p in zip(rows, result.calibrator.predict(signals), strict=True):
        assert row["calibrated"] == p
        assert row["abstains"] == (p < limit.threshold)
    assert {row["abstains"] for row in rows} == {True, False}


def test_intervals_of_signals_are_those_of_independent_questions():
    """Answers to one question share their luck: intervals that forget it are too narrow."""
    rng, truth, runs = np.random.default_rng(0), 0.75, 60
    held = {"raw": 0, "alone": 0, "independent": 0}
    for _ in range(runs):
        question = np.repeat(np.arange(50), 6)
        confidence = rng.uniform(0.5, 1, 300)
        right = rng.random(50)[question] < confidence
        rows = [
            {"question": f"q{q}", "signals": {"own": c}, "correct": bool(y)}
            for q, c, y in zip(question, confidence.tolist(), right, strict=True)
        ]
        fitted = fit_signals(AnswerRows.of(rows), stage="sigmoid")
        alone = evaluate_answers(confidence, right)
        found = {"raw": fitted.raw["own"], "alone": fitted.alone["own"], "independent": alone}
        for name, evaluation in found.items():
            held[name] += evaluation["accuracy"].low <= truth <= evaluation["accuracy"].high
    assert held["independent"] < 0.7 * runs
    assert min(held["raw"], held["alone"]) >= binom.ppf(0.001, runs, 0.9)
