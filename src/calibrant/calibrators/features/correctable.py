"""Predictions that corrections of examples change, with the derivatives of their losses.

A correction ``(n, outputs)`` has some numbers for each of ``n`` examples; a number is corrected
where it gains more than its ``doubt`` ``(outputs,)``. ``losses`` are the negative log-likelihood of
each example ``(n,)``, ``derivatives`` their slopes and curvatures by each number ``(n, outputs)``,
``odds`` the log-odds ``(n,)`` by which trees know the current prediction, ``mean`` the correction
``(outputs,)`` that some examples have together, and ``take`` returns some of the examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import expit, log_softmax

from calibrant._core.checks import FloatArray, IntArray
from calibrant.calibrators.base import BOUNDS
from calibrant.calibrators.logpartition import Records
from calibrant.calibrators.top_label import MAX_ODDS, record_odds

_STEP = 0.05
"""Change of the logarithm of a sharpness over which a second derivative is taken."""
_DOUBT = 8.0
"""Gain that the slope of the log-odds in a subgroup must exceed to be corrected."""
MAX_LOG_TEMPERATURE = float(np.log(BOUNDS[1]))
"""Largest correction of the logarithm of a temperature, up or down."""


@dataclass(frozen=True)
class _ClassOneOdds:
    """Log-odds of class 1 of two, to which an offset and a multiple of them are added.

    A subgroup in which the model is too sure of both classes has no offset, only a slope.
    """

    start: FloatArray  # (n,)
    outcome: FloatArray  # (n,) 1 where the label is 1
    spread: float  # unit of the log-odds, so that both numbers of a correction are of one size
    outputs: int = 2

    @property
    def doubt(self) -> FloatArray:
        """None about offsets, and some about slopes, which would often be noise."""
        return np.array([0.0, _DOUBT])

    @property
    def _unit(self) -> FloatArray:
        return np.clip(self.start, -MAX_ODDS, MAX_ODDS) / self.spread

    def _odds(self, correction: FloatArray) -> FloatArray:
        return np.asarray(self.start + correction[:, 0] + correction[:, 1] * self._unit)

    def losses(self, correction: FloatArray) -> FloatArray:
        """Return the negative log-likelihood of each example."""
        odds = self._odds(correction)
        return np.asarray(np.logaddexp(0, np.where(self.outcome > 0, -odds, odds)))

    def derivatives(self, correction: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the slopes and curvatures of the losses."""
        chance = expit(self._odds(correction))
        by = np.stack([np.ones(len(chance)), self._unit], axis=1)
        return (chance - self.outcome)[:, None] * by, (chance * (1 - chance))[:, None] * by**2

    def odds(self, correction: FloatArray) -> FloatArray:
        """Return the log-odds of class 1."""
        return np.clip(self._odds(correction), -MAX_ODDS, MAX_ODDS)

    def mean(self, correction: FloatArray, weight: FloatArray) -> FloatArray:
        """Return the offset and slope that are closest to the changes of the log-odds.

        Offsets that trees give to ranges of the prediction make a slope, too.
        """
        root = np.sqrt(weight)
        by = np.stack([root, root * self._unit], axis=1)
        change = correction[:, 0] + correction[:, 1] * self._unit
        return np.asarray(np.linalg.lstsq(by, root * change, rcond=None)[0])

    def take(self, which: IntArray) -> _ClassOneOdds:
        """Return some of the examples."""
        return _ClassOneOdds(self.start[which], self.outcome[which], self.spread)


@dataclass(frozen=True)
class _Temperatures:
    """Logits that are divided by a temperature, to whose logarithm the correction is added."""

    records: Records
    outputs: int = 1

    @property
    def doubt(self) -> FloatArray:
        """None."""
        return np.zeros(1)

    def _sharpness(self, correction: FloatArray) -> FloatArray:
        return np.asarray(
            np.exp(-np.clip(correction[:, 0], -MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE))
        )

    def losses(self, correction: FloatArray) -> FloatArray:
        """Return the negative log-likelihood of each example."""
        b = self._sharpness(correction)
        return np.asarray(b * self.records.own_gap + self.records.log_partition(b).value)

    def derivatives(self, correction: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the slopes, and the curvatures that labels drawn from the predictions expect.

        The latter are the variances of the scaled logits, which are never negative.
        """
        b = self._sharpness(correction)
        mean = self.records.log_partition(b).slope
        beside = self.records.log_partition(b * np.exp(_STEP)).slope
        variance = np.maximum((beside - mean) / _STEP - mean, 0)
        return -(b * self.records.own_gap + mean)[:, None], variance[:, None]

    def odds(self, correction: FloatArray) -> FloatArray:
        """Return the log-odds of the top class."""
        return record_odds(self.records, self._sharpness(correction))

    def mean(self, correction: FloatArray, weight: FloatArray) -> FloatArray:
        """Return the mean of the corrections."""
        return np.average(correction, axis=0, weights=weight)

    def take(self, which: IntArray) -> _Temperatures:
        """Return some of the examples."""
        return _Temperatures(self.records.take(which).tracked())


@dataclass(frozen=True)
class _ClassLogits:
    """Logits, to each of which a number is added."""

    start: FloatArray  # (n, classes) logarithms of probabilities
    labels: IntArray  # (n,)

    @property
    def outputs(self) -> int:
        """Number of classes."""
        return int(self.start.shape[1])

    @property
    def doubt(self) -> FloatArray:
        """None."""
        return np.zeros(self.outputs)

    def _log_probs(self, correction: FloatArray) -> FloatArray:
        return np.asarray(log_softmax(self.start + correction, axis=-1))

    def losses(self, correction: FloatArray) -> FloatArray:
        """Return the negative log-likelihood of each example."""
        return -self._log_probs(correction)[np.arange(len(self.labels)), self.labels]

    def derivatives(self, correction: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the slopes and curvatures of the losses by each logit alone."""
        probs = np.exp(self._log_probs(correction))
        slope = probs.copy()
        slope[np.arange(len(self.labels)), self.labels] -= 1
        return slope, probs * (1 - probs)

    def odds(self, correction: FloatArray) -> FloatArray:
        """Return the log-odds of the top class."""
        log_probs = self._log_probs(correction)
        top = log_probs.argmax(-1)[:, None]
        best = np.take_along_axis(log_probs, top, -1)[:, 0]
        np.put_along_axis(log_probs, top, -np.inf, -1)
        rest = np.logaddexp.reduce(log_probs, axis=-1)
        return np.asarray(np.clip(best - rest, -MAX_ODDS, MAX_ODDS))

    def mean(self, correction: FloatArray, weight: FloatArray) -> FloatArray:
        """Return the mean of the corrections."""
        return np.average(correction, axis=0, weights=weight)

    def take(self, which: IntArray) -> _ClassLogits:
        """Return some of the examples."""
        return _ClassLogits(self.start[which], self.labels[which])


_Correctable: TypeAlias = _ClassOneOdds | _Temperatures | _ClassLogits
