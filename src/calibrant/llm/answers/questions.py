"""Question sets in files, prompts for them, and whether an answer is right.

Correctness of an open answer is exact match after the normalisation of SQuAD. It is stricter
than a reader would be: a right answer in other words counts as wrong.
"""

from __future__ import annotations

import csv
import json
import os
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import BoolArray, FloatArray
from calibrant.llm.answers.choices import LETTERS
from calibrant.llm.tokens.reading import text_of

ROUNDED = 1e-6
"""Last digit of the probabilities in files of answers; a zero there stands for less than half."""


@dataclass(frozen=True)
class Question:
    """A question with what counts as right.

    Attributes
    ----------
    text : str
    references : tuple of str
        Right answers; any of them will do. Of multiple choice, the text of the right one.
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


# ------------------------------------------------------------------------------------- readers


def read_mmlu(folder: str | os.PathLike[str], split: str = "test") -> list[Question]:
    """Questions of MMLU from files ``SUBJECT_SPLIT.csv``.

    Each has the columns question, choice0 to choice3 and answer, a number from 0 to 3.

    Parameters
    ----------
    folder : path
    split : str
        ``dev`` for the examples of prompts, ``test`` for what is measured.
    """
    files = sorted(Path(folder).glob(f"*_{split}.csv"))
    if not files:
        raise FileNotFoundError(f"there are no files SUBJECT_{split}.csv in {folder}")
    return [one for file in files for one in _read_subject(file, file.stem[: -len(split) - 1])]


def _read_subject(file: Path, subject: str) -> Iterator[Question]:
    for number, row in _rows(
        file, {"question", "choice0", "choice1", "choice2", "choice3", "answer"}
    ):
        if row["answer"] not in ("0", "1", "2", "3"):
            raise ValueError(f"{file}: row {number} has the answer {row['answer']!r}, not 0 to 3")
        choices, answer = tuple(row[f"choice{i}"] for i in range(4)), int(row["answer"])
        yield Question(row["question"], (choices[answer],), choices, answer, subject)


def read_truthfulqa(file: str | os.PathLike[str]) -> list[Question]:
    """Questions of TruthfulQA.csv with all correct answers, which stand there with semicolons."""
    rows = _rows(Path(file), {"Question", "Best Answer", "Correct Answers", "Category"})
    return [
        Question(
            row["Question"],
            tuple(dict.fromkeys([row["Best Answer"].strip(), *_parts(row["Correct Answers"])])),
            subject=row["Category"],
        )
        for _, row in rows
    ]


def read_questions(file: str | os.PathLike[str], *, separator: str | None = None) -> list[Question]:
    """Open questions from a text file: question, answer, empty line.

    Answers to the same question become references of one question, in the order of the file.

    Parameters
    ----------
    file : path
    separator : str, optional
        What stands between several right answers on one line, as ``"; "`` in TruthfulQA.
    """
    path, found = Path(file), dict[str, list[str]]()
    for number, lines in _blocks(path):
        if len(lines) != 2:
            raise ValueError(
                f"{path}: line {number} begins a block of {len(lines)} lines; a question, an "
                "answer and an empty line are wanted"
            )
        answers = _parts(lines[1], separator) if separator else [lines[1]]
        found.setdefault(lines[0], []).extend(answers)
    if not found:
        raise ValueError(
            f"{path} has no question: a question, an answer and an empty line are wanted"
        )
    return [Question(text, tuple(dict.fromkeys(right))) for text, right in found.items()]


def _blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Runs of lines that are not empty, with the number of their first."""
    held: list[str] = []
    lines = text_of(path).split("\n")
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            held.append(line.strip())
        elif held:
            yield number - len(held), held
            held = []


def _parts(text: str, separator: str = ";") -> list[str]:
    return [part.strip() for part in text.split(separator.strip()) if part.strip()]


def _rows(file: Path, columns: set[str]) -> Iterator[tuple[int, dict[str, str]]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        missing = columns - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f"{file} has no column {', '.join(sorted(missing))}: its first line is "
                f"{reader.fieldnames}"
            )
        for number, row in enumerate(reader, start=1):
            if any(row[name] is None for name in columns):
                raise ValueError(f"{file}: row {number} has fewer columns than the first line")
            yield number, row


def first_of_each(questions: Iterable[Question], count: int) -> list[Question]:
    """The first questions of every subject.

    >>> asked = [Question(text, ("",), subject=text[0]) for text in ("a1", "b1", "a2", "a3")]
    >>> [one.text for one in first_of_each(asked, 2)]
    ['a1', 'a2', 'b1']
    """
    found: dict[str, list[Question]] = {}
    for one in questions:
        found.setdefault(one.subject, []).append(one)
    return [one for part in found.values() for one in part[:count]]


