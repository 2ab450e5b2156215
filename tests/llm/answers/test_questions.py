"""Question sets, prompts and grading."""

import math
import re
import string
from collections import Counter

import pytest

from calibrant.llm.answers.questions import (
    Question,
    _choice_prompt,
    _contains_reference,
    _normalised,
    _subset,
    exact_match,
    read_mmlu,
    read_questions,
    read_truthfulqa,
    short_prompt,
)


def squad_normalise(text):
    """The steps of the official script of SQuAD 1.1, in its order."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@pytest.mark.parametrize(
    ("answer", "references", "right"),
    [
        ("The Beatles", ["beatles"], True),
        (" An apple a day.\nQuestion: next?", ["apple day"], True),
        ("\n\n42 ", ["forty-two", "42"], True),
        ("U.S.A.", ["USA"], True),
        ("theatre", ["atre"], False),
        ("Lima, Peru", ["Lima"], False),
        ("", [""], False),
        ("the", ["a"], False),
        ("42", [], False),
    ],
)
def test_exact_match(answer, references, right):
    assert exact_match(answer, references) is right
    slow = squad_normalise(answer.strip().split("\n")[0])
    assert _normalised(answer.strip().split("\n")[0]) == slow
    assert right == (slow != "" and slow in map(squad_normalise, references))


@pytest.mark.parametrize("match", [exact_match, _contains_reference])
def test_one_reference_must_be_a_list(match):
    with pytest.raises(TypeError, match=r"pass \[reference\]"):
        match("a", "abc")


@pytest.mark.parametrize(
    ("answer", "references", "right"),
    [
        ("The capital of Peru is Lima.", ["Cusco", "lima"], True),
        ("It is\nthe U.S.A!", ["USA"], True),
        ("Limassol", ["Lima"], False),  # whole words only
        ("Lima", ["The capital Lima"], False),
        ("anything", ["the", ""], False),  # nothing is left of these
        ("", ["Lima"], False),
    ],
)
def test_references_in_sentences(answer, references, right):
    assert _contains_reference(answer, references) is right


def test_mmlu_files(tmp_path):
    head = "question,choice0,choice1,choice2,choice3,answer\n"
    (tmp_path / "high_school_maths_test.csv").write_text(f'{head}"1, 2 or 3?",a,b,c,d,2\n')
    (tmp_path / "high_school_maths_dev.csv").write_text(f"{head}dev?,a,b,c,d,0\n")
    (found,) = read_mmlu(tmp_path)
    assert found == Question("1, 2 or 3?", ("c",), tuple("abcd"), 2, "high_school_maths")
    assert read_mmlu(tmp_path, "dev")[0].text == "dev?"
    with pytest.raises(FileNotFoundError, match=r"SUBJECT_val\.csv"):
        read_mmlu(tmp_path, "val")
    for text, message in (
        (f"{head}q,a,b,c,d,B\n", "row 1 has the answer 'B'"),
        (f"{head}q,a,b\n", "row 1 has fewer columns"),
        ("q,a,b,c,d,A\n", "has no column answer, choice0"),
    ):
        (tmp_path / "bad_test.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_mmlu(tmp_path)


def test_text_and_truthfulqa_files(tmp_path):
    path = tmp_path / "qa.txt"
    path.write_text("who?\nme; you\n\nwhere?\nhere\n\nwho?\nhe\n", "utf-8")  # no last empty line
    assert read_questions(path) == [
        Question("who?", ("me; you", "he")),
        Question("where?", ("here",)),
    ]
    path.write_text("what?\nit\n\n \nwho?\nme\nyou\n\n", "utf-8")
    with pytest.raises(
        ValueError, match=r"line 5 of .*\.txt must have .*, got \['who\?', 'me', 'you'\]"
    ):
        read_questions(path)
    path = tmp_path / "TruthfulQA.csv"
    path.write_text(
        "\ufeffType,Category,Question,Best Answer,Correct Answers,Incorrect Answers\n"
        'x,Law,Why?,Because,"So; Because; ","Not, so; the not so.; because.; No"\n',
        "utf-8",
    )
    # an incorrect answer that is the best one, or another, in other letters is no choice
    choices = ("Because", "Not, so", "No")
    assert read_truthfulqa(path) == [Question("Why?", ("Because", "So"), choices, 0, "Law")]


def test_prompts_are_of_the_usual_form():
    shot = Question("Red?", ("no",), ("yes", "no"), 1, "colour_theory")
    asked = Question("Blue?", ("yes",), (" yes", "no"), 0, "colour_theory")
    assert _choice_prompt(asked, [shot]) == (
        "The following are multiple choice questions (with answers) about colour theory.\n\n"
        "Question: Red?\nA. yes\nB. no\nAnswer: B\n\n"
        "Question: Blue?\nA. yes\nB. no\nAnswer:"
    )
    assert short_prompt(asked, [shot]) == ("Question: Red?\nAnswer: no\n\nQuestion: Blue?\nAnswer:")
    with pytest.raises(ValueError, match="use short_prompt"):
        _choice_prompt(Question("Open?", ("yes",)))


def test_subsets_are_drawn_by_seed():
    questions = [Question(str(i), ()) for i in range(40)]
    found = _subset(questions, 10, seed=3)
    assert found == _subset(questions, 10, seed=3) != _subset(questions, 10, seed=4)
    assert [int(q.text) for q in found] == sorted({int(q.text) for q in found})
    assert _subset(questions, 99) == questions
    counts = Counter(q.text for seed in range(400) for q in _subset(questions, 10, seed=seed))
    assert len(counts) == 40
    assert max(counts.values()) < 100 + 5 * math.sqrt(75)
    with pytest.raises(ValueError, match="at least 1"):
        _subset(questions, 0)


def test_a_file_without_questions(tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.txt has no question"):
        read_questions(tmp_path / "empty.txt")
