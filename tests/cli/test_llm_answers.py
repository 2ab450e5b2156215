"""From questions to a map of confidences, by commands."""

import json
import warnings
from typing import get_args

import numpy as np
import pytest

import calibrant as cal
from calibrant.cli.llm_answers import METHODS
from calibrant.llm import ask, signals_of
from calibrant.llm.answers.calibrator import AnswerCalibrator, Map
from calibrant.llm.answers.rows import Source, read_answers
from calibrant.llm.models.huggingface import fingerprint_of
from tests.support.language_models import QUIZ_WORDS, quiz_model, quiz_tokenizer, word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

TRUTHFUL = "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and questions for it."""
    folder = tmp_path_factory.mktemp("answers")
    quiz_model().save_pretrained(folder / "model")
    quiz_tokenizer().save_pretrained(folder / "model")
    blocks = (f"what is it {word}\none\n" for word in QUIZ_WORDS[4:26])
    (folder / "questions.txt").write_text("\n".join(blocks))
    rows = (f"x,c,is it {word},{word},{word},no; four red\n" for word in ("one", "two", "yes"))
    (folder / "TruthfulQA.csv").write_text(TRUTHFUL + "".join(rows))
    return folder


@pytest.fixture
def command(run):
    """Run a command that succeeds, and return what it wrote to both streams."""

    def call(*arguments):
        code, out, err = run("llm", *arguments)
        assert code == 0, err
        return out, err

    return call


def test_from_questions_to_the_chance_of_an_answer(command, folder, tmp_path):
    graded, mapped = tmp_path / "graded.jsonl", tmp_path / "map"
    start = ("evaluate", folder / "questions.txt", "--model", folder / "model", "--level", "0")
    _, err = command(*start, "--chat", "--save-answers", graded)
    assert f"22 answers; next: calibrant llm answers fit {graded} -o MAP" in err
    assert "note: the model has no chat template" in err
    answers = read_answers(graded)
    assert 0 < answers.grades().sum() < 22
    texts = [row["question"] for row in answers.rows]
    own = ask(quiz_model(), quiz_tokenizer(), texts, max_new_tokens=64)
    assert [row["answer"] for row in answers.rows] == [answer.text for answer in own]
    confidence, source = answers.confidences()
    np.testing.assert_allclose(confidence, [answer.confidence for answer in own], rtol=1e-4)
    digest = fingerprint_of(quiz_model()).digest
    assert source == Source("geometric", "plain", digest, "none", "greedy")

    out, err = command("answers", "fit", graded, "-o", mapped, "--json")
    assert f"to use it: calibrant llm ask MODEL QUESTION --map {mapped}" in err
    assert {*json.loads(out)} == {"format", "before", "after"}
    wanted = AnswerCalibrator().fit(confidence, answers.grades(), source=source)
    fitted = cal.load(mapped)
    np.testing.assert_array_equal(fitted.predict(confidence), wanted.predict(confidence))

    (first, *_), asked = wanted.predict(confidence), texts[0]
    out, err = command("ask", folder / "model", asked, "--map", mapped, "--plain")
    assert "note" not in err
    assert out.splitlines()[-1] == f"confidence {100 * first:.0f} %"
    calibrated = tmp_path / "calibrated.csv"
    _, err = command("answers", "apply", mapped, graded, "-o", calibrated)
    assert err.strip() == f"wrote {calibrated}: 22 answers"
    rows = read_answers(calibrated).rows
    assert [float(row["calibrated"]) for row in rows] == pytest.approx(wanted.predict(confidence))
    assert [row["question"] for row in rows] == texts


def test_maps_of_a_service_are_not_for_ask(command, tmp_path):
    graded, mapped = tmp_path / "graded.jsonl", tmp_path / "map"
    source = {"prompt": "chat", "model": "gpt-4o-mini", "head": "none"}
    rows = [
        {"answer": "Lima", "token_probs": [0.02 * i + 0.1], "correct": i % 3 > 0, **source}
        for i in range(40)
    ]
    graded.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, err = command("answers", "fit", graded, "-o", mapped)
    assert f"to use it: calibrant llm answers apply {mapped} FILE -o OUT" in err


def test_samples_become_signals(command, folder, tmp_path):
    graded = tmp_path / "graded.jsonl"
    start = ("evaluate", folder / "questions.txt", "--model", folder / "model", "--level", "0")
    limit = ("--max-new-tokens", "40")
    _, err = command(*start, "--chat", "--samples", "4", *limit, "--save-answers", graded)
    rows = read_answers(graded).rows
    cut = sum(len(row["token_probs"]) == 40 for row in rows)
    message = f"note: {cut} of 22 answers were truncated and graded as they are: raise --max-new"
    assert message in " ".join(err.split())
    assert cut
    assert f"next: calibrant llm answers fit {graded} --signals all -o MAP" in " ".join(err.split())
    assert {len(row["samples"]) for row in rows} == {4}
    shares = [np.mean([text == row["answer"] for text in row["samples"]]) for row in rows]
    assert len({*shares}) > 1
    found = signals_of(read_answers(graded)).rows
    assert [row["signals"]["agreement_exact"] for row in found] == shares


