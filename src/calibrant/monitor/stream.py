"""The monitor of a stream of predictions and labels."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from concurrent.futures import Executor
from datetime import date
from functools import partial
from itertools import chain
from typing import Annotated, Any, TypeAlias

import numpy as np

from calibrant._core import checks
from calibrant._core.binning import Bins
from calibrant._core.checks import Features, Logits, Values
from calibrant._core.chunks import Progress
from calibrant._core.messages import printable
from calibrant._core.options import Count, WithOptions, above, at_least, at_most, below
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.fingerprint import calibrator_fingerprint
from calibrant.data.dataset import TEST_SPLITS, Dataset, as_dataset
from calibrant.data.shards import located
from calibrant.metrics.reductions import Pairs
from calibrant.monitor import predictions
from calibrant.monitor.e_process import EProcess, Tolerated, Window, Windows, reference_gaps
from calibrant.monitor.estimates import Estimator, WindowEstimate, WindowEstimates
from calibrant.monitor.predictions import Id, PendingPredictions
from calibrant.monitor.reference import as_bins, monitored_columns
from calibrant.monitor.report import Alarm, MonitorReport, bins_off, find_drift
from calibrant.retrain.adapter import as_calibrator
from calibrant.retrain.maccal import MaCCal

WindowId: TypeAlias = int | date


class Monitor(WithOptions):
    """Detect calibration drift of a deployed model, with few false alarms over the whole stream.

    While every prediction is right with a probability within ``tolerance`` of its confidence,
    whatever came before it, the probability of ever raising an alarm is at most ``false_alarms``.
    See :mod:`calibrant.monitor.e_process` for the test.

    Parameters
    ----------
    calibrator : Calibrator, optional
        Applied to logits first.
    window : int
        Labelled examples after which a new window begins, if windows are not named.
    false_alarms : float
    tolerance : float
        Largest difference of accuracy and confidence that is not drift: 0.02 is two points.
    reference : pair of arrays, or Bins, optional
        Confidences and outcomes at deployment, on other examples than the fit, or the sums of
        :func:`calibrant.monitor.reference.reference_bins`, which reads any number. Drift is then a
        change from the gaps of the reference, bin by bin, by more than the tolerance. Half of
        ``false_alarms`` goes into Clopper-Pearson limits of those gaps, which are assumed constant
        within a bin up to the tolerance. In bins without examples no drift is detected.
    bins : int
        Number of equal-width bins.
    first : int or date, optional
        The first window; by default that of the first examples (1 where windows have no names).
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
        calibrator: Calibrator | MaCCal | None = None,
        *,
        window: Count = 1000,
        false_alarms: Annotated[float, above(0), below(1)] = 0.05,
        tolerance: Annotated[float, at_least(0), below(0.5)] = 0.02,
        reference: tuple[Values, Values] | Bins | None = None,
        bins: Annotated[int, at_least(1), at_most(100)] = 15,
        first: WindowId | None = None,
        pending: Count = 100_000,
        keep: Count = 1000,
    ) -> None:
        self.calibrator = None if calibrator is None else as_calibrator(calibrator)
        if self.calibrator is not None:
            self.calibrator.refuse_tags("Monitor")
        self.fingerprint = (
            None if self.calibrator is None else calibrator_fingerprint(self.calibrator)
        )
        self.window, self.bins = window, bins
        self.false_alarms, self.tolerance = false_alarms, tolerance
        gaps = np.zeros((2, bins))
        if reference is not None:
            gaps = reference_gaps(as_bins(reference, bins), false_alarms / 2)
        self.tolerated = Tolerated(gaps, self.tolerance)
        self.alarm: Alarm | None = None
        self._windows = Windows(self.bins, keep, None if first is None else _number(first))
        self._dated = isinstance(first, date)  # window numbers are ordinals of days
        self._pending = PendingPredictions(pending)
        self._files: dict[str, list[float]] = {}  # by their digests; lists are of early states
        self._estimates = WindowEstimates()
        self._classes = 0

    def update(
        self,
        logits: Values | None = None,
        labels: Values | None = None,
        *,
        probs: Values | None = None,
        features: Features | None = None,
        window: WindowId | None = None,
    ) -> Monitor:
        """Add logits ``(..., classes)``, or ``probs``, with their labels ``(...)``.

        ``features`` ``(..., width)`` are for calibrators that need them. Without ``window`` the
        examples fill windows of the size that was set, after the last. Refused input changes
        nothing.
        """
        if labels is None:
            raise TypeError("labels are missing: (logits, labels) are wanted")
        self._check_open(window)
        targets, scores = predictions.integer_labels(labels), self._scores(logits, probs)
        pairs = predictions.labelled_pairs(self.calibrator, scores, targets, features)
        self._set_classes(predictions.class_count(scores))
        self._pending.counts["ignored"] += targets.size - pairs.outcome.size
        return self._take(pairs, window)

    def observe(
        self, confidence: Values, outcome: Values, *, window: WindowId | None = None
    ) -> Monitor:
        """Add pairs of confidence and outcome, of any kind of prediction.

        >>> Monitor().observe([0.9, 0.8], [1, 0]).report().n
        2
        """
        self._check_open(window)
        if predictions.is_empty(confidence) and predictions.is_empty(outcome):
            return self._take(Pairs(np.zeros(0), np.zeros(0, np.bool_)), window)
        claimed, happened, _ = checks.as_pairs(confidence, outcome)
        return self._take(Pairs(claimed, happened > 0), window)

    def predicted(
        self,
        ids: Iterable[Id],
        logits: Values | None = None,
        *,
        probs: Values | None = None,
        features: Features | None = None,
    ) -> None:
        """Remember confidence and predicted class of logits ``(n, classes)`` until labels come.

        An id that is already waiting is replaced and counted.
        """
        keys, scores = predictions.as_ids(ids), self._scores(logits, probs)
        shape = tuple(scores.shape)
        if len(shape) not in (1, 2) or shape[0] != len(keys):
            raise ValueError(f"one row of logits for each id is wanted, got {shape}, {len(keys)}")
        confidences, classes = predictions.top_predictions(self.calibrator, scores, features)
        self._set_classes(predictions.class_count(scores))
        self._pending.add(keys, confidences, classes)

    def labelled(self, ids: Iterable[Id], labels: Values, *, window: WindowId | None = None) -> int:
        """Match labels with waiting predictions; returns the number of matches.

        An example belongs to the window in which its label comes. Ids that are not waiting are
        counted and left out. The label -100 means that none will come.
        """
        keys, targets = predictions.as_ids(ids), predictions.integer_labels(labels)
        if targets.shape != (len(keys),):
            raise ValueError(f"one label per id is wanted, got {targets.shape} for {len(keys)}")
        if self._classes:
            checks.check_labels(targets, self._classes)
        self._check_open(window)
        pairs = self._pending.match(keys, targets)
        self._take(pairs, window)
        return pairs.outcome.size

    def update_file(
        self,
        path: str | os.PathLike[str] | Dataset,
        *,
        split: str | None = None,
        window: WindowId | None = None,
        name: str | None = None,
        estimator: Estimator | None = None,
        executor: Executor | None = None,
        progress: Progress | None = None,
    ) -> Monitor:
        """Add a prediction file, or a folder or glob of shards, or a dataset, as one window.

        ``window`` is the next one by default. A file with the same logits and labels as an
        earlier one, whatever their names, is left out with a warning, also when that one's window
        was summed up.

        ``estimator`` (:class:`calibrant.estimate.PerformanceEstimator`) estimates the accuracy of
        the window without labels, which the file need not have; an alarm ends its promises.
        """
        chosen = as_dataset(path).split(split, TEST_SPLITS)
        # in states too, since a file name need not be Unicode
        name = printable(name or (f"{chosen.path}, {chosen.name}" if split else chosen.path))
        self._check_open(window)
        self._check_calibrator()
        number = self._windows.next_number() if window is None else _number(window)
        total, ignored = Window.empty(self.bins, number, name), 0
        estimate = None if estimator is None else estimator.window_estimate(chosen, executor)
        if estimate is not None and "labels" not in chosen.keys:
            self._add(total, estimate)
            return self
        task = partial(predictions.shard_sums, self.calibrator, self.tolerated)
        columns = monitored_columns(self.calibrator)
        content = hashlib.sha256()
        for shard, digest in chosen.walk(
            task, *columns, rows=chosen.chunk_rows, executor=executor, progress=progress
        ):
            content.update(digest.encode())
            for sums, unlabelled in shard:
                total, ignored = total + sums, ignored + unlabelled
        if total.n and self._knows(content.hexdigest(), total):
            checks.warn(f"{name} is in the stream already and is not counted again")
            return self
        if total.n == 0:
            checks.warn(f"{name} has no labelled examples: its window is empty")
        with located(chosen.path):
            self._set_classes(chosen.classes if chosen.rows else 0)
        self._pending.counts["ignored"] += ignored
        self._files.setdefault(content.hexdigest(), [])
        self._add(total, estimate)
        return self

    def _knows(self, content: str, window: Window) -> bool:
        """Return True for the content of a file that was added."""
        # early states have the sums of confidences by name and counts
        totals = self._files.get(window.digest(), [])
        claimed = window.claimed.sum()
        early = any(math.isclose(claimed, known, rel_tol=1e-9) for known in totals)
        return early or content in self._files

    def merge(self, other: Monitor) -> Monitor:
        """Add the windows, the waiting predictions and the counts of another worker.

        Sums of windows with the same number add. An alarm of ``other`` belongs to its own stream
        and is not taken over. Merge each worker once: only files and itself are known again.
        """
        if other is self:
            raise ValueError("a monitor cannot be merged into itself: its examples count already")
        if both := self._files.keys() & other._files.keys():
            raise ValueError(
                f"{len(both)} files are in both monitors and would count twice: begin workers "
                "with like(), and give each file to one of them"
            )
        if self._form() != other._form():
            raise ValueError(f"settings must agree to merge, got {self._form()}, {other._form()}")
        if other._windows.summed.position:
            raise ValueError(
                f"a monitor that has summed up all but {other._windows.keep} windows cannot be "
                "merged into another: raise keep, or merge the other way round"
            )
        if self._windows.first is None:
            self._windows.first = other._windows.first
        for number in other.windows:
            self._check_open(number)
        for _, window in sorted(other.windows.items()):
            self._windows.put(window)
        for digest, sums in other._files.items():
            self._files.setdefault(digest, []).extend(sums)
        self._pending.merge(other._pending)
        self._estimates.by_window |= other._estimates.by_window
        self._dated = self._dated or other._dated
        self._classes = self._classes or other._classes
        return self

    def like(self) -> Monitor:
        """Return a monitor of the same settings that has seen nothing, for another worker."""
        fresh = Monitor(self.calibrator, **self._settings())
        fresh.tolerated, fresh.fingerprint = self.tolerated, self.fingerprint
        fresh._dated = self._dated
        return fresh

    @property
    def windows(self) -> dict[int, Window]:
        """Windows that are kept, by number."""
        return self._windows.kept

    @property
    def seen(self) -> int:
        """Number of labelled examples so far."""
        return self._windows.n

    @property
    def e_value(self) -> float:
        """Evidence against calibration: 1 at the start, ``1 / level`` for an alarm."""
        return self._windows.e_process().e_value

    @property
    def level(self) -> float:
        """Alarms are raised at an e-value of 1 / level; a reference takes half of false_alarms."""
        return self.false_alarms / 2 if self.tolerated.has_reference else self.false_alarms

    def report(self) -> MonitorReport:
        """Return the windows, the alarm if there was one, and the drift behind it."""
        rows, state = [], self._windows.summed
        for window, state in self._windows.history():
            figures = {"n": window.n, **window.figures(), "e_value": state.e_value}
            figures |= self._estimates.figures(window.number)
            rows.append({"window": window.name, **figures})
        alarm, drift, off = self.alarm or self._alarmed(state), None, []
        if alarm is not None:
            drift, total = find_drift(self._windows, state)
            off = bins_off(total, self.tolerated)
        return MonitorReport(
            n=self.seen,
            windows=rows,
            e_value=state.e_value,
            limit=1 / self.level,
            alarm=alarm,
            drift=drift,
            bins=off,
            false_alarms=self.false_alarms,
            tolerance=self.tolerance,
            reference=self.tolerated.has_reference,
            counts={"pending": len(self._pending.waiting), **self._pending.counts},
        )

    def resume(self, calibrator: Calibrator | MaCCal) -> Monitor:
        """Continue a loaded stream with logits; the calibrator must be the one of the stream.

        Without a calibrator a loaded monitor reports, merges and takes pairs, but no logits.
        """
        calibrator = as_calibrator(calibrator)
        wanted, got = self.fingerprint or "no calibrator", calibrator_fingerprint(calibrator)
        if wanted != got:
            message = f"this stream was collected with {wanted}, not with {got}"
            raise ValueError(f"{message}: begin a new stream after a new fit")
        self.calibrator = calibrator
        return self

    def describe(self) -> str:
        """Describe the state in a sentence."""
        return f"monitor after {self.seen:,} labelled examples in {len(self.windows):,} windows"

    def state(self) -> dict[str, Any]:
        """Return everything but the calibrator as values that JSON can hold.

        >>> Monitor.from_state(Monitor().observe([0.9], [1]).state()).seen
        1
        """
        return {
            "settings": self._settings(),
            "level": self.level,
            "known": self.tolerated.gaps.tolist(),
            "dated": self._dated,
            "calibrator": self.fingerprint,
            "classes": self._classes,
            "alarm": self.alarm and self.alarm._asdict(),
            "counts": self._pending.counts,
            "waiting": [[key, *kept] for key, kept in self._pending.waiting.items()],
            "files": self._files,
            "estimates": self._estimates.state(),
            **self._windows.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Monitor:
        """Build the monitor that :meth:`state` describes, without its calibrator."""
        unknown = set(state) - set(cls().state())
        if unknown:
            raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
        watch = cls(**state["settings"])
        gaps = np.array(state["known"], dtype=np.float64).reshape(2, watch.bins)
        if not (np.abs(gaps) <= 1).all():
            raise ValueError("known gaps must be from -1 to 1")
        watch.tolerated = Tolerated(gaps, watch.tolerance)
        watch._dated, watch.fingerprint = bool(state.get("dated")), state["calibrator"]
        checks.check_whole("classes", state["classes"], least=0)
        watch._classes = state["classes"]
        watch._pending.restore(state["counts"], state["waiting"])
        watch._windows.restore(state)
        for number in (*watch.windows, watch._windows.next_number()):
            watch._name(number)  # refuses what is no day
        watch._estimates.restore(state.get("estimates", {}))
        watch.alarm = None if state["alarm"] is None else Alarm.from_state(state["alarm"])
        if watch.alarm is not None and not watch.windows:
            raise ValueError("there is an alarm without a window")
        files = state.get("files")
        if files is None:  # early states had no list of files
            files = {w.digest(): [w.claimed.sum()] for w in watch.windows.values() if w.n}
        watch._files = {str(key): [*map(float, sums)] for key, sums in files.items()}
        if not all(map(math.isfinite, chain.from_iterable(watch._files.values()))):
            raise ValueError("sums of files must be finite")
        return watch

    def _settings(self) -> dict[str, Any]:
        names = ("window", "false_alarms", "tolerance", "bins")
        settings = {name: getattr(self, name) for name in names}
        first, keep = self._windows.first, self._windows.keep
        return {**settings, "first": first, "pending": self._pending.limit, "keep": keep}

    def _form(self) -> tuple[Any, ...]:
        """Settings that monitors must share to merge."""
        gaps = self.tolerated.gaps.round(12).tolist() if self.tolerated.has_reference else None
        return self.bins, self.tolerance, self.false_alarms, self.fingerprint, gaps

    def _scores(self, logits: Values | None, probs: Values | None) -> Logits:
        self._check_calibrator()
        if probs is not None and logits is None:
            return checks.logits_from_probs(probs)
        if logits is None or probs is not None:
            raise TypeError("either logits or probs are wanted: (logits, ...) or (probs=...)")
        return checks.as_scores(logits)

    def _check_calibrator(self) -> None:
        if self.calibrator is None and self.fingerprint is not None:
            raise ValueError(f"this stream is of {self.fingerprint}: pass it to resume(calibrator)")

    def _set_classes(self, classes: int) -> None:
        known = self._classes
        if known and classes and classes != known:
            raise ValueError(f"batches must have the same classes: {known} so far, now {classes}")
        self._classes = classes or known

    def _check_open(self, window: WindowId | None) -> None:
        """Raise if a window lies before the stream, or among those that were summed up."""
        if window is None:
            return
        number, windows = _number(window), self._windows
        if windows.first is not None and number < windows.first:
            first = self._name(windows.first)
            raise ValueError(f"window {window} is before the first, {first}: set first= to it")
        if windows.summed.position and windows.position(number) <= windows.summed.position:
            kept = windows.keep
            raise ValueError(f"window {window} was summed up, all but {kept} were: raise keep")

    def _take(self, pairs: Pairs, window: WindowId | None) -> Monitor:
        """Add pairs to one window, or to as many numbered ones as they fill."""
        if window is not None:
            self._dated = self._dated or isinstance(window, date)
            self._add(self.tolerated.window(pairs, _number(window), self._name(_number(window))))
            return self
        confidence, outcome = pairs
        while outcome.size:
            number, room = self._windows.next_number(), self.window
            last = self.windows.get(number - 1)
            if last is not None and last.n < self.window:
                number, room = last.number, self.window - last.n
            filling = Pairs(confidence[:room], outcome[:room])
            self._add(self.tolerated.window(filling, number, self._name(number)))
            confidence, outcome = confidence[room:], outcome[room:]
        return self

    def _add(self, window: Window, estimate: WindowEstimate | None = None) -> None:
        """Add a window to the stream, and remember the first alarm and an estimate."""
        self._windows.put(window)
        if self.alarm is None:
            self.alarm = self._alarmed(self._windows.e_process())
        if estimate is not None:
            self._estimates.keep(window.number, estimate, self.windows, self.alarm is not None)

    def _alarmed(self, state: EProcess) -> Alarm | None:
        if state.log_e_value() < -math.log(self.level):
            return None
        return Alarm(self.windows[max(self.windows)].name, self.seen, state.e_value)

    def _name(self, number: int) -> str:
        """Return the name of a window that was not named."""
        return date.fromordinal(number).isoformat() if self._dated else str(number)


def _number(window: WindowId) -> int:
    if isinstance(window, date):
        return window.toordinal()
    if isinstance(window, bool) or not isinstance(window, (int, np.integer)):
        raise TypeError(f"window must be a whole number or a date, got {window!r}")
    return int(window)
