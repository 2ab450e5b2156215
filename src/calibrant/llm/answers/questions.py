"""Question sets: reading them, prompts for them, and grading of answers.

Short answers are graded by exact match after the normalisation of SQuAD, which is strict: a right
answer in other words counts as wrong. Longer ones are right if they contain a reference.
"""

from __future__ import annotations

import csv
import os
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibrant._core.checks import check_whole
from calibrant.llm.heads.reading import _paragraphs

LETTERS = ("A", "B", "C", "D")
"""Names of the options of multiple choice."""


@dataclass(frozen=True)
class Question:
    """A question with its right answers.

    Attributes
    ----------
    text : str
    references : tuple of str
        Right answers, any of which is accepted; of multiple choice, the text of the right one.
    choices : tuple of str
        Empty for open questions.
    answer : int
        Number of the right choice; -1 for open questions.
    subject : str
    """

    text: str
    references: tuple[str, ...]
    choices: tuple[str, ...] = ()
    answer: int = -1
    subject: str = ""


def read_mmlu(folder: str | os.PathLike[str], split: str = "test") -> list[Question]:
    """Read questions of MMLU from files ``SUBJECT_SPLIT.csv``; ``dev`` has solved examples.

    Each has the columns question, choice0 to choice3 and answer, a number from 0 to 3.
    """
    files = sorted(Path(folder).glob(f"*_{split}.csv"))
    if not files:
        raise FileNotFoundError(f"there are no files SUBJECT_{split}.csv in {folder}")
    names, questions = ("choice0", "choice1", "choice2", "choice3"), []
    columns = {"question", *names, "answer"}
    rows = ((file, *row) for file in files for row in _csv_rows(file, columns))
    for file, number, row in rows:
        if row["answer"] not in ("0", "1", "2", "3"):
            raise ValueError(f"{file}: row {number} has the answer {row['answer']!r}, not 0 to 3")
        choices, answer = tuple(row[name] for name in names), int(row["answer"])
        subject = file.stem[: -len(split) - 1]
        questions.append(Question(row["question"], (choices[answer],), choices, answer, subject))
    return questions


def read_truthfulqa(file: str | os.PathLike[str]) -> list[Question]:
    """Read questions of TruthfulQA.csv, with all correct answers and the choices of MC1.

    The choices are the best answer, which comes first, and the incorrect answers that differ from
    it. Answers are separated by semicolons.
    """
    names = {"Question", "Best Answer", "Correct Answers", "Incorrect Answers", "Category"}
    questions = []
    for _, row in _csv_rows(Path(file), names):
        best = row["Best Answer"].strip()
        correct, incorrect = (
            [part.strip() for part in row[f"{kind} Answers"].split(";") if part.strip()]
            for kind in ("Correct", "Incorrect")
        )
        references = tuple(dict.fromkeys([best, *correct]))
        distinct: dict[str, str] = {}
        for text in (best, *incorrect):
            distinct.setdefault(_normalised(text), text)
        choices = tuple(distinct.values())
        questions.append(Question(row["Question"], references, choices, 0, row["Category"]))
    return questions


def read_questions(file: str | os.PathLike[str]) -> list[Question]:
    """Read open questions from a text file: question, answer, empty line.

    Answers to the same question become references of one question, in the order of the file.
    """
    path, references = Path(file), dict[str, list[str]]()
    for place, paragraph in _paragraphs(path):
        lines = [line.strip() for line in paragraph.split("\n")]
        if len(lines) != 2:
            raise ValueError(
                f"{place} must have a question, an answer and an empty line, got {lines!r:.80}"
            )
        references.setdefault(lines[0], []).append(lines[1])
    if not references:
        raise ValueError(f"{path} has no question: it needs a question, an answer, an empty line")
    return [Question(text, tuple(dict.fromkeys(right))) for text, right in references.items()]