def test_maps_of_short_answers_are_not_for_ask(run, command, folder, tmp_path):
    short, mapped = tmp_path / "short.csv", tmp_path / "map"
    start = ("evaluate", folder / "questions.txt", "--model", folder / "model", "--level", "0")
    command(*start, "--shots", "1", "--save-answers", short)
    short.write_text(short.read_text().replace("false", "true", 5))  # graded by hand
    assert read_answers(short).grades().sum() >= 5
    out, err = command("answers", "fit", short, "-o", mapped, "--method", "sigmoid")
    assert "21 answers" in out
    assert f"to use it: calibrant llm answers apply {mapped} FILE -o OUT" in err
    assert cal.load(mapped).stage == "sigmoid"
    code, _, err = run("llm", "ask", folder / "model", "it", "--map", mapped)
    assert code == 2
    assert "prompt short, 1 shots, not plain" in " ".join(err.split())
    assert "llm evaluate --chat --save-answers" in " ".join(err.split())


def test_truthfulqa_is_multiple_choice_and_all_sets_are_saved(command, folder, tmp_path):
    sets = (folder / "TruthfulQA.csv", folder / "questions.txt")
    start = ("--model", folder / "model", "--shots", "0", "--level", "0", "--json")
    out, _ = command("evaluate", *sets, *start, "--save-answers", tmp_path / "all.jsonl")
    rows = read_answers(tmp_path / "all.jsonl").rows
    assert [row["source"] for row in rows] == ["texts"] * 3 + ["geometric"] * 22
    right = np.mean([row["correct"] for row in rows[:3]])
    assert json.loads(out)["sources"][0]["before"]["metrics"]["accuracy"]["value"] == pytest.approx(
        right
    )
    assert {row["answer"] for row in rows[:3]} <= {"one", "two", "yes", "no", "four red"}


def test_a_long_question_in_a_later_set_costs_no_answers(run, folder, tmp_path, monkeypatch):
    (tmp_path / "long.txt").write_text(" ".join(["two"] * 3000) + "\none\n")
    monkeypatch.setattr("calibrant.llm.answers.grading.grade_questions", None)  # none is asked
    sets = (folder / "questions.txt", tmp_path / "long.txt")
    code, _, err = run("llm", "evaluate", *sets, "--model", folder / "model", "--shots", "0")
    assert code == 2
    assert "positions of the model; shorten it or leave it out" in " ".join(err.split())


def test_mistakes_show_before_the_model_is_loaded(run, folder):
    start = ("llm", "evaluate", folder / "questions.txt", "--model", "none")
    for more, message in (
        (("--chat", "--shots", "3"), "--chat asks each question alone: leave --shots out"),
        (("--save-answers", "x.txt"), "must be .jsonl or .csv, got the suffix '.txt'"),
        (("--samples", "2"), "--samples are for a file of answers: add --save-answers FILE"),
    ):
        code, _, err = run(*start, *more)
        assert code == 2
        assert message in " ".join(err.split())
    asked = ("llm", "evaluate", folder / "TruthfulQA.csv", "--model", "none", "--shots", "0")
    code, _, err = run(*asked, "--samples", "2", "--save-answers", "x.csv")
    assert code == 2
    assert "--samples is for written answers, and" in " ".join(err.split())
    for option in (("--chat",), ("--samples", "2"), ("--save-answers", "x.csv")):
        code, _, err = run("llm", "evaluate", folder / "table", *option)
        assert code == 2
        assert f"{option[0]} is for questions, which need --model" in " ".join(err.split())


def test_an_answer_is_shown_with_its_line_breaks(command, tmp_path):
    words = ["<nl>" if word == "no" else word for word in QUIZ_WORDS]
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    breaking = word_tokenizer(words, special=special, pad_token="<pad>")
    quiz_model().save_pretrained(tmp_path / "model")
    breaking.save_pretrained(tmp_path / "model")
    question = "Question: is it red Answer:"
    (answer,) = ask(quiz_model(), breaking, [question], max_new_tokens=12)
    out, _ = command("ask", tmp_path / "model", question, "--max-new-tokens", "12")
    *lines, last = out.rstrip().split("\n")
    assert "\n" in answer.text
    assert "\n".join(lines).strip() == answer.text
    wanted = f"confidence {100 * answer.confidence:.0f} %, truncated by --max-new-tokens 12"
    assert last == wanted


@pytest.mark.parametrize(("count", "warned"), [(19, True), (20, False)])
def test_a_map_of_few_answers_is_warned_of(run, tmp_path, count, warned):
    rows = "".join(f"{(i + 1) / 30},{i % 2}\n" for i in range(count))
    (tmp_path / "few.csv").write_text("confidence,correct\n" + rows)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, _, err = run("llm", "answers", "fit", tmp_path / "few.csv", "-o", tmp_path / "map")
    assert ("are too few for a map" in " ".join(err.split())) == warned


def test_methods_are_those_of_python():
    assert {*METHODS} == {*get_args(Map)}
    assert AnswerCalibrator().stage == METHODS[0] == "beta"
