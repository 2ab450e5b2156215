"""Files of graded answers."""

import csv
import json
from typing import Any

import numpy as np
import pytest

from calibrant.llm.answers.calibrator import fit_answers
from calibrant.llm.answers.confidence import Aggregator
from calibrant.llm.answers.judged import read_judged
from calibrant.llm.answers.logs.reading import read_log
from calibrant.llm.answers.rows import (
    AnswerRows,
    Row,
    Source,
    _token_probs_of,
    read_answers,
    write_rows,
)

ROW = {"question": "q", "answer": "a", "token_probs": [0.5, 0.0], "correct": True}


def written(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return path


RULES: dict[Aggregator | None, list[float]] = {
    None: [np.sqrt(0.5 * 2.5e-7), 0.6],
    "minimum": [2.5e-7, 0.4],
}


def test_token_probabilities_are_aggregated(tmp_path):
    path = written(tmp_path / "x.jsonl", ROW, {**ROW, "token_probs": [0.9, 0.4], "correct": False})
    found = read_answers(path)
    assert found.grades().tolist() == [True, False]
    assert _token_probs_of(found.rows[0], "it").tolist() == [0.5, 2.5e-7]  # rounded to nothing
    for rule, wanted in RULES.items():
        confidence, source = found.confidences(rule)
        np.testing.assert_allclose(confidence, wanted)
        assert source == Source(rule or "geometric")


TOKENS = [{"token": "a", "logprob": np.log(0.9)}, {"token": "b", "logprob": np.log(0.4)}]
FORMS: dict[str, Row] = {
    "list of tokens": {"logprobs": TOKENS},
    "chat": {"logprobs": {"content": TOKENS}},
    "completion": {
        "logprobs": {"tokens": ["a", "b"], "token_logprobs": [t["logprob"] for t in TOKENS]}
    },
    "numbers": {"token_logprobs": [t["logprob"] for t in TOKENS]},
    "unnamed numbers": {"logprobs": [t["logprob"] for t in TOKENS]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_log_probabilities_of_services_are_read(tmp_path, form, suffix):
    row = {"question": "q", "correct": True, **FORMS[form]}
    write_rows(tmp_path / f"x{suffix}", [row])
    read = read_answers(tmp_path / f"x{suffix}")
    logged = read_log(tmp_path / f"x{suffix}").answers
    for found in (read, logged, AnswerRows.of([row])):
        confidence, source = found.confidences()
        assert confidence == pytest.approx([0.6])
        assert source == Source("geometric")
    stated = AnswerRows.of([{**row, "confidence": 0.7}])
    assert stated.confidences()[0].tolist() == [0.7]
    assert stated.confidences("minimum")[0] == pytest.approx([0.4])


def test_log_probabilities_without_a_value_are_refused_in_logs(tmp_path):
    path = written(tmp_path / "x.jsonl", {**LOGGED, "logprobs": [{"token": "a"}]})
    with pytest.raises(ValueError, match=r"log-probability of token 1 .* not a number up to 0"):
        read_log(path)


def test_lists_of_dictionaries_are_rows():
    rows = AnswerRows.of([ROW])
    assert AnswerRows.of(rows) is rows
    with pytest.raises(TypeError, match=r"got 'x\.jsonl': pass read_answers\(path\)"):
        AnswerRows.of("x.jsonl")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"each answer must be a dictionary, got 0\.5"):
        AnswerRows.of([0.5])  # type: ignore[list-item]


def test_tiny_probabilities_are_kept(tmp_path):
    path = written(tmp_path / "x.jsonl", {**ROW, "token_probs": [1e-9]})
    assert read_answers(path).confidences()[0].tolist() == pytest.approx([1e-9])


def test_lines_end_with_a_line_feed_only(tmp_path):
    raw = {**ROW, "question": "a\u2028b\x85c", "answer": "d\u2029e"}
    path = tmp_path / "x.jsonl"
    lines = [json.dumps(raw, ensure_ascii=False), "", " ", json.dumps(ROW)]
    path.write_text("\n".join(lines), "utf-8")
    rows = read_answers(path).rows
    assert [row["question"] for row in rows] == ["a\u2028b\x85c", "q"]
    assert [row["answer"] for row in rows] == ["d\u2029e", "a"]


def test_nothing_is_an_empty_cell(tmp_path):
    rows: list[dict[str, Any]] = [{"judge": 1, "human": None}, {"judge": 0, "human": True}]
    write_rows(tmp_path / "x.csv", rows)
    assert (tmp_path / "x.csv").read_bytes() == b"judge,human\r\n1,\r\n0,true\r\n"
    known = read_judged(tmp_path / "x.csv").known
    assert known.tolist() == [False, True]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_answers_come_back_from_files(tmp_path, suffix):
    path, source = tmp_path / f"x{suffix}", Source("p_true", "chat", "0123", "none")
    texts = [("Which, say?", "one"), ('a "b"\nc', "0"), ("\ud800", "three")]
    values = [(0.25, [0.1, 1 / 7]), (1 / 3, [0.5]), (1.0, [1.0])]
    rows = [
        {"question": q, "answer": a, "token_probs": t, "confidence": c, **source.row()}
        for (q, a), (c, t) in zip(texts, values, strict=True)
    ]
    write_rows(path, [{**row, "correct": n != 1} for n, row in enumerate(rows)])
    found = read_answers(path)
    confidence, origin = found.confidences()
    assert (confidence.tolist(), origin) == ([0.25, 1 / 3, 1.0], source)
    assert found.grades().tolist() == [True, False, True]
    assert [_token_probs_of(row, "").tolist() for row in found.rows] == [t for _, t in values]
    assert [row["question"] for row in found.rows][:2] == [q for q, _ in texts][:2]
    assert [row["answer"] for row in found.rows] == [a for _, a in texts]
    assert repr(found) == "AnswerRows(3 answers)"


@pytest.mark.parametrize(
    ("grades", "wanted"),
    [
        (["True", "FALSE"], [True, False]),
        (["yes", "no"], [True, False]),
        (["1.0", "0.0"], [True, False]),
    ],
)
def test_tables_of_other_origin(tmp_path, grades, wanted):
    path = tmp_path / "judged.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["question", "answer", "confidence", "correct"])
        writer.writerows([["Who?", "me, you", "0.75", grade] for grade in grades])
    found = read_answers(path)
    confidence, source = found.confidences()
    assert confidence.tolist() == [0.75, 0.75]
    assert found.grades().tolist() == wanted
    assert source == Source()
    assert [row["answer"] for row in found.rows] == ["me, you"] * 2


STATED = {"confidence": 0.5, "correct": 1}
LOGGED = {"correct": 1}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[]], "line 1 of .* must be an object"),
        ([{**ROW, "token_probs": []}], "an answer without tokens"),
        ([{**ROW, "token_probs": [[0.5]]}], "must be a list of numbers, got"),
        ([{**ROW, "token_probs": [0.5, 1.5]}], r"of line 1 .* in \[0, 1\], got 1.5"),
        ([ROW, {**ROW, "token_probs": [0.5, None]}], "token_probs of line 2 .* got nan"),
        ([ROW, {**ROW, "token_probs": [-0.1]}], "got -0.1: for log-probabilities write exp"),
        ([{**ROW, "token_probs": "x"}], "token_probs of line 1 .* must be a list of numbers"),
        ([{"question": "q", "correct": 1}], "line 1 of .* has no token_probs"),
        ([ROW, {"correct": 1}], "line 2 of .* has no token_probs"),
        ([{"tokens": [{"logprob": -1}], "correct": 1}], "or logprobs as a service returned them"),
        ([STATED, {"correct": 1}], r"confidence of line 2 .* in \[0, 1\], got None"),
        ([{**STATED, "confidence": 85}], "divide percents by 100"),
        ([{**STATED, "confidence": True}], "got True"),
        ([{**STATED, "confidence": float("nan")}], "got nan"),
        ([{"confidence": 0.5}], "line 1 of .* must say whether the answer is right"),
        ([{"confidence": 0.5, "is_correct": 1}], "is_correct: did you mean is_correct"),
        ([{"confidence": 0.5, "good": 1}], "no correct .* among its keys confidence, good: rename"),
        (
            [{**LOGGED, "logprobs": [{"token": "a"}]}],
            "line 1 .* log-probability of token 1 .* None",
        ),
        ([{**LOGGED, "token_logprobs": [-1.0, 0.5]}], "log-probability of token 2 .* got 0.5"),
        (
            [{**LOGGED, "logprobs": {"steps": 3}}],
            r"has logprobs of an unknown form.*exp\(logprob\)",
        ),
        ([{**LOGGED, "logprobs": None}], "no token_probs among its keys correct, logprobs"),
        ([{**STATED, "correct": 0.5}], "must be true or false, got 0.5"),
        (
            [{**STATED, "source": "judge"}, STATED, {**STATED, "source": "p_true"}],
            "differs between line 1 of .* and line 2",
        ),
        (
            [{**STATED, "source": "judge"}, {**STATED, "source": "p_true"}],
            r"line 2 of .* \(confidence judge, not p_true\): use a file for each source",
        ),
        ([{**STATED, "model": "a"}, {**STATED, "model": "b"}], "model a, not b"),
        ([], "has no answers"),
    ],
)
def test_what_is_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        fit_answers(read_answers(written(tmp_path / "x.jsonl", *rows)))


