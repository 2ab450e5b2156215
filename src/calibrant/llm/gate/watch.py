"""The watch of a gate in use, and its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from calibrant._core.atomic_files import locked
from calibrant._core.checks import Values, as_float64
from calibrant.artifacts import load, save
from calibrant.display.results import one_line
from calibrant.llm.gate.drift import DriftReference, above
from calibrant.llm.gate.gate import Gate
from calibrant.monitor.predictions import Id, PendingPredictions, as_ids

PENDING = 20_000
"""Answers that may wait for their grade."""

T = TypeVar("T")


class GateWatch:
    """The answers that a gate has judged, their grades as they come, and whether it still holds.

    Parameters
    ----------
    gate : Gate

    Examples
    --------
    >>> from calibrant.llm import fit_gate
    >>> from calibrant.llm.answers.graded import AnswerRows
    >>> rng = np.random.default_rng(0)
    >>> confidence = rng.beta(4, 1, 3000)
    >>> right = rng.random(3000) < confidence
    >>> rows = [{"confidence": c, "correct": r} for c, r in zip(confidence, right)]
    >>> watch = GateWatch(fit_gate(AnswerRows.of(rows), max_error=0.1))
    >>> watch.note(confidence[:500])
    >>> watch.withdrawn
    ''
    >>> watch.note(rng.beta(2, 2, 500))  # other questions
    >>> watch.withdrawn
    'the promise is withdrawn: the confidences differ from those at the fit, by ... answers'
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate.fingerprint()
        self.cuts = gate.drift.cuts
        self.grades, self.confidences = gate.drift.grades.like(), gate.drift.confidences.like()
        self.pending = PendingPredictions(PENDING)

    def note(self, confidence: Values, ids: Sequence[Id | None] = ()) -> None:
        """Add calibrated confidences of answers, with the ids of those whose grades may come."""
        values = as_float64(confidence)
        if not values.size:
            return
        if ids:
            known = [(key, c) for key, c in zip(ids, values.tolist(), strict=True) if key]
            keys, waiting = as_ids([key for key, _ in known]), [c for _, c in known]
            self.pending.add(keys, waiting, [1] * len(keys))
        self.confidences.observe(*above(self.cuts, values, self.confidences.seen))

    def label(self, ids: Iterable[Id], correct: Iterable[bool]) -> int:
        """Add grades of noted answers by their ids; returns the number of those that are known."""
        right = np.array([int(one) for one in correct], np.int64)
        pairs = self.pending.match(as_ids(ids), right)
        self.grades.observe(*pairs)
        return len(pairs.outcome)

    def observe(self, confidence: Values, correct: Values) -> None:
        """Add calibrated confidences of graded answers, ``(n,)``, which must be independent."""
        self.grades.observe(confidence, correct)

    @property
    def withdrawn(self) -> str:
        """The reason why nothing is promised any more; empty while the promise holds."""
        tests = (
            (self.grades, "the grades contradict the confidences, by {:,} graded answers"),
            (self.confidences, "the confidences differ from those at the fit, by {:,} answers"),
        )
        found = [text.format(m.alarm.examples) for m, text in tests if m.alarm is not None]
        return f"the promise is withdrawn: {' and '.join(found)}" if found else ""

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
        keys = {"gate", "cuts", "grades", "confidences", "counts", "waiting"}
        if not isinstance(state, Mapping) or {*state} != keys:
            raise ValueError(f"the watch of a gate has {', '.join(sorted(keys))}")
        made = cls.__new__(cls)
        made.gate = str(state["gate"])
        reference = {name: state[name] for name in DriftReference._fields}
        made.cuts, made.grades, made.confidences = DriftReference.from_state(reference)
        made.pending = PendingPredictions(PENDING)
        made.pending.restore(state["counts"], [(key, value, 1) for key, value in state["waiting"]])
        return made


class WatchFile:
    """The state of a watch in a file that several processes update.

    Parameters
    ----------
    path : path
        A ``.json`` or ``.safetensors`` file; it is made when something is added.
    gate : Gate
    """

    def __init__(self, path: str | os.PathLike[str], gate: Gate) -> None:
        self.path = Path(path).resolve()
        self.gate = gate
        if self.path.suffix not in (".json", ".safetensors"):
            raise ValueError(f"the state must be a .json file, got {os.fspath(path)}")

    def read(self) -> GateWatch:
        """Return the watch; a new one if there is no file."""
        if not self.path.exists():
            return GateWatch(self.gate)
        watch = load(self.path, GateWatch)
        if watch.gate != self.gate.fingerprint():
            raise ValueError(f"{self.path.name} watches another gate: name a new file")
        return watch

    def update(self, change: Callable[[GateWatch], T]) -> T:
        """Apply a change and write the file, while other processes wait."""
        with locked(self.path):
            watch = self.read()
            result = change(watch)
            save(watch, self.path)
        return result
