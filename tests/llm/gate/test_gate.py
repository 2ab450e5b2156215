"""Verdicts of a gate, its words and its artifact."""

import math

import numpy as np
import pytest

import calibrant as cal
from calibrant.llm import AnswerCalibrator, Gate, SignalCalibrator, fit_gate
from calibrant.llm.answers.rows import AnswerRows, Source, SourceError
from calibrant.llm.gate.gate import Band, DriftReference, Terms, _unscored
from calibrant.llm.gate.serving import LiveGate
from calibrant.show import box
from tests.support.graded_answers import graded_answers
from tests.support.thresholds import error_threshold


def limit(value, coverage=0.5):
    return error_threshold(value, coverage, 0.02, 0.04, 100, 0.05, 0.95)


def identity(source):
    """A map that leaves confidences as they are."""
    state = AnswerCalibrator(stage="sigmoid").fit([0.2, 0.6, 0.7], [0, 1, 0]).state()
    state |= {"learned": {"line": [1.0, 0.0]}, "limits": None, "least": 0.0}
    state["source"] = source._asdict()
    return AnswerCalibrator.from_state(state)


@pytest.fixture(scope="module")
def drift():
    rng = np.random.default_rng(0)
    confidence = rng.random(200)
    return DriftReference.of(confidence, (rng.random(200) < confidence).astype(float), 0.05)


@pytest.fixture
def gate(drift):
    bands = [Band(limit(0.9), limit(0.5), ("a",)), Band(limit(0.8), limit(0.4), ("b", "c"))]
    return Gate(identity(Source("judge")), bands, Terms(0.05, 0.9, "answer", 0.25), drift)


def verdicts(gate, *rows, **options):
    return gate.check(AnswerRows.of(rows), **options)


def test_each_kind_has_its_own_thresholds(gate):
    rows = [
        {"confidence": c, "kind": kind, "source": "judge"}
        for kind in "abc"
        for c in (0.901, 0.899, 0.501, 0.401, 0.399)
    ]
    said = [one.verdict for one in verdicts(gate, *rows)]
    assert said[:5] == ["accept", "verify", "verify", "person", "person"]
    assert said[5:10] == said[10:] == ["accept", "accept", "verify", "verify", "person"]


def test_a_verdict_has_its_numbers_and_its_promise(gate):
    accept, verify, person = verdicts(
        gate, *({"confidence": c, "kind": "a", "source": "judge"} for c in (0.95, 0.7, 0.1))
    )
    assert accept.calibrated == pytest.approx(0.95)
    assert accept.threshold == 0.9
    assert accept.promise == "With 90 % certainty, at most 5 % of the accepted answers are wrong."
    assert verify.promise == (
        "With 90 % certainty, at most 20 % of the answers to verify are wrong: a verifier that "
        "misses at most 25 % of the wrong ones leaves at most 5 % wrong."
    )
    assert verify.reason == "the confidence 0.7000 is below 0.9000 and at least 0.5000"
    assert (person.promise, person.threshold) == ("", 0.5)
    assert person.reason == "the confidence 0.1000 is below 0.5000"


def test_a_kind_that_was_not_graded_has_no_promise(gate):
    one, two = verdicts(
        gate,
        {"confidence": 1.0, "kind": "new\x1b[31m", "source": "judge"},
        {"confidence": 1.0, "source": "judge"},
    )
    assert (one.verdict, one.promise, two.verdict) == ("person", "", "person")
    assert "questions of kind new\\x1b[31m: none was graded" in one.reason


def test_without_kinds_every_kind_is_the_same(drift):
    gate = Gate(identity(Source("judge")), [Band(limit(0.9))], Terms(0.05), drift)
    row = {"confidence": 0.95, "source": "judge"}
    one, two, three = verdicts(gate, {**row, "kind": "x"}, row, {**row, "confidence": 0.8})
    assert (one.verdict, two.verdict, three.verdict) == ("accept", "accept", "person")


def test_a_withdrawn_promise_hands_everything_to_a_person(gate):
    (one,) = verdicts(
        gate, {"confidence": 1.0, "kind": "a", "source": "judge"}, withdrawn="it is over"
    )
    assert (one.verdict, one.promise, one.reason) == ("person", "", "it is over")
    assert one.calibrated == pytest.approx(1)


def test_answers_without_a_usable_confidence_are_for_a_person(gate):
    good = {"confidence": 0.95, "kind": "a", "source": "judge"}
    bad = [{**good, "confidence": value} for value in (math.nan, 1.5, "high", None, True)]
    said = verdicts(gate, good, *bad, good)
    assert [one.verdict for one in said] == ["accept", *["person"] * 5, "accept"]
    assert all("must be a number in [0, 1]" in one.reason for one in said[1:-1])
    assert all(one.calibrated is None for one in said[1:-1])
    assert "answer 2" in said[1].reason


