"""Post-hoc calibrators: fitted on held-out logits, they map logits to calibrated logits."""

from __future__ import annotations

from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.scaling import Identity, TemperatureScaling

CALIBRATORS: dict[str, type[Calibrator]] = {
    "none": Identity,
    "ts": TemperatureScaling,
}
"""Every calibrator by its name on the command line and in saved files."""
