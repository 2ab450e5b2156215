"""Rows of answers: reading and writing them, and their confidences, grades and source.

Everything that reads answers, questions or logs line by line reads them by :func:`_placed_rows`.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant._core.messages import comma_separated, did_you_mean, printable
from calibrant._core.showing import frame, one_line
from calibrant.llm.answers.confidence import AGGREGATORS, Aggregator, answer_confidence
from calibrant.llm.answers.logprobs import token_material
from calibrant.llm.heads.documents import BadDocument

if TYPE_CHECKING:
    import pandas as pd

Row: TypeAlias = dict[str, Any]
Item: TypeAlias = "tuple[str, Any]"
"""A place in a file and what stands there, or a BadDocument that says why it cannot be used."""
WRONG_FORM = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors of values that are not what a log has in their place."""
LOGPROBS = ("logprobs", "token_logprobs")
"""Keys of the log-probabilities of tokens, in a form of OpenAI's interface or as numbers."""
CUT_OFF = "is cut off, as by a run that was killed"
_ROUNDED = 1e-6
"""Last digit of the token probabilities in published files of answers."""
GRADES = {
    **dict.fromkeys(("true", "yes", "right", "correct", "1"), True),
    **dict.fromkeys(("false", "no", "wrong", "incorrect", "0"), False),
}


Scale: TypeAlias = tuple[float, float]
"""Lowest and highest score of a judge."""


class SourceError(ValueError):
    """Confidences of another source than wanted, or of several."""


class Source(NamedTuple):
    """Origin of confidences; an empty part is unknown.

    Attributes
    ----------
    confidence : str
        An aggregate of token probabilities, ``p_true``, ``letters`` or ``texts`` (the probability
        of a choice), or any other name, such as that of a judge.
    prompt : str
        Form of the prompt: ``chat`` (with the digest of a system message), ``plain``, or
        ``short, 5 shots``.
    model, head : str
        Digests of the model and the temperature head; ``none`` without a head. A model that a
        service runs has its name there.
    sampling : str
        Parameters of the drawing of tokens, such as ``temperature=0, top_p=0.9``, or ``greedy``;
        ``default`` is that of the service.
    """

    confidence: str = ""
    prompt: str = ""
    model: str = ""
    head: str = ""
    sampling: str = ""

    @property
    def aggregate(self) -> Aggregator | None:
        """How token probabilities made the confidences; None if they come from elsewhere."""
        known: Any = self.confidence
        return known if known in AGGREGATORS else None

    @property
    def served(self) -> bool:
        """Whether the model is one of a service, whose weights are unknown."""
        return bool(self.model) and not re.fullmatch("[0-9a-f]{16}", self.model)

    @property
    def scale(self) -> Scale | None:
        """Scale of a judge whose scores the confidences are; None for others."""
        found = re.fullmatch(r".*, (-?\d[-+.e\d]*) to (-?\d[-+.e\d]*)", self.confidence)
        return None if found is None else (float(found[1]), float(found[2]))

    def row(self) -> Row:
        """Return the source in the form that rows have."""
        return {key: getattr(self, part) for part, key in SOURCE_KEYS.items()}

    def differences(self, other: Source) -> list[str]:
        """Return the parts that both state differently, in words."""
        parts = zip(self._fields, self, other, strict=True)
        return [
            f"{name} {one}, not {two}" for name, one, two in parts if one and two and one != two
        ]

    def check(self, other: Source, remedy: str = "fit one on answers of the same source") -> None:
        """Raise if a map that was fitted on this source is applied to another."""
        differing = self.differences(other)
        if differing:
            said = printable("; ".join(differing))
            raise SourceError(f"the answer calibrator was fitted on {said}: {remedy}")


SOURCE_KEYS = {"confidence": "source"} | {name: name for name in Source._fields[1:]}
"""Keys of a row by the part of its source."""


