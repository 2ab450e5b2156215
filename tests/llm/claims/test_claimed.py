"""Answers with claims: what is read, and what is refused."""

import json

import numpy as np
import pytest

from calibrant.llm.answers.graded import AnswerRows, read_rows, write_rows
from calibrant.llm.claims.claimed import claim_rows, claimed_answers, read_claims

ROW = {
    "answer": "Lima. No, Lima? Quito.",
    "token_texts": [" Lima", ".", " No", ",", " Lima", "?", " Quito", "."],
    "token_probs": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2],
}


def claimed(**more):
    (answer,) = claimed_answers(AnswerRows(["line 1"], [{**ROW, **more}])).answers
    return answer


def test_sentences_are_claims_by_default():
    answer = claimed()
    assert [answer.text[a:b] for a, b in answer.spans] == ["Lima.", "No, Lima?", "Quito."]
    wanted = [[0.9, 0.8], [0.7, 0.6, 0.5, 0.4], [0.3, 0.2]]
    assert [probs.tolist() for probs in answer.tokens()] == wanted
    assert answer.correct == [None] * 3


def test_spans_count_in_the_answer_and_texts_go_on_after_the_last():
    claims = [{"text": "Lima"}, {"text": "Lima", "correct": "no"}, {"span": [16, 21]}]
    answer = claimed(claims=claims)
    assert [answer.text[a:b] for a, b in answer.spans] == ["Lima", "Lima", "Quito"]
    assert [probs.tolist() for probs in answer.tokens()] == [[0.9], [0.5], [0.3]]
    assert answer.correct == [None, False, None]
    assert claimed(claims=[{"text": "Quito"}, {"text": "No"}]).spans[1] == (7, 9)


def test_all_claims_in_turn(tmp_path):
    rows = [{**ROW, "claims": [{"text": "Lima", "correct": True}, {"text": "No"}]}, ROW]
    write_rows(tmp_path / "claims.csv", rows)  # lists are JSON in cells
    claims = read_claims(tmp_path / "claims.csv")
    np.testing.assert_allclose(claims.confidence("minimum"), [0.9, 0.7, 0.8, 0.4, 0.2])
    assert claims.numbers().tolist() == [0, 0, 1, 1, 1]
    assert claims.graded().tolist() == [True, False, False, False, False]
    assert claims.correct().tolist() == [True]


def test_claims_are_written_with_text_span_and_values():
    rows = [{**ROW, "claims": [{"text": "Quito", "correct": True, "by": "me"}]}, ROW]
    answers = AnswerRows(["line 1", "line 2"], rows)
    first, second = claim_rows(answers, {"chance": np.array([0.1, 0.2, 0.3, 0.4])})
    wanted = {"text": "Quito", "span": [16, 21], "correct": True, "by": "me", "chance": 0.1}
    assert first["claims"] == [wanted]
    assert [claim["chance"] for claim in second["claims"]] == [0.2, 0.3, 0.4]
    again = claimed_answers(AnswerRows(["line 1", "line 2"], [first, second]))
    assert [answer.spans for answer in again.answers] == [
        answer.spans for answer in claimed_answers(answers).answers
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"claims": [{"text": "Cusco"}]},
            "'Cusco' of line 1 .* word for word: give its span",
        ),
        ({"claims": [{"span": [3, 99]}]}, "a span within the answer, got"),
        ({"claims": [{"span": [3, 3]}]}, "a span within the answer, got"),
        ({"claims": ["Lima"]}, "must have a text, or a span within the answer, got 'Lima'"),
        ({"claims": "Lima"}, "claims of line 1 .* must be a list, got 'Lima'"),
        ({"claims": [{"span": [5, 6]}]}, "claim ' ' of line 1 .* has no visible character"),
        ({"claims": [{"text": "Lima", "correct": "maybe"}]}, "true or false, got 'maybe'"),
        ({"answer": "Quito!"}, "answer of line 1 .* does not stand in the text of its token_texts"),
        ({"token_probs": [0.5]}, "a probability for each of 8 token_texts, got 1"),
        ({"token_texts": [1] * 8}, "token_texts of line 1 .* must be texts"),
        ({"token_texts": None}, "token_texts of line 1 .* must be a list"),
    ],
)
def test_bad_rows_are_refused(tmp_path, more, message):
    (tmp_path / "claims.jsonl").write_text(json.dumps({**ROW, **more}))
    with pytest.raises(ValueError, match=message):
        read_claims(tmp_path / "claims.jsonl")


def test_tokens_are_needed(tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"answer": "Lima", "confidence": 0.5}')
    assert read_rows(tmp_path / "answers.jsonl").rows
    with pytest.raises(ValueError, match="has no token_texts: claims need the tokens"):
        read_claims(tmp_path / "answers.jsonl")
