"""Multiple choice is calibrated out of fold, and maps belong to the source of their answers."""

import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import binom

import calibrant as cal
from calibrant._core.checks import IGNORED
from calibrant.llm.answers import choices, grading
from calibrant.llm.answers.calibrator import AnswerCalibrator, cross_validated_answers, fit_answers
from calibrant.llm.answers.confidence import evaluate_answers
from calibrant.llm.answers.grading import (
    QuestionSet,
    answer_question,
    calibrated_choices,
    confidence_of,
    evaluate_graded,
    grade_questions,
)
from calibrant.llm.answers.option_bias import PermutedChoices
from calibrant.llm.answers.questions import Question
from calibrant.llm.answers.rows import AnswerRows, Source
from calibrant.llm.answers.signal_calibrator import fit_signals
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models.fingerprint import fingerprint_of
from tests.support.calibrators import Shift
from tests.support.simulate import drawn, preferring


class Forgetful(Shift):
    """Refuses the examples that it was fitted on, by the gap of two of their logits."""

    def _fit(self, examples, context):
        super()._fit(examples, context)
        kept = np.asarray(examples.logits)[examples.labels != IGNORED]
        self.seen = set((kept[:, 1] - kept[:, 0]).round(5).tolist())

    def _transform(self, logits, top, features):
        gaps = (logits[:, 1] - logits[:, 0]).numpy().round(5).tolist()
        assert not self.seen & set(gaps), "seen"
        return super()._transform(logits, top, features)


def light(keep_argmax):
    """Auto with few of its candidates."""
    names = ["none", "ts"] if keep_argmax else ["none", "ts", "sms"]
    return cal.Auto(candidates=names, keep_argmax=keep_argmax)


@pytest.fixture
def asked(rng, monkeypatch):
    """Logits of a model that prefers the letter A, and the right choices."""
    logits, labels = drawn(rng, 600, 4)
    logits = log_softmax(preferring(logits), -1)
    monkeypatch.setattr(grading, "Auto", light)
    monkeypatch.setattr(choices, "_ask_choices_each", lambda *_, **__: shown(logits, labels))
    return logits, labels


def shown(logits, labels):
    """What the model says of questions in their own order."""
    return {"before": PermutedChoices(logits[:, None], labels, [(0, 1, 2, 3)])}


def questions(labels):
    texts = ("a", "b", "c", "d")
    every = [Question("?", (texts[label],), texts, int(label)) for label in labels]
    return QuestionSet(every, [], "letters")


def evaluations(network, labels, **options):
    model, tokenizer = network
    graded = grade_questions(model, tokenizer, questions(labels), **options)
    return evaluate_graded(graded, level=None)


def accuracy(evaluation):
    return evaluation["accuracy"].value


def test_a_preference_for_a_letter_is_corrected(asked, model, tokenizer):
    logits, labels = asked
    found = evaluations((model, tokenizer), labels)
    assert list(found) == ["before", "calibrated"]
    assert accuracy(found["before"]) == pytest.approx((logits.argmax(-1) == labels).mean())
    best = (preferring(logits, -3.0).argmax(-1) == labels).mean()
    assert accuracy(found["before"]) < best - 0.1
    assert accuracy(found["calibrated"]) == pytest.approx(best, abs=0.02)
    for name in ("ece", "nll"):
        assert found["calibrated"][name].value < found["before"][name].value / 1.2


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_predictions_can_be_kept(asked, model, tokenizer):
    logits, labels = asked
    found = calibrated_choices(logits, labels, keep_predictions=True)
    np.testing.assert_array_equal(found.argmax(-1), logits.argmax(-1))
    np.testing.assert_allclose(np.exp(found).sum(-1), 1)
    both = evaluations((model, tokenizer), labels, keep_predictions=True)
    assert accuracy(both["calibrated"]) == accuracy(both["before"])
    assert both["calibrated"]["nll"].value < both["before"]["nll"].value


def test_no_question_is_calibrated_by_a_fit_that_has_seen_it(asked, monkeypatch):
    logits, labels = asked
    monkeypatch.setattr(grading, "Auto", lambda keep_argmax: Forgetful())
    assert calibrated_choices(logits, labels).shape == (600, 4)
    with pytest.raises(AssertionError, match="seen"):
        Forgetful().fit(logits, labels).transform(logits[:1])


def test_few_questions_are_not_calibrated(asked, model, tokenizer, monkeypatch):
    logits, labels = asked
    few = shown(logits[:99], labels[:99])
    monkeypatch.setattr(choices, "_ask_choices_each", lambda *_, **__: few)
    assert list(evaluations((model, tokenizer), labels[:99])) == ["before"]


def simulated(rng, n, source):
    """Answers of an over-confident model."""
    sure = rng.uniform(0.05, 0.95, n)
    pairs = zip(sure.tolist(), rng.random(n) < sure**2, strict=True)
    return AnswerRows.of([{"confidence": c, **source.row(), "correct": y} for c, y in pairs])


@pytest.mark.parametrize("source", [Source("geometric", "chat"), Source("judge"), Source()])
def test_maps_of_files_are_those_of_python(rng, source):
    graded = simulated(rng, 400, source)
    fitted = fit_answers(graded, stage="sigmoid")
    known = source.confidence == "geometric"
    confidence = graded.confidences()[0]
    tokens = list(confidence[:, None]) if known else confidence
    own = AnswerCalibrator("geometric" if known else None, stage="sigmoid")
    own.fit(tokens, graded.grades())
    np.testing.assert_array_equal(fitted.predict(tokens), own.predict(tokens))
    assert fitted.aggregate == own.aggregate
    assert fitted.source_ == source
    rows = AnswerRows(["line 1"], [{"confidence": 0.5, "mine": 1, **({"source": source[0]})}])
    (row,) = fitted.apply(rows)
    chance = own.predict([[0.5]] if known else [0.5])[0]
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
        return calibrator.predict(confidence)

    monkeypatch.setattr(AnswerCalibrator, "fit", spy)
    monkeypatch.setattr(AnswerCalibrator, "predict_confidences", checked)
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


def test_the_confidence_follows_the_map(rng):
    maps = {name: fit_answers(simulated(rng, 99, Source(name))) for name in ("p_true", "judge")}
    assert confidence_of(None, None) == "geometric"
    assert confidence_of(maps["p_true"], None) == "p_true"
    with pytest.raises(ValueError, match="fitted on p_true confidences, got confidence=first"):
        confidence_of(maps["p_true"], "first")
    with pytest.raises(
        ValueError, match=r"for confidences of judge, .*by calibrant llm answers apply"
    ):
        confidence_of(maps["judge"], None)


def test_questions_are_answered_by_maps_of_their_source_only(model, tokenizer, rng):
    digest = fingerprint_of(model).digest
    asked = Source("geometric", "plain", digest, "none")
    answer_question(model, tokenizer, "it", calibrator=fit_answers(simulated(rng, 99, asked)))
    head = FittedHead.from_temperature(2.0, fingerprint_of(model))
    with pytest.raises(ValueError, match=r"head none, not \w{16}: fit one .*--save-answers"):
        answer_question(
            model, tokenizer, "it", fitted=head, calibrator=fit_answers(simulated(rng, 99, asked))
        )
    for other in (asked._replace(model="0"), asked._replace(prompt="chat")):
        with pytest.raises(ValueError, match="the answer calibrator was fitted on"):
            answer_question(
                model, tokenizer, "it", calibrator=fit_answers(simulated(rng, 99, other))
            )


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
