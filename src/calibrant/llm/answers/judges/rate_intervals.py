r"""Intervals of success rates that hold with few labels, near 0 and 1, and for any judge.

The interval of a rate contains all :math:`\theta` that are compatible with its estimate,

.. math:: (\hat\theta - \theta)^2 \le t^2 \left( v(\theta) + P \right), \qquad
   v(\theta) = \min\{\max\{V + s\,(\theta - \hat\theta),\;
   m \kappa\,\delta (1 - \delta)\},\; m \kappa\,\theta (1 - \theta)\}, \quad
   \delta = |\hat\theta - \theta| ,

where V is the variance by the residuals, P that of the mean prediction, m the largest share of a
label (1/n if they weigh the same), and t Student's quantile. The variance depends on the rate as
that of shares does in Wilson's interval, to which this one comes down if the judge is useless:

- :math:`s = \sum x^3 / \sum x^2`, with the terms x of the estimate, is how fast the variance of
  skewed residuals changes with their mean (exponential tilting; (1 - 2p) / n for shares);
- a rate that is off by :math:`\delta` because the judge makes errors of which none is among the
  labelled answers needs residuals of variance :math:`\delta (1 - \delta)` at least, and the errors
  may be where labels weigh most: with no error among n labels the end is :math:`t^2 / (n + t^2)`
  away, a rule of three;
- no residual varies more than a label itself. :math:`\kappa` is 1 for labels of 0 and 1; for grades
  in between it is their variance in units of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from scipy.optimize import brentq
from scipy.special import stdtrit


class Uncertainty(NamedTuple):
    """What the interval of a rate is made of; see the top of this file.

    Attributes
    ----------
    residual : float
        Variance of the estimate by the residuals.
    skew : float
        Change of that variance with the mean.
    predicted : float
        Variance of the mean prediction.
    largest : float
        Largest share of a label, or of a group of them.
    dispersion : float
        Variance of a label in units of that of 0 and 1 with the same mean.
    parameters : int
        Of the line that predicts labels.
    """

    residual: float
    skew: float
    predicted: float
    largest: float
    dispersion: float
    parameters: int

    def variance(self, rate: float, value: float) -> float:
        """Variance of the estimate ``value`` if the rate is ``rate``."""
        distance, unit = abs(rate - value), self.largest * self.dispersion
        seen = self.residual + self.skew * (rate - value)
        unseen, most = unit * distance * (1 - distance), unit * rate * (1 - rate)
        return min(max(seen, unseen), most) + self.predicted

    def ends(self, value: float, level: float) -> tuple[float, float]:
        """Return both ends of the interval around a rate."""
        freedom = max(1 / self.largest - self.parameters, 1.0)
        quantile = float(stdtrit(freedom, (1 + level) / 2))

        def beyond(rate: float) -> float:
            return abs(rate - value) - quantile * math.sqrt(self.variance(rate, value))

        return _end(beyond, value, 0.0), _end(beyond, value, 1.0)

    def with_labels(self, ratio: float) -> Uncertainty:
        """Return what it would be with ``ratio`` times as many labels, drawn in the same way."""
        residual, skew, largest = (x / ratio for x in (self.residual, self.skew, self.largest))
        return self._replace(residual=residual, skew=skew, largest=largest)


def _end(beyond: Callable[[float], float], value: float, limit: float) -> float:
    """Rate between a value and a limit at which a function crosses 0, or the limit."""
    if beyond(limit) <= 0:
        return limit
    start = value + 1e-9 * (limit - value)  # at the value itself all labels may be equal
    return float(brentq(beyond, start, limit, xtol=1e-9)) if beyond(start) < 0 else value