def test_tokens_that_cannot_be_read_are_for_a_person(gate):
    row = {"confidence": 0.95, "kind": "a", "source": "judge", "answer": "Lima"}
    for tokens, probs in ((["Lima"], 5), ("Lima", [0.9]), (["Lima"], "0.9"), (["Lima"], None)):
        (one,) = verdicts(gate, {**row, "tokens": tokens, "token_probs": probs})
        assert one.verdict == "person"


def scored(text, tokens, **about):
    return {"answer": text, "tokens": tokens, "token_probs": [0.9] * len(tokens), **about}


@pytest.mark.parametrize(
    "row",
    [
        scored("Lima, Peru", ["Lima", ",", " Peru"]),
        scored("Lima", [" Li", "ma", "</s>"]),
        scored("Lima", ["Lima", "\n\nQ:"]),  # a stop sequence
        scored("A", ["ANSWER:", " A"], completion="ANSWER: A"),  # which a scorer took out
        scored("Perú", ["Per", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}"]),
        scored("Lima", '["Li", "ma"]', token_probs="[0.9, 0.9]"),  # cells of CSV
        scored("Lima", ["Lima"], truncated="false", finish_reason="stop"),
        {"answer": "Lima", "token_probs": [0.9]},  # its tokens are not known
        {"confidence": 0.9},
    ],
)
def test_answers_that_are_scored_wholly(row):
    assert _unscored(row) == ""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (scored("Lima is the capital of Peru.", ["Lima", " is", " the"]), "another text"),
        (scored("Lima.", ["In", " Spain", ".", "Lima", "."]), "another text"),
        (scored("Lima. It is large.", ["It", " is", " large", "."]), "another text"),
        (scored("Lima, Peru", ["Lima", "", " Peru"]), "another text"),
        (scored("Perú, Lima", ["Per", "\N{REPLACEMENT CHARACTER}"]), "another text"),
        (scored("Lima", ["Lima"], truncated=True), "cut off at the largest number of tokens"),
        (scored("Lima", ["Lima"], truncated="true"), "cut off at the largest number of tokens"),
        (scored("Lima", ["Lima"], finish_reason="length"), "cut off at the largest number"),
        (scored(" \n", [" "]), "the answer is empty"),
        ({**scored("Lima", ["Li", "ma"]), "token_probs": [0.9]}, "one probability for each"),
    ],
)
def test_answers_that_are_not_scored_wholly_are_for_a_person(drift, row, reason):
    assert reason in _unscored(row)
    fitted = AnswerCalibrator(stage="sigmoid")
    right = [0] * 8 + [1] * 5 + [0] * 2 + [1] * 5
    fitted.fit([0.1] * 10 + [0.5] * 10, right, source=Source("geometric"))
    gate = Gate(fitted, [Band(limit(0.0))], Terms(0.05), drift)
    one, other = verdicts(gate, row, {"answer": "Lima", "token_probs": [0.9]})
    assert (one.verdict, other.verdict) == ("person", "accept")
    assert reason in one.reason
    assert one.calibrated is None


def test_answers_that_no_gate_accepts_are_left_out_of_the_fit(rng):
    graded = graded_answers(rng, 300).rows
    cut = [{**row, "truncated": True} for row in graded[:100]]
    with pytest.warns(UserWarning, match="100 of 300 graded answers are cut off, empty, or"):
        gate = fit_gate(AnswerRows.of([*cut, *graded[100:]]), max_error=0.3)
    assert gate.bands[0].accept.n == 200


def test_lists_of_dictionaries_will_do(rng):
    graded = graded_answers(rng, 300, sharp=0.5)
    gate = fit_gate(graded.rows, max_error=0.2)
    assert gate.state() == fit_gate(graded, max_error=0.2).state()
    assert gate.check(graded.rows) == gate.check(graded)
    assert gate.check_one({"logprobs": [{"token": "a", "logprob": -0.1}]}).calibrated is not None


def test_a_confidence_without_a_source_is_for_a_person(gate):
    (one,) = verdicts(gate, {"confidence": 1.0, "kind": "a"})
    assert (one.verdict, one.calibrated) == ("person", None)
    assert one.reason == "its confidence has no source, and the gate is for judge"


def test_the_gate_is_for_one_model_prompt_form_and_sampling(rng):
    about = {"source": "judge", "model": "m", "prompt": "chat", "sampling": "temperature=0"}
    gate = fit_gate(graded_answers(rng, 300, **about), max_error=0.3)
    assert gate.source == Source("judge", "chat", "m", "", "temperature=0")
    row = {"confidence": 1.0, **about}
    assert gate.check_one(row).verdict == "accept"
    for name, value in (("model", "n"), ("prompt", "plain"), ("sampling", "default")):
        said = gate.check_one({**row, name: value})
        assert said.verdict == "person"
        assert f"{name} {about[name]}, not {value}" in said.reason