def subset(questions: Sequence[Question], n: int, *, seed: int = 0) -> list[Question]:
    """``n`` questions drawn without replacement, in the order of the file; all if there are fewer.

    >>> [one.text for one in subset([Question(str(i), ()) for i in range(9)], 3, seed=1)]
    ['3', '4', '6']
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    count = min(n, len(questions))
    chosen = np.random.default_rng(seed).choice(len(questions), count, replace=False)
    return [questions[i] for i in np.sort(chosen)]


# ------------------------------------------------------------------------------------- prompts


def choice_prompt(question: Question, shots: Sequence[Question] = ()) -> str:
    """A prompt of the usual form for MMLU, which ends where the letter follows after a blank.

    Parameters
    ----------
    question : Question
    shots : sequence of Question
        Solved examples, usually the first five of ``dev`` with the same subject.

    Examples
    --------
    >>> print(choice_prompt(Question("2 + 2?", ("4",), ("3", "4"), 1)))
    Question: 2 + 2?
    A. 3
    B. 4
    Answer:
    """
    solved = [f"{_lettered(one)} {LETTERS[one.answer]}" for one in shots]
    start = ""
    if question.subject:
        topic = question.subject.replace("_", " ")
        start = f"The following are multiple choice questions (with answers) about {topic}.\n\n"
    return start + "\n\n".join([*solved, _lettered(question)])


def _lettered(question: Question) -> str:
    if not 2 <= len(question.choices) <= len(LETTERS):
        raise ValueError(
            f"question {question.text[:40]!r} has {len(question.choices)} choices, 2 to "
            f"{len(LETTERS)} are wanted: use short_prompt for open questions"
        )
    named = zip(LETTERS, question.choices, strict=False)
    lines = [f"{letter}. {choice.strip()}" for letter, choice in named]
    return "\n".join([f"Question: {question.text.strip()}", *lines, "Answer:"])


def short_prompt(question: Question, shots: Sequence[Question] = ()) -> str:
    """A prompt for a short open answer, in the form that :func:`first_line` cuts.

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
    """The second prompt of :func:`calibrant.llm.answers.choices.p_true` (after Kadavath et al. 2022).

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


# ------------------------------------------------------------------------------------- grading


def first_line(text: str) -> str:
    """What a model wrote up to the first line break, without blanks around it.

    A break before the first word does not count.

    >>> first_line(" Lima" + chr(10) + "Question: and of Chile?")
    'Lima'
    """
    return text.strip().split("\n", 1)[0].strip()


def normalised(text: str) -> str:
    """Text as SQuAD compares it: small letters, no punctuation, no articles, single blanks.

    >>> normalised("The  Beatles!")
    'beatles'
    """
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(answer: str, references: Iterable[str]) -> bool:
    """Whether the first line of an answer equals any reference after normalisation.

    >>> exact_match("the Beatles." + chr(10) + "Q: ...", ["Beatles", "The Fab Four"])
    True
    """
    if isinstance(references, str):
        raise TypeError("references must be a list of strings, got one string: pass [reference]")
    said = normalised(first_line(answer))
    return bool(said) and any(said == normalised(one) for one in references)


# -------------------------------------------------------------------------------- graded answers


class GradedAnswers(NamedTuple):
    """Answers of one model to one set of questions.

    Attributes
    ----------
    questions, answers : list of str
    token_probs : list of (tokens,)
    correct : (n,) of bool
    """

    questions: list[str]
    answers: list[str]
    token_probs: list[FloatArray]
    correct: BoolArray


def read_answers(file: str | os.PathLike[str]) -> GradedAnswers:
    """Graded answers from a JSON-lines file: question, answer, token_probs and correct in each.

    The probabilities of such files are rounded to six digits: a zero is read as a quarter of
    the last one.
    """
    path = Path(file)
    rows: list[dict[str, Any]] = []
    # only "\n" ends a line: strings of JSON may hold the other breaks of splitlines
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        row = _parsed(line, f"{path}: line {number}")
        missing = {"question", "answer", "token_probs", "correct"} - row.keys()
        if missing or not row["token_probs"]:
            what = f"no {', '.join(sorted(missing))}" if missing else "an answer without tokens"
            raise ValueError(f"{path}: line {number} has {what}")
        rows.append(row)
    return GradedAnswers(
        [row["question"] for row in rows],
        [row["answer"] for row in rows],
        [_floored(row["token_probs"]) for row in rows],
        np.array([row["correct"] for row in rows], dtype=bool),
    )


def _floored(probs: list[float]) -> FloatArray:
    return np.maximum(np.asarray(probs, dtype=np.float64), ROUNDED / 4)


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object, got a {type(row).__name__}")
    return row
