"""Maps of the confidence of the top class, and their effect on the rest of the row."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.special import expit, ndtr
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, warn
from calibrant._core.chunks import top_class
from calibrant._core.solve import Objective, Solution, minimise_convex
from calibrant.calibrators.base import BOUNDS, Calibrator
from calibrant.calibrators.logpartition import (
    LARGEST_GAP,
    LEAST_REST,
    TOP,
    Records,
    _softplus,
    worth_moving,
)
from calibrant.calibrators.objectives import _binned_gaps
from calibrant.calibrators.records import RecordPredictions, RecordsCalibrator
from calibrant.calibrators.scaling import best_sharpness

MAX_ODDS = 30.0  # log-odds beyond which float32 cannot tell a confidence from 0 or 1
_CPU = torch.device("cpu")
PRIOR_EXAMPLES = 10.0
"""Examples that a guess is worth, such as the best single temperature for that of the rest."""


def _keeps_by_task(calibrator: Calibrator) -> bool:
    """Return whether the predicted class never changes; before a fit, that of more than two.

    The option ``keep_argmax`` may be True (always kept), False (never), or None: kept for more than
    two classes. For two classes the threshold of 0.5 then moves, as by an intercept.
    """
    keep: bool | None = calibrator.keep_argmax  # type: ignore[assignment]
    return calibrator.classes not in (1, 2) if keep is None else keep


def _maps_class_one(calibrator: Calibrator, classes: int) -> bool:
    """Return whether the probability of class 1 is calibrated, and not that of the top class."""
    return classes <= 2 and not calibrator.keep_argmax


kept_by_task = property(_keeps_by_task)
"""``keeps_argmax`` of methods with the option ``keep_argmax``, and ``monotone``, since the order of
the classes never changes when the first is kept."""


def _with_log_odds(logits: Tensor, odds: Tensor) -> Tensor:
    r"""Give the top class new log-odds; the others share the rest as before.

    .. math:: z'_\text{top} = 0, \qquad z'_k = z_k - \log\sum_{j \ne \text{top}} e^{z_j} - s

    so that the confidence is :math:`\sigma(s)`. The largest of ``logits`` is 0.
    """
    top = top_class(logits)
    return (logits - _log_sum_without(logits, top) - odds).scatter(-1, top, 0.0)


def _log_sum_without(logits: Tensor, left_out: Tensor) -> Tensor:
    """Logarithm of the sum over all classes but one ``(..., 1)``; always finite."""
    return _log_sum(logits.scatter(-1, left_out, -torch.inf))


def _log_sum(logits: Tensor) -> Tensor:
    """Logarithm of the sum over all classes ``(..., 1)``; finite also where all are masked."""
    return logits.logsumexp(-1, keepdim=True).clamp(min=-LARGEST_GAP)


class OddsCalibrator(RecordsCalibrator):
    r"""New log-odds for the top class, and a temperature for the others.

    The log-odds are learned from logits divided by the best single temperature; the proportions of
    the other classes are those under the temperature that is best for the examples whose top class
    is wrong. Both are 1 unless ``tempered``.
    """

    tempered: bool = True
    temperature_: Tensor
    rest_temperature_: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._store(temperature_=1.0, rest_temperature_=1.0)

    def _fit_odds(self, records: Records) -> None:
        raise NotImplementedError

    def _odds(self, logits: Tensor, top: Tensor) -> Tensor:
        """New log-odds ``(..., 1)`` of logits whose largest is 0."""
        raise NotImplementedError

    def _record_odds(self, records: Records) -> FloatArray:
        """New log-odds ``(n,)`` of the examples of a table."""
        raise NotImplementedError

    def _fit_records(self, records: Records) -> None:
        if self.two_classes_only and records.classes > 2:
            raise ValueError(
                f"{type(self).__name__} is for two classes, got {records.classes}: use a method "
                "for any number, such as isotonic, beta or dirichlet"
            )
        best = float(best_sharpness(records.on(self.device)).x[0]) if self.tempered else 0.0
        rest = _rest_sharpness(records, best) if self.tempered else 0.0
        self._store(temperature_=np.exp(-best), rest_temperature_=np.exp(-rest))
        self._fit_odds(records)

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration.

        Exact where no more than nine classes would have to be held below the top one.
        """
        b, odds = 1 / float(self.rest_temperature_), self._record_odds(records)
        rise = -records.log_rest(b).value - odds  # by which every class but the top is lifted
        own = rise - b * records.own_gap
        if not self.keeps_argmax:  # only the first of equals has the new odds
            own = np.where(records.correct, 0.0, own)
            return RecordPredictions(expit(odds), np.logaddexp(0, -odds) - own)
        own = np.where(records.own_gap == 0, 0.0, own)  # ties stay level
        gaps = np.minimum(records.gaps[:, 1:].astype(np.float64), LARGEST_GAP)
        next_best = np.minimum(rise[:, None] - b * gaps, MAX_ODDS)
        above = np.where(gaps == 0, np.expm1(next_best), np.expm1(np.maximum(next_best, 0))).sum(1)
        mass = np.exp(-odds) - above
        # where all classes are known, or even the last runner-up that is known is above the top
        deep = (records.possible <= TOP) | (next_best[:, -1] > 0)
        if deep.any():
            rest = _held_rest(records.take(deep), b, rise[deep])
            level = np.where(gaps[deep] == 0, 0, np.minimum(next_best[deep], 0))
            mass[deep] = np.exp(level).sum(1) + rest
        total = np.log1p(np.maximum(mass, 0))
        return RecordPredictions(np.exp(-total), total - np.minimum(own, 0))

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        rest = logits / self.rest_temperature_.to(logits.dtype)
        return _with_log_odds(rest, self._odds(logits, top))


