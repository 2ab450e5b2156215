"""Methods that are parts of ``auto``: own maps of the top class, alone and beside other methods."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from calibrant._core.binning import stable_order
from calibrant._core.checks import IGNORED, BoolArray, FloatArray, as_float64, silenced
from calibrant._core.chunks import Examples, has_numbers, joined, labelled_chunks, top_class
from calibrant._core.options import Count, NonNegative, Seed
from calibrant._core.solve import minimise_scalar, minimise_within
from calibrant.calibrators.affine import (
    Structured,
    StructuredMatrixScaling,
    StructuredVectorScaling,
)
from calibrant.calibrators.base import BOUNDS, Calibrator, Context
from calibrant.calibrators.logpartition import LARGEST_GAP, LEAST_REST, Records
from calibrant.calibrators.network import _temperatures
from calibrant.calibrators.objectives import nll
from calibrant.calibrators.rank_gaps import RankGaps
from calibrant.calibrators.records import TemperatureCalibrator
from calibrant.calibrators.smart import SMART
from calibrant.calibrators.top_label import (
    MAX_ODDS,
    PRIOR_EXAMPLES,
    OddsCalibrator,
    TopLabelMap,
    _confidence_objective,
    _log_sum_without,
    _odds_above,
    _warn_of_bounds,
    record_odds,
)

ROUNDS = 4
"""Times that probability is shared anew which classes above the top one lose."""
MAX_GAP_LOGITS = 1 << 21
"""Logits that gaps are learned from at most: they have one parameter per class, and are slow."""


class ShrunkTemperature(TemperatureCalibrator):
    r"""One temperature, drawn towards 1 unless the examples say otherwise.

    .. math:: \min_T\; \sum_i \mathrm{NLL}_i(T) + \log\bigl(1 + (\tfrac{\log T}{0.4})^2\bigr)

    This is the mode of the posterior under a Cauchy prior on :math:`\log T`, which a few examples
    move little and clear evidence moves freely. So it is safe for any number of examples, also if
    all predictions are right. This is calibrant's own method.

    Attributes
    ----------
    temperature_ : scalar Tensor

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(1000, 4))
    >>> labels = (logits / 3 + rng.gumbel(size=logits.shape)).argmax(-1)  # T = 3 is right
    >>> for n in (5, 50, 1000):
    ...     print(round(float(ShrunkTemperature().fit(logits[:n], labels[:n]).temperature_), 1))
    1.1
    3.1
    3.0
    """

    name = "shrunk_ts"
    summary = "one temperature, drawn towards 1"
    part_of_auto = True
    parameter_count = 1
    SCALE: ClassVar[float] = 0.4  # of the prior: half of it is within a factor of 1.5
    temperature_: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._store(temperature_=1.0)

    def _fit_records(self, records: Records) -> None:
        worth = 1 / float(records.share @ records.share)  # as many examples of equal weight

        def objective(u: float) -> float:
            return nll(records, u).value + math.log1p((u / self.SCALE) ** 2) / worth

        low, high = (-math.log(bound) for bound in reversed(BOUNDS))
        self.solution_ = minimise_scalar(objective, low, high)
        self._store(temperature_=math.exp(-self.solution_.x[0]))

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        return self.temperature_.to(top.dtype)

    def _sharpness(self, records: Records) -> float:
        return 1 / float(self.temperature_)


class OddsScaling(TopLabelMap):
    r"""A rising broken line for the log-odds of the top class, and a temperature for the rest.

    .. math:: s' = \theta_1 \min(s, k_1) + \theta_2\,[s]_{k_1}^{k_2} + \theta_3 \max(s - k_2, 0)
        + \theta_0

    with slopes of at least 0 and two knots :math:`k` that cut the sum of :math:`c\,(1 - c)`, the
    variance of being right, into thirds. This is calibrant's own method.

    Parameters
    ----------
    objective : {"both", "nll"}
        ``both`` adds the soft-binned calibration error to the negative log-likelihood.
    knots : int

    Attributes
    ----------
    temperature_, rest_temperature_ : scalar Tensor
        The best one for all, under which log-odds are taken, and the one of the other classes.
    knots_, line_ : (knots,) and (knots + 2,) Tensor
        ``line_`` has the slopes, then the offset.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(5000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> OddsScaling().fit(3 * truth, labels).temperature_
    tensor(3.0...)
    """

    name = "odds"
    aliases = ("odds_scaling",)
    part_of_auto = True
    LIMIT: ClassVar[float] = 5.0  # largest slope and offset, for data without an optimum
    knots_: Tensor
    line_: Tensor

    def __init__(self, *, objective: Literal["both", "nll"] = "both", knots: Count = 2) -> None:
        super().__init__(keep_argmax=True)
        self.objective = objective
        self.knots = knots
        straight = torch.ones(knots + 2)
        straight[-1] = 0
        self._store(knots_=torch.zeros(knots), line_=straight)

    def size(self, classes: int) -> int:
        """Slopes, offset and the temperatures."""
        return self.knots + 4

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        share = weight / weight.sum()
        self._store(knots_=self._place(odds, share))
        basis = self._basis(self._tensor(odds[:, None])).cpu().numpy()
        inputs = np.concatenate([basis, np.ones((len(odds), 1))], axis=1)
        calibration = float(self.objective == "both")
        self.solution_ = minimise_within(
            _confidence_objective(inputs, outcome, share, calibration, self.device),
            np.array([1.0] * (self.knots + 1) + [0.0]),  # changes nothing
            [(0.0, self.LIMIT)] * (self.knots + 1) + [(-self.LIMIT, self.LIMIT)],
        )
        if not self.solution_.converged or np.abs(self.solution_.x).max() >= self.LIMIT:
            _warn_of_bounds(self, len(odds))
        self._store(line_=self.solution_.x)

    def _place(self, odds: FloatArray, share: FloatArray) -> FloatArray:
        confidence = expit(odds)
        order = stable_order(odds)
        doubt = np.cumsum((share * confidence * (1 - confidence))[order])
        cuts = doubt[-1] * np.arange(1, self.knots + 1) / (self.knots + 1)
        return np.asarray(odds[order][np.searchsorted(doubt, cuts)])

    def _basis(self, odds: Tensor) -> Tensor:
        """Segments of the line ``(..., 1) -> (..., knots + 1)``, each rising between its knots."""
        knots = self.knots_.to(odds.dtype)
        low = torch.cat([knots.new_full((1,), -torch.inf), knots])
        high = torch.cat([knots, knots.new_full((1,), torch.inf)])
        start = torch.cat([knots.new_zeros(1), knots])
        return odds.clamp(low, high) - start

    def _map(self, odds: Tensor) -> Tensor:
        line = self.line_.to(odds.dtype)
        return self._basis(odds[..., None]) @ line[:-1] + line[-1]


class Blend(OddsCalibrator):
    r"""The mean of the log-odds of the top class under SMART and odds scaling.

    .. math:: s' = \tfrac12 (s_\text{SMART} + s_\text{odds})

    The other classes have a temperature of their own. One looks at the margin, the other at the
    confidence, and their errors partly cancel. This is calibrant's own method, and the choice of
    ``auto`` where one temperature is not enough. ``seed`` is that of SMART.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(2000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> Blend().fit(3 * truth, labels).temperature_
    tensor(3.0...)
    """

    name = "blend"
    part_of_auto = True

    def __init__(self, *, seed: Seed = 0) -> None:
        super().__init__()
        self.seed = seed
        self.smart = SMART(seed=seed)
        self.odds = OddsScaling()

    def size(self, classes: int) -> int:
        """Those of both."""
        return self.smart.size(classes) + self.odds.size(classes)

    def effective_size(self, classes: int) -> int:
        """Ten: both searches start at one temperature, and SMART's ends after a few steps.

        On calibrated examples it loses what five free parameters would lose.
        """
        return 10

    def _fit_odds(self, records: Records) -> None:
        with silenced():  # this one has warned of the number of examples
            self.smart.fit_records(records)
        self.odds.fit_records(records)
        self.solution_ = self.smart.solution_

    def _record_odds(self, records: Records) -> FloatArray:
        by_margin = record_odds(records, self.smart._sharpness(records))
        return np.asarray((by_margin + self.odds._record_odds(records)) / 2)

    def _odds(self, logits: Tensor, top: Tensor) -> Tensor:
        return self._odds_over(logits.scatter(-1, top_class(logits), -torch.inf))

    def _odds_over(self, others: Tensor) -> Tensor:
        """New log-odds ``(..., 1)`` of the top class, whose logit of 0 is -inf among the others."""
        margin = -others.amax(-1, keepdim=True)
        temperatures = _temperatures(self.smart, margin), self.odds.temperature_.to(others.dtype)
        by_margin, by_odds = (_odds_above(others / each) for each in temperatures)
        return (by_margin + self.odds._map(by_odds)) / 2


class TopAndRest(Calibrator):
    r"""The top class by ``blend`` and ``sms``; the rest is shared by ``sms``, then ``rank_gaps``.

    To keep the predicted class binds the top class alone: the others may change places. With the
    log-odds :math:`s_\text{blend}` of :class:`Blend` and the logits :math:`u` of :class:`RankGaps`,
    fitted on the result of :class:`StructuredMatrixScaling` (whose matrix is diagonal if it would
    have more entries than there are examples), which give the top class the log-odds :math:`s_u`,

    .. math:: s = \theta_1 s_\text{blend} + \theta_2 s_u + \theta_0 , \qquad
              P(\text{top}) = \sigma(s) , \qquad
              P(k) = (1 - \sigma(s)) \frac{e^{u_k}}{\sum_{j \ne \text{top}} e^{u_j}} ,

    where each of the others is held below the top class. ``blend`` knows how far the top class
    leads, ``sms`` which classes are taken for each other. The weights :math:`\theta` minimise the
    negative log-likelihood of being right, plus the soft-binned calibration error, plus
    :math:`\frac{10}{n} \|\theta - (\tfrac12, \tfrac12, 0)\|^2` with the number :math:`n` of
    examples. Gaps and weights are learned from two million logits at most. This is calibrant's own
    method.

    Parameters
    ----------
    seed : int
        Of SMART, a part of ``blend``, and of the examples that gaps are learned from.

    Attributes
    ----------
    weights_ : (3,) Tensor
        :math:`\theta_1, \theta_2, \theta_0`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(4000, 4))
    >>> truth = logits + [0.0, 0.0, 0.0, -1.0]  # the last class is rarer than the model says
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = TopAndRest().fit(logits, labels)
    >>> fitted.predict_proba(np.array([3.0, 1.0, 1.0, 1.0])).argsort()[0]
    np.int64(3)
    """

    name = "top_and_rest"
    part_of_auto = True
    keeps_argmax = True
    MEAN: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.0)
    weights_: Tensor

    def __init__(self, *, seed: Seed = 0) -> None:
        super().__init__()
        self.seed = seed
        self.top = Blend(seed=seed)
        self.matrix: Structured = StructuredMatrixScaling()
        self.gaps = RankGaps()
        self._store(weights_=torch.tensor(self.MEAN))

    def size(self, classes: int) -> int:
        """Those of all parts, and the weights."""
        parts = (self.top, self.matrix, self.gaps)
        return sum(part.size(classes) for part in parts) + len(self.weights_)

    def effective_size(self, classes: int) -> int:
        """The larger of those of the top class and of the rest, which has penalties."""
        return max(self.top.effective_size(classes), self.matrix.effective_size(classes))

    def _fit(self, examples: Examples, context: Context) -> None:
        known = context._replace(records=context.table(examples))
        with silenced():  # this one has warned of the number of examples
            self.top = known.part(self.top, examples)
            self.matrix = known.part(_structured(examples), examples)
            some = _some(examples, self.seed)
            self.gaps.fit_examples(some._replace(logits=self.matrix.transform(some.logits)))
        self.to(examples.device)  # parts of arrays are where they were made
        self._store(weights_=self._fitted_weights(some))
        self.solution_ = self.top.solution_

    def _fitted_weights(self, examples: Examples) -> FloatArray:
        parts: list[tuple[NDArray[Any], ...]] = []
        for chunk in labelled_chunks(examples, 0, examples.labels.size):
            logits = chunk.logits.double()
            top = logits.amax(-1, keepdim=True)
            at = top_class(logits)
            both, _ = self._odds_and_shares(logits - top, at)
            hit = at[:, 0] == chunk.labels
            parts.append((as_float64(both), hit.cpu().numpy()))
        odds, right = joined(parts)
        weight = examples.labelled_weight()
        weight = np.ones(len(right)) if weight is None else weight
        inputs = np.concatenate([odds, np.ones((len(right), 1))], axis=1)
        loss = _confidence_objective(inputs, right, weight / weight.sum(), 1.0, self.device)
        start, pull = np.array(self.MEAN), PRIOR_EXAMPLES / weight.sum()

        def drawn(weights: FloatArray) -> tuple[float, FloatArray]:
            value, gradient = loss(weights)
            away = weights - start
            return value + pull * float(away @ away), gradient + 2 * pull * away

        limit = OddsScaling.LIMIT
        return minimise_within(drawn, start, [(0.0, limit), (0.0, limit), (-limit, limit)]).x

    def _odds_and_shares(self, logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Both log-odds ``(..., 2)`` of the top class ``at``, and log-shares of the others."""
        others = self.gaps._on_top_of(self.matrix._on_top_of(logits))
        shares = others - _log_sum_without(others, at)
        by_blend = self.top._odds_over(logits.scatter(-1, at, -torch.inf))
        by_others = shares.gather(-1, at).clamp(_least_odds(logits), MAX_ODDS)
        return torch.cat([by_blend, by_others], -1), shares

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        at = top_class(logits)
        both, shares = self._odds_and_shares(logits, at)
        weights = self.weights_.to(logits.dtype)
        odds = (both @ weights[:2, None] + weights[2]).clamp(min=_least_odds(logits))
        return _below_top((shares - odds).scatter(-1, at, 0.0), odds)


def _least_odds(logits: Tensor) -> float:
    """Log-odds of one class of all: a top class that claims less has no room below it."""
    return -math.log(max(logits.shape[-1] - 1, 1))


def _below_top(logits: Tensor, odds: Tensor) -> Tensor:
    """Hold all classes below the top one, whose logit is 0, without a change of its log-odds.

    What a class loses is shared by those that stay below, in proportion to their probabilities.
    """
    above = logits.amax(-1) > 0
    if has_numbers(logits) and not above.all():
        result = logits.clone()
        if above.any():
            result[above] = _below_top(logits[above], odds[above])
        return result
    rest = (-odds).exp()  # of the other classes, in units of the probability of the top one
    lowered = logits
    for _ in range(ROUNDS):
        held = lowered >= 0
        room = rest - (held.sum(-1, keepdim=True) - 1)  # the top class is one of those held
        free = torch.where(held, -torch.inf, lowered).logsumexp(-1, keepdim=True)
        raised = lowered + room.clamp(min=LEAST_REST).log() - free.clamp(min=-LARGEST_GAP)
        lowered = torch.where(held, 0, raised)
    return torch.where(above.unsqueeze(-1), lowered, logits)


class MatrixAndTop(Calibrator):
    r"""All classes by ``sms``, then the log-odds of the class on top by ``blend``.

    :class:`StructuredMatrixScaling` corrects what the model prefers whatever the question, such as
    the first of the options of a multiple choice, and may change the predicted class.
    :class:`Blend`, fitted on its result, then corrects the confidence, which the penalties of the
    matrix leave wrong where the logits say little. This is calibrant's own method.

    Parameters
    ----------
    penalty : float
        Of the matrix, relative to the published one.
    seed : int
        Of SMART, a part of ``blend``.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(4000, 4))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> logits = truth + [2.0, 0.0, 0.0, 0.0]  # the model prefers the first option
    >>> fitted = MatrixAndTop().fit(logits, labels)
    >>> for scores in (logits, fitted.transform(logits)):
    ...     print(round(float((scores.argmax(-1) == labels).mean()), 2))
    0.58
    0.69
    """

    name = "sms_blend"
    part_of_auto = True

    def __init__(self, *, penalty: NonNegative = 1.0, seed: Seed = 0) -> None:
        super().__init__()
        self.penalty = penalty
        self.seed = seed
        self.matrix: Structured = StructuredMatrixScaling()
        self.top = Blend(seed=seed)

    def size(self, classes: int) -> int:
        """Those of both."""
        return self.matrix.size(classes) + self.top.size(classes)

    def effective_size(self, classes: int) -> int:
        """The larger of the two."""
        return max(self.matrix.effective_size(classes), self.top.effective_size(classes))

    def _fit(self, examples: Examples, context: Context) -> None:
        with silenced():  # this one has warned of the number of examples
            self.matrix = context.part(_structured(examples, self.penalty), examples)
            after = self.matrix.transform(examples.logits)
            self.top.fit_examples(examples._replace(logits=after))
        self.solution_ = self.top.solution_

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        return self.top._on_top_of(self.matrix._on_top_of(logits))


def structured(classes: int, count: int, penalty: float = 1.0) -> Structured:
    """``sms`` where there are as many examples as its matrix has entries, else ``svs``."""
    kind = StructuredMatrixScaling if classes**2 <= count else StructuredVectorScaling
    return kind(penalty=penalty)


def _structured(examples: Examples, penalty: float = 1.0) -> Structured:
    return structured(examples.classes, int(np.sum(examples.labels != IGNORED)), penalty)


def _some(examples: Examples, seed: int) -> Examples:
    """Return as many of the examples as gaps are learned from, drawn by a seed."""
    count, most = int(np.sum(examples.labels != IGNORED)), MAX_GAP_LOGITS // examples.classes
    if count <= most:
        return examples
    return examples.take(np.sort(np.random.default_rng(seed).permutation(count)[:most]))
