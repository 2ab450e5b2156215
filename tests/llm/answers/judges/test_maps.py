"""Maps from the scores of a judge to chances."""

import numpy as np
import pytest
from scipy.special import expit

import calibrant as cal
from calibrant.llm.answers.graded import AnswerRows
from calibrant.llm.answers.judges.judged import (
    JudgedAnswers,
    apply_judge,
    cross_validated_judge,
    fit_judge,
    judged_answers,
)


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
    judged = judged_answers(answers, (1, 5))
    fitted = fit_judge(judged, stage="isotonic")
    cal.save(fitted, tmp_path / "map")
    mapped = apply_judge(cal.load(tmp_path / "map"), answers, (1, 5))
    chances = np.array([row["calibrated"] for row in mapped])
    np.testing.assert_allclose(chances, expit(scores - 3.5), atol=0.09)
    assert [row["judge"] for row in mapped] == scores.tolist()
    figures = cross_validated_judge(judged, stage="isotonic")
    assert figures["after"].n == 1500
    assert figures["after"]["nll"].value < figures["before"]["nll"].value
    with pytest.raises(ValueError, match="prometheus, 1 to 5, not prometheus, 1 to 10"):
        apply_judge(fitted, answers, (1, 10))


def test_grades_are_predicted_in_the_mean(rng):
    shares = rng.random(3000)
    grades = np.clip(0.2 + 0.6 * shares + 0.1 * rng.normal(size=3000), 0, 1)
    judged = JudgedAnswers(shares, grades)
    found = fit_judge(judged, stage="isotonic").predict(np.array([0.1, 0.5, 0.9]))
    np.testing.assert_allclose(found, [0.26, 0.5, 0.74], atol=0.05)
    assert cross_validated_judge(judged) == {}


@pytest.mark.parametrize(
    ("labels", "message"), [([1.0, 1.0], "all 2 are 1"), ([np.nan] * 2, "there are none")]
)
def test_labels_must_differ(labels, message):
    with pytest.raises(ValueError, match=f"must differ to calibrate a judge, and {message}"):
        fit_judge(JudgedAnswers(np.array([0.0, 1.0]), np.array(labels)))