def _rest_sharpness(records: Records, prior: float) -> float:
    r"""Log-sharpness under which wrong top classes leave the label likeliest.

    It minimises the sum of :math:`b d_y + R(b)`, which is :math:`-\log P(y \mid \text{not the top
    class})`, over the wrong examples, and is drawn to a prior as by ten examples more.
    """
    wrong = records.take(records.own_gap > 0)

    def slope(u: float) -> float:
        b = math.exp(u)
        pull = wrong.weight @ (b * wrong.own_gap + wrong.log_rest(b).slope)
        return float(pull + PRIOR_EXAMPLES * (u - prior))

    return float(minimise_convex(slope, -math.log(BOUNDS[1]), -math.log(BOUNDS[0])).x[0])


def _held_rest(records: Records, b: float, rise: FloatArray) -> FloatArray:
    r"""Sum of :math:`\min(e^{r - b d_k}, 1)` over the classes beyond the leading ten, ``(n,)``.

    Their gaps :math:`d_k` are taken for normal, with their mean and mean of :math:`e^{-b d_k}`.
    """
    gaps = np.minimum(records.gaps.astype(np.float64), LARGEST_GAP)
    count = np.maximum(records.possible - TOP, 1)
    gap = (records.mean_gap * records.possible - gaps.sum(1)) / count
    known = np.exp(-b * gaps).sum(1)
    mass = np.maximum(np.exp(records.log_partition(b).value) - known, LEAST_REST) / count
    spread = np.sqrt(np.maximum(2 * (np.log(mass) + b * gap), 1e-12))
    middle = rise - b * gap
    below = mass * np.exp(rise) * ndtr(-middle / spread - spread)
    return np.where(records.possible > TOP, count * (below + ndtr(middle / spread)), 0.0)


def _top_odds(logits: Tensor, limit: float = MAX_ODDS) -> Tensor:
    """Log-odds of the top class ``(..., 1)``, of logits whose largest is 0."""
    return _odds_above(logits.scatter(-1, top_class(logits), -torch.inf), limit)


def _odds_above(others: Tensor, limit: float = MAX_ODDS) -> Tensor:
    """Log-odds ``(..., 1)`` of a class with logit 0 over others, among which it is -inf."""
    return (-_log_sum(others)).clamp(-limit, limit)


def record_odds(records: Records, sharpness: float | FloatArray) -> FloatArray:
    """Log-odds of the top class ``(n,)`` at a sharpness."""
    return np.clip(-records.log_rest(sharpness).value, -MAX_ODDS, MAX_ODDS)


