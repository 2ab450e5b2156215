r"""Thresholds with a promise about answers, about turns, or about whole conversations.

Answers that belong together, such as the turns of a conversation, are not independent: a model that
misunderstands the first turn is wrong in the next ones, too. What is independent is the *unit*:

- ``answer``: each answer by itself. The loss of an accepted one is 1 if it is wrong.
- ``turn``: the loss of a conversation is the share of wrong ones among its accepted turns.
- ``conversation``: the loss of a conversation is 1 if any of its accepted turns is wrong.

The promise of a threshold is about the mean loss of the units of which it accepts something. Losses
of 0 or 1 are counted and tested exactly, by the binomial distribution. Others, with m units and a
mean loss of r, have the p-value of Hoeffding and Bentkus (Bates et al. 2021, "Distribution-free,
risk-controlling prediction sets"): the smaller one of :math:`e^{-m \, \mathrm{kl}(r, \alpha)}` and
:math:`e \, P(\mathrm{Bin}(m, \alpha) \le \lceil m r \rceil)`, which is valid for any losses in
[0, 1].
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr

from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant.decide.thresholds import (
    Threshold,
    Trials,
    binomial_p_values,
    lowest_passing,
    threshold,
    threshold_grid,
)

Unit = Literal["answer", "turn", "conversation"]


class Scored(NamedTuple):
    """Graded answers with calibrated confidences; each ``(answers,)``.

    Attributes
    ----------
    confidence : in [0, 1]
    correct : bool
    unit : number of the unit that the answer belongs to
    kind : kind of the question; empty where it has none
    """

    confidence: FloatArray
    correct: BoolArray
    unit: IntArray
    kind: NDArray[np.str_]

    def where(self, chosen: BoolArray) -> Scored:
        """Return the chosen answers."""
        return Scored._make(values[chosen] for values in self)

    @property
    def units(self) -> int:
        """Number of different units."""
        return np.unique(self.unit).size


def find_threshold(answers: Scored, *, unit: Unit, max_error: float, level: float) -> Threshold:
    """Return the lowest threshold that keeps its promise about the unit.

    ``max_error`` limits the mean loss of the units of which something is accepted, with the
    certainty ``level``. ``coverage`` and ``error`` of the result are shares of units.
    """
    if unit == "answer":
        pairs = {"confidence": answers.confidence, "outcome": answers.correct}
        return threshold(**pairs, max_error=max_error, level=level)
    losses = _losses_of_turns if unit == "turn" else _losses_of_conversations
    grid = threshold_grid(max_error)
    accepted, wrong = losses(answers, grid)
    p_values = binomial_p_values if unit == "conversation" else hoeffding_bentkus
    trials = Trials(grid, accepted, wrong, p_values(accepted, wrong, max_error))
    return lowest_passing(trials, answers.units, max_error=max_error, level=level)


def _losses_of_conversations(answers: Scored, grid: FloatArray) -> tuple[IntArray, IntArray]:
    """Conversations with an accepted turn, and with a wrong one among them, at each threshold."""
    return (
        _at_least(_highest(answers), grid),
        _at_least(_highest(answers.where(~answers.correct)), grid),
    )


def _highest(answers: Scored) -> FloatArray:
    """Return the highest confidence of each unit."""
    numbers, unit = np.unique(answers.unit, return_inverse=True)
    highest = np.zeros(len(numbers))
    np.maximum.at(highest, unit, answers.confidence)
    return highest


def _at_least(values: FloatArray, grid: FloatArray) -> IntArray:
    return np.asarray(len(values) - np.searchsorted(np.sort(values), grid, side="left"), np.int64)


def _losses_of_turns(answers: Scored, grid: FloatArray) -> tuple[IntArray, FloatArray]:
    """Conversations with an accepted turn, and the sum of their shares of wrong ones."""
    numbers, unit = np.unique(answers.unit, return_inverse=True)
    counts, sums = [], []
    for limit in grid:
        chosen = answers.confidence >= limit
        turns = np.bincount(unit[chosen], minlength=len(numbers))
        wrong = np.bincount(unit[chosen & ~answers.correct], minlength=len(numbers))
        counts.append(np.count_nonzero(turns))
        sums.append(float((wrong / np.maximum(turns, 1)).sum()))
    return np.array(counts, np.int64), np.array(sums)


def hoeffding_bentkus(
    accepted: IntArray, losses: FloatArray | IntArray, max_error: float
) -> FloatArray:
    """P-values of mean losses above ``max_error``, from sums of losses in [0, 1].

    >>> hoeffding_bentkus(np.array([0, 100]), np.array([0.0, 2.5]), 0.1).round(4)
    array([1.    , 0.0131])
    """
    mean = np.minimum(losses / np.maximum(accepted, 1), max_error)
    divergence = rel_entr(mean, max_error) + rel_entr(1 - mean, 1 - max_error)
    # a sum that is whole but for its last digit must not be rounded up to the next number
    up = np.ceil(np.asarray(losses, np.float64) - 1e-9)
    bentkus = math.e * binomial_p_values(accepted, up, max_error)
    return np.where(accepted > 0, np.minimum(np.exp(-accepted * divergence), bentkus), 1.0)
