"""Stated confidences: every text has one reading or none."""

import pytest

from calibrant.llm.answers.stated import LEVELS, LIKELIHOODS, stated_confidence


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("90%", 0.9),
        ("I'm 90 % sure.", 0.9),
        ("about 72.5 percent", 0.725),
        ("\uff19\uff10\uff05", 0.9),  # full-width digits and sign
        ("90,5 %", 0.905),
        ("0.85", 0.85),
        (".85", 0.85),
        ("1.0", 1.0),
        ("0", 0.0),
        (0.3, 0.3),
        (1, 1.0),
        ("9/10", 0.9),
        ("9 out of 10", 0.9),
        ("\u00bd", 0.5),
        ("50/50", 0.5),
        ("Answer: 42\n**Confidence:** 85%", 0.85),
        ("Confidence (0-100): 85%", 0.85),
        ("my confidence level is very high", 0.9),
        ("The answer is 42. I am 90% sure.", 0.9),
        ("Probability: 0.7 (70%)", 0.7),
        ("Confidence: 0.9\nIn short, confidence: 90 %", 0.9),
        ('{"answer": "Lima", "confidence": 0.8}', 0.8),
        ('```json\n{"confidence": "95%"}\n```', 0.95),
        ({"confidence_score": 0.4}, 0.4),
        ("Very likely", 0.875),
        ("almost certainly not", 0.03),
        ("I'm not very confident", 0.3),
        ("medium confidence", 0.5),
        ("high", 0.7),
        ("x" * 10_000 + " confidence: 0.6", 0.6),
    ],
)
def test_what_is_read(said, value):
    found = stated_confidence(said)
    assert found.value == pytest.approx(value, abs=1e-12)
    assert not found.reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, "nothing"),
        ("  ", "nothing"),
        ("I don't know", "declined"),
        ("I'm sorry, I cannot answer that.", "declined"),
        ("N/A", "declined"),
        ("I don't know, maybe 20%", "declined"),
        ("at least 90%", "bound"),
        ("> 0.9", "bound"),
        ("80-90%", "bound"),
        ("between 80% and 90%", "bound"),
        ("90% or 95%", "bound"),
        ("not 90% sure", "bound"),
        ("isn't likely", "bound"),
        ("not unlikely", "bound"),
        ("less likely", "bound"),
        ("7 on a scale of 1 to 10", "bound"),
        ("5% chance of being wrong", "chance to be wrong"),
        ("uncertainty: 10%", "chance to be wrong"),
        ("Confidence: 0.9\nConfidence: 0.8", "several"),
        ("70% (0.8)", "several"),
        ("likely, perhaps very likely", "the words very likely and likely"),
        ('{"confidence": 0.8, "probability": 0.7}', "2 fields"),
        ('{"answer": "Lima"}', "0 fields"),
        ({"confidence": {"value": 0.8}}, "an object"),
        ("90", "scale"),
        (90, "scale"),
        (float("nan"), "scale"),
        (float("inf"), "scale"),
        (10**400, "scale"),
        ("150%", "above 1"),
        ("24/7", "above 1"),
        ("3/0", "above 1"),
        ("-0.5", "no number"),
        ("1,000", "no number"),
        ("10/12/2020", "no number"),
        ("v1.0", "no number"),
        ("the low temperature", "no number or known word"),
        ("it is possible", "no number or known word"),
        (True, "bool"),
        ([0.9], "list"),
    ],
)
def test_what_is_not_read_has_a_reason(said, reason):
    found = stated_confidence(said)
    assert found.value is None
    assert reason in found.reason


def test_numbers_without_a_sign_are_on_the_stated_scale():
    assert stated_confidence("85", scale=100).value == 0.85
    assert stated_confidence(7, scale=10).value == 0.7
    assert stated_confidence("85 %", scale=10).value == 0.85
    assert stated_confidence("Confidence: 101", scale=100).value is None
    with pytest.raises(ValueError, match="largest confidence"):
        stated_confidence("0.9", scale=0)


def test_every_word_of_the_tables_is_read():
    for phrase, value in {**LIKELIHOODS, **LEVELS}.items():
        assert stated_confidence(f"{phrase.capitalize()}.").value == value, phrase


@pytest.mark.parametrize("text", ["confidence (", "1/", "not ", "{", "likely ", "9"])
def test_hostile_texts_are_read_at_once(text):
    assert stated_confidence(text * 200_000).value in (None, 0.675)
