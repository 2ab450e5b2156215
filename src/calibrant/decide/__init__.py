"""Decisions from calibrated probabilities: thresholds, sets of classes, class frequencies."""

from calibrant.decide.conformal_sets import ConformalSets, conformal
from calibrant.decide.priors import PriorCorrection, estimate_prior, label_shift, shift_prior
from calibrant.decide.thresholds import Threshold, threshold

__all__ = [
    "ConformalSets",
    "PriorCorrection",
    "Threshold",
    "conformal",
    "estimate_prior",
    "label_shift",
    "shift_prior",
    "threshold",
]
