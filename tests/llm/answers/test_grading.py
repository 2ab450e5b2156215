"""Sets of questions put to a tiny model, and graded."""

import numpy as np
import pytest
from scipy.special import log_softmax

import calibrant as cal
from calibrant._core.checks import IGNORED
from calibrant.llm.answers import choices, grading
from calibrant.llm.answers.asking import ask, draw_answers
from calibrant.llm.answers.calibrator import fit_answers
from calibrant.llm.answers.choices import PermutedChoices, ask_texts_each
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.answers.grading import (
    QuestionSet,
    answer_question,
    calibrated_choices,
    confidence_of,
    evaluate_graded,
    grade_questions,
)
from calibrant.llm.answers.questions import Question, short_prompt
from calibrant.llm.answers.rows import AnswerRows, Source
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models.huggingface import fingerprint_of
from tests.support.calibrators import Shift
from tests.support.language_models import QUIZ_WORDS, quiz_tokenizer, word_tokenizer
from tests.support.simulate import drawn, preferring

OPEN = [Question(f"is it {word}", ("four",)) for word in ("red", "blue", "two", "four")]
SHOTS = [Question("it", ("four",))]


def column(graded, name, default=None):
    return [row.get(name, default) for row in graded.answers.rows]


def test_written_answers_keep_where_they_come_from(model, tokenizer):
    fitted = FittedHead.from_temperature(2.0, fingerprint_of(model))
    asked = QuestionSet(OPEN, SHOTS)
    found = grade_questions(model, tokenizer, asked, fitted=fitted, confidence="minimum")
    prompts = [short_prompt(question, SHOTS) for question in OPEN]
    digest = fingerprint_of(model).digest
    assert list(found) == ["before", "global"]
    for (name, graded), head in zip(found.items(), (None, fitted), strict=True):
        answers = ask(model, tokenizer, prompts, fitted=head, one_line=True)
        assert column(graded, "question") == [question.text for question in OPEN]
        assert column(graded, "answer") == [answer.text for answer in answers]
        probs = [answer.probs for answer in answers]
        assert column(graded, "token_probs") == [one.tolist() for one in probs]
        confidence, source = graded.answers.confidences()
        np.testing.assert_array_equal(confidence, answer_confidence(probs, "minimum"))
        mark = "none" if name == "before" else source.head
        assert source == Source("minimum", "short, 1 shots", digest, mark, "greedy")
    other = FittedHead.from_temperature(2.1, fingerprint_of(model))
    again = grade_questions(model, tokenizer, asked, fitted=other)["global"].answers.source()
    assert len({"none", again.head, source.head}) == 3


@pytest.mark.parametrize("chat", [False, True])
def test_samples_answer_the_same_prompts(model, chat):
    words = ["<nl>" if word == "no" else word for word in QUIZ_WORDS]
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokenizer = word_tokenizer(words, special=special, pad_token="<pad>")
    prompts = [q.text if chat else short_prompt(q, SHOTS) for q in OPEN]
    fitted = FittedHead.from_temperature(5.0, fingerprint_of(model))  # draws do not depend on it
    asked = QuestionSet(OPEN, SHOTS, chat=chat)
    found = grade_questions(model, tokenizer, asked, fitted=fitted, samples=6)
    length = 64 if chat else 32
    wanted = draw_answers(
        model, tokenizer, prompts, samples=6, batch=2, max_new_tokens=length, one_line=not chat
    )
    for graded in found.values():
        assert column(graded, "samples") == wanted
    assert any("\n" in text for texts in wanted for text in texts) == chat
    choices = QuestionSet([Question("it", ("a",), ("a", "b"), 0)], [], "texts")
    with pytest.raises(ValueError, match="samples is for questions of the form 'written'"):
        grade_questions(model, tokenizer, choices, samples=6)


def test_longest_answer(model, tokenizer):
    asked, longest = QuestionSet(OPEN, [], chat=True), 2
    found = grade_questions(model, tokenizer, asked, max_new_tokens=longest, samples=3)
    graded = found["before"]
    texts = [question.text for question in OPEN]
    whole = ask(model, tokenizer, texts, max_new_tokens=200)
    for probs, answer in zip(column(graded, "token_probs"), whole, strict=True):
        np.testing.assert_allclose(probs, answer.probs[:longest], rtol=1e-4)
    ended = [len(answer.probs) >= longest for answer in whole]
    assert column(graded, "truncated", False) == ended
    assert any(ended)
    lengths = [len(text.split()) for texts in column(graded, "samples") for text in texts]
    assert max(lengths) <= longest
    with pytest.raises(ValueError, match="more than the 2048 positions"):
        grade_questions(model, tokenizer, asked, max_new_tokens=2047)


