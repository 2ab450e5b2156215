"""Logs of services, plain files, and how a format is told."""

import csv
import json
import math

import numpy as np
import pytest

from calibrant.llm import read_answers, read_log
from calibrant.llm.answers.logprobs import token_material
from calibrant.llm.heads.documents import BadDocument
from tests.support.chat_server import completion


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair(**more):
    request = {"model": "tiny", "messages": [{"role": "user", "content": "Capital of Peru?"}]}
    return {"request": request, "response": completion(), **more}


def batch(number, **more):
    response = {"status_code": 200, "request_id": "r", "body": completion()}
    return {"id": f"b{number}", "custom_id": f"q{number}", "response": response, **more}


def test_requests_with_responses(tmp_path):
    log = read_log(written(tmp_path / "log.jsonl", [pair(correct=True), pair(correct=False)]))
    answers = log.answers
    confidence, source = answers.confidences()
    assert log.format == "openai"
    assert [row["question"] for row in answers.rows] == ["Capital of Peru?"] * 2
    assert [row["answer"] for row in answers.rows] == ["Lima."] * 2
    assert confidence == pytest.approx([math.sqrt(0.4)] * 2)
    assert answers.grades().tolist() == [True, False]
    assert source == ("geometric", "chat", "tiny-2", "none", "default")


