"""A map and a threshold from a log, on data of known truth."""

import json
from inspect import signature
from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant.cli.llm_gate import fit as gate_verb
from calibrant.cli.llm_logs import report as report_verb
from calibrant.llm import AnswerCalibrator, Log, SignalCalibrator, fit_gate, study_answers
from calibrant.llm.answers.logs.study import _rescored, option_logits, save_options
from calibrant.llm.answers.rows import AnswerRows
from calibrant.show.answer_findings import _notes_of
from calibrant.workflows.evaluate import evaluate

TRUE_POWER = 3


def log_of(rows):
    return Log("log.jsonl", "answers", AnswerRows([f"line {i}" for i in range(len(rows))], rows))


def simulated(rng, n=600):
    """Confidences c of answers that are right with a chance of c to the third."""
    stated = rng.uniform(0.5, 1, n)
    right = rng.random(n) < stated**TRUE_POWER
    pairs = zip(stated.tolist(), right.tolist(), strict=True)
    return [{"confidence": c, "correct": y, "source": "judge"} for c, y in pairs]


@pytest.fixture(scope="module")
def study():
    return study_answers(log_of(simulated(np.random.default_rng(0), 2000)), max_error=0.3)


def test_the_map_is_the_truth(study):
    stated = np.array([row["confidence"] for row in study.rows])
    chances = np.array([row["calibrated"] for row in study.rows])
    assert np.abs(chances - stated**TRUE_POWER).mean() < 0.04
    assert study.before["ece"].low > 0.15
    assert study.after["ece"].value < 0.04
    assert study.after["nll"].value < study.before["nll"].value


def test_the_threshold_is_that_of_the_other_half(study):
    parts = np.array([row["part"] for row in study.rows])
    held_out = parts == "threshold"
    assert held_out.sum() == study.threshold.n == 1000
    again = AnswerCalibrator().fit(study.confidence[~held_out], study.correct[~held_out])
    limit = again.control(
        study.confidence[held_out], study.correct[held_out], max_error=0.3, certainty=0.95
    )
    assert study.threshold == limit
    chances = again.predict(study.confidence)
    np.testing.assert_allclose([row["calibrated"] for row in study.rows], chances)
    accepted = np.array([not row["abstains"] for row in study.rows])
    np.testing.assert_array_equal(accepted, chances >= limit.threshold)
    assert (~study.correct[accepted]).mean() < 0.3


def test_guarantees_have_one_default_certainty():
    functions = (cal.threshold, AnswerCalibrator.control, fit_gate, study_answers)
    found = [signature(one).parameters["certainty"].default for one in functions]
    for verb in (report_verb, gate_verb):
        found += [option.default for option in verb.params if option.name == "certainty"]
    assert found == [0.95] * 6


def test_the_promise_is_kept_in_most_draws(monkeypatch):
    """The true error above the threshold, over draws of small logs."""
    figures = {"before": None, "after": None}
    monkeypatch.setattr(
        "calibrant.llm.answers.logs.study.cross_validated_answers", lambda *_, **__: figures
    )
    grid, broken = np.linspace(0.5, 1, 2001), 0
    for seed in range(100):
        log = log_of(simulated(np.random.default_rng(seed), 200))
        fitted: Any = study_answers(log, max_error=0.35, certainty=0.8).calibrator
        accepted = ~fitted.abstains(fitted.predict(grid))
        error = 1 - (grid[accepted] ** TRUE_POWER).mean() if accepted.any() else 0.0
        broken += bool(error > 0.35)
    assert broken <= 30  # 20 are expected at most, and 30 have a chance below 1 %


@pytest.fixture(scope="module")
def with_signals():
    """Answers with two signals that each know a part of the truth, and no confidence."""
    rng = np.random.default_rng(3)
    odds = rng.normal(scale=1.5, size=(2, 800))
    right = rng.random(800) < 1 / (1 + np.exp(-odds.sum(0)))
    chances = 1 / (1 + np.exp(-odds))
    rows = [
        {
            "answer": "Lima",
            "stated": f"{100 * chances[0, i]:.0f} %" if i % 50 else None,
            "signals": {"judge": float(chances[1, i])},
            "correct": bool(right[i]),
        }
        for i in range(800)
    ]
    return study_answers(log_of(rows), max_error=0.3)


