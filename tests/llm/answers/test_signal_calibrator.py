"""Maps of several signals: what they keep, refuse and store."""

import json

import numpy as np
import pytest
from scipy.special import expit

import calibrant as cal
from calibrant.llm import AnswerCalibrator, SignalCalibrator
from calibrant.llm.answers.sources import Source

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


def test_a_combination_that_helps_is_kept(fitted):
    assert fitted.kept_
    assert 0.05 < fitted.gain_.low < fitted.gain_.value < fitted.gain_.high
    assert "The combination is used" in fitted.verdict()
    signals, right = simulated(1, 4000)
    found = fitted.predict(signals)
    x = np.log([signals[name] / (1 - signals[name]) for name in ("stated", "agreement")])
    assert np.abs(found - expit(1.2 * x.sum(0))).mean() < 0.03
    assert found.mean() == pytest.approx(right.mean(), abs=0.03)


def test_copies_of_one_signal_and_noise_are_not_kept():
    signals, right = simulated(n=300)
    rng = np.random.default_rng(0)
    copies = {"a": signals["stated"], "b": signals["stated"], "noise": rng.random(300)}
    fitted = SignalCalibrator(stage="sigmoid").fit(copies, right)
    assert not fitted.kept_
    assert fitted.best_ == "a"
    assert fitted.needed_ == ["a"]
    assert "a is used alone" in fitted.verdict()
    alone = AnswerCalibrator(None, stage="sigmoid").fit(copies["a"], right)
    np.testing.assert_allclose(fitted.predict(copies), alone.predict(copies["a"]), atol=1e-9)


def test_one_signal_is_the_map_of_that_signal():
    signals, right = simulated(n=300)
    fitted = SignalCalibrator().fit({"stated": signals["stated"]}, right)
    alone = AnswerCalibrator(None).fit(signals["stated"], right)
    values = np.array([0.02, 0.5, 0.98])
    np.testing.assert_allclose(fitted.predict({"stated": values}), alone.predict(values))
    assert not fitted.kept_
    assert fitted.verdict() == "stated is the only signal."


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
    assert (loaded.gain_, loaded.source_) == (fitted.gain_, fitted.source_)
    signals["stated"][:50] = np.nan
    found = loaded.predict(signals)
    np.testing.assert_array_equal(found, fitted.predict(signals))
    np.testing.assert_array_equal(loaded.abstains(found), found < limit.threshold)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("names", ["a", "a", "b"], "different texts"),
        ("names", ["a"], "one of 1 signals"),
        ("best", 3, "one of 3 signals"),
        ("best", True, "one of 3 signals"),
        ("kept", 1, "true or false"),
        ("ridge", "x", "ridge must be numbers"),
        ("coverage", [1, 1], r"coverage must be \(3,\)"),
        ("gain", [0.1, 0.2], "gain must be"),
        ("singles", [{}] * 3, "a single map has"),
        ("combination", {}, "a combination has"),
        ("stage", "cubic", "stage"),
    ],
)
def test_damaged_states_are_refused(fitted, part, value, message):
    with pytest.raises(ValueError, match=message):
        SignalCalibrator.from_state({**fitted.state(), part: value})


def test_parts_of_damaged_states_are_refused(fitted):
    state, (signals, right) = fitted.state(), simulated()
    beta = AnswerCalibrator(None, stage="beta").fit(signals["stated"], right)
    for change, message in (
        ({"inverted": 0}, "inverted must be"),
        ({"absent": 2.0}, "must be chances"),
        ({"least": 0.0}, "must be chances"),
        ({"calibrator": beta.state()}, "every map must be a sigmoid"),
    ):
        singles = [{**state["singles"][0], **change}, *state["singles"][1:]]
        with pytest.raises(ValueError, match=message):
            SignalCalibrator.from_state({**state, "singles": singles})
    worse = {**state["combination"], "weights": [-1.0, 1.0, 1.0]}
    with pytest.raises(ValueError, match="not be negative"):
        SignalCalibrator.from_state({**state, "combination": worse})
    with pytest.raises(ValueError, match="a signal calibrator has"):
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
    assert fitted.held_out_ is None
    assert "too few" in fitted.verdict()
    assert (fitted.predict(signals) < 1).all()


def test_unfitted_maps_say_so():
    empty = SignalCalibrator()
    with pytest.raises(RuntimeError, match="not fitted"):
        empty.predict({"a": [0.5]})
    with pytest.raises(RuntimeError, match="no threshold"):
        empty.abstains([0.5])
    with pytest.raises(ValueError, match="stage"):
        SignalCalibrator(stage="cubic")  # type: ignore[arg-type]


def test_weights_are_shown(fitted):
    headings, *rows = fitted.table()
    assert headings == ("signal", "answers", "weight")
    assert [row[:2] for row in rows] == [(name, "100 %") for name in simulated()[0]]
    table = fitted.to_frame()
    assert table["weight"][:2].to_list() == pytest.approx(fitted._weights()[:2])
    assert "judge:gpt-x" in fitted._repr_html_()
