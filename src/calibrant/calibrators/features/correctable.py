"""Predictions that corrections of examples change, with the derivatives of their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from scipy.special import expit, log_softmax

from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.logpartition import Records
from calibrant.calibrators.base import BOUNDS
from calibrant.calibrators.top_label import CERTAIN, record_odds

if TYPE_CHECKING:
    from typing_extensions import Self

STEP = 0.05
"""Change of the logarithm of a sharpness over which a second derivative is taken."""
HOTTEST = float(np.log(BOUNDS[1]))
"""Largest correction of the logarithm of a temperature, up or down."""


class Correctable(Protocol):
    """Predictions of ``n`` examples that a correction ``(n, outputs)`` changes."""

    @property
    def outputs(self) -> int:
        """Numbers that an example's correction has."""

    def losses(self, correction: FloatArray) -> FloatArray:
        """Return the negative log-likelihood of each example ``(n,)``."""

    def derivatives(self, correction: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the slopes and curvatures of the losses, each ``(n, outputs)``."""

    def odds(self, correction: FloatArray) -> FloatArray:
        """Return the log-odds ``(n,)`` by which trees know the current prediction."""

    def take(self, which: IntArray) -> Self:
        """Return some of the examples."""


@dataclass(frozen=True)
class ClassOneOdds:
    """Log-odds of class 1 of two, to which the correction is added."""

    start: FloatArray  # (n,)
    outcome: FloatArray  # (n,) 1 where the label is 1
    outputs: int = 1

    def losses(self, correction: FloatArray) -> FloatArray:
        """Return the negative log-likelihood of each example."""
        odds = self.start + correction[:, 0]
        return np.asarray(np.logaddexp(0, np.where(self.outcome > 0, -odds, odds)))

    def derivatives(self, correction: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the slopes and curvatures of the losses."""
        chance = expit(self.start + correction[:, 0])
        return (chance - self.outcome)[:, None], (chance * (1 - chance))[:, None]

    def odds(self, correction: FloatArray) -> FloatArray:
        """Return the log-odds of class 1."""
        return np.clip(self.start + correction[:, 0], -CERTAIN, CERTAIN)

    def take(self, which: IntArray) -> ClassOneOdds:
        """Return some of the examples."""
        return ClassOneOdds(self.start[which], self.outcome[which])


@dataclass(frozen=True)
class Temperatures:
    """Logits that are divided by a temperature, to whose logarithm the correction is added."""

    records: Records
    outputs: int = 1

    def _sharpness(self, correction: FloatArray) -> FloatArray:
        return np.asarray(np.exp(-np.clip(correction[:, 0], -HOTTEST, HOTTEST)))

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
        beside = self.records.log_partition(b * np.exp(STEP)).slope
        variance = np.maximum((beside - mean) / STEP - mean, 0)
        return -(b * self.records.own_gap + mean)[:, None], variance[:, None]

    def odds(self, correction: FloatArray) -> FloatArray:
        """Return the log-odds of the top class."""
        return record_odds(self.records, self._sharpness(correction))

    def take(self, which: IntArray) -> Temperatures:
        """Return some of the examples."""
        return Temperatures(self.records.take(which).tracked())


@dataclass(frozen=True)
class ClassLogits:
    """Logits, to each of which a number is added."""

    start: FloatArray  # (n, classes) logarithms of probabilities
    labels: IntArray  # (n,)

    @property
    def outputs(self) -> int:
        """Number of classes."""
        return int(self.start.shape[1])

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
        return np.asarray(np.clip(best - rest, -CERTAIN, CERTAIN))

    def take(self, which: IntArray) -> ClassLogits:
        """Return some of the examples."""
        return ClassLogits(self.start[which], self.labels[which])