class AnswerRows(NamedTuple):
    """Answers, each a dictionary, with the place of each for messages.

    Graded answers have ``correct`` (true or false, 1 or 0, yes or no, right or wrong) and a
    ``confidence`` in [0, 1], or ``token_probs``, the probabilities of their tokens. These may also
    come as the ``logprobs`` that a service returned, or as a list ``token_logprobs``. ``source``
    names the origin of the confidence, and must be the same for all answers, as must ``prompt``,
    ``model`` and ``head`` where they are given. ``question`` and ``answer`` are texts.
    """

    places: list[str]
    rows: list[Row]

    @classmethod
    def of(cls, rows: AnswerRows | Sequence[Mapping[str, Any]]) -> AnswerRows:
        """Return rows that are not from a file; those that have places already as they are.

        >>> AnswerRows.of([{"confidence": 0.9, "correct": True}]).places
        ['answer 1']
        """
        if isinstance(rows, AnswerRows):
            return rows
        if isinstance(rows, (str, os.PathLike)):
            raise TypeError(f"answers must be rows, got {rows!r:.80}: pass read_answers(path)")
        wrong = next((row for row in rows if not isinstance(row, Mapping)), None)
        if wrong is not None:
            raise TypeError(f"each answer must be a dictionary, got {wrong!r:.60}")
        places = [f"answer {i + 1}" for i in range(len(rows))]
        return cls(places, [_with_token_probs(row) for row in rows])

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.rows):,} answers")

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each answer. Needs pandas."""
        return frame(self.rows)

    @property
    def groups(self) -> IntArray:
        """Number of the question of each answer; one without a question has its own."""
        known: dict[str, int] = {}
        asked = [row.get("question") for row in self.rows]
        keys = [f"row {n}" if q in (None, "") else repr(q) for n, q in enumerate(asked)]
        return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)

    def where(self, chosen: BoolArray | IntArray) -> AnswerRows:
        """Return the chosen answers, by ``(n,)`` bool or by their numbers."""
        at = np.arange(len(self.rows))[chosen]
        return AnswerRows([self.places[i] for i in at], [self.rows[i] for i in at])

    def grades(self) -> BoolArray:
        """Return whether each answer is right; every row must say so."""
        return np.array([_grade_of(row, place) for place, row in zip(*self, strict=True)], bool)

    def confidences(self, aggregate: Aggregator | None = None) -> tuple[FloatArray, Source]:
        """Return the confidences and their source.

        ``aggregate`` computes the confidences from token probabilities; by default this is done, by
        the geometric mean, only if no row has a confidence.

        >>> AnswerRows.of([{"token_probs": [0.9, 0.4]}]).confidences()[0]
        array([0.6])
        """
        placed, source = list(zip(*self, strict=True)), self.source()
        stated = aggregate is None and any("confidence" in row for row in self.rows)
        tokens: list[FloatArray] = []
        if not stated or all("token_probs" in row for row in self.rows):
            tokens = [_token_probs_of(row, place) for place, row in placed]
        if stated:
            return np.array([_stated_number(row, place) for place, row in placed]), source
        rule = aggregate or "geometric"
        return answer_confidence(tokens, rule), source._replace(confidence=rule)

    def source(self) -> Source:
        """Source of all rows; raise if they differ, or if there are none."""
        if not self.rows:
            raise ValueError("there are no answers: one or more are needed")
        sources = [
            Source(**{part: str(row.get(key) or "") for part, key in SOURCE_KEYS.items()})
            for row in self.rows
        ]
        for place, source in zip(self.places, sources, strict=True):
            if source != sources[0]:
                said = sources[0].differences(source) or [f"{sources[0]}, not {source}"]
                raise SourceError(
                    f"the source of the confidence differs between {self.places[0]} and {place} "
                    f"({printable('; '.join(said))}): use a file for each source"
                )
        return sources[0]


def read_answers(file: str | os.PathLike[str]) -> AnswerRows:
    """Read answers, graded or not, from JSON lines, or from a CSV file with a line of names.

    Published token probabilities are often rounded to six digits: a zero among them is read as a
    quarter of the last digit.
    """
    path = check_suffix(file)
    placed = list(usable(_placed_rows(path)))
    if not placed:
        raise ValueError(f"{path} has no answers: it needs one to a line")
    places, rows = zip(*placed, strict=True)
    return AnswerRows(list(places), [_with_token_probs(row) for row in rows])


def check_suffix(file: str | os.PathLike[str]) -> Path:
    """Return the path of a file of answers; raise unless it is ``.jsonl`` or ``.csv``."""
    path = Path(file)
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"{path} must be .jsonl or .csv, got the suffix {path.suffix!r}")
    return path


def write_rows(file: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Write answers, one to a line, as ``.jsonl`` or ``.csv``."""
    path = check_suffix(file)
    # lone surrogates, which UTF-8 does not have, are written as JSON does
    options: Any = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
    with replacing(path) as temporary, temporary.open("w", **options) as stream:
        if path.suffix == ".jsonl":
            stream.writelines(f"{json.dumps(row)}\n" for row in rows)
            return
        writer = csv.DictWriter(stream, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        for row in rows:  # texts as they are, all else as JSON, and nothing for None
            there = {key: value for key, value in row.items() if value is not None}
            cells = {k: v if isinstance(v, str) else json.dumps(v) for k, v in there.items()}
            writer.writerow(cells)


def _placed_rows(file: Path) -> Iterator[Item]:
    """Yield the rows of a file of JSON lines, or of CSV with a line of names; empty cells lack."""
    if file.suffix != ".csv":
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    place = f"line {number} of {file}"
                    yield place, _parsed(line, place, is_whole=line.endswith(b"\n"))
        return
    wrong = "must have as many cells as the first line has names"
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        try:
            for row in reader:
                place = f"line {reader.line_num} of {file}"
                cells = {name: value for name, value in row.items() if value != ""}
                is_whole = None not in row and None not in row.values()
                yield place, cells if is_whole else BadDocument(place, wrong)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text ({error})") from error
        except csv.Error as error:  # of long cells, for instance
            problem = f"{file} cannot be read after line {reader.line_num} ({error})"
            raise ValueError(f"{problem}: write it as .jsonl") from error


def _parsed(text: bytes, place: str, *, is_whole: bool = True) -> Any:
    """Return an object of JSON, or the error that it is none."""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return BadDocument(place, f"is not valid JSON: {error}" if is_whole else CUT_OFF)
    if not isinstance(value, Mapping):
        return BadDocument(place, f"must be an object, got {value!r:.40}")
    return value


def usable(items: Iterable[Item]) -> Iterator[tuple[str, Row]]:
    """Yield the rows; raise the error of the first that cannot be used."""
    for place, item in items:
        if isinstance(item, BadDocument):
            raise item
        yield place, dict(item)


def _converted(items: Iterable[Item], convert: Callable[[Any, str], Row]) -> Iterator[Item]:
    """Apply a function to each item and its place; its errors take the place of rows."""
    for place, item in items:
        if isinstance(item, BadDocument):
            yield place, item
            continue
        try:
            yield place, convert(item, place)
        except BadDocument as error:
            yield place, error
        except WRONG_FORM as error:
            told = f"{type(error).__name__}: {error}"
            yield place, BadDocument(place, f"does not have the form of this log ({told:.120})")


def _stated_number(row: Row, place: str) -> float:
    value = row.get("confidence")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= 1 or isinstance(value, bool):
        raise ValueError(
            f"the confidence of {place} must be a number in [0, 1], got {value!r:.40}: divide "
            "percents by 100"
        )
    return number


def _grade_of(row: Mapping[str, Any], place: str) -> bool:
    """Return True if the answer, or another part, of a row is right."""
    value = row.get("correct")
    known = GRADES.get(str(value).strip().lower().removesuffix(".0"))
    if known is None:
        said = f"correct must be true or false, got {value!r:.40}"
        if "correct" not in row:
            hint = did_you_mean("correct", map(str, row)) or "rename the one that says it"
            said = f"it has no correct (true or false) {_keys(row)}: {hint.rstrip()}"
        raise ValueError(f"{place} must say whether the answer is right: {said}")
    return known


def _token_probs_of(row: Row, place: str) -> FloatArray:
    row = row if "token_probs" in row else {"token_probs": _probs_of_logprobs(row, place)}
    values = _numbers(row["token_probs"], "token_probs", place)
    wrong = values[~((values >= 0) & (values <= 1 + _ROUNDED))]
    if wrong.size:
        raise ValueError(
            f"token_probs of {place} must be in [0, 1], got {wrong[0]:g}: for log-probabilities "
            "write exp of them, and leave out answers whose tokens are unknown"
        )
    if not values.size:
        raise ValueError(f"{place} has an answer without tokens: leave it out")
    return np.where(values == 0, _ROUNDED / 4, values)


def _with_token_probs(row: Mapping[str, Any]) -> Row:
    """Return a row with the token probabilities of its log-probabilities, if these are usable.

    A row that has its confidence stays as it is.
    """
    if not {"confidence", "token_probs"}.isdisjoint(row):
        return dict(row)
    try:
        return {**row, "token_probs": _probs_of_logprobs(row, "")}
    except ValueError:  # raised again where a confidence is needed
        return dict(row)


def _probs_of_logprobs(row: Mapping[str, Any], place: str) -> list[float]:
    """Return the token probabilities of log-probabilities in a row; raise if it has none."""
    key = next((name for name in LOGPROBS if row.get(name)), None)
    if key is None:
        raise ValueError(
            f"{place} has no token_probs {_keys(row)}: every answer needs them, or logprobs as a "
            "service returned them, or a confidence; calibrant llm answers read takes them from "
            "a log"
        )
    try:
        value = _unpacked_cell(row[key])
        if isinstance(value, list):
            value = [one if isinstance(one, Mapping) else {"logprob": one} for one in value]
        return list(token_material(value, place)["token_probs"])
    except BadDocument:
        raise
    except WRONG_FORM as error:
        raise ValueError(
            f"{place} has {key} of an unknown form, {row[key]!r:.60}: write token_probs, a list "
            "of exp(logprob) of each token"
        ) from error


def is_cut_off(row: Row) -> bool:
    """Return True if an answer ended at the largest number of tokens; cells of CSV are texts."""
    said = GRADES.get(str(row.get("truncated")).strip().lower(), False)
    return said or row.get("finish_reason") == "length"


def _keys(row: Mapping[str, Any]) -> str:
    """Return the keys of a row for a message."""
    return f"among its keys {comma_separated(map(str, row))}"


def _numbers(value: Any, name: str, place: str) -> FloatArray:
    """Return a list of numbers in a row, which cells of CSV hold as JSON."""
    try:
        values = np.array(_unpacked_cell(value), np.float64)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} of {place} must be a list of numbers ({error})") from error
    if values.ndim != 1:
        raise ValueError(f"{name} of {place} must be a list of numbers, got {value!r:.60}")
    return values


def json_digest(content: Any, length: int = 16) -> str:
    """Return the first characters of a hash of what JSON can hold."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:length]


def _unpacked_cell(value: Any) -> Any:
    """Return what the JSON in a cell of a CSV file holds; other values as they are."""
    return json.loads(value) if isinstance(value, str) else value
