"""Files of judged answers, and maps of their scores."""

import json
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

import calibrant as cal
from calibrant.llm import read_judged
from calibrant.llm.answers.calibrator import cross_validated_answers, fit_answers
from calibrant.llm.answers.judged import graded_by_people, judged_source
from calibrant.llm.answers.rows import AnswerRows, Source


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        path = tmp_path / "judged.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    return write


def test_all_keys_are_read(write):
    judged = read_judged(
        write(
            {
                "judge": 7,
                "human": "yes",
                "label_probability": 0.5,
                "stratum": "x",
                "answer": "Lima",
            },
            {"judge": "3", "human": None, "system": "b", "question": "q", "answer": ""},
            {"judge": 10, "human": 0.25, "label_probability": "0.1", "system": "a"},
        ),
        scale=(1, 10),
    )
    np.testing.assert_array_equal(judged.judge, [7, 3, 10])
    np.testing.assert_array_equal(judged.human, [1, np.nan, 0.25])
    np.testing.assert_allclose(judged.shares, [6 / 9, 2 / 9, 1])
    np.testing.assert_array_equal(judged.probability, [0.5, np.nan, 0.1])
    texts: Any = judged  # none of the optional columns is None
    assert texts.strata.tolist() == ["x", "", ""]
    assert texts.systems.tolist() == ["", "b", "a"]
    assert texts.lengths.tolist() == [4, 1, 1]
    assert len(set(texts.questions.tolist())) == 3  # rows without one stand for themselves
    assert judged_source(AnswerRows.of([{"judge": 7}]), judged.scale) == Source("judge, 1 to 10")
    assert judged.part(judged.known).judge.tolist() == [7, 10]


def test_votes_in_words_need_no_scale(write):
    judged = read_judged(write({"judge": "right", "human": 1}, {"judge": False}))
    assert judged.judge.tolist() == [1, 0]
    assert judged.scale == (0, 1)
    assert judged.strata is judged.questions is judged.systems is judged.probability is None


@pytest.mark.parametrize(
    ("row", "scale", "message"),
    [
        ({"judge": 7}, None, "judge of line 1 .* from 0 to 1, got 7: state another scale, as 1,10"),
        ({"judge": 11}, (1, 10), "from 1 to 10, got 11: correct the scale or the score"),
        ({"judge": "yes"}, (1, 10), "from 1 to 10, got 'yes'"),
        ({"judge": True}, (1, 10), "from 1 to 10, got True"),
        ({"judge": float("nan")}, None, "from 0 to 1, got nan"),
        ({"judge": 1, "human": 2}, None, "human of line 1 .* a grade from 0 to 1, got 2"),
        ({"judge": 1, "human": "maybe"}, None, "got 'maybe'"),
        ({"human": 1}, None, "line 1 .* has no judge"),
        ({"judge": 1, "human": 1, "label_probability": 0}, None, "label_probability of line 1"),
        ({"judge": 1, "length": 0}, None, "length of line 1 .* must be a number above 0"),
        ({"judge": 1}, (3, 3), "scale must be the lowest and the highest score, got 3,3"),
    ],
)
def test_bad_rows_are_refused(write, row, scale, message):
    with pytest.raises(ValueError, match=message):
        read_judged(write(row), scale=scale)


def test_several_judges_are_refused(write):
    with pytest.raises(ValueError, match="the source of the confidence differs"):
        read_judged(write({"judge": 1, "source": "one"}, {"judge": 1, "source": "two"}))


def rows_of(scores, labels):
    rows = [{"judge": s, "source": "prometheus"} for s in scores]
    for row, label in zip(rows, labels, strict=True):
        row |= {} if np.isnan(label) else {"human": label}
    return AnswerRows([f"line {n}" for n in range(len(rows))], rows)


def drawn(rng, n=2000):
    """Scores from 1 to 5, and labels whose log-odds rise by 1 with each."""
    scores = rng.integers(1, 6, size=n)
    return scores, (rng.random(n) < expit(scores - 3.5)).astype(float)


def test_the_map_is_the_truth_that_labels_were_drawn_from(rng, tmp_path):
    scores, labels = drawn(rng)
    labels[1500:] = np.nan
    answers = rows_of(scores.tolist(), labels)
    graded = graded_by_people(answers, scale=(1, 5))
    cal.save(fit_answers(graded, stage="isotonic"), tmp_path / "map")
    mapped = cal.load(tmp_path / "map").apply(answers)
    chances = np.array([row["calibrated"] for row in mapped])
    np.testing.assert_allclose(chances, expit(scores - 3.5), atol=0.09)
    assert [row["judge"] for row in mapped] == scores.tolist()
    figures = cross_validated_answers(graded, stage="isotonic")
    assert figures["after"].n == 1500
    assert figures["after"]["nll"].value < figures["before"]["nll"].value


def test_maps_of_votes_take_votes_in_words():
    votes, labels = ["yes", "no", "no", "yes"] * 10, [1.0, 0.0, 1.0, 1.0] * 10
    fitted = fit_answers(graded_by_people(rows_of(votes, labels)), stage="isotonic")
    assert [row["calibrated"] for row in fitted.apply(rows_of(["Yes", 0], [np.nan] * 2))] == [
        pytest.approx(41 / 42),  # all 20 of 40 votes were right: (40 + 1) / (40 + 2)
        pytest.approx(0.5),
    ]


def test_grades_are_predicted_in_the_mean(rng):
    shares = rng.random(3000)
    grades = np.clip(0.2 + 0.6 * shares + 0.1 * rng.normal(size=3000), 0, 1)
    graded = graded_by_people(rows_of(shares.tolist(), grades))
    found = fit_answers(graded, stage="isotonic").predict(np.array([0.1, 0.5, 0.9]))
    np.testing.assert_allclose(found, [0.26, 0.5, 0.74], atol=0.05)
    # ten answers for each grade count as one document
    assert cross_validated_answers(graded)["after"].documents == 3000


def test_a_map_needs_labels():
    with pytest.raises(ValueError, match="none of 2 answers has a human label: label some"):
        graded_by_people(rows_of([0.0, 1.0], np.full(2, np.nan)))
