"""Calibrators that look at the features: the inputs of the last layer.

All of them divide by a temperature as well, so that what the features add is on top of that.
"""

from __future__ import annotations

from calibrant.calibrators.features.clipping import FeatureClipping
from calibrant.calibrators.features.groups import GroupCalibration
from calibrant.calibrators.features.proximity import ProCal

__all__ = ["FeatureClipping", "GroupCalibration", "ProCal"]
