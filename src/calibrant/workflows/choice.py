"""The choice among several methods, which is made on the examples of the fit, out of fold."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, as_weight
from calibrant._core.engines import ENGINE_FAILURES
from calibrant._core.solve import time_limit as limited
from calibrant.calibrators.auto import (
    CLEAR_GAIN_IN_ERRORS,
    MAX_EXAMPLES,
    MAX_LOGITS,
    MIN_EXAMPLES,
    Auto,
    KeepArgmax,
)
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.logpartition import Records
from calibrant.calibrators.scaling import Identity
from calibrant.data.dataset import Split
from calibrant.workflows.effect import KeptLosses, calibrated_sums
from calibrant.workflows.fit import _fit_without, _fits_from_table, _row_folds

FOLDS = 5
HOW = "cross-validated on the examples of the fit"


class MethodChoice(NamedTuple):
    """A method that was chosen, None if there was none, and the sentences that say why."""

    method: str | None
    advice: str
    remarks: Sequence[str] = ()


def choose(
    fitted: Mapping[str, Calibrator],
    split: Split,
    records: Records | None = None,
    *,
    keep_argmax: KeepArgmax = "auto",
    time_limit: float | None = None,
    seed: int = 0,
) -> MethodChoice:
    """Choose one of several methods by their held-out likelihood on the examples of a fit.

    ``auto`` has weighed methods there already, and is chosen if it is among them. Otherwise the
    methods are cross-validated, and the simplest one within noise of the best is chosen: that with
    the fewest parameters whose mean NLL is at most one standard error above the lowest (the rule
    of Breiman et al. 1984, with the error of the difference).

    Parameters
    ----------
    fitted : mapping of str to Calibrator
        Fitted on the split.
    split, records
        The examples, and their records where a method is fitted from these.
    keep_argmax : "auto" or bool
        Prefer methods that keep the predicted class. By default those of more than two classes that
        change it count only if they raise the accuracy by two standard errors of the difference.
    time_limit : float, optional
        Seconds for each fit; a method that takes longer is not chosen.
    """
    for name, calibrator in fitted.items():
        if isinstance(calibrator, Auto):
            reason, *remarks = calibrator.findings
            nothing = isinstance(calibrator.chosen_, Identity)
            what = f"Leave the logits as they are, as {name} does" if nothing else f"Use {name}"
            return MethodChoice(name, f"{what} ({HOW}: {reason}).", remarks)
    if not fitted:
        return MethodChoice(None, "No method could be fitted and measured.")
    if len(fitted) == 1:
        (name,) = fitted
        return MethodChoice(name, f"No other method was measured beside {name}.")
    try:
        trial = _CrossValidation(split, records, time_limit, seed)
    except ValueError as problem:  # fewer examples or groups than folds
        return MethodChoice(None, f"Too little data to choose a method: {problem}.")
    tried = {name: trial.held_out(calibrator) for name, calibrator in fitted.items()}
    known = {name: found for name, found in tried.items() if found is not None}
    if not known:
        return MethodChoice(None, "No method could be cross-validated on the examples of the fit.")
    keep = split.classes > 2 if keep_argmax == "auto" else keep_argmax  # no method of tags does
    safe = [name for name in known if fitted[name].keeps_argmax] if keep else []
    if safe and keep_argmax == "auto":
        before = known[safe[0]].correct
        for name, found in known.items():
            more, error = trial.mean_and_error(found.correct.astype(float) - before)
            safe += [name] if more > CLEAR_GAIN_IN_ERRORS * error else []
    lowest, chosen = trial.simplest({name: known[name] for name in safe or known})
    if fitted[chosen].name == Identity.name:
        advice = f"Leave the logits as they are ({HOW}: no gain beyond noise)."
    elif chosen == lowest:
        advice = f"Use {chosen} ({HOW}: the highest held-out likelihood)."
    else:
        close = f"the simplest that is not significantly worse than the best, {lowest}"
        advice = f"Use {chosen} ({HOW}: {close})."
    return MethodChoice(chosen, advice, trial.other_predictions(known, chosen) if safe else ())


class _HeldOut(NamedTuple):
    """Negative log-likelihood of each example, whether it is right, and the size of a method."""

    nll: FloatArray
    correct: BoolArray
    size: int


class _CrossValidation:
    """Cross-validates methods on a sample of the examples of a split, in the same folds."""

    def __init__(
        self,
        split: Split,
        records: Records | None,
        time_limit: float | None,
        seed: int,
    ) -> None:
        self.split, self.records, self.time_limit = split, records, time_limit
        labels = _sampled(split, seed)
        sample = split.with_column("labels", labels)
        self.fold = _row_folds(sample, FOLDS, seed)
        # without the floor of fits, so that "none" is tried as it is
        self.sample = replace(sample.with_column("fold", self.fold), floor=0.0)
        weight = np.ones(labels.shape)
        if split.weights is not None:
            weight = as_weight(split.weights, labels.shape).reshape(labels.shape)
        kept = weight[labels != IGNORED]
        self.share = kept / kept.sum()
        # tags of an example and tokens of a text are not independent
        self.row = np.nonzero(labels != IGNORED)[0]

    def held_out(self, calibrator: Calibrator) -> _HeldOut | None:
        """Losses by fits that did not see the example; None where a fit fails."""
        copies = [copy.deepcopy(calibrator) for _ in range(FOLDS)]
        records = self.records if _fits_from_table(calibrator, self.split) else None
        losses = KeptLosses("multilabel" if calibrator.multilabel else "top_label")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit on everything has warned
            try:
                for i, one in enumerate(copies):
                    with limited(self.time_limit):
                        _fit_without(one, self.split, self.fold, i, records)
                calibrated_sums(copies, self.sample, losses)
            except ENGINE_FAILURES:
                raise
            except Exception:  # as in a comparison: such a method is no choice
                return None
        found = losses.joined()
        return _HeldOut(found.nll, found.correct, calibrator.effective_size(self.split.classes))

    def simplest(self, known: Mapping[str, _HeldOut]) -> tuple[str, str]:
        """Return the method with the lowest NLL, and the simplest one within noise of it."""
        lowest = min(known, key=lambda name: float(self.share @ known[name].nll))
        for name in sorted(known, key=lambda name: known[name].size):
            worse, error = self.mean_and_error(known[name].nll - known[lowest].nll)
            if worse <= error:
                return lowest, name
        return lowest, lowest

    def other_predictions(self, known: Mapping[str, _HeldOut], chosen: str) -> list[str]:
        """Say what another method, which may change predictions, would clearly gain."""
        lowest, kept = min(known, key=lambda n: float(self.share @ known[n].nll)), known[chosen]
        lower, error = self.mean_and_error(kept.nll - known[lowest].nll)
        if lower <= CLEAR_GAIN_IN_ERRORS * error:
            return []
        accuracies = [100 * float(self.share @ each.correct) for each in (kept, known[lowest])]
        nlls = [float(self.share @ each.nll) for each in (kept, known[lowest])]
        return [
            f"{lowest}, which may change the predicted class, would gain: accuracy "
            f"{accuracies[0]:.2f} -> {accuracies[1]:.2f} %, NLL {nlls[0]:.4f} -> {nlls[1]:.4f} "
            f"(+- {error:.4f})"
        ]

    def mean_and_error(self, values: FloatArray) -> tuple[float, float]:
        """Weighted mean of values ``(n,)``, and its standard error, with rows drawn as a whole."""
        mean = float(self.share @ values)
        by_row = np.bincount(self.row, self.share * (values - mean))
        return mean, float(np.sqrt(by_row @ by_row))


def _sampled(split: Split, seed: int) -> IntArray:
    """Labels of a split, ignored in all rows but as many as a choice is made on."""
    labels = split.labels
    counts = (labels != IGNORED).reshape(len(labels), -1).sum(1)
    most = min(MAX_EXAMPLES, max(MAX_LOGITS // split.classes, MIN_EXAMPLES))
    if counts.sum() <= most:
        return labels
    order = np.random.default_rng(seed).permutation(len(labels))
    left_out = order[np.cumsum(counts[order]) > most]
    result = labels.copy()
    result[left_out] = IGNORED
    return result