def test_questions_of_any_kind_are_told_from_rows_without_one():
    asked: list[Any] = [1, None, 0, 0, "1", None]
    rows = [{} if one is None else {"question": one} for one in asked]
    assert AnswerRows.of(rows).groups.tolist() == [0, 1, 2, 2, 3, 4]


def test_no_answers_at_all_are_named():
    for use in (AnswerRows.confidences, AnswerRows.source, fit_answers):
        with pytest.raises(ValueError, match="there are no answers"):
            use(AnswerRows([], []))


def test_a_cell_that_is_too_long_for_csv_is_named(tmp_path):
    write_rows(tmp_path / "long.csv", [{"token_probs": [0.5] * 50_000, "correct": True}])
    with pytest.raises(ValueError, match=r"field larger than field limit .*: write it as \.jsonl"):
        read_answers(tmp_path / "long.csv")


def test_damaged_files_and_other_formats(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n" + json.dumps(ROW) + "\n\n{\n", "utf-8")
    with pytest.raises(ValueError, match=r"line 4 of .* is not valid JSON"):
        read_answers(path)
    path = tmp_path / "x.csv"
    path.write_text("confidence,correct\n0.5,1\n0.5\n")
    with pytest.raises(ValueError, match=r"line 3 of .* as many cells"):
        read_answers(path)
    for use in (read_answers, lambda path: write_rows(path, [ROW])):
        with pytest.raises(ValueError, match=r"must be \.jsonl or \.csv, got the suffix '\.json'"):
            use(tmp_path / "x.json")


def test_sources_compare_what_both_state():
    one = Source("geometric", "chat", "0123", "none")
    one.check(Source())
    one.check(Source("geometric", model="0123"))
    for other in (Source("p_true"), Source(prompt="plain"), Source(model="4"), Source(head="5")):
        with pytest.raises(ValueError, match=f"not {max(other, key=len)}: fit one on answers of"):
            one.check(other)


def test_a_log_in_the_place_of_rows_is_told_how_to_read_it(tmp_path):
    message = {"choices": [{"message": {"content": "Lima"}}]}
    log = written(tmp_path / "log.jsonl", {"response": message, "correct": True})
    with pytest.raises(ValueError, match=r"line 1 .* no token_probs.*calibrant llm answers read"):
        read_answers(log).confidences()
