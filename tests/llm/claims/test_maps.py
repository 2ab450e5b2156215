"""Chances of claims: fitted, cross-validated by answers, applied and drawn."""

import numpy as np
import pytest

import calibrant as cal
from calibrant.llm.answers.calibrator import AnswerCalibrator
from calibrant.llm.answers.graded import AnswerRows
from calibrant.llm.claims.claimed import claimed_answers
from calibrant.llm.claims.maps import (
    apply_claims,
    cross_validated_claims,
    fit_claims,
    shaded_claims,
)

TEXTS = ["It", " is", " so", ".", " <b>", " it", " is", " not", "."]
SPANS = [(0, 9), (10, 24)]


def rows_of(count, seed=0, **more):
    """Answers of two claims; right with the cube of the confidence of the claim, on average.

    Some answers are right or wrong as a whole, so that their claims go together.
    """
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        sure, luck = rng.beta(4, 1, size=2), rng.random()
        probs = np.repeat(sure, [4, 5])
        claims = [
            {"span": list(span), "correct": bool(luck < s**3)}
            for span, s in zip(SPANS, sure, strict=True)
        ]
        rows.append({"token_texts": TEXTS, "token_probs": probs.tolist(), "claims": claims, **more})
    return AnswerRows([f"line {n}" for n in range(count)], rows)


@pytest.fixture(scope="module")
def fitted():
    return fit_claims(claimed_answers(rows_of(1500, source="geometric", model="m")))


def test_chances_are_those_that_claims_were_drawn_with(fitted, tmp_path):
    np.testing.assert_allclose(fitted.predict([0.5, 0.7, 0.9]), [0.125, 0.343, 0.729], atol=0.05)
    assert fitted.source_.confidence == "claims, geometric"
    cal.save(fitted, tmp_path / "map")
    new = rows_of(3, seed=1, model="m")
    done = apply_claims(cal.load(tmp_path / "map"), new)
    sure = [row["token_probs"][at] for row in new.rows for at in (0, 4)]
    found = [claim["calibrated"] for row in done for claim in row["claims"]]
    np.testing.assert_allclose(found, fitted.predict(np.array(sure)))
    assert done[0]["claims"][1]["text"] == "<b> it is not."


def test_maps_of_other_sources_are_refused(fitted):
    with pytest.raises(ValueError, match="fitted on model m, not n"):
        apply_claims(fitted, rows_of(2, model="n"))
    whole = AnswerCalibrator().fit([[0.5], [0.6], [0.9], [0.8]], [0, 1, 1, 0])
    with pytest.raises(ValueError, match="the map is not one of claims"):
        apply_claims(whole, rows_of(2))


def test_claims_of_an_answer_are_in_one_fold(monkeypatch):
    claims, fits = claimed_answers(rows_of(60)), []
    confidence = claims.confidence()

    def spy(self, values, correct, **_):
        fits.append({*np.searchsorted(np.sort(confidence), values)})
        return plain(self, values, correct)

    plain = AnswerCalibrator.fit
    monkeypatch.setattr(AnswerCalibrator, "fit", spy)
    found = cross_validated_claims(claims, stage="sigmoid")
    assert list(found) == ["before", "after"]
    order = np.searchsorted(np.sort(confidence), confidence).reshape(60, 2)
    for used in fits:
        assert all((a in used) == (b in used) for a, b in order)
    assert len(fits) == 5


def test_intervals_count_answers():
    claims = claimed_answers(rows_of(300))
    found = cross_validated_claims(claims)
    assert found["before"].documents == 300
    assert found["before"].describe().startswith("600 claims of 300 answers; confidence that the")
    assert found["after"]["ece"].value < found["before"]["ece"].value / 2
    assert found["after"]["nll"].value < found["before"]["nll"].value
    width = found["before"]["accuracy"].high - found["before"]["accuracy"].low
    share = found["before"]["accuracy"].value
    alone = 2 * 1.645 * np.sqrt(share * (1 - share) / 600)
    assert width > 1.1 * alone  # claims of an answer are right together
    assert list(cross_validated_claims(claimed_answers(rows_of(9)))) == ["before"]


def test_ungraded_claims_are_left_out_and_grades_are_needed():
    answers = rows_of(40)
    for row in answers.rows[:10]:
        row["claims"][0].pop("correct")
    assert cross_validated_claims(claimed_answers(answers))["before"].n == 70
    plain = AnswerRows(
        answers.places, [{**row, "claims": [{"span": [0, 9]}]} for row in answers.rows]
    )
    with pytest.raises(ValueError, match="no claim has a grade"):
        fit_claims(claimed_answers(plain))


def test_what_several_claims_cover_has_the_lowest_chance(fitted):
    answers = rows_of(1)
    answers.rows[0]["claims"] = [{"span": [0, 24]}, {"span": [10, 13]}]
    (shaded,) = shaded_claims(fitted, claimed_answers(answers))
    assert shaded.tokens == ["It is so. ", "<b>", " it is not."]
    both = fitted.predict(claimed_answers(answers).confidence())
    np.testing.assert_allclose(shaded.probs, [both[0], both.min(), both[0]])
    html = shaded._repr_html_()
    assert "Probability of each claim" in html
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
