"""The stream itself: predictions, late labels, windows, workers and the state on disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta
from torch import Tensor

from calibrant._core.atomic_files import replacing
from calibrant._core.binning import bin_index, check_bins, uniform_edges
from calibrant._core.checks import (
    IGNORED,
    FloatArray,
    IntArray,
    Logits,
    Values,
    as_labels,
    as_pairs,
    as_scores,
    check_labels,
    check_whole,
    logits_from_probs,
    warn,
)
from calibrant._core.chunks import as_tensor, examples, top_class
from calibrant.calibrators.base import Calibrator
from calibrant.data import Chunk, open_dataset
from calibrant.metrics.reductions import Pairs, reduce_examples
from calibrant.monitor.evidence import (
    TILTS,
    Evidence,
    Files,
    Window,
    bin_runs,
    no_sums,
    pack,
    unpack,
)
from calibrant.monitor.report import Alarm, Drift, MonitorReport
from calibrant.workflows.effect import calibrated

MOST_BINS = 100
FORMAT = 1
"""Version of the state's layout."""

Id = int | str
Number = int | date
Progress = Callable[[int, int], object]


class Monitor:
    """Watch the calibration of a deployed model, with few false alarms over the whole stream.

    While every prediction is right with a probability within ``tolerance`` of its confidence,
    whatever came before it, an alarm is raised with a probability of at most ``false_alarms``: not
    per window but ever. The sums per window add up over workers; see the module for the test.

    Parameters
    ----------
    calibrator : Calibrator, optional
        Applied to logits first.
    window : int
        Labelled examples after which a new window begins, where windows are not named.
    false_alarms : float
        Probability of ever raising an alarm while there is no drift.
    tolerance : float
        How far the probability of being right may be from the confidence: 0.02 is two points.
    reference : pair of arrays, optional
        Confidences and outcomes measured when the model was deployed, and not those of a fit.
        Drift then means away from the gaps of the reference, bin by bin, by more than the
        tolerance. Half of ``false_alarms`` goes into Clopper-Pearson limits of those gaps, which
        are taken to be equal within a bin, but for what the tolerance covers. Where the
        reference has no examples, no drift is found.
    bins : int
        Number of equal-width bins.
    first : int or date, optional
        The first window; that of the first examples by default (1 where windows have no names).
    pending : int
        Predictions that may wait for their label; beyond that the oldest are dropped.
    keep : int
        Windows that are kept; older ones are summed up and cannot be added to.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(6000, 5))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)  # drawn from softmax(logits)
    >>> watch = Monitor(window=500)
    >>> watch.update(logits[:3000], labels[:3000]).report().alarm is None
    True
    >>> watch.update(2 * logits[3000:], labels[3000:]).report().drift.direction
    'over'

    Labels that come later are matched by their ids:

    >>> watch = Monitor()
    >>> watch.predicted(["a", "b"], logits[:2])
    >>> watch.labelled(["b"], labels[1:2])
    1
    """

    def __init__(
        self,
        calibrator: Calibrator | None = None,
        *,
        window: int = 1000,
        false_alarms: float = 0.05,
        tolerance: float = 0.02,
        reference: tuple[Values, Values] | None = None,
        bins: int = 15,
        first: Number | None = None,
        pending: int = 100_000,
        keep: int = 1000,
    ) -> None:
        _check_settings(window, false_alarms, tolerance, bins, pending, keep)
        self.calibrator = calibrator
        self.window, self.pending, self.keep, self.bins = map(int, (window, pending, keep, bins))
        self.false_alarms, self.tolerance = float(false_alarms), float(tolerance)
        self.first: int | None = None if first is None else _number(first)
        self.dated = isinstance(first, date)  # numbers of windows are those of days
        self.edges = uniform_edges(bins)
        self.level = false_alarms if reference is None else false_alarms / 2
        known = np.zeros((2, bins)) if reference is None else _gaps(reference, bins, self.level)
        self.known: FloatArray = known  # least and greatest gap that the reference allows
        self.windows: dict[int, Window] = {}
        self.alarm: Alarm | None = None
        self.made_for = None if calibrator is None else _fingerprint(calibrator)
        self._files = Files()
        self._folded = Evidence.none(bins)
        self._folded_n = 0
        self._before: tuple[int, Evidence] | None = None  # the last window, evidence before it
        self._waiting: dict[Id, tuple[float, int]] = {}
        self._classes = 0
        self._counts = dict.fromkeys(("dropped", "repeated", "unknown", "ignored"), 0)

    # --------------------------------------------------------------------------------- data in

    def update(
        self,
        logits: Values | None = None,
        labels: Values | None = None,
        *,
        probs: Values | None = None,
        features: Values | None = None,
        window: Number | None = None,
    ) -> Monitor:
        """Add logits ``(..., classes)``, or ``probs``, whose labels ``(...)`` are known.

        ``features`` ``(..., width)`` are for calibrators that need them. Without ``window`` the
        examples fill windows of the size that was set, with the numbers, or dates, after the
        last. A refused batch leaves no trace.
        """
        if labels is None:
            raise TypeError("labels are missing: (logits, labels) are wanted")
        self._check_open(window)
        targets = _targets(labels)
        found = self._pairs(logits, targets, probs, features)
        self._counts["ignored"] += targets.size - found.outcome.size
        return self._take(found, window)

    def observe(
        self, confidence: Values, outcome: Values, *, window: Number | None = None
    ) -> Monitor:
        """Add pairs of confidence and outcome, of any kind of prediction.

        >>> Monitor().observe([0.9, 0.8], [1, 0]).report().n
        2
        """
        self._check_open(window)
        if _is_empty(confidence) and _is_empty(outcome):
            return self._take(Pairs(np.zeros(0), np.zeros(0, np.bool_)), window)
        claimed, happened, _ = as_pairs(confidence, outcome)
        return self._take(Pairs(claimed, happened > 0), window)

    def predicted(
        self,
        ids: Iterable[Id],
        logits: Values | None = None,
        *,
        probs: Values | None = None,
        features: Values | None = None,
    ) -> None:
        """Remember the predictions of logits ``(n, classes)`` until their labels come.

        Of each, the confidence and the predicted class are kept. An id that is already waiting is
        replaced and counted.
        """
        names = _ids(ids)
        scores = self._scores(logits, probs)
        if scores.ndim > 2 or scores.ndim == 0 or len(scores) != len(names):
            raise ValueError(
                f"one row of logits for each id is wanted, got {tuple(scores.shape)} for "
                f"{len(names)} ids"
            )
        if self.calibrator is not None:
            scores = calibrated(self.calibrator, scores, features)
        top = _top(scores)
        rows = reduce_examples(examples(scores, top))
        self._check_classes(scores)
        for name, confidence, predicted in zip(
            names, rows.confidence.tolist(), top.tolist(), strict=True
        ):
            self._counts["repeated"] += self._waiting.pop(name, None) is not None
            self._waiting[name] = (confidence, predicted)
        self._drop()

    def labelled(self, ids: Iterable[Id], labels: Values, *, window: Number | None = None) -> int:
        """Match labels with waiting predictions; returns how many were found.

        An example belongs to the window in which its label comes. Ids that are not waiting, or not
        any more, are counted and left out. The label -100 says that none will come.
        """
        names, targets = _ids(ids), _targets(labels)
        if targets.shape != (len(names),):
            raise ValueError(f"one label per id is wanted, got {targets.shape} for {len(names)}")
        if self._classes:
            check_labels(targets, self._classes)
        self._check_open(window)
        pairs = []
        for name, label in zip(names, targets.tolist(), strict=True):
            waited = self._waiting.pop(name, None)
            if waited is None:
                self._counts["unknown"] += 1
            elif label == IGNORED:
                self._counts["ignored"] += 1
            else:
                pairs.append((waited[0], waited[1] == label))
        claimed, right = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        self._take(Pairs(claimed, right > 0), window)
        return len(pairs)

    def update_file(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = None,
        window: Number | None = None,
        name: str | None = None,
        progress: Progress | None = None,
    ) -> Monitor:
        """Add a prediction file, or a folder or glob of shards, as one window.

        ``window`` is the next one by default. A file that is in the stream already, under the same
        name and with the same sums, is left out with a warning: it was given twice. Files are
        recognised for good, also when their window has been summed up.
        """
        chosen = open_dataset(path).split(split, ("test", ""))
        name = name or (f"{path}, {chosen.name}" if split else os.fspath(path))
        needed = self.calibrator is not None and self.calibrator.needs_features
        columns = [chosen.domain, "labels", *(["features"] if needed else [])]
        self._check_open(window)
        number = self._next() if window is None else _number(window)
        total, ignored, classes = self._empty(number, name), 0, self._classes
        try:
            shards = chosen.walk(self._shard, *columns, rows=chosen.chunk_rows, progress=progress)
            for sums, left_out in shards:
                total, ignored = total + sums, ignored + left_out
        except Exception:
            self._classes = classes  # a refused file leaves no trace
            raise
        if total in self._files:
            warn(f"{name} is in the stream already and is not counted again")
            return self
        if total.n == 0:
            warn(f"{name} has no labelled examples: its window is empty")
        self._counts["ignored"] += ignored
        self._files.add(total)
        self._add(total)
        return self

    def merge(self, other: Monitor) -> Monitor:
        """Add the windows, the waiting predictions and the counts of another worker.

        Sums of windows with the same number add. An alarm of ``other`` belongs to its own stream
        and is not taken over; the report on the total is about the total.
        """
        if self._form() != other._form():
            raise ValueError(
                f"monitors of different form do not merge: {self._form()}, {other._form()}"
            )
        if other._folded.position:
            raise ValueError(
                f"a monitor with more than {other.keep} windows has summed up the oldest and "
                "cannot be merged into another: raise keep, or merge the other way round"
            )
        if self.first is None:
            self.first = other.first
        for number in other.windows:
            self._check_open(number)
        self.dated = self.dated or other.dated
        for window in other.windows.values():
            self._put(window)
        self._fold()
        self._files.merge(other._files)
        for key, count in other._counts.items():
            self._counts[key] += count
        self._classes = self._classes or other._classes
        self._counts["repeated"] += len(self._waiting.keys() & other._waiting.keys())
        self._waiting |= other._waiting
        self._drop()
        return self

    def like(self) -> Monitor:
        """A monitor of the same settings that has seen nothing, for another worker."""
        fresh = Monitor(
            self.calibrator,
            window=self.window,
            false_alarms=self.false_alarms,
            tolerance=self.tolerance,
            bins=self.bins,
            first=self.first,
            pending=self.pending,
            keep=self.keep,
        )
        fresh.level, fresh.known, fresh.made_for = self.level, self.known, self.made_for
        fresh.dated = self.dated
        return fresh

    # -------------------------------------------------------------------------------- findings

    @property
    def seen(self) -> int:
        """Number of labelled examples so far."""
        return self._folded_n + sum(window.n for window in self.windows.values())

    @property
    def e_value(self) -> float:
        """The evidence of everything so far; an alarm is raised at ``1 / level``."""
        return _exp(self._evidence().log_e_value(self.bins))

    def report(self) -> MonitorReport:
        """What the windows show, and whether the calibrator should be fitted again."""
        rows, evidence = [], self._folded
        for number in sorted(self.windows):
            window = self.windows[number]
            evidence = evidence.after(window.log_bets(), self._position(number))
            e_value = _exp(evidence.log_e_value(self.bins))
            row = {"window": window.name, "n": window.n, **window.figures(), "e_value": e_value}
            rows.append(row)
        alarm = self.alarm or self._alarmed(evidence)
        drift, off = (None, []) if alarm is None else self._drift(evidence)
        return MonitorReport(
            self.seen,
            rows,
            _exp(evidence.log_e_value(self.bins)),
            1 / self.level,
            alarm,
            drift,
            off,
            self.false_alarms,
            self.tolerance,
            self.level != self.false_alarms,
            {"pending": len(self._waiting), **self._counts},
        )

    def _drift(self, evidence: Evidence) -> tuple[Drift, list[dict[str, float]]]:
        """The bet with the most money, and the bins that are off since it began."""
        weighted = evidence.weighted(self.bins)
        tilt, run = np.unravel_index(int(weighted.argmax()), weighted.shape)
        low, high = (int(ends[run]) for ends in bin_runs(self.bins)[:2])
        numbers = sorted(self.windows)
        gains = [self.windows[k].log_bets()[tilt, low:high].sum() for k in numbers]
        positions = np.array([self._position(number) for number in numbers], dtype=float)
        scores = np.cumsum(gains[::-1])[::-1] - np.log(positions * (positions + 1))
        begins = int(scores.argmax())
        total = self._empty(numbers[begins], self.windows[numbers[begins]].name)
        for number in numbers[begins:]:
            total += self.windows[number]
        claimed, right, n = (x[low:high].sum() for x in (total.claimed, total.right, total.count))
        n = n or math.nan
        found = Drift(
            "over" if TILTS[tilt] < 0 else "under",
            total.name + " or earlier" * (begins == 0 and self._folded.position > 0),
            float(self.edges[low]),
            float(self.edges[high]),
            int(total.count[low:high].sum()),
            float(claimed / n),
            float(right / n),
        )
        return found, self._off(total)

    def _off(self, total: Window) -> list[dict[str, float]]:
        """Bins whose gap is outside what is allowed by more than two standard errors."""
        found = []
        least = max(10, 0.01 * total.n)
        for b in np.flatnonzero(total.count >= least).tolist():
            n, claimed = int(total.count[b]), total.claimed[b] / total.count[b]
            right = total.right[b] / n
            low, high = np.clip(claimed + self._allowed()[:, b], 0, 1)
            bound = low if right < low else high
            if not low <= right <= high and abs(right - bound) > 2 * _deviation(bound, n):
                ends = {"low": float(self.edges[b]), "high": float(self.edges[b + 1]), "n": n}
                found.append({**ends, "confidence": float(claimed), "accuracy": float(right)})
        return found

    # ------------------------------------------------------------------------------ to and from

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a JSON file; a kill leaves the old file or the new one."""
        text = json.dumps(self._state(), allow_nan=False)
        with replacing(Path(path)) as temporary:
            temporary.write_text(text, "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str], calibrator: Calibrator | None = None) -> Monitor:
        """Read what :meth:`save` wrote; the calibrator must be the one it was written with.

        Without one the state can be merged and reported, and takes pairs, but no logits.
        """
        try:
            state = json.loads(Path(path).read_text("utf-8"))
            if state["format"] > FORMAT:
                raise ValueError(
                    f"it has format {state['format']}, this release reads up to {FORMAT}: upgrade"
                )
            found = cls._restored(state)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as problem:
            raise ValueError(f"{path} is not the state of a monitor ({problem})") from problem
        if calibrator is not None and found.made_for != _fingerprint(calibrator):
            raise ValueError(
                f"{path} was collected with {found.made_for or 'no calibrator'}, not with "
                f"{_fingerprint(calibrator)}: begin a new stream after a new fit"
            )
        found.calibrator = calibrator
        return found

    def _state(self) -> dict[str, Any]:
        settings = ("window", "false_alarms", "tolerance", "bins", "first", "pending", "keep")
        return {
            "format": FORMAT,
            "kind": "monitor",
            "settings": {name: getattr(self, name) for name in settings},
            "level": self.level,
            "known": self.known.tolist(),
            "dated": self.dated,
            "calibrator": self.made_for,
            "classes": self._classes,
            "alarm": self.alarm and self.alarm._asdict(),
            "counts": self._counts,
            "waiting": [[name, *kept] for name, kept in self._waiting.items()],
            "files": self._files.totals,
            "windows": [pack(self.windows[number]) for number in sorted(self.windows)],
            "folded": {
                "n": self._folded_n,
                "position": self._folded.position,
                "logs": self._folded.logs.tolist() if self._folded.position else None,
            },
        }

    @classmethod
    def _restored(cls, state: dict[str, Any]) -> Monitor:
        if state["kind"] != "monitor":
            raise ValueError(f"it holds {state['kind']!r}")
        found = cls(**state["settings"])
        found.level, found.made_for = float(state["level"]), state["calibrator"]
        found.known = np.array(state["known"], dtype=np.float64).reshape(2, found.bins)
        found.dated = bool(state.get("dated", False))
        found._classes = int(state["classes"])
        found.alarm = None if state["alarm"] is None else Alarm(**state["alarm"])
        found._counts = {name: int(state["counts"][name]) for name in found._counts}
        found._waiting = {name: (float(c), int(k)) for name, c, k in state["waiting"]}
        for packed in state["windows"]:
            window = unpack(packed, found.bins)
            found.windows[window.number] = window
        found._files = Files.restored(state.get("files"), found.windows.values())
        folded = state["folded"]
        if folded["position"]:
            logs = np.array(folded["logs"], dtype=np.float64).reshape(found._folded.logs.shape)
            found._folded, found._folded_n = Evidence(folded["position"], logs), int(folded["n"])
        return found

    # --------------------------------------------------------------------------------- plumbing

    def _form(self) -> tuple[Any, ...]:
        known = tuple(self.known.round(12).reshape(-1).tolist()) if self.known.any() else ()
        return (self.bins, self.tolerance, self.false_alarms, self.made_for, known)

    def _allowed(self) -> FloatArray:
        """Least and greatest difference of accuracy and confidence, ``(2, bins)``."""
        return np.asarray(self.known + np.array([[-self.tolerance], [self.tolerance]]))

    def _empty(self, number: int, name: str) -> Window:
        return Window(number, name, *no_sums(self.bins))

    def _sums(self, pairs: Pairs, number: int, name: str) -> Window:
        """Sums of pairs per bin, and of what the bets cost."""
        claimed, right = pairs
        index = bin_index(claimed, self.edges)
        low, high = np.clip(claimed + self._allowed()[:, index], 0, 1)
        costs = [np.log1p((high if tilt > 0 else low) * np.expm1(tilt)) for tilt in TILTS]

        def total(values: FloatArray) -> FloatArray:
            return np.bincount(index, values, self.bins).astype(np.float64, copy=False)

        count = np.bincount(index, minlength=self.bins).astype(np.int64)
        hits = total(right.astype(np.float64)).astype(np.int64)
        return Window(number, name, count, hits, total(claimed), np.stack([*map(total, costs)]))

    def _scores(self, logits: Values | None, probs: Values | None) -> Logits:
        """Logits before calibration."""
        if self.calibrator is None and self.made_for is not None:
            raise ValueError(
                f"this stream is of {self.made_for}: pass it to Monitor.load(path, calibrator)"
            )
        if probs is not None and logits is None:
            return logits_from_probs(probs)[0]
        if logits is None or probs is not None:
            raise TypeError("either logits or probs are wanted: (logits, ...) or (probs=...)")
        return as_scores(logits)

    def _pairs(
        self,
        logits: Values | None,
        labels: Values,
        probs: Values | None,
        features: Values | None = None,
    ) -> Pairs:
        """Pairs of the labelled rows; what the others hold does not matter."""
        scores = self._scores(logits, probs)
        given = examples(scores, labels)
        if self.calibrator is not None:
            kept = (given.labels != IGNORED).reshape(as_labels(labels).shape)
            beside = None if features is None else _rows(as_scores(features, "features"), kept)
            found = calibrated(self.calibrator, _rows(scores, kept), beside)
            given = examples(found, given.labels[kept.reshape(-1)])
        rows = reduce_examples(given)
        self._check_classes(scores)
        return Pairs(rows.confidence, rows.outcome)

    def _shard(self, chunks: Iterator[Chunk]) -> tuple[Window, int]:
        """Sums of one shard of a file, and its ignored labels."""
        total, ignored = self._empty(0, ""), 0
        for chunk in chunks:
            scores = chunk.get("logits"), chunk.labels, chunk.get("probs")
            pairs = self._pairs(*scores, chunk.get("features"))
            total += self._sums(pairs, 0, "")
            ignored += chunk.labels.size - pairs.outcome.size
        return total, ignored

    def _check_classes(self, scores: Logits) -> None:
        if _is_empty(scores):
            return  # an empty list says nothing about classes
        classes = 2 if scores.ndim == 1 else int(scores.shape[-1])
        if self._classes not in (0, classes):
            raise ValueError(
                f"every batch must have the same classes: {self._classes} so far, now {classes}"
            )
        self._classes = classes

    def _take(self, pairs: Pairs, window: Number | None) -> Monitor:
        """Add pairs to one window, or to as many numbered ones as they fill."""
        if window is not None:
            self.dated = self.dated or isinstance(window, date)
            number = _number(window)
            self._add(self._sums(pairs, number, self._name(number)))
            return self
        done = 0
        while done < pairs.outcome.size:
            number = max(self.windows, default=self._next())
            room = self.window - (self.windows[number].n if number in self.windows else 0)
            if room <= 0:
                number, room = self._next(), self.window
            some = slice(done, done + room)
            part = Pairs(pairs.confidence[some], pairs.outcome[some])
            self._add(self._sums(part, number, self._name(number)))
            done += room
        return self

    def _name(self, number: int) -> str:
        """What a window is called that has no name of its own."""
        return date.fromordinal(number).isoformat() if self.dated else str(number)

    def _next(self) -> int:
        """Number of the window after the last."""
        if self.windows:
            return max(self.windows) + 1
        return 1 if self.first is None else self.first

    def _add(self, window: Window) -> None:
        """Add sums to the stream, and look whether they raise an alarm."""
        self._put(window)
        self._fold()
        if self.alarm is None:
            self.alarm = self._alarmed(self._evidence())

    def _put(self, window: Window) -> None:
        if self.first is None:
            self.first = window.number
        number = window.number
        if self._before is not None and number < self._before[0]:
            self._before = None  # an earlier window changes
        known = self.windows.get(number)
        self.windows[number] = window if known is None else known + window

    def _fold(self) -> None:
        """Sum up the oldest windows beyond those that are kept."""
        while len(self.windows) > self.keep:
            oldest = self.windows.pop(min(self.windows))
            self._folded_n += oldest.n
            position = self._position(oldest.number)
            self._folded = self._folded.after(oldest.log_bets(), position)
            if self._before is not None and self._before[0] <= oldest.number:
                self._before = None

    def _alarmed(self, evidence: Evidence) -> Alarm | None:
        log_e = evidence.log_e_value(self.bins)
        if log_e < -math.log(self.level):
            return None
        return Alarm(self.windows[max(self.windows)].name, self.seen, _exp(log_e))

    def _evidence(self) -> Evidence:
        """Evidence of all windows; all but the last are remembered."""
        if not self.windows:
            return self._folded
        last = max(self.windows)
        if self._before is None or self._before[0] != last:
            start, numbers = self._folded, sorted(self.windows)[:-1]
            if self._before is not None:  # a window was begun: those before it are known
                start = self._before[1]
                numbers = [k for k in numbers if k >= self._before[0]]
            for number in numbers:
                start = start.after(self.windows[number].log_bets(), self._position(number))
            self._before = (last, start)
        return self._before[1].after(self.windows[last].log_bets(), self._position(last))

    def _position(self, number: int) -> int:
        assert self.first is not None
        return number - self.first + 1

    def _check_open(self, window: Number | None) -> None:
        """Raise where a window lies before the stream, or among those that are summed up."""
        if window is None:
            return
        number = _number(window)
        if self.first is not None and number < self.first:
            raise ValueError(
                f"window {window} is before the first, {self._name(self.first)}: set first= when "
                "the stream begins"
            )
        if self._folded.position and self._position(number) <= self._folded.position:
            raise ValueError(
                f"window {window} was summed up with all but the last {self.keep}: raise keep"
            )

    def _drop(self) -> None:
        while len(self._waiting) > self.pending:
            del self._waiting[next(iter(self._waiting))]
            self._counts["dropped"] += 1


def _check_settings(
    window: int, false_alarms: float, tolerance: float, bins: int, pending: int, keep: int
) -> None:
    for name, value in (("window", window), ("pending", pending), ("keep", keep)):
        check_whole(name, value)
    check_bins(bins)
    if bins > MOST_BINS:
        raise ValueError(
            f"bins must be at most {MOST_BINS}, got {bins}: every run of bins is tested"
        )
    if not 0 < false_alarms < 1:
        raise ValueError(f"false_alarms must be between 0 and 1, got {false_alarms}: 0.05 is 5 %")
    if not 0 <= tolerance < 0.5:
        raise ValueError(
            f"tolerance must be at least 0 and below 0.5, got {tolerance}: 0.02 is 2 %"
        )


def _number(window: Number) -> int:
    if isinstance(window, date):
        return window.toordinal()
    if isinstance(window, bool) or not isinstance(window, (int, np.integer)):
        raise TypeError(f"window must be a whole number or a date, got {window!r}")
    return int(window)


def _ids(ids: Iterable[Id]) -> list[Id]:
    """Ids as they can be looked up and written to JSON."""
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"ids must be a list, one for each example, got {ids!r}")
    values = ids.tolist() if isinstance(ids, (np.ndarray, Tensor)) else list(ids)
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    for value in plain:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"ids must be whole numbers or text, got {value!r}: use str(id)")
    return plain


def _is_empty(values: Values) -> bool:
    shape = getattr(values, "shape", None)
    return isinstance(values, (list, tuple)) and not values if shape is None else 0 in shape


def _targets(labels: Values) -> IntArray:
    """Labels as whole numbers; an empty list, which NumPy takes for one of floats, is no error."""
    return np.zeros(0, np.int64) if _is_empty(labels) else as_labels(labels)


def _rows(values: Logits, kept: NDArray[np.bool_]) -> Logits:
    return values[torch.from_numpy(kept) if isinstance(values, Tensor) else kept]


def _top(scores: Logits) -> IntArray:
    """Predicted class of each row; one logit is that of class 1 against 0."""
    block = as_tensor(scores)
    top = (block > 0).long() if block.ndim == 1 else top_class(block)
    return np.asarray(top.cpu().numpy(), dtype=np.int64)


def _gaps(reference: tuple[Values, Values], bins: int, level: float) -> FloatArray:
    """Limits of accuracy minus confidence per bin, ``(2, bins)``, that hold for all bins at once.

    By Clopper and Pearson, at ``level`` divided by the two sides of all bins with examples
    (Bonferroni). There is no upper limit (1) where all were right, no lower one (-1) where none
    was, and neither in a bin without examples: a neighbour's gap may be quite another.
    """
    claimed, happened, _ = as_pairs(*reference)
    index = bin_index(claimed, uniform_edges(bins))
    n, right, total = (np.bincount(index, values, bins) for values in (None, happened, claimed))
    tail = level / (2 * np.count_nonzero(n))
    low = beta.ppf(tail, np.maximum(right, 1), n - right + 1)
    high = beta.ppf(1 - tail, right + 1, np.maximum(n - right, 1))
    mean = total / np.maximum(n, 1)
    return np.stack([np.where(right > 0, low - mean, -1.0), np.where(right < n, high - mean, 1.0)])


def _fingerprint(calibrator: Calibrator) -> str:
    """Name of a fitted calibrator: its class and a digest of what it has learned."""
    config = json.dumps(calibrator.config(), sort_keys=True, default=lambda part: str(type(part)))
    digest = hashlib.sha256(config.encode())
    for name, value in sorted(calibrator.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().double().numpy().tobytes())
    return f"{type(calibrator).__name__} {digest.hexdigest()[:12]}"


def _deviation(share: float, n: int) -> float:
    return math.sqrt(max(share * (1 - share), 1 / n) / n)


def _exp(log: float) -> float:
    """Exponential that stays a number of JSON."""
    return math.exp(min(log, 690.0))
