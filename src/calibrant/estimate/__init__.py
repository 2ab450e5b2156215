"""Performance from no or few labels: estimates, their guarantees, and what to label next."""

from __future__ import annotations

from calibrant.estimate.performance import PerformanceEstimator, estimate_performance
from calibrant.estimate.performance_estimate import PerformanceEstimate
from calibrant.estimate.sampling import LabelSample, choose_labels
from calibrant.estimate.shifts import Shift

__all__ = [
    "LabelSample",
    "PerformanceEstimate",
    "PerformanceEstimator",
    "Shift",
    "choose_labels",
    "estimate_performance",
]