def _csv_rows(file: Path, columns: set[str]) -> Iterator[tuple[int, dict[str, str]]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        missing = columns - set(reader.fieldnames or ())
        if missing:
            names = ", ".join(sorted(missing))
            raise ValueError(f"{file} has no column {names}; it has {reader.fieldnames}")
        for number, row in enumerate(reader, start=1):
            if any(row[name] is None for name in columns):
                raise ValueError(f"{file}: row {number} has fewer columns than the first line")
            yield number, row


def _first_of_each(questions: Iterable[Question], count: int) -> list[Question]:
    by_subject: dict[str, list[Question]] = {}
    for one in questions:
        by_subject.setdefault(one.subject, []).append(one)
    return [one for group in by_subject.values() for one in group[:count]]


def _subset(questions: Sequence[Question], n: int, *, seed: int = 0) -> list[Question]:
    """Draw ``n`` questions without replacement, in the order of the file; or all of fewer."""
    check_whole("n", n)
    count = min(n, len(questions))
    chosen = np.random.default_rng(seed).choice(len(questions), count, replace=False)
    return [questions[i] for i in np.sort(chosen)]


def _choice_prompt(question: Question, shots: Sequence[Question] = ()) -> str:
    """Make a prompt of the usual form for MMLU, after which a space and the letter follow.

    ``shots`` are solved examples, of which those with the same subject are shown, or all if none
    has it.
    """
    own = [one for one in shots if one.subject == question.subject] or shots
    solved = [f"{_lettered(one)} {LETTERS[one.answer]}" for one in own]
    start = ""
    if question.subject:
        topic = question.subject.replace("_", " ")
        start = f"The following are multiple choice questions (with answers) about {topic}.\n\n"
    return start + "\n\n".join([*solved, _lettered(question)])


def _lettered(question: Question) -> str:
    if not 2 <= len(question.choices) <= len(LETTERS):
        raise ValueError(
            f"question {question.text[:40]!r} must have 2 to {len(LETTERS)} choices, got "
            f"{len(question.choices)}: use short_prompt for open questions"
        )
    named = zip(LETTERS, question.choices, strict=False)
    lines = [f"{letter}. {choice.strip()}" for letter, choice in named]
    return "\n".join([f"Question: {question.text.strip()}", *lines, "Answer:"])


def short_prompt(question: Question, shots: Sequence[Question] = ()) -> str:
    """Make a prompt for a short open answer.

    >>> print(short_prompt(Question("Capital of Peru?", ("Lima",)), [Question("1 + 1?", ("2",))]))
    Question: 1 + 1?
    Answer: 2
    <BLANKLINE>
    Question: Capital of Peru?
    Answer:
    """
    solved = [f"Question: {one.text}\nAnswer: {one.references[0]}" for one in shots]
    return "\n\n".join([*solved, f"Question: {question.text}\nAnswer:"])


def verdict_prompt(question: Question, answer: str) -> str:
    """Make the second prompt of P(True), after Kadavath et al. (2022).

    >>> print(verdict_prompt(Question("Capital of Peru?", ()), "Lima"))
    Question: Capital of Peru?
    Proposed answer: Lima
    Is the proposed answer true or false?
    Answer:
    """
    return (
        f"Question: {question.text}\nProposed answer: {answer}\n"
        "Is the proposed answer true or false?\nAnswer:"
    )


def _normalised(text: str) -> str:
    """Normalise a text as SQuAD does: lower case, no punctuation, no articles, single spaces."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(answer: str, references: Iterable[str]) -> bool:
    """Return True if the first line of an answer equals any reference after normalisation.

    >>> exact_match("the Beatles." + chr(10) + "Q: ...", ["Beatles", "The Fab Four"])
    True
    """
    return _normalised(answer.strip().split("\n", 1)[0]) in _plain_references(references)


def _contains_reference(answer: str, references: Iterable[str]) -> bool:
    """Return True if an answer contains any reference after normalisation, as whole words.

    It is for answers in sentences. What surrounds the reference is not looked at, so that "not
    Lima" counts as right.
    """
    text = f" {_normalised(answer)} "
    return any(f" {one} " in text for one in _plain_references(references))


def _plain_references(references: Iterable[str]) -> list[str]:
    """Normalise references; those of which nothing is left match no answer."""
    if isinstance(references, str):
        raise TypeError("references must be a list of strings, got one string: pass [reference]")
    return [plain for plain in map(_normalised, references) if plain]
