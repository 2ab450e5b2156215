"""Drift of the answers that a gate judges: with grades that come later, and without any.

A promise holds for answers like those it was found with. Two tests watch for others, each a
:class:`~calibrant.monitor.Monitor`:

- of grades: calibrated confidences and whether the answers were right, against those of the fit;
- of confidences alone: the share of answers above a confidence, against that share at the fit. Of
  each answer one of ``CUTS`` shares is looked at, in turn, so that the answers are independent
  bets.

While the answers do not change, the probability of ever raising an alarm is at most
``false_alarms``, half of it for each test. After an alarm the promise is withdrawn until a new gate
is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import FloatArray, as_float64
from calibrant.metrics.reductions import Pairs
from calibrant.monitor import Monitor

CUTS = 8
"""Confidences at which shares are compared."""
BINS, MANY = 10, 1000
"""Bins of the test of grades, half of them for fewer graded answers than many."""
WINDOW = 100
"""Answers between the beginnings of drift that are tested for."""
TOLERANCE = 0.05
"""Largest change of a share of answers that is not drift."""


class DriftReference(NamedTuple):
    """Confidences and outcomes at the fit, in the form in which monitors compare with them.

    Attributes
    ----------
    cuts : (CUTS,)
        Rising confidences.
    grades, confidences : Monitor
        Without examples.
    """

    cuts: FloatArray
    grades: Monitor
    confidences: Monitor

    @classmethod
    def of(cls, confidence: FloatArray, correct: FloatArray, false_alarms: float) -> DriftReference:
        """Make the reference of independent graded answers, ``(n,)``, in random order."""
        half = len(confidence) // 2
        # confidences for the cuts, and others for the shares above them
        cuts = np.quantile(confidence[:half], 1 - _shares())
        settings: dict[str, Any] = {"false_alarms": false_alarms / 2, "window": WINDOW}
        # every answer counts at every cut: the limits of a monitor hold for each bin by itself
        over = confidence[half:, None] >= cuts
        shares = np.broadcast_to(_shares(), over.shape).ravel(), over.ravel()
        watched = Monitor(reference=shares, bins=CUTS, tolerance=TOLERANCE, **settings)
        bins = BINS if len(confidence) >= MANY else BINS // 2
        grades = Monitor(reference=(confidence, correct), bins=bins, **settings)
        return cls(cuts, grades, watched)

    def state(self) -> dict[str, Any]:
        """Return everything for JSON."""
        watched = {name: getattr(self, name).state() for name in ("grades", "confidences")}
        return {"cuts": self.cuts.tolist(), **watched}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DriftReference:
        """Make the reference of what :meth:`state` returned."""
        if not isinstance(state, Mapping) or {*state} != {*cls._fields}:
            raise ValueError(f"a drift reference has {', '.join(cls._fields)}")
        cuts = as_float64(state["cuts"])
        if cuts.shape != (CUTS,) or not ((cuts >= 0) & (cuts <= 1)).all():
            raise ValueError(f"cuts must be {CUTS} numbers in [0, 1], got {state['cuts']!r:.80}")
        grades, confidences = (Monitor.from_state(state[name]) for name in cls._fields[1:])
        return cls(cuts, grades, confidences)


def _shares() -> FloatArray:
    """Return the shares of answers above the cuts, one in the middle of each bin of a monitor."""
    return (CUTS - np.arange(CUTS) - 0.5) / CUTS


def above(cuts: FloatArray, confidence: FloatArray, first: int) -> Pairs:
    """Return the expected share of answers above a cut, and whether each is above it."""
    at = (first + np.arange(len(confidence))) % CUTS
    return Pairs(_shares()[at], confidence >= cuts[at])
