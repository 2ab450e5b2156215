"""Multiple choice is calibrated out of fold, and a preference for letters is corrected."""

import numpy as np
import pytest
from scipy.special import log_softmax

import calibrant as cal
from calibrant._core.checks import IGNORED
from calibrant.llm.answers import asking, grading
from calibrant.llm.answers.grading import QuestionSet, calibrated_choices
from calibrant.llm.answers.questions import Question
from calibrant.llm.workflows import evaluate_questions
from tests.support.calibrators import Shift
from tests.support.language_models import quiz_model, quiz_tokenizer
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
    monkeypatch.setattr(asking, "ask_choices_each", lambda *_, **__: ({"before": logits}, labels))
    return logits, labels


@pytest.fixture(scope="module")
def network():
    """A tiny model and its tokenizer."""
    return quiz_model(), quiz_tokenizer()


def questions(labels):
    texts = ("a", "b", "c", "d")
    every = [Question("?", (texts[label],), texts, int(label)) for label in labels]
    return QuestionSet(every, [], "letters")


def accuracy(evaluation):
    return evaluation["accuracy"].value


def test_a_preference_for_a_letter_is_corrected(asked, network):
    logits, labels = asked
    found = evaluate_questions(*network, questions(labels), level=None)
    assert list(found) == ["before", "calibrated"]
    assert accuracy(found["before"]) == pytest.approx((logits.argmax(-1) == labels).mean())
    best = (preferring(logits, -3.0).argmax(-1) == labels).mean()
    assert accuracy(found["before"]) < best - 0.1
    assert accuracy(found["calibrated"]) == pytest.approx(best, abs=0.02)
    for name in ("ece", "nll"):
        assert found["calibrated"][name].value < found["before"][name].value / 1.2


def test_predictions_can_be_kept(asked, network):
    logits, labels = asked
    found = calibrated_choices(logits, labels, keep_predictions=True)
    np.testing.assert_array_equal(found.argmax(-1), logits.argmax(-1))
    np.testing.assert_allclose(np.exp(found).sum(-1), 1)
    both = evaluate_questions(*network, questions(labels), keep_predictions=True, level=None)
    assert accuracy(both["calibrated"]) == accuracy(both["before"])
    assert both["calibrated"]["nll"].value < both["before"]["nll"].value


def test_no_question_is_calibrated_by_a_fit_that_has_seen_it(asked, monkeypatch):
    logits, labels = asked
    monkeypatch.setattr(grading, "Auto", lambda keep_argmax: Forgetful())
    assert calibrated_choices(logits, labels).shape == (600, 4)
    with pytest.raises(AssertionError, match="seen"):
        Forgetful().fit(logits, labels).transform(logits[:1])


def test_few_questions_are_not_calibrated(asked, network, monkeypatch):
    logits, labels = asked
    few = {"before": logits[:99]}, labels[:99]
    monkeypatch.setattr(asking, "ask_choices_each", lambda *_, **__: few)
    assert list(evaluate_questions(*network, questions(labels[:99]), level=None)) == ["before"]
