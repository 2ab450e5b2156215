"""What the study of language models reads, and how it divides it."""

import argparse
import csv
import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDIES))
    monkeypatch.delitem(sys.modules, "language_models", raising=False)
    return import_module("language_models")


class Words:
    """A tokenizer of words, in place of a real one."""

    eos_token_id = 0

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        return turns[0]["content"]


@pytest.fixture
def given(tmp_path):
    """Five questions of one set, one of them without a wrong answer, two of TruthfulQA."""
    (tmp_path / "qa").mkdir()
    with (tmp_path / "qa" / "sciq.train.pos_neg.csv").open("w", newline="") as file:
        rows = [(f"question {i}", f"right {i}", f"['wrong {i}', 'false']") for i in range(4)]
        heading = ("question", "correct_answer", "wrong_answer")
        csv.writer(file).writerows([heading, *rows, ("question 4", "right 4", "[]")])
    with (tmp_path / "truthfulqa.csv").open("w", newline="") as file:
        columns = ("Category", "Question", "Best Answer", "Correct Answers", "Incorrect Answers")
        why = ("x", "Why?", "Because", "Because", "So; so; because; No")
        csv.writer(file).writerows([columns, why, ("x", "Who?", "I", "I", "i")])
    chat = [{"conversations": ["ask", "answer it"]}] * 2
    (tmp_path / "lima.json").write_text(json.dumps(chat))
    return argparse.Namespace(data=tmp_path, examples=2, limit=10)


def test_questions_to_tune_on_and_to_choose_from_are_others(study, given):
    tuned = study.preferences(given.data)[: given.examples]
    chosen = study.to_choose(given)["sciq"]
    assert len(tuned) == 2
    assert not {one.text for one in tuned} & {one.text for one in chosen}
    assert all(one.choices[one.answer] in one.references for one in chosen)


def test_texts_that_are_right_or_repeated_are_no_choices(study, given):
    (one,) = study.to_choose(given)["truthfulqa"]  # the other has no wrong answer left
    assert one.choices == ("Because", "So", "No")


def test_a_question_without_a_wrong_answer_is_learned_but_not_preferred(study, given):
    given.examples = 5
    right, pairs = study.examples(given, Words())
    assert len(right) == 1 + 5  # every other chat
    assert len(pairs) == 4
    for (good, start), (bad, same) in pairs:
        assert start == same
        assert good[:start] == bad[:start]
        assert good[-1] == bad[-1] == Words.eos_token_id


def test_heads_that_questions_wait_for_are_trained_first(study, tmp_path):
    given = argparse.Namespace(out=tmp_path, seeds=2, epochs=1, device="cuda")
    jobs = study.jobs(given)
    first = {f"{head}-{name}" for _, head, name, _, _, _ in jobs[: len(study.ASKED)]}
    assert first == set(study.ASKED)
    assert len({job[1:4] for job in jobs}) == len(jobs) == 2 * sum(map(len, study.HEADS.values()))
    assert {job[1] for job in jobs if job[5] == "cuda"} == {"ats"}


def test_a_map_is_measured_on_answers_that_it_was_not_fitted_on(study):
    rng = np.random.default_rng(0)
    sure = rng.uniform(0.5, 0.99, 4000)
    right = rng.random(4000) < sure**3
    as_it_is, after = study.judged("none", sure, right)
    assert (as_it_is["head"], after["head"]) == ("none", "none, map")
    assert (as_it_is["n"], after["n"]) == (4000, 2000)
    assert float(after["ece"]) < 0.05 < 0.2 < float(as_it_is["ece"])
    claimed, held = study.mapped(sure, right)
    second = np.random.default_rng(0).permutation(4000)[2000:]
    changed = np.where(np.isin(np.arange(4000), second), ~right, right)
    again, flipped = study.mapped(sure, changed)
    np.testing.assert_array_equal(claimed, again)
    np.testing.assert_array_equal(held, ~flipped)
    assert len(list(study.judged("ats-paper", sure, right))) == 1
