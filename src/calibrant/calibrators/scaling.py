"""Temperatures that all samples share: none, one, and an ensemble of three."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from torch import Tensor

from calibrant._partition import Records
from calibrant._solve import Solution, minimise_convex, minimise_scalar
from calibrant.calibrators.base import BOUNDS, TemperatureCalibrator
from calibrant.calibrators.objectives import brier, ece, nll, soft_ece


class Identity(TemperatureCalibrator):
    """Leave the logits as they are: what every other method is compared with.

    >>> Identity().fit([[2.0, 1.0]], [0]).temperature([[2.0, 1.0]])
    array([1.])
    """

    def size(self, classes: int) -> int:
        """No parameter."""
        return 0

    def _fit_records(self, records: Records) -> None:
        self.solution_ = None

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        return top.new_ones(())


class TemperatureScaling(TemperatureCalibrator):
    r"""One temperature for all: :math:`\mathrm{softmax}(z / T)` (Guo et al. 2017).

    The negative log-likelihood is convex in :math:`1/T`, so its optimum is found to rounding
    error whatever the start. The other objectives are searched on a grid, then within the best
    cell of it. Data without an optimum (every prediction right, or worse than chance) end at
    0.05 or 20, with a warning.

    Parameters
    ----------
    objective : {"nll", "brier", "ece", "soft_ece"}
        What the temperature minimises. ``ece`` has 15 equal-width bins, ``soft_ece`` is the
        smooth version of it that SMART uses.

    Attributes
    ----------
    temperature_ : scalar Tensor

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(5000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = TemperatureScaling().fit(3 * truth, labels)
    >>> round(float(fitted.temperature_), 1)
    3.0
    """

    temperature_: Tensor

    def __init__(self, *, objective: Literal["nll", "brier", "ece", "soft_ece"] = "nll") -> None:
        super().__init__()
        self.objective = objective
        self._learned(temperature_=1.0)

    def size(self, classes: int) -> int:
        """One parameter."""
        return 1

    def _fit_records(self, records: Records) -> None:
        self.solution_ = best_sharpness(records, self.objective)
        temperature = float(np.exp(-self.solution_.x[0]))
        if not self.solution_.converged:
            warnings.warn(
                f"no temperature between {BOUNDS[0]:g} and {BOUNDS[1]:g} is best for these "
                f"{len(records):,} samples: it went to {temperature:g}; are all of them right, "
                "or worse than chance?",
                stacklevel=5,
            )
        self._learned(temperature_=temperature)

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        return self.temperature_.to(top.dtype)


def best_sharpness(records: Records, objective: str = "nll") -> Solution:
    """The log-sharpness ``log b = -log T`` that minimises an objective over the records."""
    low, high = -np.log(BOUNDS[1]), -np.log(BOUNDS[0])
    if objective == "nll":
        return minimise_convex(lambda u: float(nll(records, u).gradient.sum()), low, high)
    measure = {"brier": brier, "ece": ece, "soft_ece": soft_ece}[objective]
    return minimise_scalar(lambda u: measure(records, u).value, low, high)