def test_own_grades(model, tokenizer):
    seen = []

    def grade(answer, question):
        seen.append((answer, question))
        return question.text.endswith("two")

    graded = grade_questions(model, tokenizer, QuestionSet(OPEN, []), grade=grade)["before"]
    assert column(graded, "correct") == [False, False, True, False]
    assert seen == list(zip(column(graded, "answer"), OPEN, strict=True))
    choices = QuestionSet([Question("it", ("a",), ("a", "b"), 0)], [], "texts")
    with pytest.raises(ValueError, match="grade is for questions of the form 'written'"):
        grade_questions(model, tokenizer, choices, grade=grade)


def test_chats_are_asked_as_one_asks(model, tokenizer):
    talking = quiz_tokenizer()
    talking.chat_template = "{{ '<s> red ' + messages[0]['content'] + ' blue' }}"
    graded = grade_questions(model, talking, QuestionSet(OPEN, [], chat=True))["before"]
    prompts = [f"<s> red {question.text} blue" for question in OPEN]
    answers = ask(model, talking, prompts, max_new_tokens=64)
    assert column(graded, "answer") == [answer.text for answer in answers]
    assert column(graded, "correct") == [
        "four" in text.split() for text in column(graded, "answer")
    ]
    assert 0 < sum(column(graded, "correct")) < len(OPEN)
    assert graded.answers.source().prompt == "chat"
    plain = grade_questions(model, tokenizer, QuestionSet(OPEN[:1], [], chat=True))["before"]
    assert plain.answers.source().prompt == "plain"  # that tokenizer has no template


def test_likeliest_text_is_the_answer(model, tokenizer):
    questions = [
        Question("is it", ("blue no",), ("blue no", "two", "red"), 0),
        Question("what is it", ("two",), ("two", "A"), 0),
        Question("it", ("A",), ("A", "two"), 0),
    ]
    graded = grade_questions(model, tokenizer, QuestionSet(questions, SHOTS, "texts"))["before"]
    rows = ask_texts_each(model, tokenizer, questions, {"": None}, shots=SHOTS)[""]
    best = [int(row.argmax()) for row in rows]
    assert 0 < sum(best) < 6
    assert column(graded, "correct") == [at == 0 for at in best]
    pairs = zip(questions, best, strict=True)
    assert column(graded, "answer") == [question.choices[at] for question, at in pairs]
    np.testing.assert_allclose(column(graded, "confidence"), [np.exp(row.max()) for row in rows])
    assert graded.answers.source()[:2] == ("texts", "1 shots")
    assert not any(column(graded, "token_probs"))


@pytest.mark.parametrize("form", ["written", "letters", "texts"])
def test_no_question_is_asked_if_one_is_too_long(model, tokenizer, form, monkeypatch):
    for name in ("generate", "forward"):
        monkeypatch.setattr(model, name, None)
    long = " ".join(["two"] * model.config.max_position_embeddings)
    questions = [Question(text, ("yes",), ("yes", "no"), 0) for text in ("is it", long)]
    with pytest.raises(ValueError, match="positions of the model"):
        grade_questions(model, tokenizer, QuestionSet(questions, [], form))


def test_the_second_prompt_counts_too(model, tokenizer):
    words = model.config.max_position_embeddings - 64 - 3
    asked = QuestionSet([Question(" ".join(["two"] * words), ())], [], chat=True)
    found = grade_questions(model, tokenizer, asked)
    assert len(found["before"].answers.rows) == 1
    with pytest.raises(ValueError, match="and 65 may follow"):
        grade_questions(model, tokenizer, asked, confidence="p_true")


def test_letters_are_not_a_chat(tmp_path):
    with pytest.raises(ValueError, match="is answered by letters, not as a chat"):
        grading.read_question_set(tmp_path, chat=True)


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
def test_answers_can_be_kept(asked):
    logits, labels = asked
    found = calibrated_choices(logits, labels, keep_argmax=True)
    np.testing.assert_array_equal(found.argmax(-1), logits.argmax(-1))
    np.testing.assert_allclose(np.exp(found).sum(-1), 1)


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


def simulated(rng, source):
    """Answers of an over-confident model."""
    sure = rng.uniform(0.05, 0.95, 99)
    pairs = zip(sure.tolist(), rng.random(99) < sure**2, strict=True)
    return AnswerRows.of([{"confidence": c, **source.row(), "correct": y} for c, y in pairs])


def test_the_confidence_follows_the_map(rng):
    maps = {name: fit_answers(simulated(rng, Source(name))) for name in ("p_true", "judge")}
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
    answer_question(model, tokenizer, "it", calibrator=fit_answers(simulated(rng, asked)))
    head = FittedHead.from_temperature(2.0, fingerprint_of(model))
    with pytest.raises(ValueError, match=r"head none, not \w{16}: fit one .*--save-answers"):
        answer_question(
            model, tokenizer, "it", fitted=head, calibrator=fit_answers(simulated(rng, asked))
        )
    for other in (asked._replace(model="0"), asked._replace(prompt="chat")):
        with pytest.raises(ValueError, match="the answer calibrator was fitted on"):
            answer_question(model, tokenizer, "it", calibrator=fit_answers(simulated(rng, other)))
