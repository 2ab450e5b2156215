"""The monitor of a stream of predictions and labels."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Annotated, Any

import numpy as np

from calibrant._core import checks
from calibrant._core.binning import Bins
from calibrant._core.checks import BoolArray, Features, Logits, Values
from calibrant._core.messages import printable
from calibrant._core.options import Count, WithOptions, above, at_least, at_most, below
from calibrant._core.probs import logits_from_probs
from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.calibrators.description import calibrator_fingerprint
from calibrant.data.dataset import TEST_SPLITS, Dataset, Split
from calibrant.data.files import as_dataset
from calibrant.data.shards import located
from calibrant.metrics.reductions import Pairs, probability_of
from calibrant.monitor.deliveries import (
    Id,
    PendingPredictions,
    _chunk_delivery,
    _class_count,
    _Delivery,
    _in_stream_order,
    _integer_labels,
    _is_empty,
    _KeyedExamples,
    _labelled_pairs,
    _recognised,
    _stream_order,
    _watched_classes,
    as_ids,
)
from calibrant.monitor.e_process import EProcess
from calibrant.monitor.monitor_report import Alarm, MonitorReport, _bins_off, _doubt, _find_drift
from calibrant.monitor.reference import _reference_gaps
from calibrant.monitor.seen import _Known, _SeenExamples
from calibrant.monitor.stream_windows import (
    NOT_ESTIMATED,
    Estimator,
    Tolerated,
    Window,
    WindowEstimate,
    WindowId,
    Windows,
    _window_number,
)
from calibrant.workflows.effect import input_names

NEW = " new"
"""Column that tells new examples from others, under a name that no file has."""
NO_PAIRS = Pairs(np.zeros(0), np.zeros(0, np.bool_))
AGAIN = "is in the stream already and is not counted again; if these are other examples"


class Monitor(WithOptions):
    """Detect calibration drift of a deployed model, with few false alarms over the whole stream.

    While every prediction is right with a probability within ``tolerance`` of its confidence,
    whatever came before it, the probability of ever raising an alarm is at most ``false_alarms``.
    Of two classes P(y = 1) is watched, as in an evaluation, whichever class is predicted. See
    :mod:`calibrant.monitor.e_process` for the test.

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
    remember : int
        Examples that are recognised when they are delivered again; beyond that the oldest windows
        are forgotten, but never the last. Each takes 12 bytes of the state.

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
        window: Count = 1000,
        false_alarms: Annotated[float, above(0), below(1)] = 0.05,
        tolerance: Annotated[float, at_least(0), below(0.5)] = 0.02,
        reference: tuple[Values, Values] | Bins | None = None,
        bins: Annotated[int, at_least(1), at_most(100)] = 15,
        first: WindowId | None = None,
        pending: Count = 100_000,
        keep: Count = 1000,
        remember: Count = 1_000_000,
    ) -> None:
        if calibrator is not None:
            check_calibrator(calibrator)
            calibrator.refuse_tags("Monitor")
        self.calibrator = calibrator
        self.fingerprint = (
            None if self.calibrator is None else calibrator_fingerprint(self.calibrator)
        )
        self.window, self.bins = window, bins
        self.false_alarms, self.tolerance = false_alarms, tolerance
        gaps = np.zeros((2, bins))
        if reference is not None:
            gaps = _reference_gaps(reference, bins, false_alarms / 2)
        self.tolerated = Tolerated(gaps, self.tolerance)
        self.alarm: Alarm | None = None
        self._windows = Windows(self.bins, keep, first)
        self._pending = PendingPredictions(pending)
        self._seen = _SeenExamples(remember)
        self._counts = dict.fromkeys(("again", "late", "lost"), 0)
        self._classes = 0
        self._columns: list[str] = []
        self._ids: str | None = None
        self._warned = False

    @checks.warnings_at_caller()
    def update(
        self,
        logits: Values | None = None,
        labels: Values | None = None,
        *,
        probs: Values | None = None,
        features: Features | None = None,
        ids: Iterable[Id] | None = None,
        window: WindowId | None = None,
    ) -> Monitor:
        """Add logits ``(..., classes)``, or ``probs``, with their labels ``(...)``.

        ``features`` ``(..., width)`` are for calibrators that need them. Without ``window`` the
        examples fill windows of the size that was set, after the last. Refused input changes
        nothing.

        Examples that are delivered again are recognised by their ``ids``, one for each row, or else
        by their scores. Each label counts once, and one that was -100 so far joins the window of
        its example.
        """
        if labels is None:
            raise TypeError("labels are missing: (logits, labels) are wanted")
        self._windows.check_open(window)
        logits, probs, labels = _in_stream_order(self.calibrator, logits, probs, labels)
        targets, scores = _integer_labels(labels), self._scores(logits, probs)
        pairs = _labelled_pairs(self.calibrator, scores, targets, features)
        stored = scores if probs is None else checks.as_scores(probs)
        examples = _recognised(stored, targets, ids, probs is not None)
        known = self._seen.recognise(examples)
        self._set_classes(_class_count(scores))
        self._warn_of_probs(stored, probs is not None)
        if known.nothing:
            checks.warn(f"this batch {AGAIN}, {_remedy(examples)}")
        return self._count(_Delivery.of(examples, pairs), known, window)

    def observe(
        self,
        confidence: Values,
        outcome: Values,
        *,
        ids: Iterable[Id] | None = None,
        window: WindowId | None = None,
    ) -> Monitor:
        """Add pairs of confidence and outcome, of any kind of prediction.

        Pairs that are delivered again are recognised by ``ids`` only.

        >>> Monitor().observe([0.9, 0.8], [1, 0]).report().n
        2
        """
        self._windows.check_open(window)
        pairs = NO_PAIRS
        if not (_is_empty(confidence) and _is_empty(outcome)):
            claimed, happened, _ = checks.as_pairs(confidence, outcome)
            pairs = Pairs(claimed, happened > 0)
        delivery = _Delivery.of_pairs(pairs, ids)
        return self._count(delivery, self._seen.recognise(delivery.examples), window)

    @checks.warnings_at_caller()
    def predicted(
        self,
        ids: Iterable[Id],
        logits: Values | None = None,
        *,
        probs: Values | None = None,
        features: Features | None = None,
    ) -> None:
        """Remember the confidences of logits ``(n, classes)`` until labels come.

        An id that is already waiting is replaced and counted.
        """
        logits, probs, _ = _in_stream_order(self.calibrator, logits, probs)
        keys, scores = as_ids(ids), self._scores(logits, probs)
        shape = tuple(scores.shape)
        if len(shape) not in (1, 2) or shape[0] != len(keys):
            raise ValueError(f"one row of logits for each id is wanted, got {shape}, {len(keys)}")
        confidences, classes = _watched_classes(self.calibrator, scores, features)
        if keys:
            self._seen.check_comparable("ids")
        self._set_classes(_class_count(scores))
        self._warn_of_probs(scores, probs is not None)
        self._pending.add(keys, confidences, classes)

    def labelled(self, ids: Iterable[Id], labels: Values, *, window: WindowId | None = None) -> int:
        """Match labels with waiting predictions; returns the number of matches.

        An example belongs to the window in which its label comes. Ids that are not waiting are
        counted and left out, and so are those whose label has counted already. The label -100 means
        that none will come.
        """
        keys, targets = as_ids(ids), _integer_labels(labels)
        if targets.shape != (len(keys),):
            raise ValueError(f"one label per id is wanted, got {targets.shape} for {len(keys)}")
        if self._classes:
            checks.check_labels(targets, self._classes)
        self._windows.check_open(window)
        matched, pairs = self._pending.match(keys, targets)
        delivery = _Delivery.of_pairs(pairs, matched)
        known = self._seen.recognise(delivery.examples)
        self._count(delivery, known, window)
        return pairs.outcome.size - known.again

    @checks.warnings_at_caller()
    def update_file(
        self,
        path: str | os.PathLike[str] | Dataset,
        *,
        split: str | None = None,
        ids: str | None = None,
        window: WindowId | None = None,
        name: str | None = None,
        estimator: Estimator | None = None,
    ) -> Monitor:
        """Add a prediction file, or a folder or glob of shards, or a dataset, as one window.

        ``window`` is the next one by default. Examples that are delivered again, in whatever file,
        order or precision, are recognised by the column ``ids``, or else by their scores. Each
        label counts once, and one that was missing so far joins the window of its example; only
        examples that are new make a window.

        ``estimator`` (:class:`calibrant.estimate.PerformanceEstimator`) estimates the accuracy of
        the window, of its new examples, without labels, which the file need not have; an alarm ends
        its guarantees.
        """
        dataset = as_dataset(path)
        dataset = dataset.in_order(_stream_order(self.calibrator, dataset.class_names))
        chosen = dataset.split(split, TEST_SPLITS)
        # in states too, since a file name need not be Unicode
        name = printable(name or (f"{chosen.path}, {chosen.name}" if split else chosen.path))
        self._windows.check_open(window)
        self._check_calibrator()
        chosen.warn_of_mistakes(copies=False)
        columns = [chosen.domain, *input_names(self.calibrator), *([] if ids is None else [ids])]
        if estimator is None or "labels" in chosen.keys:
            columns.append("labels")
        task = partial(_chunk_delivery, self.calibrator, ids)
        parts = list(chosen.map(task, *columns, rows=chosen.chunk_rows))
        delivery = _Delivery.joined(parts) if parts else _Delivery.of_pairs(NO_PAIRS, None)
        with located(chosen.path):
            known = self._seen.recognise(delivery.examples)
        if known.nothing:
            checks.warn(f"{name} {AGAIN}, {_remedy(delivery.examples)}")
            return self._count(delivery, known)
        estimate = None
        if estimator is not None and known.new.any():
            estimate = estimator.window_estimate(_new_examples(chosen, known.new))
        with located(chosen.path):
            self._set_classes(chosen.classes if chosen.rows else 0)
        self._columns, self._ids = dataset.named.words, ids
        if estimate is None and not delivery.examples.labelled.any():
            checks.warn(f"{name} has no labelled examples: its window is empty")
        number = self._windows.next_number() if window is None else window
        return self._count(delivery, known, number, self._windows.unused_name(name), estimate)

    def merge(self, other: Monitor) -> Monitor:
        """Add the windows, the waiting predictions and the counts of another worker.

        Sums of windows with the same number add. An alarm of ``other`` belongs to its own stream
        and is not taken over. Examples that count in both are refused.
        """
        if other is self:
            raise ValueError("a monitor cannot be merged into itself: its examples count already")
        if self._form() != other._form():
            raise ValueError(f"settings must agree to merge, got {self._form()}, {other._form()}")
        if other._windows.summed.position:
            raise ValueError(
                f"a monitor that has summed up all but {other._windows.keep} windows cannot be "
                "merged into another: raise keep, or merge the other way round"
            )
        known = [self._seen.recognise(examples) for examples in other._seen.windows.values()]
        if both := sum(each.again for each in known):
            raise ValueError(
                f"{both:,} examples are in both monitors and would count twice: begin workers "
                "with like(), and give each example to one of them; if these are other examples "
                "with equal scores, pass ids"
            )
        if self._windows.first is None:
            self._windows.first = other._windows.first
        for number in other.windows:
            self._windows.check_open(number)
        for _, window in sorted(other.windows.items()):
            self._windows.put(window)
        self._seen.merge(other._seen, known)
        self._pending.merge(other._pending)
        for key, count in other._counts.items():
            self._counts[key] += count
        self._windows.dated = self._windows.dated or other._windows.dated
        self._classes = self._classes or other._classes
        return self

    def like(self) -> Monitor:
        """Return a monitor of the same settings that has seen nothing, for another worker."""
        fresh = Monitor(self.calibrator, **self._settings())
        fresh.tolerated, fresh.fingerprint = self.tolerated, self.fingerprint
        fresh._windows.dated = self._windows.dated
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
        estimated = any(window.estimate for window in self.windows.values())
        for window, state in self._windows.history():
            figures = {"n": window.n, **window.figures(), "e_value": state.e_value}
            if estimated:
                figures |= (window.estimate or NOT_ESTIMATED).figures()
            rows.append({"window": window.name, **figures})
        alarm, drift, off, doubt = self.alarm or self._alarmed(state), None, [], ""
        if alarm is not None:
            drift, total = _find_drift(self._windows, state)
            off, doubt = _bins_off(total, self.tolerated), _doubt(total, self._classes)
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
            counts={
                "pending": len(self._pending.waiting),
                **self._pending.counts,
                **self._counts,
                "alike": self._seen.alike,
            },
            doubt=doubt,
            probability=probability_of("binary") if self._classes == 2 else "",
            columns=self._columns,
            ids=self._ids,
            calibrated=self.fingerprint is not None,
        )

    def resume(self, calibrator: Calibrator) -> Monitor:
        """Continue a loaded stream with logits; the calibrator must be the one of the stream.

        Without a calibrator a loaded monitor reports, merges and takes pairs, but no logits.
        """
        check_calibrator(calibrator)
        wanted, got = self.fingerprint or "no calibrator", calibrator_fingerprint(calibrator)
        if wanted != got:
            message = f"this stream was collected with {wanted}, not with {got}"
            raise ValueError(f"{message}: begin a new stream after a new fit, in another state")
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
            "dated": self._windows.dated,
            "calibrator": self.fingerprint,
            "classes": self._classes,
            "columns": self._columns,
            "ids": self._ids,
            "alarm": self.alarm and self.alarm._asdict(),
            "counts": {**self._pending.counts, **self._counts},
            "waiting": [[key, *kept] for key, kept in self._pending.waiting.items()],
            "seen": self._seen.state(),
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
        watch._windows.dated, watch.fingerprint = bool(state["dated"]), state["calibrator"]
        checks.check_whole("classes", state["classes"], least=0)
        watch._classes = state["classes"]
        watch._columns, watch._ids = state["columns"], state["ids"]
        words = [*watch._columns, *([] if watch._ids is None else [watch._ids])]
        if not all(isinstance(word, str) for word in words):
            raise ValueError(f"names of columns must be texts, got {words!r:.200}")
        watch._pending.restore(state["counts"], state["waiting"])
        watch._windows.restore(state)
        for number in (*watch.windows, watch._windows.next_number()):
            watch._windows.name(number)  # refuses what is no day
        watch.alarm = None if state["alarm"] is None else Alarm.from_state(state["alarm"])
        if watch.alarm is not None and not watch.windows:
            raise ValueError("there is an alarm without a window")
        for name in watch._counts:
            checks.check_whole(name, state["counts"][name], least=0)
            watch._counts[name] = state["counts"][name]
        watch._seen.restore(state["seen"])
        return watch

    def _settings(self) -> dict[str, Any]:
        names = ("window", "false_alarms", "tolerance", "bins")
        settings = {name: getattr(self, name) for name in names}
        first, keep = self._windows.first, self._windows.keep
        limits = {"pending": self._pending.limit, "remember": self._seen.limit}
        return {**settings, "first": first, "keep": keep, **limits}

    def _form(self) -> tuple[Any, ...]:
        """Settings that monitors must share to merge."""
        gaps = self.tolerated.gaps.round(12).tolist() if self.tolerated.has_reference else None
        return self.bins, self.tolerance, self.false_alarms, self.fingerprint, gaps

    def _scores(self, logits: Values | None, probs: Values | None) -> Logits:
        self._check_calibrator()
        if probs is not None and logits is None:
            return logits_from_probs(probs)
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

    def _count(
        self,
        delivery: _Delivery,
        known: _Known,
        window: WindowId | None = None,
        name: str = "",
        estimate: WindowEstimate | None = None,
    ) -> Monitor:
        """Add late labels to the windows of their examples, and new examples to new windows."""
        self._counts["again"] += known.again
        for late in known.late:
            came = delivery.take(late.examples)
            self._seen.settle(late, came.examples.labels)
            self._pending.counts["ignored"] -= len(came.examples)
            is_open = self._windows.is_open(late.window)  # else it was summed up
            self._counts["late" if is_open else "lost"] += len(came.examples)
            if is_open:
                self._add(self._sums(came, late.window))
        new = delivery.take(known.new)
        self._pending.counts["ignored"] += int(np.sum(~new.examples.labelled))
        self._windows.dated = self._windows.dated or isinstance(window, date)
        anything = len(new.examples) or not len(delivery.examples)
        for number, part in self._parts(new, window) if anything else ():
            self._seen.add(number, part.examples)
            if window is not None or part.examples.labelled.any():
                self._add(self._sums(part, number, name), estimate)
        return self

    def _parts(self, new: _Delivery, window: WindowId | None) -> Iterator[tuple[int, _Delivery]]:
        """Yield new examples by window: the one that is named, or as many as they fill."""
        if window is not None:
            yield _window_number(window), new
            return
        first, filled = self._windows.next_number(), 0
        last = self.windows.get(first - 1)
        if last is not None and last.n < self.window:
            first, filled = last.number, last.n
        for number, part in new.filling(filled, self.window):
            yield first + number, part

    def _sums(self, delivery: _Delivery, number: int, name: str = "") -> Window:
        name, of_class_1 = name or self._windows.name(number), self._classes == 2
        return self.tolerated.window(delivery.pairs, number, name, of_class_1=of_class_1)

    def _warn_of_probs(self, scores: Logits, are_probs: bool) -> None:
        """Warn once in a stream of logits that look like probabilities."""
        if not (are_probs or self._warned) and (reason := checks.look_like_probs(scores)):
            self._warned = True
            remedy = "if they are, pass them as probs="
            checks.warn(f"logits look like probabilities: {reason}; {remedy}")

    def _add(self, window: Window, estimate: WindowEstimate | None = None) -> None:
        """Add a window to the stream, and remember the first alarm and an estimate."""
        self._windows.put(window)
        if self.alarm is None:
            self.alarm = self._alarmed(self._windows.e_process())
        if estimate is not None and window.number in self.windows:
            if self.alarm is not None:
                estimate = WindowEstimate(estimate.value, math.nan, math.nan, "withdrawn")
            self.windows[window.number].estimate = estimate

    def _alarmed(self, state: EProcess) -> Alarm | None:
        if state.log_e_value() < -math.log(self.level):
            return None
        return Alarm(self.windows[max(self.windows)].name, self.seen, state.e_value)


def _new_examples(split: Split, new: BoolArray) -> Split:
    """Return a split in which examples that are not ``new`` have the weight 0."""
    if new.all():
        return split
    weighted = replace(split, dataset=replace(split.dataset, sample_weight=NEW))
    weight = new.astype(np.float64).reshape(split.rows, *split.shape[:-1])
    return weighted.with_column(NEW, weight)


def _remedy(examples: _KeyedExamples) -> str:
    """Return what to do where new examples are taken for others."""
    return "give them other ids" if examples.by == "ids" else "pass ids to tell equal scores apart"