def test_a_batch_with_outcomes_in_another_file(tmp_path):
    file = written(tmp_path / "batch.jsonl", [batch(0), batch(1)])
    with (tmp_path / "graded.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerows([("id", "ok", "question"), ("q1", "no", "b?"), ("q0", "yes", "a?")])
    log = read_log(file, grades=tmp_path / "graded.csv", outcome="ok")
    assert log.answers.grades().tolist() == [True, False]
    assert [row["question"] for row in log.answers.rows] == ["a?", "b?"]
    assert not any("correct" in row for row in read_log(file).answers.rows)
    written(tmp_path / "few.jsonl", [{"custom_id": "q0", "correct": 1}])
    with pytest.raises(ValueError, match=r"line 2 of .* has the id 'q1', not in"):
        read_log(file, grades=tmp_path / "few.jsonl")
    written(tmp_path / "twice.jsonl", [{"id": "q0", "correct": 1}, {"id": "q0", "correct": 0}])
    with pytest.raises(ValueError, match=r"line 2 of .* repeats the id 'q0'"):
        read_log(file, grades=tmp_path / "twice.jsonl")


def test_grades_of_ids_that_are_numbers(tmp_path):
    file = written(tmp_path / "log.jsonl", [{"id": i, "confidence": 0.5} for i in range(3)])
    (tmp_path / "graded.csv").write_text("id,correct\n2,yes\n1,no\n0,no\n")
    log = read_log(file, grades=tmp_path / "graded.csv")
    assert log.answers.grades().tolist() == [False, False, True]
    lines = [{**pair(), "id": i} for i in range(2)]
    ids = [row["id"] for row in read_log(written(tmp_path / "chats.jsonl", lines)).answers.rows]
    assert ids == ["0", "1"]


def test_one_grade_is_not_that_of_two_answers(tmp_path):
    file = written(tmp_path / "log.jsonl", [batch(0), batch(1), batch(0)])
    written(tmp_path / "graded.jsonl", [{"id": f"q{i}", "correct": 1} for i in range(2)])
    with pytest.raises(ValueError, match=r"line 3 of .* repeats the id 'q0'"):
        read_log(file, grades=tmp_path / "graded.jsonl")
    assert len(read_log(file).answers.rows) == 3


def test_top_tokens_with_one_text_are_added_and_have_probabilities():
    shown = [{"token": "\ufffd", "logprob": -1.0}, {"token": "\ufffd", "logprob": -2.0}]
    token = {"token": "a", "logprob": -1.0, "top_logprobs": [*shown, {"token": "a", "logprob": -3}]}
    (top,) = token_material([token], "it")["top_logprobs"]
    added = math.log(math.exp(-1) + math.exp(-2))
    assert top == {"\ufffd": pytest.approx(added), "a": pytest.approx(-3)}
    token["top_logprobs"] = [{"token": None, "logprob": -1.0}]  # as of a token without text
    assert token_material([token], "it")["top_logprobs"] == [{"": -1.0}]
    token["top_logprobs"] = [{"token": "b", "logprob": math.nan}]
    with pytest.raises(BadDocument, match="of the top token 'b' that is not a number up to 0"):
        token_material([token], "it")


def test_responses_of_the_newer_interface(tmp_path):
    token = {"token": "Lima", "logprob": math.log(0.8), "top_logprobs": []}
    part = {"type": "output_text", "text": "Lima", "logprobs": [token]}
    body = {
        "object": "response",
        "model": "m",
        "output": [{"type": "reasoning"}, {"type": "message", "content": [part]}],
    }
    line = {"request": {"input": "Capital of Peru?"}, "response": body, "correct": 1}
    (row,) = read_log(written(tmp_path / "log.jsonl", [line])).answers.rows
    assert (row["question"], row["answer"]) == ("Capital of Peru?", "Lima")
    assert row["token_probs"] == pytest.approx([0.8])
    bare = {**body, "correct": 0}
    assert read_log(written(tmp_path / "bare.jsonl", [bare])).answers.rows[0]["correct"] == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (pair(correct=None), "correct must be true or false, got None"),
        (
            pair(correct=1, response=completion(tokens={"a": math.nan})),
            "of token 1 .'a'. that is no",
        ),
        (pair(correct=1, response=completion(choices=[])), "has no choices"),
        (pair(correct=1, response=completion(choices=["Lima"])), "another form than OpenAI's"),
        (pair(correct=1, response=completion(text=None)), "has no text"),
        (pair(correct=1, response="<html>"), "is not a chat completion, got '<html>'"),
        (pair(correct=1, response=completion(tokens={})), "request logprobs=True"),
        (pair(correct=1, error={"code": "timeout"}), "is a request that failed"),
        (batch(0, correct=1, response={"status_code": 500, "body": {}}), "with status 500"),
        ({"response": {"error": {"message": "no"}}, "correct": 1}, "is an error of the service"),
        ([1], "must be an object"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, message):
    file = written(tmp_path / "log.jsonl", [pair(correct=True), line])
    with pytest.raises(ValueError, match=message) as error:
        read_log(file)
    assert f"line 2 of {file}" in str(error.value)
    with pytest.warns(UserWarning, match=r"left out 1 of 2 answers of .*\n  line 2: "):
        assert read_log(file, skip_bad=True).left_out == 1


def test_a_line_that_is_cut_off_is_named(tmp_path):
    file = written(tmp_path / "log.jsonl", [pair(correct=True)] * 3)
    file.write_text(file.read_text()[:-30])
    with pytest.raises(ValueError, match=r"line 3 of .* is cut off, as by a run that was killed; "):
        read_log(file)
    with pytest.warns(UserWarning, match="line 3: is cut off"):
        assert len(read_log(file, skip_bad=True).answers.rows) == 2


def test_plain_files_are_read_as_ever(tmp_path):
    rows = [{"confidence": 0.9, "correct": "yes", "source": "judge"}] * 2
    file = written(tmp_path / "a.jsonl", rows)
    log = read_log(file)
    assert log.format == "answers"
    assert log.answers.source() == read_answers(file).source()
    np.testing.assert_array_equal(log.answers.confidences()[0], [0.9, 0.9])
    (tmp_path / "a.csv").write_text("confidence,right\n0.9,yes\n0.2,no\n")
    assert read_log(tmp_path / "a.csv", outcome="right").answers.grades().tolist() == [True, False]
    bad = written(tmp_path / "b.jsonl", [*rows, {"confidence": 90, "correct": 1}])
    with pytest.raises(ValueError, match=r"must be a number in \[0, 1\], got 90: divide percents"):
        read_log(bad)
    odd = written(tmp_path / "d.jsonl", [*rows, {**rows[0], "signals": {"judge": 7}}])
    with pytest.raises(ValueError, match=r"line 3 of .*judge"):
        read_log(odd)
    with pytest.raises(ValueError, match="has no confidence: each row needs a confidence"):
        read_log(written(tmp_path / "c.jsonl", [{"correct": 1}]))


def test_a_response_of_text_is_in_a_row_of_ones_own(tmp_path):
    row = {"response": "Lima", "confidence": 0.9, "correct": 1}
    assert read_log(written(tmp_path / "a.jsonl", [row])).format == "answers"
    failed = [{"custom_id": "a", "response": None, "error": {"code": "x"}}, pair(correct=1)]
    with pytest.raises(ValueError, match=r"line 1 of .* is a request that failed"):
        read_log(written(tmp_path / "b.jsonl", failed))


def test_all_answers_are_graded_or_none(tmp_path):
    bare = pair()
    assert "correct" not in read_log(written(tmp_path / "new.jsonl", [bare])).answers.rows[0]
    some = written(tmp_path / "some.jsonl", [pair(correct=1), bare])
    with pytest.raises(ValueError, match=r"line 2 of .* whether the answer is right"):
        read_log(some)
    with pytest.warns(UserWarning, match="left out 1 of 2"):
        assert len(read_log(some, skip_bad=True).answers.rows) == 1


def test_unknown_formats_are_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="neither a log of Inspect nor results of lm-eval"):
        read_log(tmp_path / "x.json")
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_log(tmp_path / "e.jsonl")


def test_mixed_sources_are_refused(tmp_path):
    other = completion(model="huge")
    file = written(tmp_path / "log.jsonl", [pair(correct=1), pair(correct=0, response=other)])
    with pytest.raises(ValueError, match="model tiny-2, not huge"):
        read_log(file).answers.source()
