"""Questions for services, and what becomes of replies."""

import math

import pytest

from calibrant.llm.answers.collecting import (
    Asked,
    RequestPlan,
    p_true_of,
    read_asked,
    without_statement,
)


@pytest.mark.parametrize(
    ("said", "answer", "stated"),
    [
        ("Lima\nConfidence: 90%", "Lima", "Confidence: 90%"),
        ("Lima\n\n**Confidence:** 90 %\n", "Lima", "**Confidence:** 90 %"),
        ("Confidence: 90%", "", "Confidence: 90%"),
        ("The confidence interval is [0, 1].", "The confidence interval is [0, 1].", None),
        ("Confidence matters.\nLima", "Confidence matters.\nLima", None),
    ],
)
def test_the_last_line_states_the_confidence(said, answer, stated):
    assert without_statement({"answer": said}) == {"answer": answer, "stated": stated}


def test_tokens_of_the_statement_leave_with_it():
    tokens = ["Li", "ma", "\n", "Conf", "idence: 9%"]
    reply = {"answer": "".join(tokens), "tokens": tokens, "token_probs": [0.1, 0.2, 0.3, 0.4, 0.5]}
    row = without_statement(reply)
    assert row["tokens"] == ["Li", "ma"]
    assert row["token_probs"] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("shown", "chance"),
    [({"True": -1.0, "False": -1.0}, 0.5), ({" false": 0.0}, 0.0), ({"Yes": -0.1}, None)],
)
def test_p_true_sums_spellings(shown, chance):
    assert p_true_of(shown) == chance


@pytest.mark.parametrize(
    ("shown", "chance"),
    [
        ({"The": 0.9, "True": 0.004, "A": 0.002}, 0.004 / 0.006),
        ({"The": 0.9, "False": 0.002}, 0.5),
        ({"True": 0.9}, 0.9),
        ({"True": 0.999, "The": 1e-9}, 1.0),
    ],
)
def test_a_word_below_the_top_tokens_may_be_as_likely_as_the_least_of_them(shown, chance):
    logprobs = {token: math.log(one) for token, one in shown.items()}
    assert p_true_of(logprobs) == pytest.approx(chance)


def test_options_and_chats_change_the_key_and_grades_do_not():
    one = Asked([{"role": "user", "content": "a"}])
    key = RequestPlan("m").key(one)
    assert RequestPlan("m", grade="none").key(one) == key
    assert RequestPlan("m").key(one._replace(references=("b",), id="7")) == key
    assert RequestPlan("m").key(Asked([{"role": "user", "content": "b"}])) != key
    for changed in ({"samples": 1}, {"fields": {"seed": 1}}, {"system": "s"}, {"stated": True}):
        assert RequestPlan("m", **changed).key(one) != key
    assert RequestPlan("n").key(one) != key


def test_questions_of_every_form(tmp_path):
    lines = (
        '{"question": "a?", "references": ["x", "y"], "id": 7, "kind": "k"}',
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b?"}]}',
        '{"question": "a?", "answer": "z"}',
    )
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    first, second = read_asked(tmp_path / "q.jsonl")  # the third is asked already
    assert (first.question, first.references, first.id, first.kind) == ("a?", ("x", "y"), "7", "k")
    assert (second.question, len(second.messages), second.references) == ("b?", 2, ())
    (tmp_path / "q.csv").write_text("question,reference\na?,x\n")
    assert read_asked(tmp_path / "q.csv")[0].references == ("x",)
    (tmp_path / "q.txt").write_text("a?\nx\n\nb?\ny\n")
    assert [one.references for one in read_asked(tmp_path / "q.txt")] == [("x",), ("y",)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.jsonl", '{"text": "a"}', "line 1 of .* must have a question or messages, got text"),
        ("q.jsonl", "[1]", r"line 1 of .* must be an object, got \[1\]"),
        ("q.jsonl", "", "has no questions"),
        ("q.json", "[]", "must be .jsonl, .csv or .txt"),
    ],
)
def test_other_files_of_questions_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_asked(tmp_path / name)