class TopLabelMap(OddsCalibrator):
    """New log-odds of one class as a function of the old ones alone.

    It is the top class or, for two classes unless ``keep_argmax``, class 1. Subclasses need not
    know which: ``_fit_map`` and ``_map`` get its log-odds, which stand for its probability, since
    probabilities near 1 have no digits left to tell examples apart.
    """

    keeps_argmax = monotone = kept_by_task
    keep_argmax: bool | None
    limit: ClassVar[float] = MAX_ODDS  # beyond which log-odds are cut

    def __init__(self, *, keep_argmax: bool | None = None) -> None:
        super().__init__()
        self.keep_argmax = keep_argmax

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        """Learn from log-odds of the class, whether it is the label, and weights, each ``(n,)``."""
        raise NotImplementedError

    def _map(self, odds: Tensor) -> Tensor:
        raise NotImplementedError

    def _keep(self, solution: Solution, count: int) -> FloatArray:
        """Return the parameters of a search on a number of examples; warn if it found no best."""
        self.solution_ = solution
        if not solution.converged:
            _warn_of_bounds(self, count)
        return solution.x

    def _fit_odds(self, records: Records) -> None:
        odds, side = self._mapped_odds(records)
        outcome = np.where(side > 0, records.correct, ~records.correct)
        self._fit_map(odds, outcome, records.weight)

    def _mapped_odds(self, records: Records) -> tuple[FloatArray, FloatArray]:
        """Log-odds of the mapped class, and 1, or -1 where it is not the top one, each ``(n,)``."""
        if not _maps_class_one(self, records.classes):
            odds = record_odds(records, 1 / float(self.temperature_))
            return odds, np.ones(len(records))
        side = np.where(records.one_on_top, 1.0, -1.0)
        margin = records.margin / float(self.temperature_)
        return side * np.minimum(margin, self.limit), side

    def _record_odds(self, records: Records) -> FloatArray:
        odds, side = self._mapped_odds(records)
        result = self._map(self._tensor(odds))
        return np.asarray(side * result.cpu().numpy())

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration.

        The confidence is that of the class that was on top before.
        """
        if not _maps_class_one(self, records.classes):
            return super().predict_records(records)
        odds = np.where(records.possible > 1, self._record_odds(records), np.inf)
        own = np.where(records.correct, odds, -odds)
        return RecordPredictions(expit(odds), np.logaddexp(0, -own))

    def _odds(self, logits: Tensor, top: Tensor) -> Tensor:
        odds = _top_odds(logits / self.temperature_.to(logits.dtype), self.limit)
        if not _maps_class_one(self, logits.shape[-1]):
            return self._map(odds)
        side = 2 * top_class(logits).to(odds.dtype) - 1  # 1 where class 1 is on top
        return side * self._map(side * odds)


def _confidence_objective(
    inputs: FloatArray,
    correct: BoolArray,
    share: FloatArray,
    weight: float,
    device: torch.device = _CPU,
) -> Objective:
    """Likelihood of being right under log-odds linear in the inputs, plus weighted soft ECE.

    It is computed on the device, if there are enough examples for that.
    """
    columns: Any = inputs, correct, share
    if moved := worth_moving(len(inputs), device):
        columns = [torch.from_numpy(x.astype(np.float64)).to(device) for x in columns]
    inputs, correct, share = columns

    def value_and_gradient(parameters: Any) -> tuple[float, FloatArray]:
        odds = inputs @ (torch.from_numpy(parameters).to(device) if moved else parameters)
        cost, confidence = _softplus(odds)
        value: Any = share @ (cost - correct * odds)
        gradient = share * (confidence - correct)
        if weight:
            gap, by_confidence = _binned_gaps(confidence, correct, share, sigma=0.05, delta=1e-3)
            value = value + weight * gap
            gradient = gradient + weight * by_confidence * confidence * (1 - confidence)
        found: Any = gradient @ inputs
        return float(value), found.cpu().numpy() if moved else found

    return value_and_gradient


def _warn_of_bounds(calibrator: TopLabelMap, count: int) -> None:
    """Warn that a number of examples have no optimum."""
    which = f"{type(calibrator).__name__} found no optimum for these {count:,} examples"
    warn(f"{which} and stopped at its bounds; are all of them right, wrong or of one class?")
