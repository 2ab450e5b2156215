"""Read answers from logs of any known format, which is told from their content."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from calibrant._core.checks import warn
from calibrant._core.messages import printable
from calibrant._core.showing import one_line
from calibrant.llm.answers.logs import completions, harness, inspect_logs
from calibrant.llm.answers.rows import (
    LOGPROBS,
    AnswerRows,
    Item,
    Row,
    _converted,
    _parsed,
    _placed_rows,
    _with_token_probs,
    read_answers,
)
from calibrant.llm.answers.signals import signals_of
from calibrant.llm.heads.documents import BadDocument
from calibrant.llm.heads.reading import _counted, _refusal

Format = Literal["answers", "lm_eval", "inspect", "openai"]
_IDS = ("id", "custom_id")
"""Keys by which grades are found."""
_JOINED = ("correct", "question", "kind", "truth")
"""Values that a file of grades adds to answers."""
_SIGNALS = ("signals", "stated", "samples", "judges")
"""Values of rows that make signals besides a confidence."""
_MATERIAL = ("confidence", "token_probs", *_SIGNALS)
"""Values of which an answer needs one to be calibrated."""
_NO_CONFIDENCE = {
    "lm_eval": "lm-eval logs log-likelihoods for multiple choice and, with repeats, several texts "
    "of written answers, but nothing for single texts and no confidence for likelihood tasks",
    "inspect": "run inspect eval with --logprobs, or several --epochs",
    "openai": "request logprobs=True from the service",
    "answers": "each row needs a confidence or token_probs",
}


class Log(NamedTuple):
    """Answers of a log.

    Attributes
    ----------
    path : str
    format : str
        ``answers``, ``lm_eval``, ``inspect`` or ``openai``.
    answers : AnswerRows
        Rows as in files of graded answers, with ``id`` and ``kind`` if the log has them.
    left_out : int
        Number of answers that could not be used.
    """

    path: str
    format: Format
    answers: AnswerRows
    left_out: int = 0

    @property
    def has_signals(self) -> bool:
        """True if answers have signals besides a confidence."""
        return any(row.get(name) for row in self.answers.rows for name in _SIGNALS)

    def __repr__(self) -> str:
        counted = f"{len(self.answers.rows):,} answers"
        return one_line(self, counted, self.format, f"{self.left_out:,} left out")


def read_log(
    path: str | os.PathLike[str],
    *,
    outcome: str | None = None,
    grades: str | os.PathLike[str] | None = None,
    skip_bad: bool = False,
) -> Log:
    """Read the answers of a log, graded or not. If one is graded, all must be.

    Parameters
    ----------
    path : path
        Samples of lm-evaluation-harness, their folder, or the results beside them (``lm_eval``); a
        log of Inspect, or a folder of these (``inspect``); JSON lines of chat completions or
        responses of OpenAI's interface (``openai``); or rows as for
        :func:`calibrant.llm.read_answers` (``answers``). The content tells which.
    outcome : str, optional
        What says if an answer is right: the metric of lm-eval, or metric and filter
        (``"exact_match,strict-match"``); the scorer of Inspect; or the key of a line. By default
        the first that is 0 or 1, the first scorer, and ``correct``.
    grades : path, optional
        ``.jsonl`` or ``.csv`` with ``id`` (or ``custom_id``) and ``correct`` of each answer, and
        also ``question``, ``kind`` or ``truth`` (the right values of a structured answer), where
        the log does not have them.
    skip_bad : bool
        Leave out answers that cannot be used, with a warning that lists them. By default they are
        an error, which lists them too.

    Examples
    --------
    ::

        log = read_log("batch_output.jsonl", grades="graded.csv")
        confidence, source = log.answers.confidences()
    """
    file = Path(path)
    name = _format_of(file)
    items = list(_joined(READERS[name](file, outcome), grades, outcome))
    graded = any("correct" in row for _, row in items if not isinstance(row, BadDocument))
    answers, bad = AnswerRows([], []), list[BadDocument]()
    for place, row in items:
        problem = row if isinstance(row, BadDocument) else _problem(row, place, name, graded)
        if problem is not None:
            bad.append(problem)
        else:
            answers.places.append(place)
            answers.rows.append(row)
    if bad and not (skip_bad and answers.rows):
        raise ValueError(_refusal(bad, len(answers.rows), file, "answers"))
    if bad:
        warn(f"left out {_counted(bad, len(answers.rows), file, 'answers')}")
    if not answers.rows:
        raise ValueError(f"{file} has no answers")
    # of several tasks, with a form of prompt each, a map is one for their mixture
    forms = sorted({str(row.get("prompt", "")) for row in answers.rows})
    if len(forms) > 1 and len({row.get("kind") for row in answers.rows}) > 1:
        for row in answers.rows:
            row["prompt"] = "; ".join(filter(None, forms))
    return Log(str(file), name, answers, len(bad))


def _with_outcome(row: Row, outcome: str | None) -> Row:
    """Return a row whose outcome has another name as ``correct``."""
    return row if outcome is None or outcome not in row else {**row, "correct": row[outcome]}


READERS: dict[str, Callable[[Path, str | None], Iterator[Item]]] = {
    "answers": lambda file, outcome: _converted(
        _placed_rows(file), lambda row, _: _with_outcome(_with_token_probs(row), outcome)
    ),
    "lm_eval": lambda path, outcome: chain.from_iterable(
        harness._answers(file, outcome) for file in harness._sample_files(path)
    ),
    "inspect": lambda path, outcome: chain.from_iterable(
        inspect_logs._answers(file, outcome) for file in inspect_logs._inspect_files(path)
    ),
    "openai": lambda file, outcome: _converted(
        _placed_rows(file), lambda line, place: completions._answer(line, place, outcome)
    ),
}


def _format_of(file: Path) -> Format:
    if file.is_dir():
        if any(file.rglob("samples_*.jsonl")):
            return "lm_eval"
        if inspect_logs._inspect_files(file):
            return "inspect"
        raise ValueError(
            f"{file} has neither files samples_TASK_DATE.jsonl nor logs of Inspect, .eval or "
            ".json: name another folder, or run lm_eval with --log_samples"
        )
    if file.suffix == ".csv":
        return "answers"
    if file.suffix == ".eval" or zipfile.is_zipfile(file):
        return "inspect"
    if file.suffix == ".json":
        whole = _parsed(file.read_bytes(), str(file))
        if isinstance(whole, BadDocument):
            raise whole
        if "eval" in whole:
            return "inspect"
        if "results" in whole and "configs" in whole:
            return "lm_eval"
        raise ValueError(
            f"{file} is neither a log of Inspect nor results of lm-eval; it has the keys "
            f"{printable(', '.join(map(str, whole)))}: write one answer to a line, as .jsonl"
        )
    for _, line in _placed_rows(file):
        if isinstance(line, BadDocument):
            return "answers"
        if "doc_id" in line and "resps" in line:
            return "lm_eval"
        # a text under response is that of an answer in a row of one's own
        served = not isinstance(line.get("response", ""), str) or "choices" in line
        served = served or line.get("object") == "response"
        return "openai" if served else "answers"
    raise ValueError(f"{file} is empty: it has no answers")


def _joined(
    items: Iterator[Item], grades: str | os.PathLike[str] | None, outcome: str | None
) -> Iterator[Item]:
    """Add what a file of grades says to the answers of the same id."""
    if grades is None:
        return items
    known: dict[str, Row] = {}
    for place, row in zip(*read_answers(grades), strict=True):
        named = _id_of(row)
        if named is None or named in known:
            problem = "has no id" if named is None else f"repeats the id {named!r:.60}"
            raise ValueError(f"{place} {problem}: every answer needs one line")
        row = _with_outcome(row, outcome)
        known[named] = {name: row[name] for name in _JOINED if name in row}

    def add(row: Row, place: str) -> Row:
        named = _id_of(row)
        if named is None or named not in known:
            raise BadDocument(place, f"has the id {named!r:.60}, not in {grades}")
        if named in graded:
            raise BadDocument(place, f"repeats the id {named!r:.60}: {grades} grades one answer")
        graded.add(named)
        return {**row, **known[named]}

    graded = set[str]()
    return _converted(items, add)


def _id_of(row: Row) -> str | None:
    return next((str(row[name]) for name in _IDS if row.get(name) not in (None, "")), None)


def _problem(row: Row, place: str, name: Format, graded: bool) -> BadDocument | None:
    alone = AnswerRows([place], [row])
    try:
        if graded:
            alone.grades()
        if "confidence" in row or "token_probs" in row:
            alone.confidences()
        elif graded and not any(row.get(key) for key in _MATERIAL):
            if any(row.get(key) for key in LOGPROBS):
                alone.confidences()  # raises: they are not usable
            return BadDocument(place, f"has no confidence: {_NO_CONFIDENCE[name]}")
        if any(row.get(key) for key in _SIGNALS):
            signals_of(alone)
    except ValueError as error:
        said = str(error).replace(f" of {place}", "").replace(place, "it")
        return BadDocument(place, f"cannot be used: {said}")
    return None
