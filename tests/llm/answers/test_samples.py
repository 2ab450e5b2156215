"""Agreement of samples, against definitions written out."""

import math

import numpy as np
import pytest

from calibrant.llm.answers.signals import (
    _plain_text,
    _same_text,
    agreement,
    by_embedding,
    by_entailment,
    clusters,
    semantic_entropy,
)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("The Beatles.", "beatles", True),
        ("1,000", "1000", True),
        ("Lima, Peru", "lima peru", True),
        ("\uff2c\uff49\uff4d\uff41", "Lima", True),  # full-width letters
        ("3.5", "35", False),
        ("-5", "5", False),
        ("\u22125", "-5", True),  # the minus sign of typesetters
        ("C++", "C", False),
        ("C#", "C", False),
        ("A", "B", False),
        ("a", "the", False),
        ("", "?", False),
        ("\u6771\u4eac", "\u4eac\u90fd", False),
    ],
)
def test_texts_are_equal_up_to_their_writing(a, b, equal):
    assert _same_text(a, b) == _same_text(b, a) == equal
    assert _plain_text(_plain_text(a)) == _plain_text(a)


def test_agreement_is_a_share_of_the_samples():
    samples = ["Lima", "lima.", "Cusco", "LIMA"]
    assert agreement("Lima", samples) == 0.75
    assert agreement("Lima", samples, str.__eq__) == 0.25
    assert agreement("Rome", samples) == 0
    with pytest.raises(ValueError, match="one text or more"):
        agreement("Lima", [])
    with pytest.raises(TypeError, match="list of texts"):
        agreement("Lima", "Lima")
    with pytest.raises(TypeError, match="list of texts"):
        agreement("Lima", ["Lima", None])  # type: ignore[list-item]


def test_a_text_joins_the_first_cluster_whose_first_text_means_the_same():
    def near(a, b):
        return abs(int(a) - int(b)) <= 1

    # 2 is near 1, the first of its cluster; 3 is near 2 but not near 1
    assert clusters(["1", "2", "3", "1"], near) == [[0, 1, 3], [2]]


def test_entailment_must_hold_both_ways():
    same = by_entailment(lambda a, b: set(b.split()) <= set(a.split()))
    assert clusters(["Lima Peru", "Lima", "Peru Lima"], same) == [[0, 2], [1]]


def test_embeddings_are_compared_by_their_cosine():
    vectors = {"a": [1.0, 0.0], "b": [3.0, 0.1], "c": [0.0, 2.0], "d": [0.0, 0.0]}
    calls = []

    def embed(texts):
        calls.extend(texts)
        return np.array([vectors[text] for text in texts])

    same = by_embedding(embed)
    assert clusters(["a", "b", "c", "a"], same) == [[0, 1, 3], [2]]
    assert sorted(calls) == ["a", "b", "c"]  # each text once
    assert by_embedding(embed, min_cosine=1)("b", "b")
    with pytest.raises(ValueError, match="not 0"):
        same("a", "d")
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        by_embedding(embed, min_cosine=90)


def test_semantic_entropy_is_that_of_the_meanings():
    grouped = [[0, 3, 4], [1], [2, 5]]
    shares = [3 / 6, 1 / 6, 2 / 6]
    wanted = -sum(p * math.log(p) for p in shares)
    assert semantic_entropy(grouped) == pytest.approx(wanted)
    assert semantic_entropy(grouped, normalised=True) == pytest.approx(wanted / math.log(6))


def test_one_meaning_has_no_entropy_and_all_meanings_the_largest():
    assert str(semantic_entropy([[0, 1, 2]])) == "0.0"
    assert semantic_entropy([[0], [1], [2]], normalised=True) == pytest.approx(1)


@pytest.mark.parametrize("grouped", [[[0], [0]], [[0], []]])
def test_what_is_refused(grouped):
    with pytest.raises(ValueError, match="each text once"):
        semantic_entropy(grouped)


def test_one_text_has_no_normalised_entropy():
    with pytest.raises(ValueError, match="two texts"):
        semantic_entropy([[0]], normalised=True)
