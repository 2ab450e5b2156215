"""Performance of a batch without labels, or with few, from calibrated predictions."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from calibrant._core.checks import (
    FloatArray,
    Values,
    check_level,
    warnings_at_caller,
)
from calibrant._core.class_names import kept_names
from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.data.dataset import TEST_SPLITS, Split
from calibrant.data.files import Data, as_dataset
from calibrant.data.shards import located
from calibrant.estimate.cells import (
    _event_cell,
    _fill_cells,
    _fill_strata,
    _make_strata,
    _Strata,
    _sums_by,
)
from calibrant.estimate.interval import _estimate_metrics
from calibrant.estimate.performance_estimate import (
    FEWEST_LABELS,
    TITLES,
    PerformanceEstimate,
    Status,
)
from calibrant.estimate.prediction_summary import (
    NEVER,
    _batch_split,
    _PredictionSummary,
    _summarise,
)
from calibrant.estimate.sampling import _with_known_labels
from calibrant.estimate.shifts import BINS, Shift, _find_shifts, _label_shift_weights, _seen_rows
from calibrant.metrics.intervals import Estimate
from calibrant.monitor import Monitor, WindowEstimate

CLAIM_TOLERANCE = 0.02
"""Error of a claim that is no contradiction, however many labels show it."""
MOST_GAP = 0.05
"""Root mean squared gap of confidence and accuracy of a reference beyond which predictions are
refused, if its p-value is below CERTAIN."""
CERTAIN = 1e-4
UNEXPLAINED = 0.25
"""Part of a shift that changed class frequencies may leave, to be taken for its cause."""
DISTINCT = 5
"""Size of a shift, in units of its noise, from which its cause can be told."""


class _Explanation(NamedTuple):
    """A reference, weighted so as to explain a batch, and the shifts that this leaves."""

    strata: _Strata
    shifts: list[Shift]
    new_prior: FloatArray | None = None  # with changed class frequencies

    def size(self, level: float = math.inf) -> float:
        """Return the largest shift that is not chance, at a level for all views together."""
        significant = [s.size for s in self.shifts if s.p_value < level / len(self.shifts)]
        return max(significant, default=0.0)


class PerformanceEstimator:
    """Estimate the performance of batches from their predictions, beside a labelled reference.

    Parameters
    ----------
    reference : path, Dataset, mapping or data frame, optional
        Labelled predictions of the same model, best not those of the calibrator's fit, which show
        it a little better than it is. Without a reference, intervals need labels of the batch.
    calibrator : Calibrator, optional
        Fitted; applied to the logits of the reference and of batches first.
    reference_split : str, optional
        Its split; ``test``, else the unnamed split, by default.
    threshold : float, optional
        Confidence from which answers are accepted: coverage and error of these are estimated too.
    level : float
        Coverage of the intervals.
    tolerance : float
        Largest widening, in accuracy, beyond which the guarantee is withdrawn.
    drift_level : float
        Probability of seeing a shift where there is none, over all views together.
    false_alarms : float
        Probability that labels contradict the reference, or without one the confidences, although
        the accuracy is within two points of what these claim.
    seed : int
        Random seed for intervals.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(6000, 5))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)  # drawn from softmax(logits)
    >>> estimator = PerformanceEstimator({"logits": logits[:3000], "labels": labels[:3000]})
    >>> result = estimator.estimate(logits[3000:])
    >>> low, high = result["accuracy"][1:]
    >>> result.status, bool(low < (logits[3000:].argmax(-1) == labels[3000:]).mean() < high)
    ('holds', True)
    """

    def __init__(
        self,
        reference: Data | None = None,
        *,
        calibrator: Calibrator | None = None,
        reference_split: str | None = None,
        threshold: float | None = None,
        level: float = 0.9,
        tolerance: float = 0.1,
        drift_level: float = 0.01,
        false_alarms: float = 0.05,
        seed: int = 0,
    ) -> None:
        check_level(level)
        limits = {"tolerance": tolerance, "drift_level": drift_level, "false_alarms": false_alarms}
        for name, value in limits.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
        if threshold is not None and not 0 < threshold < 1:
            raise ValueError(f"threshold must be a confidence between 0 and 1, got {threshold}")
        if calibrator is not None:
            check_calibrator(calibrator)
            calibrator.refuse_tags("PerformanceEstimator")
        self.calibrator = calibrator
        self.threshold, self.level, self.tolerance = threshold, level, tolerance
        self.drift_level, self.false_alarms, self.seed = drift_level, false_alarms, seed
        self._reference: _PredictionSummary | None = None
        self.class_names = None if self.calibrator is None else self.calibrator.class_names_
        if reference is not None:
            dataset = as_dataset(reference).in_order(self.class_names)
            self.class_names = self.class_names or kept_names(dataset.class_names)
            split = dataset.split(reference_split, TEST_SPLITS)
            self._reference = self._summed(split, labels=True, labelled_only=True)
            _check_reference(self._reference, split)

    @warnings_at_caller()
    def estimate(
        self,
        data: Data | Values | None = None,
        *,
        probs: Values | None = None,
        features: Values | None = None,
        labels: Values | str | os.PathLike[str] | bool = True,
        inclusion: Values | None = None,
        sample_weight: Values | str | None = None,
        split: str | None = None,
        monitor: Monitor | None = None,
    ) -> PerformanceEstimate:
        """Estimate the performance of a batch.

        From 30 labels of the batch on, the estimate rests on these alone.

        Parameters
        ----------
        data : logits (..., classes) or (n,), path, Dataset, mapping or data frame
            As for :func:`calibrant.evaluate`, without labels, or with labels of some examples.
        probs, features : optional
            Instead of logits, and for calibrators and shifts.
        labels : (n,) integers, path, or bool
            Those that are known, -100 elsewhere; or a ``.csv`` file of :func:`choose_labels` that
            was filled in. By default those of a file are used; False ignores them.
        inclusion : (n,), optional
            Probabilities with which the examples were selected for labelling; in a file the column
            ``inclusion_probability``. Without it, the selection may depend on the confidence
            alone.
        sample_weight, split
            As for :func:`calibrant.evaluate`.
        monitor : Monitor, optional
            Its alarm, from labels of earlier batches, withdraws the guarantee.
        """
        chosen = _batch_split(
            data,
            probs=probs,
            features=features,
            sample_weight=sample_weight,
            split=split,
        )
        chosen = _with_known_labels(chosen, labels, inclusion).in_order(self.class_names)
        use = labels is not False and "labels" in chosen.keys
        batch = self._summed(chosen, labels=use)
        with located(chosen.path):
            _check_batch(batch, self._reference)
        return self._result(batch, monitor)

    def window_estimate(self, split: Split) -> WindowEstimate:
        """Return the estimated accuracy of a window of a monitor, without its labels."""
        if self._reference is None:
            raise ValueError(
                "windows are estimated beside labelled predictions: pass them as "
                "PerformanceEstimator(reference) (--estimate)"
            )
        batch = self._summed(split.in_order(self.class_names), labels=False)
        with located(split.path):
            _check_batch(batch, self._reference)
        result = self._result(batch, None)
        return WindowEstimate(*result["accuracy"], result.status)

    def _summed(
        self, split: Split, *, labels: bool, labelled_only: bool = False
    ) -> _PredictionSummary:
        if self.calibrator is None:
            split.warn_of_mistakes(copies=False)
        options = {"labels": labels, "labelled_only": labelled_only}
        return _summarise(split, self.calibrator, threshold=self.threshold, **options)

    def _result(self, batch: _PredictionSummary, monitor: Monitor | None) -> PerformanceEstimate:
        reference, labels = self._reference, batch.rows.label.size
        explanations = [] if reference is None else self._explanations(batch, reference)
        evidence: list[_Strata | None] = [e.strata for e in explanations] or [None]
        status, reasons, widening = self._promise(explanations)
        doubts = self._doubts(batch, evidence, monitor)
        if labels >= FEWEST_LABELS:
            status, reasons, widening = "contradicted" if doubts else "labels", doubts, 0.0
            # a labelled example that was selected with probability 1 / k stands for k - 1 others
            others = 1 / batch.inclusion - 1 if batch.selected else 1.0
            cell = _event_cell(batch.rows, NEVER)
            selected = _fill_cells(batch.rows, cell, batch.weight * others)
            stratum = _make_strata(selected, two_classes=batch.two_classes)
            evidence = [_fill_strata(stratum, selected)]
        elif doubts:
            status, reasons, widening = "withdrawn", [*reasons, *doubts], 0.0
        prior = next((e.new_prior for e in explanations if e.new_prior is not None), None)
        return PerformanceEstimate(
            n=batch.n,
            classes=batch.predicted.size,
            metrics=self._metrics(batch, evidence, status, widening),
            level=self.level,
            status=status,
            reasons=reasons,
            shifts=_plain(explanations).shifts if explanations else [],
            widening=widening,
            unseen=self._unseen(batch, explanations) if status == "holds" else math.nan,
            reference=0 if reference is None else reference.rows.label.size,
            labels=labels,
            threshold=self.threshold,
            new_prior=None if prior is None else prior.tolist(),
        )

    def _explanations(
        self, batch: _PredictionSummary, reference: _PredictionSummary
    ) -> list[_Explanation]:
        """Return the reference as it is, and with class frequencies that fit better, if there are.

        A label shift is looked for only where the batch differs from the reference at all. It comes
        first, and gives the estimate, if the shift is large enough to tell it from others.
        """
        index = _make_strata(reference.labelled, two_classes=reference.two_classes)
        seen = batch.seen()
        plain = _Explanation(
            _fill_strata(index, reference.labelled),
            _find_shifts(seen, reference.seen(), seed=self.seed),
        )
        found = plain.size(self.drift_level) > 0
        shifted = (
            _label_shift_weights(reference.rows, reference.weight, batch.probs) if found else None
        )
        if shifted is None:
            return [plain]
        prior, ratio = shifted
        weight = reference.weight * ratio[reference.rows.label]
        cell = _event_cell(reference.rows, NEVER if self.threshold is None else self.threshold)
        weighted = _seen_rows(reference.rows, weight, ratio.size, cell)
        sampled = reference.sample_weight * ratio[reference.sample_label]
        weighted = weighted._replace(features=reference.features, weight=sampled)
        explained = _Explanation(
            _fill_strata(index, _fill_cells(reference.rows, cell, weight)),
            _find_shifts(seen, weighted, seed=self.seed),
            prior,
        )
        if explained.size() >= UNEXPLAINED * plain.size():
            return [plain]
        noise = BINS * (1 / seen.size + 1 / reference.seen().size)
        return [explained, plain] if plain.size() > DISTINCT * noise else [plain, explained]

    def _promise(self, explanations: Sequence[_Explanation]) -> tuple[Status, list[str], float]:
        """Return the state of the guarantee, its reasons, and by how much intervals widen."""
        if not explanations:
            return "unchecked", [], 0.0
        assert self._reference is not None
        plain = _plain(explanations)
        best = min(explanations, key=lambda e: e.size(self.drift_level))
        if plain.size(self.drift_level) == 0:
            return "holds", [], 0.0
        widening = math.sqrt(best.size(self.drift_level)) * _deviation(self._reference)
        limit = self.drift_level / len(plain.shifts)
        views = [s.view for s in plain.shifts if s.p_value < limit]
        reasons = [f"{comma_separated(views)} shifted from the reference"]
        if best.new_prior is not None:
            reasons.append("changed class frequencies would explain most of it")
        if widening > self.tolerance:
            hidden = f"a hidden shift as large could change accuracy by {100 * widening:.0f} points"
            return "withdrawn", [*reasons, hidden], widening
        return "widened", reasons, widening

    def _unseen(self, batch: _PredictionSummary, explanations: Sequence[_Explanation]) -> float:
        """Return the change of accuracy that a shift could cause without being seen."""
        assert self._reference is not None
        if self.drift_level == 0:
            return math.nan
        shifts = _plain(explanations).shifts
        sizes, level = (batch.seen().size, self._reference.seen().size), self.drift_level
        visible = max(shift.visible(*sizes, level / len(shifts)) for shift in shifts)
        return math.sqrt(visible) * _deviation(self._reference)

    def _doubts(
        self, batch: _PredictionSummary, evidence: Sequence[_Strata | None], monitor: Monitor | None
    ) -> list[str]:
        """Return the reasons why the calibration does not hold, as labels show it."""
        doubts = []
        if monitor is not None and monitor.alarm is not None:
            doubts.append(f"the monitor raised an alarm at window {monitor.alarm.window}")
        if batch.rows.label.size:
            compared = [_compare_labels(batch, strata) for strata in evidence]
            best = max(compared, key=lambda agreement: agreement.p_value)
            if best.p_value < self.false_alarms:
                source = "the reference expects" if self._reference else "the confidences claim"
                doubts.append(
                    f"the labels show an accuracy of {100 * best.shown:.1f} % where {source} "
                    f"{100 * best.claimed:.1f} %"
                )
        return doubts

    def _metrics(
        self,
        batch: _PredictionSummary,
        evidence: Sequence[_Strata | None],
        status: Status,
        widening: float,
    ) -> dict[str, Estimate]:
        estimates = [
            _estimate_metrics(batch, strata, widening=widening, level=self.level, seed=self.seed)
            for strata in evidence
        ]
        names = [name for name in TITLES if name in estimates[0]]
        if self.threshold is None:
            names = [name for name in names if name not in ("coverage", "accepted_error")]
        if status == "withdrawn":
            return {name: Estimate(estimates[0][name].value) for name in names}
        # the first value, with the hull of all intervals
        return {
            name: Estimate(
                estimates[0][name].value,
                min(e[name].low for e in estimates),
                max(e[name].high for e in estimates),
            )
            for name in names
        }


class _LabelAgreement(NamedTuple):
    """Accuracy as claimed and as labels show it, and the p-value of their difference."""

    claimed: float
    shown: float
    p_value: float


def _compare_labels(batch: _PredictionSummary, strata: _Strata | None) -> _LabelAgreement:
    r"""Compare the labels of a batch with a reference, or with its confidences if that is None.

    Labelled answers :math:`i` with weights :math:`w_i`, which add up to one, are right
    (:math:`y_i = 1`) or not; the reference, or without one the confidence, claims that they are
    with the probability :math:`q_i`. Claims are allowed to be off by two points, towards what the
    labels show. The sum of :math:`w_i (y_i - q_i)` is then compared with its standard error if the
    claims are true: that of the outcomes, and that of the reference, which is a sample as well.
    """
    rows = batch.rows
    cell = _event_cell(rows, NEVER)
    event = rows.event if strata is None else strata.adjusted(rows.event, cell)
    sign = np.where((rows.predicted == 1) | (not batch.two_classes), 1.0, -1.0)
    claimed = np.where(sign > 0, event, 1 - event)
    weight = batch.weight / batch.inclusion
    weight = weight / weight.sum()
    expected, shown = float(weight @ claimed), float(weight @ (rows.label == rows.predicted))
    direction = 1 if shown > expected else -1
    allowed = np.clip(claimed + direction * CLAIM_TOLERANCE, 0, 1)
    variance = weight**2 @ (allowed * (1 - allowed))
    if strata is not None:
        moved = _sums_by(strata.stratum[cell], weight * sign, strata.size.size)
        variance += moved**2 @ strata.variance()
    half_a_label = weight @ weight / 2  # correction of continuity
    excess = max(direction * (shown - weight @ allowed) - half_a_label, 0.0)
    p_value = 2 * ndtr(-excess / math.sqrt(max(variance, 1e-12)))
    return _LabelAgreement(expected, shown, float(p_value))


def _plain(explanations: Sequence[_Explanation]) -> _Explanation:
    """Return the explanation without changed class frequencies."""
    return next(e for e in explanations if e.new_prior is None)


def _deviation(reference: _PredictionSummary) -> float:
    """Return the standard deviation of an outcome around its probability."""
    event, weight = reference.rows.event, reference.weight
    return math.sqrt(float(np.average(event * (1 - event), weights=weight)))


def _check_reference(reference: _PredictionSummary, split: Split) -> None:
    """Raise for a reference that shows no calibration."""
    index = _make_strata(reference.labelled, two_classes=reference.two_classes)
    strata = _fill_strata(index, reference.labelled)
    gap, p_value = strata.gap()
    if gap > MOST_GAP and p_value < CERTAIN:
        raise ValueError(
            f"{split.path}: the predictions are not calibrated, confidence and accuracy of the "
            f"reference differ by {100 * gap:.1f} points: fit a calibrator with "
            "cal.fit (calibrant fit) and pass it as calibrator= (--calibrator)"
        )


def _check_batch(batch: _PredictionSummary, reference: _PredictionSummary | None) -> None:
    if batch.rows.label.size == batch.n:
        raise ValueError(
            f"all {batch.n:,} examples have labels, so that nothing is left to estimate: measure "
            "with cal.evaluate (calibrant evaluate), or pass labels=False (--ignore-labels)"
        )
    if reference is not None and reference.predicted.size != batch.predicted.size:
        raise ValueError(
            f"the reference has {reference.predicted.size} classes, the batch "
            f"{batch.predicted.size}: both must be of one model"
        )


@warnings_at_caller()
def estimate_performance(
    data: Data | Values | None = None,
    reference: Data | None = None,
    *,
    calibrator: Calibrator | None = None,
    reference_split: str | None = None,
    threshold: float | None = None,
    level: float = 0.9,
    tolerance: float = 0.1,
    drift_level: float = 0.01,
    false_alarms: float = 0.05,
    seed: int = 0,
    probs: Values | None = None,
    features: Values | None = None,
    labels: Values | str | os.PathLike[str] | bool = True,
    inclusion: Values | None = None,
    sample_weight: Values | str | None = None,
    split: str | None = None,
    monitor: Monitor | None = None,
) -> PerformanceEstimate:
    """Estimate accuracy and other metrics of a batch from calibrated predictions.

    With a labelled reference, calibration is corrected as it shows, and shifts of confidence,
    margin, predicted classes and features from it widen the intervals or withdraw them. With labels
    of 30 examples or more, values and intervals rest on these alone. With neither there are values,
    which are right if the confidences are, and no intervals. Parameters are those of
    :class:`PerformanceEstimator` and of its ``estimate``; use these for several batches.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> probs = rng.uniform(size=2000)
    >>> result = estimate_performance(probs=probs)
    >>> result.status, round(result["accuracy"].value, 2)
    ('unchecked', 0.75)
    """
    estimator = PerformanceEstimator(
        reference,
        calibrator=calibrator,
        reference_split=reference_split,
        threshold=threshold,
        level=level,
        tolerance=tolerance,
        drift_level=drift_level,
        false_alarms=false_alarms,
        seed=seed,
    )
    return estimator.estimate(
        data,
        probs=probs,
        features=features,
        labels=labels,
        inclusion=inclusion,
        sample_weight=sample_weight,
        split=split,
        monitor=monitor,
    )
