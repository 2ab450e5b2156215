"""Calibrators by features, which are the inputs of the last layer, or by metadata."""

from __future__ import annotations

from calibrant.calibrators.features.clipping import FeatureClipping
from calibrant.calibrators.features.group_calibration import GroupCalibration
from calibrant.calibrators.features.multicalibration import Multicalibration
from calibrant.calibrators.features.proximity import ProCal

__all__ = ["FeatureClipping", "GroupCalibration", "Multicalibration", "ProCal"]
