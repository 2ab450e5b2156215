"""Judge responses of a server and rows of a file, and note them for the watch of the gate."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import BoolArray, IntArray
from calibrant._core.messages import comma_separated
from calibrant.llm.answers.confidence import AGGREGATORS
from calibrant.llm.answers.graded import AnswerRows, Row
from calibrant.llm.answers.signal_calibrator import SignalCalibrator
from calibrant.llm.gate.gate import Gate
from calibrant.llm.gate.responses import Asked, Choice, Collected
from calibrant.llm.gate.verdicts import Verdict, most_careful
from calibrant.llm.gate.watch import GateWatch, WatchFile

NONE = "the upstream returned no answer"
COLUMNS = ("verdict", "threshold", "reason")
CUT = "the answer was cut off before its end"


class Judge:
    """A gate in use: verdicts on responses, and notes of them.

    Parameters
    ----------
    gate : Gate
        For confidences that can be computed from the log-probabilities of tokens.
    state : path, optional
        File of the watch. Notes are kept in memory until :meth:`flush`, which also reads whether
        the promise was withdrawn meanwhile, by grades that another process added.
    """

    def __init__(self, gate: Gate, state: str | os.PathLike[str] | None = None) -> None:
        _check_served(gate)
        self.gate = gate
        self.file = None if state is None else WatchFile(state, gate)
        self.withdrawn = "" if self.file is None else self.file.read().withdrawn
        self._notes: list[tuple[str, float]] = []
        self._lock = threading.Lock()

    def judge(
        self, response: Collected, asked: Asked, kind: str = "", problem: str = ""
    ) -> dict[str, Any]:
        """Return the verdict on a response for JSON; with several choices, also that on each.

        The verdict on several choices is the most careful one. With a ``problem`` no choice is
        accepted.
        """
        verdicts = {
            number: self._verdict(choice, response, asked, kind, problem)
            for number, choice in sorted(response.choices.items())
        }
        if not verdicts:
            return Verdict.unknown(problem or NONE).to_dict()
        result = most_careful(list(verdicts.values())).to_dict()
        if len(verdicts) > 1:
            each = [{"index": number, **one.to_dict()} for number, one in verdicts.items()]
            result["choices"] = each
        self._note(response, asked, verdicts)
        return result

    def _verdict(
        self, choice: Choice, response: Collected, asked: Asked, kind: str, problem: str
    ) -> Verdict:
        if asked.echoes:
            problem = "the answer begins with the prompt (echo)"
        problem = problem or choice.problem()
        if problem:
            return Verdict.unknown(problem)
        row = choice.row(asked, str(response.about.get("model") or ""), kind)
        return self.gate.check_one(row, self.withdrawn)

    def _note(self, response: Collected, asked: Asked, verdicts: dict[int, Verdict]) -> None:
        """Note the first answer; others to the same question, or later turns, depend on it."""
        first = next(iter(verdicts.values()))
        independent = self.gate.terms.unit == "answer" or asked.turn == 1
        if self.file is not None and independent and first.confidence is not None:
            with self._lock:
                self._notes.append((str(response.about.get("id") or ""), first.confidence))

    def flush(self) -> None:
        """Add the notes to the file, and read whether the promise still holds."""
        if self.file is None:
            return
        with self._lock:
            notes, self._notes = self._notes, []
        if not notes:
            self.withdrawn = self.file.read().withdrawn
            return
        try:
            ids, confidences = zip(*notes, strict=True)
            self.withdrawn = self.file.update(lambda watch: _noted(watch, ids, confidences))
        except BaseException:
            with self._lock:  # a full disk must not lose them
                self._notes = [*notes, *self._notes]
            raise


def _check_served(gate: Gate) -> None:
    """Raise if the gate needs confidences that cannot be computed from a response."""
    fitted = gate.calibrator
    if isinstance(fitted, SignalCalibrator):
        needed = [name for name in fitted.names_ if name not in AGGREGATORS]
    else:
        needed = [] if fitted.aggregate else [fitted.source_.confidence or "other confidences"]
    if needed:
        raise ValueError(
            f"this gate is for {comma_separated(needed)}, which no server returns: fit a gate on "
            "token_probs, or use calibrant llm gate check"
        )


def _noted(watch: GateWatch, ids: tuple[str, ...], confidences: tuple[float, ...]) -> str:
    watch.note(confidences, ids)
    return watch.withdrawn


def judge_rows(
    gate: Gate, answers: AnswerRows, state: str | os.PathLike[str] | None = None
) -> list[Row]:
    """Return rows with ``verdict``, ``calibrated``, ``threshold`` and ``reason`` of each answer.

    With ``state``, the file of a watch, the answers are noted there, and a promise that was
    withdrawn is not used.

    >>> from calibrant.llm import fit_gate
    >>> rng = np.random.default_rng(0)
    >>> graded = [{"confidence": c, "correct": rng.random() < c} for c in rng.beta(9, 1, 900)]
    >>> gate = fit_gate(AnswerRows.of(graded), max_error=0.1)
    >>> new = AnswerRows.of([{"id": "a", "confidence": 0.99}, {"id": "b"}])
    >>> [(row["id"], row["verdict"]) for row in judge_rows(gate, new)]
    [('a', 'accept'), ('b', 'person')]
    """
    file = None if state is None else WatchFile(state, gate)
    verdicts = gate.check(answers, "" if file is None else file.read().withdrawn)
    if file is not None:
        known = np.array([one.confidence is not None for one in verdicts])
        chosen = np.flatnonzero(known & independent(gate, answers))
        file.update(lambda watch: _note_rows(watch, answers, verdicts, chosen))
    return [
        {**row, **_columns(verdict)} for row, verdict in zip(answers.rows, verdicts, strict=True)
    ]


def _columns(verdict: Verdict) -> Row:
    shown = verdict.to_dict()
    return {"calibrated": shown["confidence"], **{k: shown[k] for k in COLUMNS}}


def _note_rows(
    watch: GateWatch, answers: AnswerRows, verdicts: list[Verdict], chosen: IntArray
) -> None:
    ids = [_id(answers.rows[i]) for i in chosen]
    watch.note([verdicts[i].confidence for i in chosen], ids)


def independent(gate: Gate, answers: AnswerRows) -> BoolArray:
    """Return True for answers of which no two depend on each other: the first of a conversation."""
    if gate.terms.unit == "answer":
        return np.ones(len(answers.rows), dtype=bool)
    named = [row.get("conversation") for row in answers.rows]
    seen: set[str] = set()
    first = []
    for name in named:
        first.append(name in (None, "") or str(name) not in seen)
        seen.add(str(name))
    return np.array(first, dtype=bool)


class Added(NamedTuple):
    """Numbers of grades that were added to a watch, and of those whose answer is unknown."""

    used: int
    unknown: int


def add_grades(file: WatchFile, answers: AnswerRows) -> Added:
    """Add grades to the file of a watch: of answers with an ``id``, or with their confidence."""
    correct = answers.grades()
    by_id = np.array([_has_id_only(row) for row in answers.rows])
    whole = ~by_id & independent(file.gate, answers)
    confidence: list[float | None] = []
    if whole.any():
        confidence = [one.confidence for one in file.gate.check(answers.where(whole))]
    scored = np.array([value is not None for value in confidence], dtype=bool)
    ids = [_id(row) for row in answers.where(by_id).rows]

    def add(watch: GateWatch) -> int:
        found = np.array(confidence, dtype=np.float64)[scored]
        watch.observe(found, correct[whole][scored])
        return watch.label(ids, correct[by_id].tolist())

    matched = file.update(add)
    return Added(matched + int(scored.sum()), len(ids) - matched + int((~scored).sum()))


def _has_id_only(row: Row) -> bool:
    return bool(_id(row)) and not {"confidence", "token_probs"} & {*row}


def _id(row: Row) -> str:
    return "" if row.get("id") is None else str(row["id"])
