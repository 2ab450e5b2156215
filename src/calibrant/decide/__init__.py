"""Decisions from calibrated probabilities: thresholds, prediction sets, class frequencies."""

from calibrant.decide.conformal_sets import ConformalSets as ConformalSets, conformal as conformal
from calibrant.decide.priors import (
    PriorCorrection as PriorCorrection,
    estimate_prior as estimate_prior,
    label_shift as label_shift,
    shift_prior as shift_prior,
)
from calibrant.decide.rules import DecisionRule as DecisionRule
from calibrant.decide.threshold_limits import threshold as threshold, thresholds as thresholds
from calibrant.decide.threshold_results import ShownLimit as ShownLimit, Threshold as Threshold