def test_other_sources_are_refused(gate):
    good = {"confidence": 0.95, "kind": "a", "source": "judge"}
    with pytest.raises(SourceError, match="confidence judge, not p_true"):
        verdicts(gate, {**good, "source": "p_true"})
    with pytest.raises(SourceError, match="differs between answer 1 and answer 2"):
        verdicts(gate, good, {**good, "source": "p_true"})
    assert gate.check_one(good).verdict == "accept"
    other = gate.check_one({**good, "source": "p_true"})
    assert other.verdict == "person"
    assert "confidence judge, not p_true" in other.reason


def test_the_artifact_holds_everything(gate, drift, tmp_path):
    cal.save(gate, tmp_path / "gate")
    again = cal.load(tmp_path / "gate", Gate)
    assert again.state() == gate.state()
    assert again.fingerprint() == gate.fingerprint()
    rows = [{"confidence": c, "kind": "a", "source": "judge"} for c in np.linspace(0, 1, 40)]
    assert verdicts(again, *rows) == verdicts(gate, *rows)
    other = Gate(gate.calibrator, gate.bands, gate.terms._replace(max_error=0.06), drift)
    assert other.fingerprint() != gate.fingerprint()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("bands", [], "one band for any kind"),
        ("bands", [{"accept": {}}], "a saved Band has"),
        ("terms", {"max_error": 2.0}, "max_error must be between 0 and 1"),
        ("terms", {"max_error": 0.1, "unit": "day"}, "unit"),
        ("map", {"kind": "threshold", "state": None}, "threshold"),
        ("map", {"kind": "os", "state": {}}, "unknown kind"),
        ("drift", {}, "a saved DriftReference has"),
    ],
)
def test_damaged_states_are_refused(gate, key, value, message):
    with pytest.raises(ValueError, match=message):
        Gate.from_state({**gate.state(), key: value})


def test_a_map_of_another_kind_is_refused(gate):
    monitor = {"kind": "monitor", "state": cal.Monitor().state()}
    with pytest.raises(ValueError, match="a gate needs a map of answers, got a Monitor"):
        Gate.from_state({**gate.state(), "map": monitor})


def test_maps_of_signals(drift, tmp_path):
    rng = np.random.default_rng(2)
    odds = rng.normal(1, 1.5, size=(2, 1500))
    right = rng.random(1500) < 1 / (1 + np.exp(-odds.sum(0)))
    signals = dict(zip(("stated", "judge"), 1 / (1 + np.exp(-odds)), strict=True))
    fitted = SignalCalibrator().fit(
        {name: values[:500] for name, values in signals.items()}, right[:500]
    )
    rows = [
        {"signals": {name: float(signals[name][i]) for name in signals}, "correct": bool(right[i])}
        for i in range(500, 1500)
    ]
    gate = fit_gate(AnswerRows.of(rows), max_error=0.1, calibrator=fitted)
    cal.save(gate, tmp_path / "gate")
    again = cal.load(tmp_path / "gate", Gate)
    said = verdicts(again, *rows)
    accepted = np.array([one.verdict == "accept" for one in said])
    assert 0.2 < accepted.mean() < 1
    wanted = fitted.predict({name: values[500:] for name, values in signals.items()})
    assert [one.calibrated for one in said] == pytest.approx(wanted.tolist())
    lacks = {"signals": {"stated": 0.999, "judge": None}}
    _, one = verdicts(again, rows[0], lacks)
    assert (one.verdict, one.calibrated) == ("person", None)
    assert one.reason == "it lacks judge, which every graded answer had"
    with pytest.raises(
        ValueError, match="this gate is for stated, judge, which no service returns"
    ):
        LiveGate(again)


def test_a_gate_that_accepts_nothing_says_so(drift):
    none = error_threshold(math.inf, 0.0, math.nan, math.nan, 20, 0.05, 0.95)
    gate = Gate(identity(Source("judge")), [Band(none)], Terms(0.05), drift)
    assert gate.promise() == ""
    assert "accepts none" in repr(gate)
    (one,) = verdicts(gate, {"confidence": 1.0, "source": "judge"})
    assert one.verdict == "person"
    assert one.to_dict()["threshold"] is None
    assert one.reason.endswith("is below every threshold")
    (table,) = box(gate).tables()
    assert table.rows[0][2:4] == ("none", "0.0 %")
    assert "No answer is accepted" in box(gate).text()


def test_it_shows_itself(gate):
    assert gate.promise("verify").startswith("With 90 % certainty, at most 20 %")
    assert "a; b, c together" in gate._repr_html_()
    assert "Gate(With 90 % certainty" in repr(gate)
    pytest.importorskip("pandas")
    assert gate.to_frame()["decision"].tolist() == ["accept", "verify"] * 2
