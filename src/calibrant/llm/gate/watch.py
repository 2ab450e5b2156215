"""The watch of a gate in use, its file, and what rows of answers add to it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from calibrant._core.atomic_files import locked, replacing
from calibrant._core.checks import BoolArray, Values, as_float64
from calibrant._core.showing import one_line
from calibrant.llm.answers.calibrator import _check_state
from calibrant.llm.answers.rows import AnswerRows, Row, _stated_number, json_digest
from calibrant.llm.gate.gate import _CUTS, _SHARES, DriftReference, Gate
from calibrant.monitor.deliveries import Id, PendingPredictions, as_ids

LOG = logging.getLogger(__name__)
_UNKNOWN_STATE = (
    "whether the guarantee was withdrawn is unknown; if it was not, start a new file by calibrant "
    "llm gate watch GATE --state FILE --new"
)
_COLUMNS = ("calibrated", "verdict", "threshold", "reason")
_PENDING = 20_000
"""Answers that may wait for their grade."""

T = TypeVar("T")


class GateWatch:
    """The answers that a gate has judged, their grades as they come, and whether it still holds.

    Examples
    --------
    ::

        watch = GateWatch(gate)
        watch.note([verdict.calibrated for verdict in gate.check(answers)])
        if watch.withdrawn:
            ...
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate.fingerprint()
        self.cuts = gate.drift.cuts
        self.grades, self.confidences = gate.drift.grades.like(), gate.drift.confidences.like()
        self.pending = PendingPredictions(_PENDING)

    def note(self, confidence: Values, ids: Sequence[Id | None] = ()) -> None:
        """Add calibrated confidences of answers, with the ids of those whose grades may come."""
        values = as_float64(confidence)
        if not values.size:
            return
        if ids:
            known = [(key, c) for key, c in zip(ids, values.tolist(), strict=True) if key]
            keys, waiting = as_ids([key for key, _ in known]), [c for _, c in known]
            self.pending.add(keys, waiting, [1] * len(keys))
        at = (self.confidences.seen + np.arange(len(values))) % _CUTS
        self.confidences.observe(_SHARES[at], values >= self.cuts[at])

    def label(self, ids: Iterable[Id], correct: Iterable[bool]) -> int:
        """Add grades of noted answers by their ids; returns the number of those that are known."""
        right = np.array([int(one) for one in correct], np.int64)
        _, pairs = self.pending.match(as_ids(ids), right)
        self.grades.observe(*pairs)
        return len(pairs.outcome)

    def observe(self, confidence: Values, correct: Values) -> None:
        """Add calibrated confidences of graded answers, ``(n,)``, which must be independent."""
        self.grades.observe(confidence, correct)

    @property
    def withdrawn(self) -> str:
        """The reason why nothing is guaranteed any more; empty while the guarantee holds."""
        tests = (
            (self.grades, "the grades contradict the confidences, by {:,} graded answers"),
            (self.confidences, "the confidences differ from those at the fit, by {:,} answers"),
        )
        found = [text.format(m.alarm.examples) for m, text in tests if m.alarm is not None]
        return f"the guarantee is withdrawn: {' and '.join(found)}" if found else ""

    def describe(self) -> str:
        """Describe the state in a line."""
        waiting = len(self.pending.waiting)
        return (
            f"{self.confidences.seen:,} answers judged, {self.grades.seen:,} grades, {waiting:,} "
            "answers that wait for one"
        )

    def __repr__(self) -> str:
        return one_line(self, self.describe(), self.withdrawn)

    def state(self) -> dict[str, Any]:
        """Return everything for JSON."""
        waiting = [[key, confidence] for key, (confidence, _) in self.pending.waiting.items()]
        return {
            "gate": self.gate,
            "cuts": self.cuts.tolist(),
            "grades": self.grades.state(),
            "confidences": self.confidences.state(),
            "counts": self.pending.counts,
            "waiting": waiting,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> GateWatch:
        """Make a watch of what :meth:`state` returned."""
        _check_state(state, ("gate", "cuts", "grades", "confidences", "counts", "waiting"), cls)
        made = cls.__new__(cls)
        made.gate = str(state["gate"])
        reference = {name: state[name] for name in DriftReference._fields}
        made.cuts, made.grades, made.confidences = DriftReference.from_state(reference)
        made.pending = PendingPredictions(_PENDING)
        made.pending.restore(state["counts"], [(key, value, 1) for key, value in state["waiting"]])
        return made


class WatchFile:
    """The state of a watch in a file that several processes update.

    Where the file, ``.json``, is missing or damaged, nobody knows if the guarantee was withdrawn:
    nothing is guaranteed then. :meth:`start` makes the file, once for each gate.
    """

    def __init__(self, path: str | os.PathLike[str], gate: Gate) -> None:
        self.path = Path(path).resolve()
        self.gate = gate
        if self.path.suffix != ".json":
            raise ValueError(f"the state must be a .json file, got {os.fspath(path)}")

    def start(self, artifact: str | os.PathLike[str] | None = None) -> None:
        """Make the file of a gate that has judged nothing; raise if there is one.

        ``artifact`` is where the gate is saved. When its guarantee is withdrawn, a file beside it
        records that, and no other watch of the same gate begins.
        """
        record = None
        if artifact is not None:
            place = Path(artifact).resolve()
            record = place.with_name(place.name + ".withdrawn")
            if record.exists() and self.gate.fingerprint() in record.read_text("utf-8"):
                raise ValueError(
                    f"the guarantee of {place} was withdrawn, as {record} records: fit a gate on "
                    "recent answers"
                )
        with locked(self.path):
            if self.path.exists():
                raise ValueError(
                    f"{self.path} exists: what it says of drift would be lost; name another file, "
                    "or remove it"
                )
            self._write(GateWatch(self.gate), record)
        LOG.info("%s: the watch of gate %s begins", self.path, self.gate.fingerprint())

    def read(self) -> GateWatch:
        """Return the watch; raise ValueError if the file is missing, damaged, or another gate's."""
        return self._read()[0]

    def _read(self) -> tuple[GateWatch, Path | None]:
        """Return the watch, and the file that records a withdrawal."""
        try:
            state = dict(json.loads(self.path.read_text("utf-8")))
            if state.pop("digest") != json_digest(state):
                raise ValueError("its digest does not fit its content")
            record = state.pop("record")
            watch = GateWatch.from_state(state)
        except FileNotFoundError as error:
            raise ValueError(f"{self.path} is missing: {_UNKNOWN_STATE}") from error
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(
                f"{self.path} cannot be read ({error!s:.200}): {_UNKNOWN_STATE}"
            ) from error
        if watch.gate != self.gate.fingerprint():
            raise ValueError(f"{self.path} watches another gate: name a file of this one")
        return watch, None if record is None else Path(record)

    def withdrawn(self) -> str:
        """Return why nothing is guaranteed, also if that is because the file cannot be read."""
        try:
            return self.read().withdrawn
        except ValueError as error:
            LOG.error("%s", error)
            return f"the guarantee is withdrawn: {error}"

    def update(self, change: Callable[[GateWatch], T]) -> T:
        """Apply a change and write the file, while other processes wait."""
        with locked(self.path):
            watch, record = self._read()
            before = watch.withdrawn
            result = change(watch)
            self._write(watch, record)
        if watch.withdrawn and not before:
            LOG.warning("%s: %s", self.path, watch.withdrawn)
            if record is not None:
                try:
                    with record.open("a", encoding="utf-8") as stream:
                        stream.write(f"gate {watch.gate}: {watch.withdrawn}\n")
                except OSError as error:  # the gate may lie where nothing can be written
                    LOG.error("%s", error)
        return result

    def _write(self, watch: GateWatch, record: Path | None) -> None:
        state = {**watch.state(), "record": None if record is None else str(record)}
        with replacing(self.path) as temporary:
            content = {**state, "digest": json_digest(state)}
            temporary.write_text(json.dumps(content), encoding="utf-8")


def judge_rows(
    gate: Gate, answers: AnswerRows, state: str | os.PathLike[str] | None = None
) -> list[Row]:
    """Return rows with ``verdict``, ``calibrated``, ``threshold`` and ``reason`` of each answer.

    With ``state``, the file of a watch, the answers are noted there, and a guarantee that was
    withdrawn is not used.
    """
    file = None if state is None else WatchFile(state, gate)
    withdrawn = "" if file is None else file.withdrawn()
    verdicts = gate.check(answers, withdrawn)
    if file is not None and not withdrawn:
        known = np.array([one.calibrated is not None for one in verdicts])
        chosen = np.flatnonzero(known & _independent(gate, answers))
        ids = [_id(answers.rows[i]) for i in chosen]
        confidences = np.array([verdicts[i].calibrated for i in chosen], np.float64)
        file.update(lambda watch: watch.note(confidences, ids))
    shown = [verdict.to_dict() for verdict in verdicts]
    return [
        {**row, **{name: one[name] for name in _COLUMNS}}
        for row, one in zip(answers.rows, shown, strict=True)
    ]


def _independent(gate: Gate, answers: AnswerRows) -> BoolArray:
    """Return True for answers of which no two depend on each other: the first of a conversation."""
    if gate.terms.unit == "answer":
        return np.ones(len(answers.rows), dtype=bool)
    first: dict[str | int, int] = {}
    for number, row in enumerate(answers.rows):
        name = row.get("conversation")
        first.setdefault(number if name in (None, "") else str(name), number)
    return np.isin(np.arange(len(answers.rows)), [*first.values()])


def add_grades(file: WatchFile, answers: AnswerRows) -> tuple[int, list[tuple[str, str]]]:
    """Add grades to the file of a watch: of answers with an ``id``, or with their confidence.

    An answer whose confidence is not in its row may have ``calibrated``, what the gate made of it.
    Returns how many grades were added, and the places of the others, each with the reason.
    """
    correct, rows = answers.grades(), answers.rows
    raw = np.array([not {"confidence", "token_probs"}.isdisjoint(row) for row in rows])
    mapped = ~raw & np.array([row.get("calibrated") is not None for row in rows])
    by_id = ~raw & ~mapped & np.array([bool(_id(row)) for row in rows])
    counts = by_id | _independent(file.gate, answers)
    scores: dict[int, float] = {}
    unused = dict.fromkeys(
        np.flatnonzero(~counts).tolist(), "another answer of its conversation counts"
    )
    checked = np.flatnonzero(counts & ~by_id & ~mapped).tolist()
    verdicts = file.gate.check(answers.where(np.array(checked))) if checked else ()
    for i, one in zip(checked, verdicts, strict=True):
        if one.calibrated is None:
            unused[i] = one.reason
        else:
            scores[i] = one.calibrated
    for i in np.flatnonzero(counts & mapped).tolist():
        try:
            scores[i] = _stated_number({"confidence": rows[i]["calibrated"]}, answers.places[i])
        except ValueError as error:
            unused[i] = str(error)

    def add(watch: GateWatch) -> None:
        chosen = sorted(scores)
        watch.observe([scores[i] for i in chosen], correct[chosen])
        ids = {i: _id(rows[i]) for i in np.flatnonzero(by_id).tolist()}
        waiting = {*watch.pending.waiting}
        for i, key in ids.items():
            if key not in waiting:
                unused[i] = "no answer that was judged under its id waits for a grade"
            waiting.discard(key)
        watch.label(ids.values(), correct[by_id].tolist())

    file.update(add)
    return len(rows) - len(unused), [(answers.places[i], unused[i]) for i in sorted(unused)]


def _id(row: Row) -> str:
    return "" if row.get("id") is None else str(row["id"])