def test_several_signals_are_combined(with_signals):
    study = with_signals
    assert isinstance(study.calibrator, SignalCalibrator)
    assert study.source in ("stated", "judge")
    alone = [one["nll"].value for one in study.signals.alone.values()]
    assert len(alone) == 2
    assert study.after["nll"].value < min(alone)
    assert study.after["auroc"].low > study.before["auroc"].value
    assert study.threshold.n == study.held_out.sum() == 400
    accepted = np.array([not row["abstains"] for row in study.rows])
    assert 0 < accepted.mean() < 1
    assert (~study.correct[accepted]).mean() < 0.3


@pytest.mark.filterwarnings("ignore:confident answers are not right more often")
def test_few_answers_with_signals_get_a_map_of_their_confidence(rng):
    rows = [
        {**row, "answer": "a", "samples": ["a", "b"], "correct": i % 8 == 0}
        for i, row in enumerate(simulated(rng, 40))
    ]
    study = study_answers(log_of(rows))
    assert study.signals is None
    assert isinstance(study.calibrator, AnswerCalibrator)


def test_answers_to_one_question_stay_in_one_half(rng):
    rows = [{**row, "question": f"q{i % 30}"} for i, row in enumerate(simulated(rng, 90))]
    held_out = study_answers(log_of(rows)).held_out
    assert held_out.sum() == 45
    for question in range(30):
        assert len(set(held_out[question::30].tolist())) == 1


def test_few_answers_are_refused_and_some_get_a_simpler_map(rng):
    with pytest.raises(ValueError, match=r"log.jsonl has 10 graded answers to 10 questions: 20 or"):
        study_answers(log_of(simulated(rng, 10)))
    assert study_answers(log_of(simulated(rng, 150))).calibrator.stage == "sigmoid"
    rows = [{**row, "question": f"q{i % 4}"} for i, row in enumerate(simulated(rng, 40))]
    with pytest.raises(ValueError, match=r"40 graded answers to 4 questions: .* to 10 questions"):
        study_answers(log_of(rows))


def test_repeated_questions_are_counted(rng):
    rows = [{**row, "question": f"q{i // 2}"} for i, row in enumerate(simulated(rng, 40))]
    (note,) = [
        one for one in _notes_of(study_answers(log_of(rows))) if one.title == "About the data"
    ]
    assert note.evidence.startswith("20 answers are to questions that come more than once")


@pytest.fixture(scope="module")
def choices():
    """Options of which the first is preferred whatever it says."""
    rng = np.random.default_rng(1)
    honest = 2 * rng.normal(size=(100, 3))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    return honest + np.array([3.0, 0, 0]), labels


def test_options_are_calibrated_and_scored_again(choices, monkeypatch):
    # all candidates of auto, in five folds each, would take seconds
    monkeypatch.setattr("calibrant.calibrators.auto.FREE", ("none", "sms"))
    logits, labels = choices
    figures, probs = _rescored(logits, labels)
    before, after = figures["before"], figures["after"]
    plain = evaluate(logits, labels, estimand="top_label", level=None)
    for name in ("accuracy", "ece", "brier"):
        assert before[name].value == pytest.approx(plain[name].value)
    assert after["accuracy"].value > before["accuracy"].value + 0.05
    assert after["brier"].value < before["brier"].value
    np.testing.assert_allclose(probs.sum(1), 1)
    assert after["accuracy"].value == pytest.approx((probs.argmax(1) == labels).mean())


def test_options_of_rows_are_a_prediction_file(tmp_path, choices):
    rows = [
        {"option_logits": [-1.0, -2.0], "label": 1},
        {"option_logits": [-1.0, -2.0, -3.0], "label": 0},
    ]
    save_options(rows, tmp_path / "options.npz")
    with np.load(tmp_path / "options.npz") as held:
        np.testing.assert_array_equal(held["logits"], [[-1, -2, -np.inf], [-1, -2, -3]])
        np.testing.assert_array_equal(held["labels"], [1, 0])
    assert cal.evaluate(tmp_path / "options.npz", level=None)["accuracy"].value == 0.5
    assert option_logits([{"option_logits": [-1.0, -2.0], "label": None}]) is None
    cells = [{name: json.dumps(value) for name, value in row.items()} for row in rows]  # of CSV
    for found, wanted in zip(option_logits(cells) or (), option_logits(rows) or (), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert option_logits([{"option_logits": "[-1.0, -2.0]", "label": "null"}]) is None
    with pytest.raises(ValueError, match=r"is for multiple choice.*write .jsonl or .csv"):
        save_options([{"confidence": 0.5}], tmp_path / "options.npz")
